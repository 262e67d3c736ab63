"""The end of a step that needs all micro-batches at once: it is done once, behind all forwards and before any backward.

    of each micro-batch    values are handed over: what is of samples, addends, what is the same in all
    of the whole batch     samples put together, addends added up; ops on these; gradients of what was handed over
    of each micro-batch    its part of these gradients, from which its backward starts

A loss that balances experts is so, as a product of two means over samples, and a loss that compares samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....placement import Placement
from ....sbp.call import Ref, refs_in
from ....sbp.logical import Logical, LogicalOp, Loss, Source
from .micro import made_alone

__all__ = ["WholeBatch", "handed_over", "whole_batch"]


@dataclass(frozen=True, eq=False)
class WholeBatch:
    """The ops on all micro-batches, as a graph of what is `handed` over, its first sources in order. `result` is that
    of the step, by its numbers; of these `late` are made here, as results of this graph in that order. Those of `early`
    are results of micro-batches, before what is handed over."""

    logical: Logical
    handed: int
    result: Any
    early: tuple[int, ...]
    late: tuple[int, ...]
    losses: int  # of micro-batches, before those that get their gradients from here
    known: Mapping[str, Logical]  # by the names of sources behind those, how they are made of arguments

    @property
    def wants(self) -> tuple[int, ...]:
        """The sources that want gradients, by number."""
        sources = enumerate(self.logical.sources)
        return tuple(n for n, s in sources if s.requires_grad) if self.logical.losses else ()


def handed_over(n: int, like: Tensor, number: int, user: LogicalOp, end: Placement | None) -> LogicalOp:
    """The op that brings a value to the end of the step, for one that uses it there. It is a copy, because what another
    stage has made is no result of the last, and a weight no loss."""
    origin = replace(user.origin, recompute="", kept_of="", offload=None)
    return LogicalOp(torch.ops.aten.clone.default, (Ref(n),), {}, (like,), (number,), True, origin, end)


def whole_batch(
    step: Logical,
    ops: Sequence[LogicalOp],
    handed: Mapping[int, Tensor],
    given: Mapping[int, Tensor],
    end: Placement | None,
) -> tuple[WholeBatch, tuple[Loss, ...]]:
    """These ops of a step as a graph of their own, on what is handed over, and on what is made of arguments alone; and
    the losses that are left for others."""
    made = {n for op in ops for n in op.numbers}
    number = {n: at for at, n in enumerate([*handed, *given])}
    number.update({n: len(number) + at for at, n in enumerate(sorted(made))})
    late_losses = tuple(loss for loss in step.losses if loss.number in made)
    wants = step.wants_grad if late_losses else frozenset()
    sources = tuple(Source(f"whole {at}", "input", x, n in wants, end) for at, (n, x) in enumerate(handed.items()))
    known = {f"known {n}": made_alone(step, n) for n in given}
    sources += tuple(Source(f"known {n}", "input", x, False, end) for n, x in given.items())
    results = tuple(dict.fromkeys(refs_in(step.result)))
    late, early = tuple(n for n in results if n in made), tuple(n for n in results if n not in made)
    mine = tuple(
        op.of(number, numbers=tuple(number[n] for n in op.numbers), placement=end or op.placement) for op in ops
    )
    losses = tuple(Loss(number[loss.number]) for loss in late_losses)
    logical = Logical(sources, mine, tuple(Ref(number[n]) for n in late), losses)
    left = tuple(loss for loss in step.losses if loss.number not in made)
    return WholeBatch(logical, len(handed), step.result, early, late, len(left), known), left
