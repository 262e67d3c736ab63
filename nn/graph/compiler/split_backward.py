"""A segment's backward in two: first the gradients of what came in, then those of weights, which nobody waits for.

The first half runs all that those gradients depend on, and hands on values that the second half needs as the *rest*.
Zero-bubble schedules run the second half whenever a device would idle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..lower.localise import Local
from .joint import Traced, ancestors, cut, gradients
from .recorder import Recording

__all__ = ["Apart", "SplitBackward", "apart", "by_autograd"]


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """The two halves as graphs, and which of the saved tensors and of the inputs taken again each one needs."""

    first: Recording
    second: Recording
    saved: tuple[tuple[int, ...], tuple[int, ...]]
    again: tuple[tuple[int, ...], tuple[int, ...]]
    owns: tuple[bool, ...]  # for each gradient of a weight, whether its memory is nobody else's


@dataclass(frozen=True, eq=False)
class Apart:
    """Two functions: first(*saved, *again, *cotangents) returns gradients and, last, the rest as a tuple;
    second(*saved, *again, *rest) returns the gradients of weights. `saved` and `again` say what goes into each."""

    first: Callable[..., tuple[Any, ...]]
    second: Callable[..., tuple[Any, ...]]
    saved: tuple[tuple[int, ...], tuple[int, ...]]
    again: tuple[tuple[int, ...], tuple[int, ...]]
    owns: tuple[bool, ...]


def apart(traced: Traced, weights: Sequence[bool]) -> SplitBackward:
    """The backward cut in two; `weights` says of each gradient whether it is of a weight."""
    assert traced.backward is not None
    graph = traced.backward.graph
    given = [node for node in graph.nodes if node.op == "placeholder"]
    saved, again = given[: traced.saved], given[traced.saved : traced.saved + len(traced.again)]
    cotangents = given[traced.saved + len(traced.again) :]
    flat: Any = graph.output_node().args[0]
    into = tuple(y for y, weight in zip(flat, weights, strict=True) if not weight)
    theirs = tuple(y for y, weight in zip(flat, weights, strict=True) if weight)
    early = ancestors(into)
    late = ancestors(theirs) - early
    made = early.difference(saved, again) | set(cotangents)
    rest = sorted(made.intersection([*theirs, *(node for user in late for node in user.all_input_nodes)]))
    late |= {node for node in theirs if node not in early}
    kept = [[n for n, node in enumerate(saved) if node in part] for part in (early, _used(late, theirs))]
    taken = [[n for n, node in enumerate(again) if node in part] for part in (early, _used(late, theirs))]
    first = cut(
        traced.backward,
        [*(saved[n] for n in kept[0]), *(again[n] for n in taken[0]), *cotangents],
        early,
        (*into, tuple(rest)),
    )
    second = cut(
        traced.backward, [*(saved[n] for n in kept[1]), *(again[n] for n in taken[1]), *rest], late, tuple(theirs)
    )
    numbers = [tuple(traced.again[n] for n in part) for part in taken]
    mine = [(y, owns) for y, owns, weight in zip(flat, traced.owns, weights, strict=True) if weight]
    owns = tuple(owns and y not in early for y, owns in mine)
    return SplitBackward(first, second, (tuple(kept[0]), tuple(kept[1])), (numbers[0], numbers[1]), owns)


def _used(nodes: set[fx.Node], ends: Sequence[fx.Node]) -> set[fx.Node]:
    return {*ends, *(node for user in nodes for node in user.all_input_nodes)}


def by_autograd(local: Local, weights: Sequence[bool]) -> Apart:
    """The halves by torch's own autograd, which computes what they have in common twice."""
    ours = [i for i, weight in zip(local.wants, weights, strict=True) if not weight]
    theirs = [i for i, weight in zip(local.wants, weights, strict=True) if weight]

    def first(saved: tuple[list[Tensor], list[Tensor]], *cotangents: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            return *gradients(local, *saved, cotangents, ours, keep=True), cotangents

    def second(saved: tuple[list[Tensor], list[Tensor]], *cotangents: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            return tuple(gradients(local, *saved, cotangents, theirs))

    return Apart(first, second, ((0,), (0,)), ((), ()), (False,) * len(theirs))
