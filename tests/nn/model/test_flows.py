"""Notes of how modules' inputs and results flow: where graphs move them, and that values stay what they were."""

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.boxing.graph.physical import Box, Physical
from sbpflow.boxing.graph.text.parse import from_text
from sbpflow.boxing.graph.text.text import to_text
from sbpflow.placement.errors import PlacementError, SbpError, ShapeError
from sbpflow.sbp.text import Pin
from tests.nn.graph.alike import GRID, LINE, same, same_grads
from tests.ranks import Ranks

TENSOR = flow.placement("cpu:[0-3] as (tensor=4)")
CONTEXT = flow.placement("cpu:[0-3] as (data=2, context=2)")
F64 = torch.float64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm: Any = nn.LayerNorm(width)
        self.norm2: Any = nn.LayerNorm(width)
        self.qkv, self.out = nn.ModuleList(), nn.Linear(width, width)
        self.qkv.extend(nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        rows, tokens, width = normed.shape
        q, k, v = (part(normed).view(rows, tokens, 4, width // 4).transpose(1, 2) for part in self.qkv)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(rows, tokens, width))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


def net(width: int = 16, layers: int = 3, dtype: torch.dtype = F64) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers))).to(dtype)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def moves(graph: Physical, module: str) -> list[tuple[str, str]]:
    """The moves that are made inside of a module in the forward, as signatures."""
    return [
        (str(graph.layout(s.source).sbp[0]), str(s.output.layout.sbp[0]))
        for s in graph.steps
        if isinstance(s, Box)
        and s.origin.module.startswith(module)
        and s.output.layout.state != graph.layout(s.source).state
    ]


def megatron(model: nn.Module) -> None:
    columns = {f"*.{name}.{kind}": S(0) for name in ("qkv.*", "up") for kind in ("weight", "bias")}
    rest: dict[str, Any] = {"*.norm*": B, "*.out.bias": B, "*.down.bias": B}
    flow.nn.shard(model, {**columns, "*.out.weight": S(1), "*.down.weight": S(1), **rest})
    for block in model.children():
        assert isinstance(block, Block)
        flow.nn.flow([block.norm, block.norm2], result={"tensor": S(1)})


def test_sequence_parallel_is_two_all_gathers_and_two_reduce_scatters_a_layer() -> None:
    with torch.device("meta"):
        model = net(1024, 4, torch.float32)
    megatron(model)
    graph = (
        flow.compile(model, loss_fn, placement=TENSOR).plan_for(torch.empty(1, 512, 1024, device="meta")).planned.graph
    )
    assert sorted(way for way in moves(graph, "1") if way != ("B", "P")) == [("P", "S(1)")] * 2 + [("S(1)", "B")] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "where", [TENSOR, flow.placement("cpu:[0-1] as (tensor=2)"), flow.placement("cpu:[0] as (tensor=1)")], ids=str
)
def test_megatron_with_sequence_parallel_trains_as_one_device(where: flow.Placement) -> None:
    model, x = net(), torch.randn(2, 8, 16, dtype=F64)
    one = copy.deepcopy(model)
    megatron(model)
    same(flow.compile(model, loss_fn, placement=where)(x), loss_fn(one, x))
    torch.autograd.backward(loss_fn(one, x))
    same_grads(model, one)


@pytest.mark.parametrize("spelling", [S(1), (S(1),), "S(1)", {"tensor": S(-2)}, "{tensor: S(1)}"], ids=str)
def test_a_result_lies_as_it_was_said_in_any_spelling(spelling: Any) -> None:
    model = nn.Linear(6, 4)
    flow.nn.flow(model, result=spelling)
    found = flow.compile(model, placement=TENSOR)(torch.randn(2, 5, 6))
    assert found.sbp == (S(1),)


@pytest.mark.parametrize(
    ("said", "lies"), [({"data": S(0)}, (S(0), ...)), ((None, S(1)), (..., S(1))), (("?", B), (..., B)), ("B", (B, B))]
)
def test_axes_that_are_not_named_are_chosen(said: Any, lies: tuple[Any, ...]) -> None:
    model, x = nn.Linear(6, 4), torch.randn(8, 8, 6)
    flow.nn.shard(model, {"weight": {"tensor": S(0)}, "bias": {"tensor": S(0)}})
    flow.nn.flow(model, result=said)
    found = flow.compile(model, placement=GRID)(x)
    same(found, model(x), 1e-6)
    assert all(wanted in (..., mine) for wanted, mine in zip(lies, found.sbp, strict=True))


