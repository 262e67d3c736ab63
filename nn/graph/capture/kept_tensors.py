"""Tensors that a program keeps as plain attributes of modules. They are not there after a step, which is told."""

import warnings
from collections.abc import Set

from torch import Tensor

from ....placement.errors import SbpError
from .module_state import ModuleState
from .repeats.likeness import ALL
from .tape import Tape

__all__ = ["tell_kept"]


def tell_kept(held: ModuleState, tape: Tape, lacked: Set[tuple[int, str]], varying: Set[int]) -> None:
    """Raise an error if the program asked for a tensor before there was one, since the next call would find this. Warn
    if it was another before.

    `lacked` has the module's identity and the name of those that were asked for, or `ALL`, `varying` the numbers of
    sources. A tensor that depends on none of these, such as a mask, is the same at each call.
    """
    stale = []
    for path, key, before, now in held.kept():
        whole = (key[0], ALL) in lacked and not isinstance(before, Tensor)
        if (whole or key in lacked) and _varies(tape, tape.number(now), varying):
            raise SbpError(
                f"capture: {path} is asked for before there is a tensor, and then kept as a plain attribute, made at "
                f"{_made_at(tape, now)}\n"
                "  the next call would not find it\n"
                f"  make it a buffer in __init__: self.register_buffer({key[1]!r}, ...)"
            )
        if isinstance(before, Tensor):
            stale.append((path, now))
    if stale:
        more = f" and {len(stale) - 3} more" if len(stale) > 3 else ""
        warnings.warn(
            f"{', '.join(path for path, _ in stale[:3])}{more}: plain attributes that a forward sets, made at "
            f"{_made_at(tape, stale[0][1])}, are after a step what they were before it: code that reads them between "
            "steps reads old values\n"
            "  return such a tensor, or make it a buffer; with pruning and weight_norm, run the model once outside of "
            "the graph before you read it",
            stacklevel=2,
        )


def _made_at(tape: Tape, x: Tensor) -> str:
    """The line that made a tensor, or where the program ended."""
    number = tape.number(x)
    return next((op.origin.line for op in reversed(tape.ops) if number in op.numbers), tape.origin.line)


def _varies(tape: Tape, number: int, varying: Set[int]) -> bool:
    """Whether a value depends on one of these sources, or on random numbers."""
    behind = {number}
    for op in reversed(tape.ops):
        if not behind.isdisjoint(op.numbers):
            if op.draws:
                return True
            behind.update(op.inputs)
    return not behind.isdisjoint(varying)
