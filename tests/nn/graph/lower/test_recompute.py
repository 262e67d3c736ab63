"""Activation checkpointing in a graph: a region is run again for its backward, as it ran, and little of it is kept."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import sbpflow as flow
from sbpflow import S
from sbpflow.boxing.graph.physical import Op
from sbpflow.placement import Placement
from sbpflow.placement.errors import SbpError
from tests.ranks import Ranks

from ..memory.test_liveness import Live
from ..pipes import Gpt, llama, words_loss

ONE, PAIR = flow.placement("cpu", range(1)), flow.placement("cpu", range(2))
GRID = flow.placement("cpu", [[0, 1], [2, 3]])
REENTRANT = [True, False]


class Layer(nn.Module):
    """With `inner`, a region of its own is inside."""

    def __init__(self, width: int, inner: bool | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop, self.inner = nn.Dropout(0.3), inner

    def wide(self, x: Tensor) -> Tensor:
        return self.drop(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.wide(y) if self.inner is None else checkpoint(self.wide, y, use_reentrant=self.inner)
        return x + self.drop(self.down(y))  # type: ignore[no-any-return]


class Deep(nn.Module):
    """Layers, each of which is a region if it is said of which kind."""

    def __init__(self, kind: bool | None, width: int = 16, layers: int = 4, inner: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.kind = nn.Linear(width, width), kind
        self.layers = nn.ModuleList(Layer(width, inner) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if self.kind is None else checkpoint(layer, x, use_reentrant=self.kind)
        return x.square().mean()


def values(width: int = 16, rows: int = 12) -> Tensor:
    return torch.linspace(-1, 1, rows * 5 * width, dtype=torch.float64).reshape(rows, 5, width)


def call(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = model(x)
    return value


def learnt(model: nn.Module, x: Tensor, hints: Any = None, **how: Any) -> list[Tensor]:
    """The loss of a step, the gradients, and one number more that is drawn behind it."""
    if hints:
        flow.nn.shard(model, hints)
    step = flow.compile(model, call, **how)
    torch.manual_seed(3)
    loss = step(x).full_tensor()
    behind = torch.rand(1)
    grads = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, flow.GlobalTensor)]
    assert len(grads) == len(list(model.parameters()))
    return [loss, behind, *grads]


def alike(make: Callable[[bool | None], nn.Module], x: Tensor, hints: Any = None, **how: Any) -> list[Tensor]:
    """Values that are learnt, the same with and without regions of both kinds."""
    wanted = learnt(make(None), x, hints, **how)
    for kind in REENTRANT:
        same(learnt(make(kind), x, hints, **how), wanted)
    return wanted


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    """But for the order of sums, which a plan decides."""
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7 if mine.dtype == torch.float32 else 1e-12)


def deep(kind: bool | None, **how: Any) -> Deep:
    return Deep(kind, **how).double()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["code", "autograd"])
@pytest.mark.parametrize("where", [ONE, PAIR, GRID], ids=["alone", "pair", "grid"])
def test_a_region_is_recomputed_with_its_random_numbers(where: Placement, backend: str) -> None:
    found = alike(partial(deep, layers=2), values(), placement=where, backend=backend)
    plain = deep(None, layers=2)
    torch.manual_seed(3)
    loss = plain(values())
    loss.backward()
    wanted = [loss, torch.rand(1), *(p.grad for p in plain.parameters())]
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other)


HINTS: dict[str, Any] = {
    "tensor": {"layers.*.up.weight": S(0), "layers.*.up.bias": S(0), "layers.*.down.weight": S(1)},
    "zero": {"*weight": S(0)},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", HINTS)
def test_moves_inside_of_a_region_are_made_again(way: str) -> None:
    alike(partial(deep, layers=2), values(), HINTS[way], placement=PAIR)

    def again(kind: bool | None) -> int:
        model = deep(kind)
        flow.nn.shard(model, HINTS[way])
        moves = flow.compile(model, call, placement=PAIR).plan_for(values()).explain().moves
        return sum(row.count for row in moves if row.direction == "again" and not row.free)

    assert again(False) >= again(None) + 3  # of four layers: what the last one adds is added up behind it


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved"])
def test_a_pipeline_recomputes(schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1

    def make(kind: bool | None, layers: int = 2 * chunks) -> Deep:
        model, ranks = deep(kind, layers=layers), [[0, 1], [2, 3]] * chunks
        flow.nn.pipeline(model.layers, [flow.placement("cpu", each) for each in ranks])
        return model

    alike(make, values(), micro_batches=4, schedule=schedule)

    def kept(kind: bool | None) -> int:
        how: Any = {"schedule": schedule, "draws": "micro_batch"}  # else the numbers of dropout are held either way
        step = flow.compile(make(kind, 4), call, micro_batches=4, **how).plan_for(values()).planned
        return int(step.memory()[0].activations)

    assert kept(False) < 0.6 * kept(None)


def told(model: nn.Module, text: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten())


def test_regions_of_slices_of_sequences() -> None:
    text = torch.randint(32, (4, 6))

    def learns(regions: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Gpt().double()
        if regions:
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        step = flow.compile(model, told, micro_batches=2, slices=2, placement=ONE)
        loss = step(text).full_tensor()
        return [loss, *(p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, flow.GlobalTensor))]

    plain, again = learns(False), learns(True)
    assert len(plain) == len(again) > 20
    same(again, plain)


class Calls(TorchDispatchMode):
    """Counts calls of an op."""

    def __init__(self, op: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op, self.many = op, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.many += func is self.op
        return func(*args, **(kwargs or {}))


def test_only_what_is_in_a_region_is_run_again() -> None:
    for kind, times in ((None, 1), (True, 2), (False, 2)):
        step = flow.compile(deep(kind), call, placement=ONE, backend="code").plan_for(values())
        step(values())
        with Calls(torch.ops.aten.gelu.default) as seen:
            step(values())
        assert seen.many == 4 * times


def peak(kind: bool | None, backend: Any) -> int:
    """Bytes that a step makes at its peak."""
    model, x = Deep(kind, 64, 8), values(64, 64).float()
    step = flow.compile(model, call, placement=ONE, backend=backend)
    step(x)
    model.zero_grad()
    with Live() as live:
        step(x)
    return int(live.peak)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["code", "autograd"])
def test_memory_falls_as_it_does_without_a_graph(backend: str) -> None:
    def eager(kind: bool | None) -> int:
        model, x = Deep(kind, 64, 8), values(64, 64).float()
        model(x).backward()
        model.zero_grad()
        with Live() as live:
            model(x).backward()
        return int(live.peak)

    plain = peak(None, backend)
    for kind in REENTRANT:
        assert peak(kind, backend) < 0.4 * plain
        assert peak(kind, backend) < 1.3 * eager(kind)


def test_the_account_of_memory_knows_of_regions() -> None:
    def counted(kind: bool | None) -> int:
        step = flow.compile(Deep(kind, 64, 8), call, placement=ONE).plan_for(values(64, 64).float()).planned
        return int(step.memory()[0].activations)

    assert counted(False) < 0.4 * counted(None)


def test_a_limit_counts_what_is_recomputed_as_not_kept() -> None:
    def again(kind: bool | None) -> Any:
        x, model = values(64, 64).float(), Deep(kind, 64, 8)
        return flow.compile(model, call, placement=ONE, memory=9e6).plan_for(x).explain().memory.again  # type: ignore[union-attr]

    assert again(None)
    assert not again(False)


def test_it_is_counted_and_drawn(tmp_path: Path) -> None:
    step = flow.compile(deep(False), call, placement=PAIR).plan_for(values())
    report = step.explain()
    assert report.dict()["recomputed"] == {"ops": report.recomputed[0], "regions": 4}
    assert f"({report.recomputed[0]} of them again in the backward, in 4 regions)" in str(report)
    assert "recomputed" in step.draw(tmp_path / "step.dot").read_text()
    assert "recomputed" in step.draw(tmp_path / "modules.dot", depth=1).read_text()
    plain = flow.compile(deep(None), call, placement=PAIR).plan_for(values())
    assert "again in the backward" not in str(plain.explain())
    assert "recomputed" not in plain.draw(tmp_path / "plain.dot").read_text()
    again, once = report.compute, plain.explain().compute
    assert again is not None
    assert once is not None
    assert again > once


def test_regions_inside_of_repeated_layers() -> None:
    alike(lambda kind: deep(None, inner=kind), values(), placement=PAIR)
    alike(lambda kind: deep(kind, inner=kind), values(), placement=PAIR)
    for model, many in ((deep(None, inner=False), 4), (deep(False, inner=True), 4)):
        assert flow.compile(model, call, placement=PAIR).plan_for(values()).explain().recomputed[1] == many


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.abs()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.mul(grads[0], 2 * x.abs())


class Mixed(nn.Module):
    """A region with a function that has its own backward, a recurrent layer, and a policy that nobody follows."""

    def __init__(self, kind: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first = kind, nn.Linear(16, 16)
        self.net = nn.GRU(16, 8, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)

    def region(self, x: Tensor) -> Tensor:
        out, _ = self.net(Doubled.apply(x))  # type: ignore[no-untyped-call]
        return x + out  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            if self.kind is None:
                x = self.region(x)
            elif self.kind:
                x = checkpoint(self.region, x, use_reentrant=True)
            else:
                policy = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
                x = checkpoint(self.region, x, use_reentrant=False, context_fn=policy)
        return x.square().mean()


def test_functions_and_recurrent_layers_in_a_region() -> None:
    alike(lambda kind: Mixed(kind).double(), values(), placement=PAIR)
    report = flow.compile(Mixed(True).double(), call, placement=PAIR).plan_for(values()).explain()
    assert [row.op for row in report.ops if "recurrent" in row.op]
    outside = [s for s in report.graph.steps if isinstance(s, Op) and not s.origin.recompute]
    assert {str(step.op).split(".")[1] for step in outside} == {"linear", "square", "mean"}


def test_checkpoint_sequential() -> None:
    class Sequence(nn.Module):
        def __init__(self, kind: bool | None) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.kind, self.layers = kind, nn.Sequential(*(Layer(16) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            if self.kind is None:
                return self.layers(x).square().mean()  # type: ignore[no-any-return]
            y = checkpoint_sequential(self.layers, 2, x * 1, use_reentrant=self.kind)  # type: ignore[no-untyped-call]
            return y.square().mean()  # type: ignore[no-any-return]

    wanted = learnt(Sequence(None).double(), values(), placement=PAIR)
    found = learnt(Sequence(False).double(), values(), placement=PAIR)
    same(found, wanted)


def test_a_reentrant_region_of_nothing_that_wants_a_gradient_gives_none() -> None:
    class Frozen(Deep):
        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.layers[0], x, use_reentrant=True)
            return self.layers[1](y).square().mean()  # type: ignore[no-any-return]

    plain, mine = (Frozen(None).double() for _ in range(2))
    step = flow.compile(mine, call, placement=PAIR)
    for learn in (lambda x: torch.autograd.backward(plain(x)), step):
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
            learn(values())
    wanted = [p.grad is None for p in plain.parameters()]
    assert [p.grad is None for p in mine.parameters()] == wanted
    assert any(wanted)
    assert not all(wanted)


def test_nothing_is_recomputed_where_nothing_learns() -> None:
    with torch.no_grad():
        step = flow.compile(deep(False), placement=ONE)
        step(values())
        with Calls(torch.ops.aten.gelu.default) as seen:
            step(values())
    assert seen.many == 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", REENTRANT)
@pytest.mark.parametrize("how", [{"placement": PAIR}, {"micro_batches": 2, "schedule": "1f1b"}], ids=["pair", "stages"])
def test_gradient_checkpointing_enable(how: dict[str, Any], kind: bool) -> None:
    text = torch.randint(32, (4, 6))

    def learns(kind: bool | None) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = llama().train()
        if kind is not None:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": kind})
            model.enable_input_require_grads()
        if how.get("schedule"):
            flow.nn.pipeline(model.model.layers, [flow.placement("cpu", [0]), flow.placement("cpu", [1])])
        step = flow.compile(model, words_loss, **how)
        loss = step(text).full_tensor()
        assert step.explain().recomputed[1] == (4 if kind is not None else 0)
        return [loss, *(p.grad.full_tensor() for p in model.parameters())]

    same(learns(kind), learns(None))


def staged(kind: bool | None) -> Deep:
    model = deep(kind, layers=2)
    flow.nn.pipeline(model.layers, [flow.placement("cpu", [0, 1]), flow.placement("cpu", [2, 3])])
    return model


def learns_on_ranks(way: str) -> None:
    if way == "stages":
        alike(staged, values(), micro_batches=4, schedule="1f1b")
    else:
        where = flow.placement("cpu", range(4)) if way == "tensor" else GRID
        alike(partial(deep, layers=2), values(), HINTS[way], placement=where)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["tensor", "zero", "stages"])
def test_real_ranks_recompute(ranks4: Ranks, way: str) -> None:
    ranks4(learns_on_ranks, way)


class Chosen(nn.Module):
    """Regions of which a policy keeps what some ops make."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
        self.layers.double()
        self.context = partial(create_selective_checkpoint_contexts, policy)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False, context_fn=self.context)
        return x.square().mean()


