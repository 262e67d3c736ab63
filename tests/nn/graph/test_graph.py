"""A graph does what one device does: its steps, its results, and what users do between steps."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.placement.errors import SbpError
from tests.ranks import Ranks

LINE = flow.placement("cpu", range(4))
GRID = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
F64 = torch.float64
WHERE = pytest.mark.parametrize("where", [LINE, GRID], ids=["line", "grid"])


def net(dtype: torch.dtype = F64) -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(rows: int = 8, at: int = 0, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 + at)
    return torch.randn(rows, 4, dtype=F64, generator=draw).to(dtype), torch.randint(3, (rows,), generator=draw)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def whole(value: Any) -> Any:
    if isinstance(value, flow.GlobalTensor):
        return value.detach().full_tensor()
    return value.detach() if isinstance(value, Tensor) else value


def same(mine: Any, one: Any, tolerance: float = 1e-10) -> None:
    """Sums are made in another order."""
    torch.testing.assert_close(whole(mine), whole(one), rtol=tolerance, atol=tolerance)


def same_model(mine: nn.Module, one: nn.Module, tolerance: float = 1e-10) -> None:
    held, wanted = mine.state_dict(), one.state_dict()
    assert list(held) == list(wanted)
    for name, value in wanted.items():
        same(held[name], value, tolerance)


def same_grads(mine: nn.Module, one: nn.Module) -> None:
    for (name, p), q in zip(mine.named_parameters(), one.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            same(p.grad, q.grad)


def compiled(graph: flow.Graph) -> int:
    """How many steps were captured."""
    return sum(map(len, graph._steps.values()))


Optimize = Callable[[nn.Module], torch.optim.Optimizer]


def eager(model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer | None, *args: Any, clip: float = 0) -> Any:
    """The step on one device."""
    result = loss(model, *args)
    first = result[0] if isinstance(result, tuple) else result
    first.backward()
    if optimizer is not None:
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return result


def trains_alike(
    model: nn.Module,
    where: flow.Placement,
    make: Optimize = sgd,
    loss: Any = loss_fn,
    steps: int = 3,
    tolerance: float = 1e-10,
    **options: Any,
) -> flow.Graph:
    one = copy.deepcopy(model)
    ones, mine = make(one), make(model)
    step = flow.compile(model, loss, mine, placement=where, **options)
    clip = options.get("clip_grad_norm") or 0
    for at in range(steps):
        x, y = batch(at=at)
        x = x.to(next(one.parameters()).dtype)
        same(step(x, y), eager(one, loss, ones, x, y, clip=clip), tolerance)
    same_model(model, one, tolerance)
    return step


# Steps


@WHERE
def test_a_step_is_that_of_one_device(where: flow.Placement) -> None:
    trains_alike(net(), where)


@WHERE
def test_gradients_are_clipped_as_on_one_device(where: flow.Placement) -> None:
    trains_alike(net(), where, clip_grad_norm=0.05)


@WHERE
def test_float32_too(where: flow.Placement) -> None:
    trains_alike(net(torch.float32), where, tolerance=1e-5)


@WHERE
@pytest.mark.parametrize("rows", [6, 3, 1])
def test_any_number_of_rows_is_shared_out(where: flow.Placement, rows: int) -> None:
    model, one = net(), net()
    flow.nn.shard(model, {"0.weight": (S(0), B)[: where.ndim]})
    step = flow.compile(model, loss_fn, sgd(model), placement=where)
    ones = sgd(one)
    for at in range(2):
        x, y = batch(rows, at)
        given = flow.tensor(x, placement=where, sbp={"data": S(0)} if where is GRID else S(0)), y
        same(step(*given), eager(one, loss_fn, ones, x, y))
    same_model(model, one)


@WHERE
def test_without_an_optimizer_gradients_add_up_on_the_parameters(where: flow.Placement) -> None:
    model, one = net(), net()
    step = flow.compile(model, loss_fn, placement=where)
    for at in range(3):
        step(*batch(at=at))
        loss_fn(one, *batch(at=at)).backward()  # type: ignore[no-untyped-call]
        same_grads(model, one)
    model.zero_grad()
    step(*batch())
    one.zero_grad()
    loss_fn(one, *batch()).backward()  # type: ignore[no-untyped-call]
    same_grads(model, one)


class Losses(flow.Graph):
    """Two losses on one model, and results in all sorts of containers."""

    def __init__(self, model: nn.Module, optimizer: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.model, self.optimizer = model, optimizer

    def build(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        out = self.model(x)
        first, second = F.cross_entropy(out, y), out.square().mean()
        first.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        (second * 0.5).backward()
        return {"losses": (first, second), "guesses": out.argmax(-1), "rows": len(x)}


@WHERE
def test_several_losses_and_results(where: flow.Placement) -> None:
    model, one = net(), net()
    step, ones = Losses(model, sgd(model), placement=where), sgd(one)
    for at in range(3):
        x, y = batch(at=at)
        found = step(x, y)
        out = one(x)
        first, second = F.cross_entropy(out, y), out.square().mean()
        (first + 0.5 * second).backward()
        ones.step()
        ones.zero_grad()
        same(found["losses"][0], first)
        same(found["losses"][1], second)
        assert torch.equal(whole(found["guesses"]), out.argmax(-1))
        assert found["rows"] == 8
        assert type(found["losses"]) is tuple
    same_model(model, one)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    logits: Any
    note: str


def nested(model: nn.Module, given: Any, *, scale: float, extra: Any = None) -> Any:
    out = model(given["x"][0]) * scale + extra.first
    return Record(out, "kept"), Pair(out.sum(), [extra.second, None])


@WHERE
def test_arguments_and_results_may_be_nested(where: flow.Placement) -> None:
    model, one = net(), net()

    class Nested(flow.Graph):
        def __init__(self) -> None:
            super().__init__(placement=where)
            self.model = model

        def build(self, *args: Any, **kwargs: Any) -> Any:
            return nested(self.model, *args, **kwargs)

    x, _ = batch()
    step = Nested()
    args: Any = ({"x": [x, 3]},)
    kwargs: Any = {"scale": 2.0, "extra": Pair(torch.ones(3, dtype=F64), torch.zeros(2))}
    with torch.no_grad():
        for _ in range(2):
            record, pair = step(*args, **kwargs)
            wanted, other = nested(one, *args, **kwargs)
            assert type(record) is Record
            assert type(pair) is Pair
            assert record.note == "kept"
            assert pair.second[1] is None
            same(record.logits, wanted.logits)
            same(pair.first, other.first)
            same(pair.second[0], other.second[0])
        kwargs["scale"] = 3.0
        same(step(*args, **kwargs)[0].logits, nested(one, *args, **kwargs)[0].logits)


@WHERE
def test_a_dataclass_and_a_models_own_output_as_arguments_and_results(where: flow.Placement) -> None:
    from transformers.modeling_outputs import BaseModelOutput

    class Doubles(flow.Graph):
        def build(self, given: Any, record: Record) -> Any:
            return BaseModelOutput(last_hidden_state=given.last_hidden_state * 2), Record(
                record.logits + 1, record.note
            )

    x, _ = batch()
    step = Doubles(placement=where)
    for k in range(2):
        output, record = step(BaseModelOutput(last_hidden_state=x + k), Record(x - k, "a"))
        assert type(output) is BaseModelOutput
        same(output.last_hidden_state, 2 * (x + k))
        same(record.logits, x - k + 1)
    assert compiled(step) == 1
    step(BaseModelOutput(last_hidden_state=x), Record(x, "b"))
    assert compiled(step) == 2


# Inference, and graphs that share a model


@WHERE
def test_an_inference_graph_is_the_models_forward(where: flow.Placement) -> None:
    model, one = net(), net()
    forward = flow.compile(model, placement=where)
    x, _ = batch()
    with torch.no_grad():
        y = forward(x)
    same(y, one(x))
    assert not y.requires_grad
    assert not forward.step.trains


def test_under_no_grad_a_training_graph_only_tells_the_loss() -> None:
    model, one = net(), net()
    step = flow.compile(model, loss_fn, sgd(model), placement=LINE)
    with torch.no_grad():
        same(step(*batch()), loss_fn(one, *batch()))
    same_model(model, one)
    step(*batch())
    eager(one, loss_fn, sgd(one), *batch())
    same_model(model, one)


class Noisy(nn.Module):
    """Dropout and a batch norm: train and eval differ, and buffers change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.last = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        out: Tensor = self.last(self.drop(self.norm(self.first(x))))
        return out


