"""Hooks that a captured forward puts on gradients: each is an eager part that hands its tensor on.

So a hook is called at each step, once, with the whole gradient as one global tensor, and what it returns goes on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .....boxing.record import user_line
from .....placement.errors import SbpError
from ....eager_parts.marks import EagerFunction
from ..tape import Tape

__all__ = ["hooked"]


class _InGraph:
    """The handle of a hook. The next forward would put it on again, so that to remove it later is in vain."""

    def __init__(self, tape: Tape) -> None:
        self.tape, self.ops = tape, len(tape.ops)

    def remove(self) -> None:
        if torch._guards.detect_fake_mode() is not None:
            raise SbpError(
                f"capture: a hook on a gradient is removed in the forward that puts it on, at {user_line()}\n"
                "  leave both out"
            )


def hooked(tape: Tape, x: Tensor, hook: Callable[[Tensor], Any]) -> _InGraph:
    """Put a hook on the gradient of a captured tensor, which is another value from now on."""
    view = tape.view(x)
    number = tape.read(view)
    if view.memory.fixed:
        raise SbpError(
            f"capture: a hook is put on a parameter's gradient in the forward, at {user_line()}\n"
            "  put it there before, outside of the step: hooks of parameters are called at each"
        )
    if view.step is not None or any(number in op.inputs for op in tape.ops):
        what = "is a view of another" if view.step is not None else "was used before"
        raise SbpError(
            f"capture: a hook is put on the gradient of a tensor {tuple(x.shape)} that {what}, at {user_line()}\n"
            "  call register_hook right after it is made, on x = x.clone() if it is a view"
        )

    def hear(value: Tensor) -> Tensor:
        made = value.clone()
        if made.requires_grad:
            made.register_hook(hook)  # type: ignore[no-untyped-call]
        return made

    made = EagerFunction(hear)(x)
    tape.write(view, tape.number(made))
    return _InGraph(tape)
