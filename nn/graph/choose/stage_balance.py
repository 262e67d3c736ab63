"""The balance of stages: pipelines of which nobody said where stages end, cut by what layers take in a captured step.

Modules stay as they are: a step that is planned knows which of them it moves, and notes it in them when it first runs.
From then on, or as soon as parameters of such layers are global, they stay where they are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

from torch import nn

from ....actors.schedules.schedule import Schedule
from ....placement import Placement
from ....sbp.kernels.update_kernels import UpdateKernels
from ....sbp.logical import Logical, LogicalOp
from ...model.annotate import LayerMoves, placement_of
from ...model.balance import LayerCut, LayerWork, ends_of, open_cuts, runs
from ...tensors.tensor import GlobalTensor
from .stage_costs import stage_costs
from .stage_work import LayerCost, StageWork

__all__ = ["Balance", "even_stages", "layer_of_each", "paths_of"]

OpenCut: TypeAlias = tuple[LayerCut, list[nn.Module]]

NAMED = 8  # runs whose layers are listed


@dataclass(frozen=True)
class Balance:
    """The layers that a step moves to other stages, and what there is to say of how pipelines were cut."""

    moved: LayerMoves = field(default_factory=dict)
    said: str = ""


def paths_of(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """The path of every module by its identity."""
    return {id(part): path for prefix, module in modules.items() for path, part in module.named_modules(prefix=prefix)}


def layer_of_each(inside: Iterable[str], paths: Sequence[str]) -> Iterator[int]:
    """The number of the listed module that each op is in, by the path of the op's own module.

    An op that is in none of them counts for the one before it, such as an op of the head, or for the first."""
    last = 0
    for module in inside:
        last = next((n for n, path in enumerate(paths) if f"{module}.".startswith(f"{path}.")), last)
        yield last


def even_stages(
    logical: Logical,
    modules: Mapping[str, nn.Module],
    schedule: Schedule,
    micro_batches: int,
    states: int,
    update: UpdateKernels,
    *,
    sliced: bool,
    free: bool = False,
) -> Balance:
    """The best cuts of the open pipelines in some modules, for a step that was captured and not placed yet.

    An optimizer keeps so many `states` of each parameter and has such an `update`; sequences may be `sliced`. Global
    parameters keep their layers where they are, unless they are `free`."""
    cuts = sorted(open_cuts(modules.values()), key=lambda each: each[0].first)
    if not cuts:
        return Balance()
    paths = paths_of(modules)
    cuts = [each for each in cuts if _is_called(logical, [paths[id(layer)] for layer in each[1]])] or cuts
    listed = [paths[id(layer)] for _, layers in cuts for layer in layers]
    ops = list(_ops(logical, modules, cuts, listed))
    at = list(layer_of_each((module for module, _ in ops), listed))
    placements = [place for cut, _ in cuts for place in cut.placements]
    many = max(micro_batches, len(placements))  # fewer fill no pipeline, and others may use the model
    costs = stage_costs(logical, [op for _, op in ops], at, len(listed), placements, many, states, update)
    towers = [(cut.layers, len(cut.placements)) for cut, _ in cuts]
    work = StageWork(costs, placements, schedule, many, bool(logical.losses) and not sliced, towers)
    stays = [n for n, (_, layers) in enumerate(cuts) if not free and _is_global(layers)]
    now = _behind(cuts, [ends_of(layers) for _, layers in cuts])
    first = _behind(cuts, _guess(cuts, costs, many))
    return _Judged(work, cuts, now, work.best(first), stays).balance()


class _Judged(NamedTuple):
    """How layers are cut now, and the best way; those of some lists stay where their parameters are."""

    work: StageWork
    cuts: Sequence[OpenCut]
    now: Sequence[int]
    best: Sequence[int]
    stays: Sequence[int]

    def balance(self) -> Balance:
        work, best = self.work, self.best
        worth = work.seconds(self.now) > max(cut.worth for cut, _ in self.cuts) * work.seconds(best)
        better, shares = (_shares(work.busy(ends)) for ends in (best, self.now))
        taken = " and ".join(f"{_runs(ends)} layers" for ends in self.of_each(self.now))
        if len(self.stays) == len(self.cuts):
            other = " and ".join(map(_runs, self.of_each(best)))
            would = f", and would have {better} if {other} had been cut before they were global" if worth else ""
            return Balance({}, f"{taken} where their parameters are: stages have {shares} of the computing{would}")
        if self.stays:
            best = work.best(self.now, self.stays)
            worth = work.seconds(self.now) > max(cut.worth for cut, _ in self.cuts) * work.seconds(best)
            better = _shares(work.busy(best))
        if not worth:
            return Balance({}, f"{taken} by their weights: stages have {shares} of the computing")
        moved: dict[nn.Module, tuple[Placement, int]] = {}
        for n, ((cut, layers), ends) in enumerate(zip(self.cuts, self.of_each(best), strict=True)):
            moved.update({} if n in self.stays else runs(cut, layers, ends))
        taken = " and ".join(f"{_runs(ends)} layers" for ends in self.of_each(best))
        return Balance(moved, f"{taken} by what they take: stages have {better} of the computing")

    def of_each(self, ends: Sequence[int]) -> Iterator[list[int]]:
        """The ends of the runs of each list, counted from its own first layer."""
        first = chunk = 0
        for cut, _ in self.cuts:
            yield [end - first for end in ends[chunk : chunk + len(cut.placements)]]
            first, chunk = first + cut.layers, chunk + len(cut.placements)


def _behind(cuts: Sequence[OpenCut], each: Iterable[Sequence[int]]) -> list[int]:
    """The ends of the runs of several lists, as if these were one."""
    firsts = accumulate((cut.layers for cut, _ in cuts), initial=0)
    return [first + end for first, ends in zip(firsts, each, strict=False) for end in ends]


def _guess(cuts: Sequence[OpenCut], costs: Sequence[Sequence[LayerCost]], many: int) -> Iterator[list[int]]:
    """A good cut of each list by itself."""
    first = chunk = 0
    for cut, _ in cuts:
        mine = costs[chunk][first : first + cut.layers]
        yield LayerWork([cost.busy for cost in mine], [2 * cost.hop for cost in mine[:-1]], many).ends(cut.placements)
        first, chunk = first + cut.layers, chunk + len(cut.placements)


def _is_called(logical: Logical, paths: Sequence[str]) -> bool:
    """Whether any of these layers has an op in the step; others, such as a decoder's where a step encodes, stay."""
    called = {f"{module}." for module in {op.origin.module for op in logical.ops}}
    return any(module.startswith(f"{path}.") for module in called for path in paths)