@WHERE
def test_training_and_evaluation_share_one_model(where: flow.Placement) -> None:
    model, one = Noisy().double(), Noisy().double()
    model.drop.p = one.drop.p = 0.0
    train, evaluate = flow.compile(model, loss_fn, sgd(model), placement=where), flow.compile(model)
    ones = sgd(one)
    for at in range(2):
        x, y = batch(at=at)
        model.train(), one.train()
        same(train(x, y), eager(one, loss_fn, ones, x, y))
        held = dict(model.named_parameters())
        model.eval(), one.eval()
        with torch.no_grad():
            same(evaluate(x), one(x))
        assert all(value is held[name] for name, value in model.named_parameters())
        same_model(model, one)
    assert compiled(train) == compiled(evaluate) == 1


def test_eval_mode_is_another_graph_of_the_same_model() -> None:
    model = Noisy()
    forward = flow.compile(model, placement=LINE)
    x = batch(dtype=torch.float32)[0]
    with torch.no_grad():
        first, second = forward(x), forward(x)
        assert not torch.equal(whole(first), whole(second))  # dropout draws anew
        model.eval()
        assert torch.equal(whole(forward(x)), whole(forward(x)))
        assert compiled(forward) == 2
        model.train()
        forward(x)
        assert compiled(forward) == 2


