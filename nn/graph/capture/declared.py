"""Declarations of single tensors while a program is captured: factories with a placement, `to_global`, and flows into
and out of modules.

A captured tensor is the whole one, without values; where it lives and how it lies are notes on the op that makes it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ....boxing.record import user_line
from ....placement import Placement
from ....placement.errors import SbpError
from ....placement.structure import mapped
from ....sbp import SbpLike, layout
from ...model.flows import FlowError, Side, flow_of
from ...tensors.factories import declared_by
from .arguments import tensors_by_path
from .interceptor import Interceptor
from .tape import Tape

__all__ = ["Declared"]


class Declared:
    """Notes on a tape. A note without a placement is about `rest`; tensors are made on `device`."""

    def __init__(self, tape: Tape, watch: Interceptor, device: str, rest: Placement | None) -> None:
        self.tape, self.watch, self.device, self.rest = tape, watch, device, rest

    def flowing(self, module: nn.Module, side: Side, value: Any) -> Any:
        """The arguments of a module, (args, kwargs), or its result, with notes where it is said how they lie."""
        pin = flow_of(module).get(side)
        if pin is None:
            return value
        found = tensors_by_path(*value) if side == "input" else tensors_by_path([value], {})
        met = {path: x for path, x in found.items() if isinstance(x, FakeTensor)}
        what = f"the {side} of {self.watch.module or type(module).__name__}"
        first = next((x for x in met.values() if _has_dims(x, pin.dims)), None)
        if first is None:
            said = ", ".join(f"{path} {tuple(x.shape)}" for path, x in met.items()) or "no tensor"
            raise FlowError(
                f"{what} is to flow as {pin}, and no tensor in it has these dims\n  there is {said}\n"
                f"  say it anew, as in flow.nn.flow(module, {side}=...), or take it back by {side}=None",
                of=self.watch.module,
                side=side,
            )
        self.tape.origin = self.watch.here()
        with self.watch.paused():
            flows = {id(x): self.tape.flow(x, replace(pin, what=what)) for x in met.values() if x.shape == first.shape}
        return mapped(value, Tensor, lambda x: flows.get(id(x), x))

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, factories and `to_global` tell what they would have made."""

        def to_global(
            x: Tensor,
            placement: Any = None,
            sbp: Any = None,
            *,
            grad_sbp: Any = None,
            encoder: Any = None,
            kept: Any = None,
        ) -> Tensor:
            if encoder is not None or kept is not None:
                raise SbpError(
                    f"capture: to_global at {user_line()} has encoder=, and a graph moves where it chooses to\n"
                    "  say it of parameters or modules, flow.nn.compress(model, ...), or move it before the call"
                )
            return self.moved(x, placement, sbp, grad_sbp)

        FakeTensor.to_global = to_global  # type: ignore[attr-defined]
        try:
            with declared_by(self.made):
                yield
        finally:
            del FakeTensor.to_global  # type: ignore[attr-defined]

    def made(
        self, make: Callable[[torch.device], Tensor], where: Placement, sbp: SbpLike, seeded: torch.device | None
    ) -> Tensor:
        """A factory's tensor; one with a seed of its own is the same at every step, so it is made now."""
        if seeded is None:
            here = torch.device(self.device)
            return self._noted(lambda: make(here), where, sbp)
        with self.watch.paused(), unset_fake_temporarily():
            value = make(seeded)
        return self._noted(lambda: torch.ops.aten.lift_fresh(value).clone(), where, sbp)

    def moved(self, x: Tensor, placement: Placement | None, sbp: SbpLike | None, grad_sbp: SbpLike | None) -> Tensor:
        where = placement or self.rest
        if where is None or grad_sbp is not None:
            what, fix = (
                ("does not say where", "give it placement=, or the graph one")
                if where is None
                else ("has grad_sbp=", "leave it out: a graph chooses itself how gradients lie")
            )
            raise SbpError(f"capture: to_global at {user_line()} {what}\n  {fix}")
        return self._noted(x.clone, where, sbp)

    def _noted(self, make: Callable[[], Tensor], where: Placement, sbp: SbpLike | None) -> Tensor:
        """A tensor as it is to lie. Addends are made of it afterwards: ranks that each made it would add it up,
        and few ops give any."""
        tape = self.tape
        with self.watch.paused():
            like = make()
        lies = None if sbp is None else layout(where, sbp, tuple(like.shape), like.dtype).state
        before = tape.placement, tape.lies
        tape.placement, tape.lies = where, None if lies is None or lies.partial else lies
        try:
            made = make()
            if lies is None or not lies.partial:
                return made
            with self.watch.paused():
                return tape.flow(made, lies)
        finally:
            tape.placement, tape.lies = before


def _has_dims(x: Tensor, dims: Iterable[int]) -> bool:
    """Whether a tensor has these dims, and one at all."""
    return x.ndim > 0 and all(-x.ndim <= d < x.ndim for d in dims)
