"""Transforms of torch.func while a step is captured: vmap, grad, vjp, jvp and what is made of them.

Above autograd a transform's calls are of its own wrappers. So they are let go by there, and seen where torch has taken
all levels off: as plain calls of plain tensors, batched, or of a derivative. These are the ops of the graph, which
takes derivatives of them in turn.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from .....boxing.record import user_line
from .....placement.errors import SbpError
from .....sbp.call import map_tensors, tensors_in
from ..tape import Tape

__all__ = ["BelowTransforms", "is_wrapped", "transformed", "unwrapped"]

aten = torch.ops.aten


def transformed() -> bool:
    """Whether the program is inside of a transform, or of a level of forward-mode differentiation."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_wrapped(x: Tensor) -> bool:
    """Whether a tensor is a wrapper of a transform, which may be over."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def unwrapped(x: Tensor) -> Tensor:
    """The tensor that wrappers of transforms are around."""
    while is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


class BelowTransforms(TorchDispatchMode):
    """Puts the calls that come out below all transforms on the tape."""

    def __init__(
        self,
        tape: Tape,
        known: Callable[[Tensor], Tensor | None],
        fake: Callable[[Tensor], Tensor],
        run: Callable[..., Any],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape, self.known, self.fake, self.run = tape, known, fake, run
        self.refusal: SbpError | None = None  # which formulas that torch has as scripts wrap into an error of their own

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that was seen above autograd."""
        try:
            with self:
                return func(*args, **kwargs)
        except RuntimeError:
            if self.refusal is not None:
                raise self.refusal from None
            raise

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        taken = tensors_in([args, kwargs])
        if taken and not any(isinstance(x, FakeTensor) for x in taken) and _counts():
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        if any(
            x.is_meta and not x._is_zerotensor() for x in taken
        ):  # by which torch learns of what shape a product of zeros is
            if not all(x.is_meta or x._is_zerotensor() for x in taken):
                self.refusal = SbpError(
                    f"capture: torch differentiates a formula forward that {func} is a part of, at {user_line()}, and "
                    "has no fakes for its zeros\n  differentiate backward: torch.func.jacrev in the place of jacfwd, "
                    "jacrev(jacrev(f)) of hessian(f)"
                )
                raise self.refusal
            with warnings.catch_warnings():  # fakes of such look for a gradient
                warnings.simplefilter("ignore")
                return func(*args, **(kwargs or {}))
        named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
        if "backward" not in str(func) and named.get("running_mean") is not None and named.get("training"):
            raise SbpError(
                f"capture: {func} writes running statistics inside of a transform of torch.func, at {user_line()}\n"
                "  call model.eval() before, or take the derivative by torch.autograd.grad"
            )
        where = next((x.device for x in taken if isinstance(x, FakeTensor)), torch.device("cpu"))
        args, kwargs = (map_tensors(each, lambda x: self._seen(x, where)) for each in (args, kwargs or {}))
        out = self.run(func, args, kwargs)
        self.tape.record(func, args, kwargs, out, below=True)
        return out

    def _seen(self, x: Tensor, where: torch.device) -> Tensor:
        """The fake of a tensor; numbers and zeros that formulas of derivatives make are written down."""
        if isinstance(x, FakeTensor) or (x.dim() and not x._is_zerotensor()) or self.known(x) is not None:
            return self.fake(x)
        with unset_fake_temporarily():
            value = 0 if x._is_zerotensor() else x.item()
        lies = x.device if x._is_zerotensor() and not x.is_meta else where  # a number goes to what it meets
        size, kept = [*x.shape], {"dtype": x.dtype, "device": lies}
        made: Tensor = aten.full.default(size, value, **kept)
        self.tape.record(aten.full.default, (size, value), kept, made)
        return made


def _counts() -> bool:
    """Whether torch makes the basis of a Jacobian: in 2.11 it counts elements by tensors, which no program has made."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name != "_chunked_standard_basis_for_":
        frame = frame.f_back
    return frame.f_back is not None