@WHERE
def test_dropout_draws_what_one_device_draws(where: flow.Placement) -> None:
    model, one = Noisy().double(), Noisy().double()
    step, ones = flow.compile(model, loss_fn, sgd(model), placement=where), sgd(one)
    torch.manual_seed(5)
    mine = [step(*batch(at=at)) for at in range(2)]
    torch.manual_seed(5)
    for at in range(2):
        same(mine[at], eager(one, loss_fn, ones, *batch(at=at)))


# What makes another graph


def test_other_shapes_are_captured_once_each() -> None:
    model = net()
    step = flow.compile(model, loss_fn, sgd(model), placement=LINE)
    for rows in (8, 4, 8, 4, 8):
        step(*batch(rows))
    assert compiled(step) == 2
    built: list[int] = []

    class Counts(flow.Graph):
        def build(self, x: Tensor, flag: bool) -> Tensor:
            built.append(len(x))
            return x + 1 if flag else x - 1

    counts = Counts(placement=LINE)
    for rows, flag in ((2, True), (2, True), (3, True), (2, False), (3, True)):
        assert torch.equal(whole(counts(torch.ones(rows), flag)), torch.ones(rows) + (1 if flag else -1))
    assert built == [2, 3, 2]


def test_numbers_of_other_types_are_other_arguments() -> None:
    class Adds(flow.Graph):
        def build(self, x: Tensor, n: Any) -> Tensor:
            return x + n  # type: ignore[no-any-return]

    adds = Adds(placement=LINE)
    x = torch.ones(2, dtype=torch.long)
    assert [adds(x, n).dtype for n in (1, 1.0, True)] == [torch.long, torch.float32, torch.long]


def test_frozen_parameters_stay_and_freezing_is_noticed() -> None:
    model, one = net(), net()
    for each in (model, one):
        each[0].requires_grad_(False)
    step = flow.compile(model, loss_fn, torch.optim.SGD([*model[2].parameters()], lr=0.1), placement=GRID)
    ones = torch.optim.SGD([*one[2].parameters()], lr=0.1)
    same(step(*batch()), eager(one, loss_fn, ones, *batch()))
    same_model(model, one)
    for each in (model, one):
        each[2].bias.requires_grad_(False)
    same(step(*batch(at=1)), eager(one, loss_fn, ones, *batch(at=1)))
    same_model(model, one)
    assert compiled(step) == 2


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.kind = nn.Linear(4, 3), 1.0, "plain"

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.scale
        return out.abs() if self.kind == "abs" else out


def test_numbers_that_modules_hold_are_noticed_when_they_change() -> None:
    model = Scaled()
    one = copy.deepcopy(model)
    forward = flow.compile(model, placement=LINE)
    x = batch(dtype=torch.float32)[0]
    with torch.no_grad():
        for scale, kind in ((1.0, "plain"), (2.0, "plain"), (2.0, "abs"), (1.0, "plain")):
            model.scale, model.kind = one.scale, one.kind = scale, kind
            same(forward(x), one(x), 1e-6)
    assert compiled(forward) == 3


