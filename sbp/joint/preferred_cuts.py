"""Preferred cuts: how consumers would like a tensor to be cut where no plain signature says it.

A packed projection is viewed as (3, heads, width) or cut in three; to split heads over an axis its columns must be cut
in three first, which is a state with a hole. Such a wish is carried back through the ops before it to the weight.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

from ..call import NEVER, Call, Match
from ..registry import rule_for
from ..state import Factors
from ..traits import traits
from .options import Cut, answer_of

__all__ = ["Cuts", "plain_cuts", "wishes"]

Cuts: TypeAlias = dict[Cut, None]  # an ordered set


def wishes(
    calls: Sequence[tuple[Call, tuple[int, ...], tuple[int, ...]]], asked: Iterable[tuple[int, Cut]] = ()
) -> Mapping[int, Cuts]:
    """The cuts of each value that would be of use further on. Calls come with the numbers of their inputs and outputs;
    `asked` are cuts that somebody asked for."""
    found: dict[int, Cuts] = {}
    for number, cut in asked:
        found.setdefault(number, {})[cut] = None
    for call, inputs, outputs in reversed(calls):
        for number, cut in _before(call, inputs, [found.get(n, {}) for n in outputs]):
            found.setdefault(number, {})[cut] = None
    return found


def plain_cuts(cuts: Iterable[Cut]) -> tuple[Cut, ...]:
    """Those without holes."""
    return tuple(cut for cut in cuts if all(f >= 0 for f in cut[1]))


def _before(call: Call, inputs: tuple[int, ...], wanted: Sequence[Cuts]) -> Iterable[tuple[int, tuple[int, Factors]]]:
    if "regrouped" in traits(call.name):
        yield from ((inputs[0], cut) for cut in _of_view(call, wanted[0]))
        return
    if "pieces" in traits(call.name):
        yield from ((inputs[0], cut) for cut in _of_parts(call))
    if not any(wanted):
        return
    answer = answer_of(call) if rule_for(call.op, call.name) else None
    if isinstance(answer, Match):
        for dims, cuts in zip(answer.outputs, wanted, strict=True):
            for d, factors in cuts:
                for number, before in zip(inputs, answer.inputs, strict=True):
                    if dims[d] != NEVER and dims[d] in before:
                        yield number, (before.index(dims[d]), factors)


def _axes(call: Call) -> list[tuple[int, ...]]:
    many = [a for a, n in enumerate(call.sizes) if n > 1]
    return [axes for count in (1, 2) for axes in combinations(many, count)]


def _of_view(call: Call, wanted: Cuts) -> Iterable[tuple[int, Factors]]:
    """Splits of dims of the result as cuts of the input; only those that a plain split would not give."""
    from ..book.views import carried  # loads the book: not before someone plans

    shape, target = tuple(call.inputs[0].shape), tuple(call.outputs[0].shape)
    split: Cuts = {(d, axes): None for d in range(1, len(target)) for axes in _axes(call)}
    for d, factors in {**split, **wanted}:
        dims = tuple(factors if at == d else () for at in range(len(target)))
        before = carried(target, shape, dims, call.sizes)
        for at, cut in enumerate(before or ()):
            said = (d, factors) in wanted
            inside = d < len(target) - 1  # the last dim is what ops reduce, or a head's width
            if any(f < 0 for f in cut):
                if inside or said:
                    yield at, cut
            elif cut and said and all(f >= 0 for f in factors):
                yield at, cut


def _of_parts(call: Call) -> Iterable[tuple[int, Factors]]:
    dim = call.bound["dim"] % call.inputs[0].ndim
    parts = len(call.outputs)
    if parts > 1 and len({y.shape[dim] for y in call.outputs}) == 1:
        for axes in _axes(call):
            yield dim, (-parts, *axes)