def _is_global(layers: Sequence[nn.Module]) -> bool:
    return any(isinstance(p, GlobalTensor) for layer in layers for p in layer.parameters())


def _ops(
    logical: Logical,
    modules: Mapping[str, nn.Module],
    cuts: Sequence[OpenCut],
    listed: Sequence[str],
) -> Iterator[tuple[str, LogicalOp]]:
    """Each op with its module, or the layer that stands for the module.

    A module that was placed and is none of the layers counts for the layer at the same end of a pipeline; if it is
    placed elsewhere, its ops are left out."""
    where = placement_of(modules)
    inside = {path for path in where if any(f"{path}.".startswith(f"{layer}.") for layer in listed)}
    ends: dict[Placement, str] = {}
    at = 0
    for cut, _ in cuts:
        ends.setdefault(cut.placements[0], listed[at])
        at += cut.layers
        ends[cut.placements[-1]] = listed[at - 1]
    for op in logical.ops:
        module = op.origin.module
        there = op.placement or where.get(module)
        if there is None or module in inside:
            yield module, op
        elif there in ends:
            yield ends[there], op


def _runs(ends: Sequence[int]) -> str:
    """The count of layers in each run, as text."""
    counts = [end - first for first, end in pairwise([0, *ends])]
    if len(counts) > NAMED:
        return f"{len(counts)} runs of {min(counts)} to {max(counts)}"
    return " | ".join(map(str, counts))


def _shares(spent: Sequence[float]) -> str:
    """The part of all computing that each stage does."""
    shares = [one / (sum(spent) or 1.0) for one in spent]
    if len(shares) > NAMED:
        return f"{min(shares):.1%} to {max(shares):.1%}"
    return " | ".join(f"{share:.0%}" for share in shares)
