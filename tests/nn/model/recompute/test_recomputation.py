"""Modules whose forward the backward runs again: in graphs and without them, values are those of the plain model."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import S
from sbpflow.nn.model.recompute.replay import Contexts
from sbpflow.placement import Placement
from sbpflow.placement.errors import PlacementError, SbpError
from tests.nn.graph.memory.test_liveness import Live
from tests.nn.graph.pipes import llama, words_loss
from tests.ranks import Ranks

ONE, PAIR = flow.placement("cpu", range(1)), flow.placement("cpu", range(2))
GRID = flow.placement("cpu:[0-3] as (data=2, tensor=2)")


class Attention(nn.Module):
    """Written out, or fused."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.fused, self.drop = fused, nn.Dropout(0.3)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, tokens, width = x.shape
        q, k, v = (part(x).view(rows, tokens, 4, width // 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.fused:
            heads, weights = F.scaled_dot_product_attention(q, k, v, is_causal=True), None
        else:
            hidden = torch.full((tokens, tokens), -1e9, dtype=x.dtype).triu(1)
            scores = torch.matmul(q, k.transpose(2, 3)) * 0.5 + hidden
            weights = self.drop(F.softmax(scores, -1, dtype=torch.float64).to(x.dtype))
            heads = torch.matmul(weights, v)
        return self.out(heads.transpose(1, 2).reshape(rows, tokens, width)), weights


class Block(nn.Module):
    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(width), Attention(width, fused), nn.Sequential()
        self.mlp.extend((nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))[0]
        y: Tensor = x + self.drop(self.mlp(x))
        return y


class Net(nn.Module):
    def __init__(self, layers: int = 3, width: int = 16, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers: Any = nn.ModuleList(Block(width, fused) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def values(rows: int = 4, width: int = 16) -> Tensor:
    return torch.randn(rows, 6, width, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def whole(x: Any) -> Tensor:
    found: Tensor = x.full_tensor() if isinstance(x, flow.GlobalTensor) else x
    return found


def learnt(model: nn.Module, run: Callable[..., Any], *args: Any) -> dict[str, Tensor]:
    """The loss, all gradients, all buffers, and a number that is drawn behind."""
    torch.manual_seed(3)
    found = {"loss": whole(run(model, *args)).detach(), "behind": torch.rand(1)}
    found.update({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})
    return found | {name: whole(x).detach().clone() for name, x in model.named_buffers()}


def eager(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_fn(model, x)
    torch.autograd.backward(loss)
    return loss


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-9, msg=name)


def whole_blocks(model: Net) -> None:
    flow.nn.recompute(list(model.layers))


def keeping(model: Net) -> None:
    flow.nn.recompute(list(model.layers), keep=["mm", "attention"])


def cores(model: Net) -> None:
    flow.nn.recompute([layer.attention for layer in model.layers], only="attention")


def nested(model: Net) -> None:
    whole_blocks(model)
    flow.nn.recompute([layer.mlp for layer in model.layers], keep="gelu")
    cores(model)


WAYS = [whole_blocks, keeping, cores, nested]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fused", [False, True], ids=["written out", "fused"])
@pytest.mark.parametrize("say", WAYS)
def test_without_a_graph(say: Callable[[Net], None], fused: bool) -> None:
    plain, model = (Net(fused=fused).double() for _ in range(2))
    say(model)
    same(learnt(model, eager, values()), learnt(plain, eager, values()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("say", WAYS)
def test_with_global_tensors(say: Callable[[Net], None]) -> None:
    plain, model = (Net(2).double() for _ in range(2))
    say(model)
    flow.nn.to_global(model, placement=GRID, sbp={"layers.*.mlp.1.weight": {"tensor": S(0)}})
    x = flow.tensor(values(), placement=GRID, sbp={"data": S(0)})
    same(learnt(model, eager, x), learnt(plain, eager, values()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", [ONE, GRID], ids=["alone", "grid"])
@pytest.mark.parametrize("say", WAYS)
def test_in_a_graph(say: Callable[[Net], None], where: Placement) -> None:
    plain, model = (Net().double() for _ in range(2))
    say(model)
    found = learnt(model, lambda m, x: flow.compile(m, loss_fn, placement=where)(x), values())
    same(found, learnt(plain, eager, values()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("say", [keeping, cores])
def test_in_a_pipeline(say: Callable[[Net], None]) -> None:
    def run(say: Callable[[Net], None] | None) -> dict[str, Tensor]:
        model = Net(4).double()
        if say:
            say(model)
        flow.nn.pipeline(model.layers, [flow.placement("cpu", ranks) for ranks in ([0, 1], [2, 3])])
        return learnt(model, lambda m, x: flow.compile(m, loss_fn, micro_batches=2, schedule="1f1b")(x), values())

    same(run(say), run(None))


@pytest.mark.sweep
def test_by_inductor() -> None:
    from torch._inductor import config

    plain, model = (Net(1).double() for _ in range(2))
    cores(model)
    flow.nn.recompute(model.layers[0].mlp, keep="mm")
    with config.patch(compile_threads=1):  # else it leaves threads running
        step = flow.compile(model, loss_fn, placement=ONE, backend="inductor")
        same(learnt(model, lambda m, x: step(x), values()), learnt(plain, eager, values()))


def regions(model: nn.Module, x: Tensor, **options: Any) -> list[tuple[str, str]]:
    """The ops that are run again, with their regions."""
    step = flow.compile(model, loss_fn, placement=PAIR, **options).plan_for(x).planned
    return [(op.name, op.origin.recompute) for op in step.plan.logical.ops if op.origin.recompute]


def test_a_block_is_a_region_and_equal_ones_are_traced_once() -> None:
    model = Net().double()
    whole_blocks(model)
    found = regions(model, values())
    assert len({region for _, region in found}) == 3
    assert [op for op, _ in found].count("linear") == 3 * 6


def test_what_is_kept_is_no_part_of_it() -> None:
    model = Net().double()
    keeping(model)
    assert not {"linear", "matmul", "softmax.int"} & {op for op, _ in regions(model, values())}
    flow.nn.recompute(list(model.layers), keep=["gelu", "layer_norm"])
    left = {op for op, _ in regions(model, values())}
    assert not {"gelu", "layer_norm"} & left
    assert "linear" in left


@pytest.mark.parametrize("fused", [False, True], ids=["written out", "fused"])
def test_only_attention_is_all_between_query_key_value_and_context(fused: bool) -> None:
    model = Net(fused=fused).double()
    cores(model)
    found = regions(model, values())
    core = ["matmul", "mul.Tensor", "add.Tensor", "softmax.int", "dropout", "matmul"]
    assert [op for op, _ in found] == (["scaled_dot_product_attention"] if fused else core) * 3
    assert len({region for _, region in found}) == 3


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_only_attention_of_transformers(kind: str) -> None:
    """Their cores are functions, not modules."""
    text = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(1))
    models = [llama(attn_implementation=kind).double()]
    models.append(copy.deepcopy(models[0]))
    flow.nn.recompute([layer.self_attn for layer in models[1].model.layers], only="attention")  # type: ignore[union-attr]

    def run(model: nn.Module, text: Tensor) -> Tensor:
        loss = words_loss(model, text)
        torch.autograd.backward(loss)
        return loss

    wanted = learnt(models[0], run, text)
    same(learnt(models[1], run, text), wanted)
    models[1].zero_grad()
    step = flow.compile(models[1], words_loss, placement=PAIR)
    same(learnt(models[1], lambda m, text: step(text), text), wanted)
    again = {op.name for op in step.planned.plan.logical.ops if op.origin.recompute}
    assert again >= ({"matmul", "softmax.int"} if kind == "eager" else {"scaled_dot_product_attention"})
    assert "linear" not in again


def peak(model: nn.Module, run: Callable[[], Any]) -> int:
    run()
    model.zero_grad()
    with Live() as live:
        run()
    return int(live.peak)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_what_attention_makes_is_let_go(graph: bool) -> None:
    """Of six tokens and width 16 little is the core's; of 128 tokens most is."""

    def needs(say: Callable[[Net], None] | None) -> int:
        model, x = Net(6, 8).double(), torch.randn(2, 128, 8, dtype=torch.float64)
        if say:
            say(model)
        step = flow.compile(model, loss_fn, placement=ONE) if graph else None
        return peak(model, lambda: step(x) if step else eager(model, x))

    assert needs(cores) < 0.6 * needs(None)


class Pair(NamedTuple):
    first: Tensor
    rest: dict[str, Tensor]


class Odd(nn.Module):
    """A module that is called twice, takes names, gives a structure, writes in place, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.norm, self.drop = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: Tensor, context_fn: str = "") -> Pair:
        y = self.drop(self.norm(self.line(x).flatten(0, 1))).reshape(x.shape)
        return Pair(y.clone().relu_() * scale, {"y": y, "x": x})


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()

    def forward(self, x: Tensor) -> Tensor:
        one = self.odd(x, scale=x.mean(), context_fn="mine")
        two = self.odd(one.first, scale=one.rest["y"].mean())
        with torch.no_grad():
            three = self.odd(x, scale=x)
        y: Tensor = two.first + one.rest["x"] + three.first
        return y


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keep", [(), "mm", ("batch_norm", "linear")], ids=str)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_structures_names_statistics_and_two_calls(graph: bool, keep: Any) -> None:
    plain, model = (Twice().double() for _ in range(2))
    flow.nn.recompute(model.odd, keep=keep)
    run = (lambda m, x: flow.compile(m, loss_fn, placement=ONE)(x)) if graph else eager
    same(learnt(model, run, values()), learnt(plain, eager, values()))


def test_gradients_twice_of_one_forward() -> None:
    plain, model = (Net(1).double() for _ in range(2))
    cores(model)
    for m in (plain, model):
        torch.manual_seed(3)
        loss = loss_fn(m, values())
        torch.autograd.backward(loss, retain_graph=True)
        torch.autograd.backward(loss)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_the_module_stays_what_it_is() -> None:
    model, plain = Net(1), Net(1)
    flow.nn.recompute(model.layers[0])
    assert type(model.layers[0]) is Block
    assert list(model.state_dict()) == list(plain.state_dict())
    assert inspect.signature(model.layers[0].forward) == inspect.signature(plain.layers[0].forward)
    assert "Block  recomputed" in str(flow.nn.annotations(model))
    flow.nn.recompute(model.layers[0], None)
    assert "forward" not in vars(model.layers[0])


def test_a_forward_of_its_own_is_kept_and_comes_back() -> None:
    model = nn.Linear(4, 4)
    model.forward = own = lambda x: x * 3  # type: ignore[method-assign]
    flow.nn.recompute(flow.nn.recompute(model))
    assert torch.equal(model(torch.ones(4)), torch.full((4,), 3.0))
    flow.nn.recompute(model, None)
    assert model.forward is own


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deep", "shallow", "pickle"]
)
def test_copies_run_their_own_weights(copied: Callable[[Any], Any]) -> None:
    model = nn.Linear(4, 4, bias=False)
    flow.nn.recompute(model, keep="mm")
    other = copied(model)
    other._parameters = {"weight": nn.Parameter(torch.ones(4, 4)), "bias": None}
    assert torch.equal(other(torch.ones(4)), torch.full((4,), 4.0))
    assert "recomputed keep mm" in str(flow.nn.annotations(other))
    flow.nn.recompute(other, None)
    assert "recomputed" in str(flow.nn.annotations(model))


def test_a_new_word_makes_a_new_plan() -> None:
    model = Net().double()
    step = flow.compile(model, loss_fn, placement=PAIR).plan_for(values())
    whole_blocks(model)
    step(values())
    assert step.explain().recomputed[1] == 3


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        y: Tensor = self.line(x) * self.seen
        return y


def wrong(**said: Any) -> Callable[[], Any]:
    return lambda: flow.nn.recompute(nn.Linear(4, 4), **said)


def run_eager(model: nn.Module, **said: Any) -> Callable[[], Any]:
    return lambda: flow.nn.recompute(model, **said)(torch.ones(2, 4))


def run_graph() -> None:
    model = flow.nn.recompute(nn.Linear(4, 4), only="attention")
    flow.compile(model, loss_fn, placement=ONE).plan_for(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        (wrong(keep="gellu"), SbpError, "no op called 'gellu'.*did you mean 'gelu'"),
        (wrong(keep=["mm", "atention"]), SbpError, "'atention'.*'attention'"),
        (wrong(keep="dropout"), SbpError, "made of other ops.*mm, attention"),
        (wrong(keep="mm", only="attention"), SbpError, "give one"),
        (wrong(only="mm"), SbpError, r"only=\['attention'\].*keep="),
        (lambda: flow.nn.recompute(nn.ModuleList()), SbpError, "ModuleList is never called"),
        (lambda: flow.nn.recompute([3]), PlacementError, "found int"),  # type: ignore[type-var]
        (run_eager(Counting()), SbpError, "Counting changes its buffer seen.*in a graph"),
        (run_eager(nn.Linear(4, 4), only="attention"), SbpError, "Linear has no attention.*leave out only"),
        (run_graph, SbpError, "has no attention.*leave out only"),
    ],
)
def test_what_cannot_be(body: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"(?s){said}"):
        body()


def test_a_buffer_that_counts_is_right_in_a_graph() -> None:
    plain, model = Counting(), Counting()
    model.load_state_dict(plain.state_dict())
    flow.nn.recompute(model)
    x = torch.ones(2, 4)
    same(learnt(model, lambda m, x: flow.compile(m, loss_fn, placement=PAIR)(x), x), learnt(plain, eager, x))


def on_ranks() -> list[float]:
    model = Net(2).double()
    keeping(model)
    flow.nn.recompute(model.layers[0].attention, only="attention")
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = flow.compile(model, loss_fn, optimizer, placement=GRID)
    return [step(values()).item() for _ in range(2)]


@pytest.mark.sweep
def test_on_real_ranks(ranks4: Ranks) -> None:
    found = ranks4(on_ranks)
    assert found == [found[0]] * 4
    assert found[0] == pytest.approx(on_ranks())


def test_a_buffer_that_is_replaced_is_seen_though_the_last_lies_where_the_first_was() -> None:
    model = Counting()
    first, kept = id(model.seen), Contexts(model, frozenset())

    def run() -> None:
        with kept.watched():
            for _ in range(50):
                model.seen = torch.zeros(())
                if id(model.seen) == first:
                    break

    with pytest.raises(SbpError, match="changes its buffer seen"):
        run()