def test_a_named_axis_leaves_the_others_to_the_weights() -> None:
    """It is not B on the axis that nobody named."""
    model = nn.Linear(6, 8)
    flow.nn.shard(model, {"weight": (B, S(0)), "bias": (B, S(0))})
    flow.nn.flow(model, result={"data": S(0)})
    assert flow.compile(model, placement=GRID)(torch.randn(64, 6)).sbp == (S(0), S(1))


def test_nothing_runs_for_it() -> None:
    """A result that lies so already costs no op and no move."""
    plain, said = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
    flow.nn.flow(list(said.children()), input=S(0), result=S(0))
    x = torch.ones(1 << 16, 4)
    steps = [
        flow.compile(model, loss_fn, placement=LINE, inputs={"x": S(0)}).plan_for(x).planned.graph.steps
        for model in (plain, said)
    ]
    assert [type(step) for step in steps[0]] == [type(step) for step in steps[1]]


def test_what_flows_in_pieces_is_kept_in_pieces() -> None:
    """The backward gathers it again, as Megatron does; the text of the graph says so."""
    model = net(layers=2)
    megatron(model)
    step = flow.compile(model, loss_fn, placement=TENSOR).plan_for(torch.randn(2, 8, 16, dtype=F64))
    graph = step.planned.graph
    again = [s for s in graph.steps if isinstance(s, Box) and s.again]
    assert {s.source.rpartition(".")[0] for s in again} == {
        f"{at}.{norm}" for at in range(2) for norm in ("norm", "norm2")
    }
    assert sum(row.count for row in step.explain().moves if row.direction == "again") == 4
    assert from_text(to_text(graph)) == graph


def test_gradients_come_back_the_dual_way() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    flow.nn.flow(model[0], result=S(1))
    step = flow.compile(model, loss_fn, placement=TENSOR)
    step(torch.randn(4, 4))
    (pin,) = [op for op in step.planned.plan.decided.logical.ops if op.lies is not None]
    value = step.planned.graph.values[step.planned.plan.decided.names[pin.numbers[0]]]
    assert value.layout.dual.sbp == (S(1),)


@dataclass
class Out:
    hidden: Tensor
    mask: Tensor
    again: Tensor


class Many(nn.Module):
    """Takes and gives several tensors, in the structure that it was made with."""

    def __init__(self, pack: Callable[..., Any]) -> None:
        super().__init__()
        self.line, self.pack = nn.Linear(4, 4), pack

    def forward(self, x: Tensor, mask: Tensor, *, other: Tensor) -> Any:
        y = self.line(x)
        return self.pack(y, mask.sum(-1), y + other)


@pytest.mark.parametrize(
    "pack", [lambda *x: x, lambda *x: {"a": x[0], "b": [x[1], x[2]]}, Out], ids=["tuple", "dict", "data"]
)
def test_the_first_tensor_with_the_dims_and_those_of_its_shape(pack: Callable[..., Any]) -> None:
    model, x = Many(pack), torch.randn(8, 8, 4)
    flow.nn.flow(model, input=S(2), result=S(1))
    step = flow.compile(model, placement=LINE)
    step(x, torch.ones(8, 4), other=x)
    pins = [op for op in step.planned.plan.decided.logical.ops if op.lies is not None]
    assert [str(op.lies) for op in pins] == ["S(2)", "S(2)", "S(1)", "S(1)"]
    assert {tuple(op.outputs[0].shape) for op in pins} == {(8, 8, 4)}


def test_what_is_one_tensor_for_the_caller_is_one_inside() -> None:
    """Attention looks whether query, key and value are the same."""
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True, dtype=F64), torch.randn(4, 6, 8, dtype=F64)
    wanted = attention(x, x, x, need_weights=False)[0]
    flow.nn.flow(attention, input=S(0))
    step = flow.compile(attention, lambda m, x: m(x, x, x, need_weights=False)[0].sum(), placement=LINE)
    same(step(x), wanted.sum())
    assert sum(op.lies is not None for op in step.planned.plan.decided.logical.ops) == 1


