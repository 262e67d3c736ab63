"""Flows: how what goes into a module, and what comes out of it, is to lie in a graph.

    flow.nn.flow(layer.norm, result={"tensor": flow.S(1)})                          norm -> tensor=S(1)
    flow.nn.flow(model, input={"data": flow.S(0), "context": flow.S(1)})            model <- data=S(0), context=S(1)

It is said of the first tensor that has the dims which are cut, and of all others of its shape: of the hidden states, or
of query, key and value, and not of a mask or of a cache. Axes that are not named stay free.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any, Literal, TypeVar

from torch import nn

from ...placement.errors import PlacementError, SbpError, ShapeError
from ...sbp import Partial
from ...sbp.text import PartSbp, Pin
from .annotate import Modules, note

__all__ = ["FlowError", "Side", "flow", "flow_of", "flows_of", "flows_said", "is_called"]

Side = Literal["input", "result"]
Flowing = TypeVar("Flowing", bound=nn.Module | Sequence[nn.Module])

FLOW = "_sbpflow_flow"  # what goes in and what comes out, each as it was said
ARROWS: dict[Side, str] = {"input": "<-", "result": "->"}


class FlowError(SbpError, ShapeError):
    """A flow that cannot be: `of` a module by its path, on one side of it, or of an argument by its name."""

    def __init__(self, message: str, *, of: str, side: Side | Literal["argument"]) -> None:
        super().__init__(message)
        self.of, self.side = of, side


def flow(
    modules: Flowing,
    *,
    result: PartSbp | EllipsisType | None = ...,
    input: PartSbp | EllipsisType | None = ...,
) -> Flowing:
    """Say how the result of a module, or of each of several, is to lie, or its input; None takes it back.

    Graphs move it there, and gradients come back the same way; without a graph nothing changes. A signature names axes,
    `{"tensor": S(1)}`, or has an entry for each, where None and "?" are free; a lone one is meant for every axis.
    """
    each = [modules] if isinstance(modules, nn.Module) else modules
    sides: dict[Side, Any] = {"input": input, "result": result}
    said = {side: sbp for side, sbp in sides.items() if sbp is not ...}
    if not said:
        raise SbpError(
            'flow: nothing is said\n  say result= or input=, as in flow.nn.flow(norm, result={"tensor": S(1)})'
        )
    for module in each if isinstance(each, list | tuple) else [each]:
        if not isinstance(module, nn.Module):
            raise PlacementError(
                f"flow: expected a module or a list of modules, found {type(module).__name__}\n"
                "  pass what is in the model, as in flow.nn.flow(model.norm, result=...)"
            )
        if not is_called(module):
            raise SbpError(
                f"flow: {type(module).__name__} is never called, so nothing goes into it or comes out of it\n"
                "  say it of those in it, as in flow.nn.flow(list(model.layers), result=...)"
            )
    pins = {side: _pin(side, sbp) for side, sbp in said.items()}
    for module in each:
        known = {**flow_of(module), **pins}
        note(module, FLOW, {side: pin for side, pin in known.items() if pin is not None} or None)
    return modules


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward: lists and dicts of modules have none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _pin(side: Side, sbp: PartSbp | None) -> Pin | None:
    if sbp is None:
        return None
    try:
        pin = Pin.read(sbp)
    except SbpError as error:
        raise SbpError(f"flow: {side}={sbp!r}\n  {error}") from None
    if any(isinstance(entry, Partial) for entry in pin.entries):
        raise SbpError(
            f"flow: {side}={pin}\n  addends are what ops make of parts, and graphs know where they pay\n"
            "  say B where the sum is to be whole, S(d) where in pieces, or leave the axis out"
        )
    return pin if any(entry is not None for entry in pin.entries) else None


def flow_of(module: nn.Module) -> Mapping[Side, Pin]:
    """All that is said of how a module's input and result lie."""
    said: Mapping[Side, Pin] = module.__dict__.get(FLOW, {})
    return said


def flows_of(modules: Modules) -> dict[str, Mapping[Side, Pin]]:
    """The flows of all modules that have some said of them, by path."""
    found = ((path, module) for prefix, root in modules.items() for path, module in root.named_modules(prefix=prefix))
    return {path: said for path, module in found if (said := flow_of(module))}


def flows_said(module: nn.Module) -> Iterable[str]:
    """The same as text: `-> {tensor: S(1)}`."""
    return [f"{ARROWS[side]} {pin}" for side, pin in flow_of(module).items()]
