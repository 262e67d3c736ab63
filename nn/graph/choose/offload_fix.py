"""The help for a step that does not fit: its states on the host, planned before it is said."""

from collections.abc import Callable
from dataclasses import replace

from ....boxing.figures import duration
from ....placement.errors import SbpflowError, ShortageError
from ....sbp.logical import Logical
from .choose import Decided

__all__ = ["with_fix"]


def with_fix(
    error: ShortageError, logical: Logical, limit: float, decided: Callable[[Logical], Decided]
) -> ShortageError:
    """The error of a step that no plan brings within a limit; its fix is states on the host, if that fits.

    `decided` plans a graph within the limit, or raises."""
    stays = any(s.kind == "parameter" and s.requires_grad and s.offload is None for s in logical.sources)
    if not (logical.losses and stays):
        return error
    sources = (replace(s, offload="cpu") if s.kind == "parameter" else s for s in logical.sources)
    try:
        seconds = decided(replace(logical, sources=tuple(sources))).solution.cost
    except SbpflowError:
        return error
    return ShortageError(
        f"{error}\n  it fits with 'offload states ** to cpu' in its plan, or flow.nn.offload(model, \"*\"): "
        f"{duration(seconds)} a step by our price; "
        f"flow.find_plan(model, batch, memory={int(limit)}) may find one of less"
    )
