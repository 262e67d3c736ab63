"""A graph does what one device does: its steps and its results."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from sbpflow.nn.graph.run.pipeline import Pipelined
from tests.nn.graph.alike import (
    F64,
    GRID,
    LINE,
    WHERE,
    batch,
    compiled,
    eager,
    loss_fn,
    net,
    same,
    same_grads,
    same_model,
    sgd,
    trains_alike,
    whole,
)
from tests.nn.graph.paths import Path, every_path
from tests.ranks import Ranks

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


def kept_gradients() -> None:
    model, one = net(), net()
    flow.nn.shard(model, {"*": B})
    step = flow.compile(model, loss_fn, placement=LINE)
    seen: list[tuple[Tensor, Tensor]] = []
    for at in range(3):
        step(*(flow.tensor(value, placement=LINE, sbp=S(0)) for value in batch(16, at)))
        loss_fn(one, *batch(16, at)).backward()  # type: ignore[no-untyped-call]
        same_grads(model, one)
        seen += [(p.grad, q.grad.clone()) for p, q in zip(model.parameters(), one.parameters(), strict=True)]
        model.zero_grad()
        one.zero_grad()
    for mine, wanted in seen:
        same(mine, wanted)


def test_gradients_that_someone_keeps_do_not_change(ranks4: Ranks) -> None:
    kept_gradients()
    ranks4(kept_gradients)


class Losses(flow.nn.Graph):
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


@every_path
def test_several_losses_and_results(path: Path) -> None:
    model, one = path.placed(net()), net()
    step, ones = Losses(model, sgd(model), **path.options), sgd(one)
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

    class Nested(flow.nn.Graph):
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

    class Doubles(flow.nn.Graph):
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("hints", [{"*": B}, {"*": S(0)}, {}], ids=["bucketed", "gathered again", "chosen"])
@pytest.mark.parametrize("prices", ["flat", "cpu"])
def test_what_a_step_says_that_it_sends_is_what_it_sends(hints: dict[str, Any], prices: str) -> None:
    """Gradients of a bucket go by one plan, which may send less than one for each: of little, another is quickest."""
    model = nn.Sequential(nn.Linear(4, 64), *(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 3)).double()
    with flow.use_cluster(prices):
        flow.nn.shard(model, hints)
        step = flow.compile(model, loss_fn, sgd(model), placement=LINE)
        x, y = batch(64)
        data = flow.tensor(x, placement=LINE, sbp=S(0)), flow.tensor(y, placement=LINE, sbp=S(0))
        step(*data)
        with flow.record() as moves:
            step(*data)
        sent = sum(move.boxing.total for move in moves)
        assert sent > 0
        assert sent == sum(row.total * row.count for row in step.explain().moves)
        assert repr(step).endswith(f" {sent} bytes sent in all")


MEANS = [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss]


@pytest.mark.parametrize("pieces", [None, 4], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("mean", MEANS, ids=lambda mean: mean.__name__)
def test_a_loss_does_not_keep_the_memory_of_what_it_is_the_mean_of(
    mean: Any, pieces: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU torch leaves these numbers in memory of that size, which lives as long as they do."""
    parts: list[Tensor] = []
    run = Pipelined.__call__

    def seen(self: Pipelined, *args: Any) -> Any:
        made = run(self, *args)
        parts.extend(x for values in made[0] for shards in values.values() for x in shards)
        return made

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = mean(model(x).sigmoid(), y.sigmoid())
        return found

    x, y = batch(64)[0], torch.ones(64, 8, dtype=F64)
    model = nn.Linear(4, 8).double()
    wanted = loss(model, x, y).item()
    options: Any = {"micro_batches": pieces} if pieces else {}
    monkeypatch.setattr(Pipelined, "__call__", seen)
    found = flow.compile(model, loss, sgd(model), placement=flow.placement("cpu", [0]), **options)(x, y)
    assert found.item() == pytest.approx(wanted)
    assert len(parts) == (pieces or 0)
    assert [x.untyped_storage().nbytes() for x in (*found._shards, *parts)] == [8] * (1 + len(parts))
