"""Eager parts in micro-batches: one that does to each sample what it does to it alone runs for each micro-batch.

Nobody knows that of Python code, so it is tried: on values that are made up, of all samples and of those of each
micro-batch, what it gives back has to be the same. Numbers that look like lengths, labels and those that leave out are
among them, and what draws, writes to a buffer, or gives back a sum over samples, is none of these.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....placement.structure import leaves
from ....sbp.call import Call, Way
from ....sbp.choose import everywhere
from ....sbp.layout import RunLayout
from ....sbp.logical import LogicalOp
from ....sbp.state import Runs, State
from ...eager_parts.marks import EagerMark
from ...eager_parts.part import EagerPart, Made
from ...tensors.tensor import GlobalTensor
from ..capture.eager_trial import PartTrial
from ..capture.surroundings.settings import drawn_states, same_setting
from .needs_all import NeedsAll

__all__ = ["SampleParts", "of_piece"]

# What whole numbers are made of: counts, labels, labels of which some are left out.
NUMBERS: tuple[tuple[int, ...], ...] = ((0, 1), (-1, 0, 1), (-100, 0, 1), (0, 1, 2, 3), (1, 2, 5, 7))
NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}
Values = Callable[[Tensor, torch.Generator], Tensor]


class SampleParts:
    """Asks of eager parts in a step along time how what they give back lies, where inputs lie so."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def way(self, op: LogicalOp, call: Call) -> Way | None:
        """The way of a part for the samples of its inputs; None if it is none that does to each what it does alone."""
        part: Any = op.op
        assert isinstance(part, EagerPart)
        if not any(state.split or state.partial for state in call.states):
            return everywhere(call)
        alone = len(self.runs.lengths) == 1 and not any(state.partial for state in call.states)
        if not alone or part.call.draws or part.call.written:
            return None
        found: list[tuple[State, ...]] = []
        for values in _values():
            try:
                found.append(self._lie(part, call, values))
            except _Mixes:
                return None
            except Exception:  # not every part takes every value
                continue
        return Way(call.states, found[0]) if found and len(set(found)) == 1 else None

    def refused(self, op: LogicalOp) -> NeedsAll:
        part: Any = op.op
        return NeedsAll(
            f"the eager part {part.name}, called at {part.call.place}, needs more than one micro-batch at once\n"
            f"  {self._why(part)}\n"
            "  leave micro_batches= out, have it give back what it makes of each sample, or have it captured: "
            "flow.nn.eager(module, None) takes the mark back"
        )

    def _why(self, part: EagerPart) -> str:
        if part.call.draws:
            return "it draws random numbers, which are those of the whole batch on one device"
        if part.call.written:
            names = ", ".join(part.call.held.names[at] for at in part.call.written)
            return f"it writes to {names}, once for the whole batch on one device"
        return "it was tried on values that were made up: what it gives back is not what it makes of each sample alone"

    def _lie(self, part: EagerPart, call: Call, values: Values) -> tuple[State, ...]:
        """How its results lie, as these values show it."""
        chance = torch.Generator().manual_seed(0)
        given = [_made(x, values, chance) for x in call.inputs[: part.call.many]]
        held = [_held(part.call.held.now(at), values, chance) for at in range(len(part.call.held.tensors))]
        whole = _run(part, [*given, *held])
        pieces = []
        for k in range(len(self.runs.lengths[0])):
            mine = [self._cut(x, state, k) for x, state in zip(given, call.states, strict=False)]
            pieces.append(_run(part, [*mine, *held]))
        return tuple(self._state(y, [piece[at] for piece in pieces]) for at, y in enumerate(whole))

    def _cut(self, x: Tensor, state: State, k: int) -> Tensor:
        """The part of a value that a micro-batch has."""
        layout = RunLayout(self.runs, state, tuple(x.shape), x.dtype)
        for d, spans in enumerate(layout.spans(k)):
            if state.dims[d]:
                rows = torch.cat([torch.arange(lo, hi, device="cpu") for lo, hi in spans])
                x = x.index_select(d, rows)
        return x.detach().requires_grad_(x.requires_grad)

    def _state(self, whole: Tensor, pieces: Sequence[Tensor]) -> State:
        samples = self.runs.sizes[0]
        for d, size in enumerate(whole.shape):
            if not size or size % samples:
                continue
            state = State(tuple((0,) if at == d else () for at in range(whole.ndim)))
            cut = [self._cut(whole, state, k) for k in range(len(pieces))]
            if all(_near(a, b) for a, b in zip(cut, pieces, strict=True)):
                return state
        raise _Mixes


class _Mixes(Exception):
    """A part gives back what is not made of each sample alone."""


def of_piece(op: LogicalOp, outputs: Sequence[Tensor]) -> Any:
    """A part that gives back tensors of these sizes, as for the samples of one micro-batch."""
    part: Any = op.op
    made = tuple(Made(tuple(y.shape), old.dtype) for y, old in zip(outputs, part.call.made, strict=False))
    return EagerPart(replace(part.call, made=made))


def _values() -> Iterator[Values]:
    for at, numbers in enumerate(NUMBERS):
        yield partial(_filled, numbers, at)


def _filled(numbers: Sequence[int], at: int, x: Tensor, chance: torch.Generator) -> Tensor:
    """Numbers around zero, or all above it, and whole ones of these."""
    if x.is_floating_point() or x.is_complex():
        drawn = torch.randn(x.shape, generator=chance, dtype=torch.float64, device="cpu")
        return (drawn.abs() if at == len(NUMBERS) - 1 else drawn).to(x.dtype)
    picked = torch.tensor(numbers, device="cpu")[torch.randint(len(numbers), x.shape, generator=chance, device="cpu")]
    return picked > 0 if x.dtype is torch.bool else picked.to(x.dtype)


def _made(x: Tensor, values: Values, chance: torch.Generator) -> Tensor:
    return values(x, chance).requires_grad_(x.is_floating_point())


def _held(x: Tensor, values: Values, chance: torch.Generator) -> Tensor:
    """A tensor that a module holds, or, where no process has all of it, one like it."""
    real = not isinstance(x, GlobalTensor) and not x.is_meta
    made = x.detach().cpu().clone() if real else values(torch.empty(x.shape, dtype=x.dtype, device="cpu"), chance)
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


class _Undrawn(EagerMark):
    """The code of a part, which may draw no random numbers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = _chance()
        made = super().__call__(*args, **kwargs)
        if not all(map(same_setting, _chance(), before)):
            raise _Mixes
        return made


def _chance() -> list[Any]:
    """The states of generators of random numbers."""
    return [*drawn_states(), torch.get_rng_state()]


def _run(part: EagerPart, tensors: Sequence[Tensor]) -> list[Tensor]:
    call, mark = part.call, _Undrawn(part.call.mark.module, part.call.mark.inner)
    trial = PartTrial(mark, call.given, tensors, [None] * len(tensors), call.held, call.place, *ASIDE)
    with torch.set_grad_enabled(call.grad):
        return [y.detach() for y in leaves(trial.of_values(tensors), Tensor)]


ASIDE: tuple[Any, Any] = (nullcontext, lambda _: nullcontext())


def _near(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    by = NEAR.get(a.dtype, 2e-2)
    most = max(1.0, a.abs().max().item()) if a.numel() else 1.0
    return torch.allclose(a, b, rtol=by, atol=by * most, equal_nan=True)