class Weighted(flow.Graph):
    def __init__(self, weight: float) -> None:
        super().__init__(placement=LINE)
        self.weight, self.calls = weight, 0

    def build(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_numbers_that_the_graph_holds_are_noticed_too_where_they_are_read() -> None:
    graph = Weighted(2.0)
    for weight in (2.0, 3.0, 2.0):
        graph.weight, graph.calls = weight, graph.calls + 1
        assert torch.equal(whole(graph(torch.ones(2))), torch.full((2,), weight))
    assert compiled(graph) == 2


def test_numbers_that_nothing_reads_may_change_freely() -> None:
    model = Scaled()
    forward = flow.compile(model, placement=LINE)
    x = batch(dtype=torch.float32)[0]
    with torch.no_grad():
        for step in range(3):
            model.step = step  # type: ignore[assignment]
            forward(x)
    assert compiled(forward) == 1


def test_layers_that_are_alike_are_all_looked_at() -> None:
    model = nn.Sequential(*(Scaled() for _ in range(1)), nn.Linear(3, 4), *(Scaled() for _ in range(1)))
    one = copy.deepcopy(model)
    forward = flow.compile(model, placement=LINE)
    x = batch(dtype=torch.float32)[0]
    with torch.no_grad():
        for scale in (1.0, 2.0):
            model[2].scale = one[2].scale = scale  # type: ignore[assignment]
            same(forward(x), one(x), 1e-6)


def test_dropouts_probability_may_change() -> None:
    model = Noisy()
    forward = flow.compile(model, placement=LINE)
    x = batch(dtype=torch.float32)[0]
    with torch.no_grad():
        forward(x)
        model.drop.p = 0.0
        assert torch.equal(whole(forward(x)), whole(forward(x)))


# Global tensors as inputs


@WHERE
def test_a_global_input_stays_where_it_is(where: flow.Placement) -> None:
    model, one = net(), net()
    forward = flow.compile(model, placement=where)
    x, _ = batch()
    given = flow.tensor(x, placement=where, sbp=(S(0), B)[: where.ndim])
    before = [shard.data_ptr() for shard in given._shards]
    with torch.no_grad(), flow.record() as moves:
        out = forward(given)
    same(out, one(x))
    assert [shard.data_ptr() for shard in given._shards] == before
    source = next(s for s in forward.physical.sources if s.kind == "input")
    assert source.value.layout.state == given._layout.state
    assert sum(move.plan.total for move in moves) == sum(row.total for row in forward.explain().moves)


def test_a_partial_input_is_added_up() -> None:
    model, one = net(), net()
    forward = flow.compile(model, placement=LINE)
    parts = [batch(at=at)[0] for at in range(4)]
    given = flow.from_local(parts, placement=LINE, sbp=P)
    with torch.no_grad():
        same(forward(given), one(sum(parts)))


def test_arguments_that_require_grad_get_it() -> None:
    model, one = net(), net()
    step = flow.compile(model, loss_fn, sgd(model), placement=GRID)
    x, y = batch()
    mine, ones = x.clone().requires_grad_(), x.clone().requires_grad_()
    there = flow.tensor(x, placement=GRID, sbp=(S(0), B), requires_grad=True)
    for k in range(2):
        wanted = loss_fn(one, ones, y)
        wanted.backward()  # type: ignore[no-untyped-call]
        same(step(there if k else mine, y), wanted)
        optimizer = sgd(one)
        optimizer.step()
        optimizer.zero_grad()
        same((there if k else mine).grad, ones.grad)
        ones.grad = None


# Modules and optimizers


class Both(flow.Graph):
    """Two models, each with its optimizer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(3)
        self.front, self.back = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()
        self.one, self.other = sgd(self.front), torch.optim.AdamW(self.back.parameters(), lr=0.01)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.back(self.front(x).relu()), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


@WHERE
def test_two_modules_and_two_optimizers(where: flow.Placement) -> None:
    step, one = Both(placement=where), Both()
    for at in range(3):
        same(step(*batch(at=at)), one.build(*batch(at=at)))
        for optimizer in (one.one, one.other):
            optimizer.step()
            optimizer.zero_grad()
    same_model(step.front, one.front)
    same_model(step.back, one.back)
    names = [s.value.name for s in step.physical.sources if s.kind == "parameter"]
    assert names == ["front.weight", "front.bias", "back.weight", "back.bias"]


class Shared(flow.Graph):
    """Modules in a list, of which two share a weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(3)
        self.parts = [nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), nn.Linear(4, 3).double()]
        self.parts[1].weight = self.parts[0].weight
        values = {id(p): p for part in self.parts for p in part.parameters()}
        self.optimizer = torch.optim.SGD(values.values(), lr=0.1)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        loss = F.cross_entropy(x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def test_modules_in_a_list_may_share_a_weight() -> None:
    step, one = Shared(placement=LINE), Shared()
    for at in range(2):
        same(step(*batch(at=at)), one.build(*batch(at=at)))
        one.optimizer.step()
        one.optimizer.zero_grad()
    assert step.parts[0].weight is step.parts[1].weight
    for mine, other in zip(step.parts, one.parts, strict=True):
        same_model(mine, other)


class Odd(nn.Module):
    """A tied weight, one that nothing uses, and a module that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight
        self.spare, self.idle = nn.Parameter(torch.ones(3)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(self.second(self.first(x)).relu())
        return out


@WHERE
def test_tied_and_unused_parameters(where: flow.Placement) -> None:
    model = Odd().double()
    step = trains_alike(model, where)
    assert model.first.weight is model.second.weight
    assert isinstance(model.spare, flow.GlobalTensor)
    assert model.spare.grad is None
    assert step.step.trains


def test_unused_parameters_have_no_gradient() -> None:
    model, one = Odd(), Odd()
    step = flow.compile(model, loss_fn, placement=LINE)
    step(*batch(dtype=torch.float32))
    eager(one, loss_fn, None, *batch(dtype=torch.float32))
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in one.parameters()]


@WHERE
def test_buffers_change_as_on_one_device(where: flow.Placement) -> None:
    model = Noisy().double()
    model.drop.p = 0.0
    trains_alike(model, where)
    assert int(model.seen) == 24


@WHERE
def test_the_models_own_parameters_are_global_afterwards(where: flow.Placement) -> None:
    model, one = net(), net()
    step, ones = flow.compile(model, loss_fn, sgd(model), placement=where), sgd(one)
    for at in range(3):
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at)))
        x = batch(at=at)[0]
        with torch.no_grad():  # an eager call in between has the new values
            same(model(flow.tensor(x, placement=where, sbp=(B,) * where.ndim)), one(x))
    assert "placement=cpu:[0-3]" in repr(model[0].bias)
    assert str(step).startswith("Sequential: ")
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    step(*batch())
    model.load_state_dict(saved)
    same_model(model, one)
    same(step(*batch(at=5)), loss_fn(one, *batch(at=5)))


def test_a_whole_state_dict_can_be_loaded_between_steps() -> None:
    model, one = net(), net()
    step = flow.compile(model, loss_fn, sgd(model), placement=GRID)
    step(*batch())
    model.load_state_dict(one.state_dict())
    same(step(*batch()), loss_fn(one, *batch()))


def test_eager_training_in_between_goes_on_with_the_same_weights_and_momentum() -> None:
    model, one = net(), net()
    mine, ones = sgd(model), sgd(one)
    step = flow.compile(model, loss_fn, mine, placement=LINE)
    for at in range(4):
        x, y = batch(at=at)
        if at % 2:
            eager(
                model, loss_fn, mine, flow.tensor(x, placement=LINE, sbp=S(0)), flow.tensor(y, placement=LINE, sbp=S(0))
            )
        else:
            step(x, y)
        eager(one, loss_fn, ones, x, y)
    same_model(model, one)


# Where layers live


@pytest.mark.parametrize("nest", [False, True], ids=["side by side", "nested"])
def test_layers_on_several_placements(nest: bool) -> None:
    model = net()
    if nest:
        flow.nn.place(model, LINE)
        flow.nn.place(model[2], flow.placement("cpu", range(2)))
    else:
        flow.nn.place(model[:2], GRID[0])
        flow.nn.place(model[2], GRID[1])
    one = copy.deepcopy(model)
    step, ones = flow.compile(model, loss_fn, sgd(model)), sgd(one)
    for at in range(3):
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at)))
    same_model(model, one)
    assert model[0].weight.placement != model[2].weight.placement


def test_hints_hold() -> None:
    model = net()
    flow.nn.shard(model, {"0.weight": {"tensor": S(0)}, "2.weight": {"tensor": S(1)}})
    trains_alike(model, GRID)
    assert model[0].weight.sbp == (B, S(0))
    assert model[2].weight.sbp == (B, S(1))


def test_a_parameter_may_be_addends() -> None:
    model = net()
    flow.nn.shard(model, {"0.weight": P})
    trains_alike(model, LINE)
    assert model[0].weight.sbp == (P,)


@WHERE
def test_a_model_on_meta_is_planned_then_made(where: flow.Placement) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    step = flow.compile(model, loss_fn, placement=where)
    torch.manual_seed(7)
    step.plan(*batch(dtype=torch.float32))
    assert step.text()
    torch.manual_seed(7)
    one = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    same(step(*batch(dtype=torch.float32)), loss_fn(one, *batch(dtype=torch.float32)), 1e-6)
    same_model(model, one, 0)


# Autocast, copies, backends


@WHERE
def test_autocast_inside_build_is_eagers(where: flow.Placement) -> None:
    def cast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x).float(), y)

    trains_alike(net(torch.float32), where, loss=cast, tolerance=3e-2)


def test_autocast_around_the_call_is_noticed() -> None:
    model = net(torch.float32)
    forward = flow.compile(model, placement=LINE)
    x = batch(dtype=torch.float32)[0]
    with torch.no_grad():
        assert forward(x).dtype is torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert forward(x).dtype is torch.bfloat16
        with torch.autocast("cpu", torch.float16):
            assert forward(x).dtype is torch.float16
        assert forward(x).dtype is torch.float32


@pytest.mark.parametrize("backend", ["autograd", "code"])
def test_backends_agree(backend: Any) -> None:
    trains_alike(net(), GRID, backend=backend)


def test_a_copy_of_a_graph_has_a_model_of_its_own() -> None:
    model, one = net(), net()
    step, ones = flow.compile(model, loss_fn, sgd(model), placement=LINE), sgd(one)
    step(*batch())
    eager(one, loss_fn, ones, *batch())
    other: Any = copy.deepcopy(step)
    step(*batch(at=7))
    same_model(other.model, one)
    same(other(*batch(at=1)), eager(one, loss_fn, ones, *batch(at=1)))
    same_model(other.model, one)


def test_a_graph_is_not_pickled() -> None:
    with pytest.raises(SbpError, match=r"^Linear: a graph cannot be pickled, .*\n  save model.state_dict\(\)"):
        pickle.dumps(flow.compile(nn.Linear(2, 2)))


# Real ranks


def on_ranks() -> list[float]:
    model, one = net(), net()
    torch.manual_seed(0)
    step, ones = flow.compile(model, loss_fn, sgd(model), placement=GRID), sgd(one)
    losses = []
    for at in range(3):
        loss = step(*batch(at=at))
        same(loss, eager(one, loss_fn, ones, *batch(at=at)))
        losses.append(loss.item())
    same_model(model, one)
    return losses


def test_on_real_ranks(ranks4: Ranks) -> None:
    found = ranks4(on_ranks)
    assert all(losses == found[0] for losses in found)


def differing_seeds() -> str:
    model = nn.Sequential(net(), nn.Dropout())
    torch.manual_seed(10 + torch.distributed.get_rank())
    try:
        flow.compile(model, loss_fn, placement=LINE)(*batch())
    except SbpError as error:
        return str(error)
    return ""


def differing_plans() -> str:
    class Differs(flow.Graph):
        def build(self, x: Tensor) -> Tensor:
            return x + torch.distributed.get_rank()

    try:
        Differs(placement=LINE)(torch.ones(4))
    except SbpError as error:
        return str(error)
    return ""


def differing_weights() -> str:
    model = nn.Linear(4, 3).double()
    nn.init.constant_(model.bias, torch.distributed.get_rank())
    step = flow.compile(model, loss_fn, placement=LINE)
    try:
        step(*batch())
    except SbpError as error:
        return str(error)
    return ""


def test_ranks_that_differ_are_told(ranks4: Ranks) -> None:
    for text in ranks4(differing_plans):
        assert "made different plans of Differs\n  build must do the same on every rank" in text
    for text in ranks4(differing_weights):
        assert "have different values in" in text
    for text in ranks4(differing_seeds):
        assert "seed" in text