def test_a_write_to_what_flows_is_seen_outside() -> None:
    """The tensor inside of the module is the caller's: nothing may be copied."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        hidden: Tensor = x * 2
        model(hidden)
        return hidden

    model, x = nn.ReLU(inplace=True), torch.randn(8, 4)
    flow.nn.flow(model, input=S(0), result=S(1))
    with torch.no_grad():
        found = flow.compile(model, lambda m, x: step(m, x), placement=LINE)(x)
    assert torch.equal(found.full_tensor(), (x * 2).relu())


def test_equal_layers_with_other_notes_are_not_alike() -> None:
    model, x = net(layers=4), torch.randn(4, 8, 16, dtype=F64)
    one = copy.deepcopy(model)
    flow.nn.flow([model[1].norm, model[3].norm], result=S(1))
    flow.nn.flow(model[2], result=S(2))
    step = flow.compile(model, loss_fn, placement=LINE)
    same(step(x), loss_fn(one, x))
    pins = [(op.origin.module, str(op.lies)) for op in step.planned.plan.decided.logical.ops if op.lies is not None]
    assert pins == [("1.norm", "S(1)"), ("2", "S(2)"), ("3.norm", "S(1)")]


def test_layers_that_are_not_traced_anew_keep_their_notes() -> None:
    model = net(layers=4)
    megatron(model)
    step = flow.compile(model, loss_fn, placement=TENSOR).plan_for(torch.randn(2, 8, 16, dtype=F64))
    pins = [op.origin.module for op in step.planned.plan.decided.logical.ops if op.lies is not None]
    assert pins == [f"{layer}.{norm}" for layer in range(4) for norm in ("norm", "norm2")]


def test_notes_are_kept_by_copies_and_taken_back() -> None:
    model = net(layers=1)
    flow.nn.flow(model[0], result=S(1), input={"tensor": S(0)})
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "0: Block  <- {tensor: S(0)}  -> S(1)" in str(flow.nn.annotations(made))
        flow.nn.flow(made[0], result=None)
        assert "->" not in str(flow.nn.annotations(made))
        assert "<- {tensor: S(0)}" in str(flow.nn.annotations(made))
    assert list(model.state_dict()) == list(net(layers=1).state_dict())


def test_a_new_word_makes_a_new_plan() -> None:
    model, x = nn.Linear(4, 4), torch.randn(8, 8, 4)
    step = flow.compile(model, placement=LINE)
    step.plan_for(x)
    flow.nn.flow(model, result=S(1))
    assert step(x).sbp == (S(1),)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "inputs", [{"x": {"data": S(0), "context": S(1)}}, {"0": ("?", S(1))}, {"x": "{data: S(0)}"}], ids=str
)
@pytest.mark.parametrize("many", [1, 2])
def test_arguments_lie_as_said(inputs: Any, many: int) -> None:
    """Context parallel: tokens are cut; in micro-batches those of each."""
    model, x = net(layers=2), torch.randn(4, 8, 16, dtype=F64)
    one = copy.deepcopy(model)
    step = flow.compile(model, loss_fn, placement=CONTEXT, inputs=inputs, micro_batches=many)
    torch.autograd.backward(loss_fn(one, x))
    same(step(x), loss_fn(one, x))
    same_grads(model, one)
    lies = step.planned.graph.sources[0].value.layout.sbp
    wanted = Pin.read(next(iter(inputs.values()))).on(CONTEXT, 3)
    assert all(entry in (None, mine) for entry, mine in zip(wanted, lies, strict=True))


def test_arguments_in_structures() -> None:
    def step(model: Any, batch: dict[str, Tensor], y: Tensor) -> Any:
        return model(batch["x"]).mean() * batch["scale"] + y.mean()

    given = {"x": torch.randn(8, 4), "scale": torch.tensor(2.0)}
    for name in ("batch", "batch.x"):
        made = flow.compile(nn.Linear(4, 4), step, placement=LINE, inputs={name: S(0)}).plan_for(given, torch.ones(8))
        lies = {s.value.name: s.value.layout.sbp for s in made.planned.graph.sources}
        assert lies["0.x"] == (S(0),)
        assert lies["0.scale"] == (B,)


def wrong(**said: Any) -> Callable[[], Any]:
    return lambda: flow.nn.flow(nn.Linear(4, 4), **said)


def planned(model: nn.Module, sbp: Any, side: str = "result", **options: Any) -> Callable[[], Any]:
    def made() -> Any:
        flow.nn.flow(model, **{side: sbp})
        return flow.compile(model, placement=GRID, **options).plan_for(torch.ones(8, 4))

    return made


def graph(inputs: Any, x: Any = None) -> Callable[[], Any]:
    return lambda: flow.compile(nn.Linear(4, 4), placement=GRID, inputs=inputs).plan_for(
        torch.ones(8, 4) if x is None else x()
    )


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        (wrong(), SbpError, "nothing is said.*result="),
        (wrong(result=P), SbpError, "result=P.*addends.*B where"),
        (wrong(input="Q"), SbpError, "input='Q'.*cannot read"),
        (lambda: flow.nn.flow(nn.ModuleList(), result=B), SbpError, "ModuleList is never called.*those in it"),
        (lambda: flow.nn.flow(["a"], result=B), PlacementError, "found str"),  # type: ignore[type-var]
        (
            planned(nn.Linear(4, 4), S(2)),
            ShapeError,
            r"the result of Linear is to flow as S\(2\).*\(8, 4\).*say it anew",
        ),
        (
            planned(nn.Linear(4, 4), {"pipe": S(0)}, "input"),
            PlacementError,
            "the input of Linear.*'pipe'.*data, tensor",
        ),
        (planned(nn.Linear(4, 4), (S(0),)), SbpError, "1 entries.*2 axes"),
        (graph({"y": B}), SbpError, "no such argument.*are input"),
        (graph({"input": S(2)}), ShapeError, r"input \(8, 4\)"),
        (graph({"input": P}), SbpError, "no addend"),
        (graph({"input": {"dat": S(0)}}), PlacementError, "the argument input.*did you mean 'data'"),
        (graph([S(0)]), SbpError, "signatures by name"),
        (graph({"input": S(0)}, lambda: flow.ones(8, 4, placement=GRID, sbp=B)), SbpError, "came as.*to_global"),
    ],
)
def test_what_cannot_be(body: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"(?s){said}"):
        body()


def test_a_module_that_is_not_called_is_told_of() -> None:
    model = nn.MultiheadAttention(8, 2)
    flow.nn.flow(model.out_proj, result=S(0))
    with pytest.warns(UserWarning, match="does not call out_proj"):
        flow.compile(model, lambda m, x: m(x, x, x)[0].sum(), placement=LINE).plan_for(torch.ones(4, 2, 8))


def test_pieces_of_other_sizes_in_a_pipeline() -> None:
    """Uneven pieces, over stages."""
    model, x = net(layers=2), torch.randn(6, 7, 16, dtype=F64)
    one = copy.deepcopy(model)
    for layer, ranks in zip(model, ([0, 1], [2, 3]), strict=True):
        flow.nn.place(layer, flow.placement("cpu", ranks))
        flow.nn.flow(layer.norm, result=S(1))
        flow.nn.flow(layer, input=S(2), result=S(1))
    step = flow.compile(model, loss_fn, micro_batches=3)
    same(step(x), loss_fn(one, x))
    torch.autograd.backward(loss_fn(one, x))
    same_grads(model, one)


def trained() -> Sequence[float]:
    model, x = net(layers=1), torch.randn(2, 8, 16, dtype=F64, generator=torch.Generator().manual_seed(3))
    megatron(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = flow.compile(model, loss_fn, optimizer, placement=TENSOR, inputs={"x": {"tensor": S(1)}})
    return [step(x).item() for _ in range(2)]


@pytest.mark.sweep
def test_on_real_ranks(ranks4: Ranks) -> None:
    found = ranks4(trained)
    assert found == [found[0]] * 4
    assert found[0] == pytest.approx(trained())
