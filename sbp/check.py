"""The oracle of the rule book: what a rule lists must hold, and what holds must be listed.

A call is run whole and run on the shards of simulated ranks, forward and backward, and the two must agree; `check_rule`
does that for every signature on one axis, those that the book lists and those that it does not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from math import prod
from typing import Any

import torch
from torch import Tensor

from .call import Call, Match, Piece, Way, map_tensors
from .choose import all_ways, divides, with_windows
from .registry import find
from .schema import named_op
from .state import Factors, Runs, State
from .trial import Trial, TriedOp, one_thread, states_of

__all__ = ["RuleReport", "check_rule", "check_runs", "check_way", "expand_line"]


@dataclass
class RuleReport:
    """The findings of `check_rule`: listed signatures that do not hold, and signatures that hold and are not listed."""

    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"wrong    {text}" for text in self.wrong] + [f"missing  {text}" for text in self.missing]
        return "\n".join(lines) or "every listed signature holds, and no other"


def check_way(
    op: TriedOp,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    way: Way,
    sizes: tuple[int, ...] = (),
    runs: Runs | None = None,
) -> str | None:
    """The difference when the ranks of a grid, or runs of them, run this way, forward or backward; None if it holds."""
    with one_thread():
        return Trial(op, args, kwargs, sizes, runs).differs(way)


def check_rule(op: torch._ops.OpOverload | str, *args: Any, **kwargs: Any) -> RuleReport:
    """Whether the op's rule is right and complete for these arguments, on 2 and on 3 ranks."""
    if isinstance(op, str):
        op = named_op(op)
    report = RuleReport()
    with one_thread():
        for ranks in (2, 3):
            trial = Trial(op, args, kwargs, (ranks,))
            ways = _listed(trial, op, ranks)
            if not ways:
                return RuleReport(wrong=["the book has no rule for this call"])
            for way in ways:
                if trouble := trial.differs(way):
                    report.wrong.append(f"{_text(way)} on {ranks} ranks: {trouble}")
            known = {(way.inputs, way.outputs) for way in ways}
            for way in trial.tries(ranks):
                if (way.inputs, way.outputs) not in known and trial.differs(way) is None:
                    report.missing.append(f"{_text(way)} on {ranks} ranks")
    return report


def check_runs(runs: Runs, op: torch._ops.OpOverload | str, *args: Any, **kwargs: Any) -> list[str]:
    """The signatures of a rule that are wrong where ranks hold runs of samples, along one axis or several."""
    op = named_op(op) if isinstance(op, str) else op
    with one_thread():
        trial = Trial(op, args, kwargs, runs=runs)
        found: dict[tuple[object, ...], Way] = {}
        kinds = product(*(_states_along(t, runs.sizes) for t in trial.inputs))
        for states in islice(kinds, MOST):
            call = _asked(trial, op, states, runs.sizes)
            for way in all_ways(call, find(call), divides):
                if not _bool_addends(trial, way):
                    found.setdefault((way.inputs, way.outputs), way)
        wrong = [(way, trial.differs(way)) for way in found.values()]
    return [f"{way.inputs} -> {way.outputs} on runs of {runs.lengths}: {trouble}" for way, trouble in wrong if trouble]


MOST = 200  # of the states that inputs are tried in


def _states_along(whole: Tensor, sizes: Sequence[int]) -> list[State]:
    """States of a tensor with dims cut by one axis, by the first before the second, or by it inside of parts."""
    cuts: list[Factors] = [(axis,) for axis in range(len(sizes))]
    cuts += [tuple(range(len(sizes)))] * (len(sizes) > 1)
    cuts += [(-k, axis) for axis in range(len(sizes)) for k in (2, 3)]
    found = [State(((),) * whole.dim())]
    for dims in product([(), *cuts], repeat=whole.dim()):
        axes = [f for factors in dims for f in factors if f >= 0]
        fit = all(
            n and n % prod(sizes[f] if f >= 0 else -f for f in cut) == 0
            for n, cut in zip(whole.shape, dims, strict=True)
        )
        if axes and len(axes) == len(set(axes)) and fit:
            found.append(State(tuple(dims)))
    if whole.dtype != torch.bool:
        found += [State(((),) * whole.dim(), (axis,)) for axis in range(len(sizes))]
    return found