def products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.PREFER_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [products, [torch.ops.aten.addmm.default]], ids=["function", "list"])
def test_what_a_policy_saves_is_not_run_again(policy: Any) -> None:
    model, x = Chosen(policy), torch.randn(4, 8, dtype=torch.float64)
    model(x).backward()
    wanted = [p.grad for p in model.parameters()]
    mine = Chosen(policy)
    step = flow.compile(mine, lambda model, x: model(x), placement=PAIR, backend="code")
    step(x)
    for p, want in zip(mine.parameters(), wanted, strict=True):
        assert isinstance(p.grad, flow.GlobalTensor)
        torch.testing.assert_close(p.grad.full_tensor(), want)
    again = {op.op for op in step.physical.steps if isinstance(op, Op) and op.origin.recompute}
    assert torch.ops.aten.gelu.default in again
    assert torch.ops.aten.linear.default not in again


def test_a_context_that_is_no_policy_is_refused() -> None:
    def run(x: Tensor) -> Any:
        return checkpoint(torch.sin, x, use_reentrant=False, context_fn=lambda: (nullcontext(), nullcontext())).sum()

    with pytest.raises(SbpError, match="contexts that a graph does not run"):
        flow.compile(nn.Linear(2, 2), lambda model, x: run(model(x)), placement=PAIR).plan_for(torch.ones(2, 2))
