"""The balance of stages: pipelines of which nobody said where stages end, cut by what layers take in a captured step.

Modules stay as they are: a step that is planned knows which of them it moves, and notes it in them when it first runs.
From then on, or as soon as parameters of such layers are global, they stay where they are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import nn

from ....actors.schedules.schedule import Schedule
from ....placement import Placement
from ....sbp.logical import Logical, LogicalOp
from ...model.annotate import LayerMoves, placement_of
from ...model.balance import LayerCut, LayerWork, ends_of, open_cuts, runs
from ...tensors.tensor import GlobalTensor
from .stage_costs import stage_costs
from .stage_work import StageWork

__all__ = ["Balance", "even_stages", "layer_of_each", "paths_of"]

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
    *,
    sliced: bool,
    free: bool = False,
) -> Balance:
    """The best cuts of the open pipelines in some modules, for a step that was captured and not placed yet.

    An optimizer keeps so many `states` of each parameter, and sequences may be `sliced`. Global parameters keep their
    layers where they are, unless they are `free`."""
    cuts = open_cuts(modules.values())
    if not cuts:
        return Balance()
    paths = paths_of(modules)
    listed = [paths[id(layer)] for _, layers in cuts for layer in layers]
    ops = list(_ops(logical, modules, cuts, listed))
    at = list(layer_of_each((module for module, _ in ops), listed))
    moved: dict[nn.Module, tuple[Placement, int]] = {}
    said: list[str] = []
    first = 0
    for cut, layers in cuts:
        inside = slice(first, first := first + cut.layers)
        many = max(micro_batches, len(cut.placements))  # fewer fill no pipeline, and others may use the model
        found = stage_costs(logical, [op for _, op in ops], at, len(listed), cut.placements, many, states)
        costs = [each[inside] for each in found]
        work = StageWork(costs, cut.placements, schedule, many, bool(logical.losses) and not sliced)
        now = ends_of(layers)
        guess = LayerWork([cost.busy for cost in costs[0]], [2 * cost.hop for cost in costs[0][:-1]], many)
        best = work.best(guess.ends(cut.placements))
        better, shares = (_shares(work.busy(ends)) for ends in (best, now))
        worth = work.seconds(now) > cut.worth * work.seconds(best)
        if not free and any(isinstance(p, GlobalTensor) for layer in layers for p in layer.parameters()):
            other = f", and would have {better} if {_runs(best)} had been cut before they were global" if worth else ""
            said.append(f"{_runs(now)} layers where their parameters are: stages have {shares} of the computing{other}")
        elif worth:
            moved.update(runs(cut, layers, best))
            said.append(f"{_runs(best)} layers by what they take: stages have {better} of the computing")
        else:
            said.append(f"{_runs(now)} layers by their weights: stages have {shares} of the computing")
    return Balance(moved, "; ".join(said))


def _ops(
    logical: Logical,
    modules: Mapping[str, nn.Module],
    cuts: Sequence[tuple[LayerCut, Sequence[nn.Module]]],
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