def expand_line(match: Match, op: TriedOp, ranks: int, tensors: Sequence[Tensor]) -> list[Way]:
    """Every signature that a match allows on a grid of one axis."""

    def dims(tensors: tuple[tuple[int, ...], ...], factor: int | None) -> list[State]:
        return [State(tuple((0,) if f == factor else () for f in tensor)) for tensor in tensors]

    def partial(tensor: tuple[int, ...], reduction: Any = "sum") -> State:
        return State(((),) * len(tensor), (0,), reduction)

    ways = [Way(tuple(dims(match.inputs, None)), tuple(dims(match.outputs, None)), match.local)]
    for factor, size in enumerate(match.sizes):
        if not match.hollow and size < ranks:
            continue
        whole = match.whole(factor, ranks)
        if whole is None:
            continue
        inputs, outputs, local = dims(match.inputs, factor), dims(match.outputs, factor), match.local
        inputs = [ways[0].inputs[at] if at in whole else state for at, state in enumerate(inputs)]
        kind = match.reduced.get(factor)
        if kind is not None:
            inputs = [partial(match.inputs[at]) if at in match.addends else s for at, s in enumerate(inputs)]
            outputs = [partial(tensor, "sum" if kind == "avg" else kind) for tensor in match.outputs]
        if any(f == factor for _, f in match.windows):
            local = match.near
            inputs = [with_windows(match, at, s, tensors[at].shape, (ranks,)) for at, s in enumerate(inputs)]
        if kind == "avg" and local is None:
            local = _weighted(op, match, factor)
        ways.append(Way(tuple(inputs), tuple(outputs), local))
    for group in match.linear:
        inputs = [
            partial(t) if at in group else s for at, (t, s) in enumerate(zip(match.inputs, ways[0].inputs, strict=True))
        ]
        ways.append(Way(tuple(inputs), tuple(partial(tensor) for tensor in match.outputs), match.local))
    return ways


def _weighted(op: TriedOp, match: Match, factor: int) -> Callable[..., Any]:
    """The op with its means weighted by a rank's share of the factor, so that they add up to the mean."""
    at, dim = next((at, t.index(factor)) for at, t in enumerate(match.inputs) if factor in t)

    def local(piece: Piece, *args: Any, **kwargs: Any) -> Any:
        share = piece.inputs[at].local_shape(piece.rank)[dim] / match.sizes[factor]
        out = op(*args, **kwargs)
        return out * share if isinstance(out, Tensor) else type(out)(part * share for part in out)

    return local


def _listed(trial: Trial, op: torch._ops.OpOverload, ranks: int) -> list[Way]:
    """The ways that the rule lists for a call: all of a match, or those that it finds for any input states."""
    ways: dict[tuple[object, ...], Way] = {}
    for states in product(*(states_of(t, ranks) for t in trial.inputs)):
        found = find(_asked(trial, op, states, (ranks,)))
        if found is None:
            return []
        if isinstance(found, Match):
            return [way for way in expand_line(found, op, ranks, trial.inputs) if not _bool_addends(trial, way)]
        for way in found:
            ways.setdefault((way.inputs, way.outputs), way)
    return list(ways.values())


def _asked(trial: Trial, op: torch._ops.OpOverload, states: tuple[State, ...], sizes: tuple[int, ...]) -> Call:
    """The call of a trial as rules look at it."""
    put = iter([_meta(t) for t in trial.inputs])
    args, kwargs = map_tensors((tuple(trial.args), trial.kwargs), lambda _: next(put))
    return Call(op, args, kwargs, tuple(map(_meta, trial.outputs)), states, sizes)


def _bool_addends(trial: Trial, way: Way) -> bool:
    """Whether inputs are addends that never can be."""
    return any(s.partial and t.dtype == torch.bool for t, s in zip(trial.inputs, way.inputs, strict=True))


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _text(way: Way) -> str:
    """A way on one axis as rules are read.

    >>> _text(Way((State(((0,), ())), State(((),))), (State(((), (0,))),)))
    'S(0), B -> S(1)'
    """
    sides = [", ".join(repr(state.sbp(1)[0]) for state in states) for states in (way.inputs, way.outputs)]
    return " -> ".join(sides)
