"""Errors of compressed gradients, as a user has them: to look at, to save, and to forget."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from ....boxing.kept import KeptErrors, left_out
from ....placement.errors import SbpError
from ....placement.world import owned, world
from ...tensors.tensor import GlobalTensor, wrap

__all__ = ["StepErrors", "keeps_errors", "refuse_unsaved"]

_kept: "WeakKeyDictionary[Optimizer, KeptErrors]" = WeakKeyDictionary()  # of the graphs that optimizers step in


def keeps_errors(optimizer: Optimizer, kept: KeptErrors) -> None:
    """Note in which errors the gradients are kept that an optimizer steps by."""
    _kept[optimizer] = kept


def refuse_unsaved(optimizers: Sequence[Optimizer], extra: Mapping[str, Any] | None) -> None:
    """Refuse to save an optimizer without the errors that are to be added to its next gradients."""
    saved = [value.kept for value in (extra or {}).values() if isinstance(value, StepErrors)]
    for optimizer in optimizers:
        kept = _kept.get(optimizer)
        if kept and not any(kept is one for one in saved):
            raise SbpError(
                f"flow.save: the gradients that {type(optimizer).__name__} steps by are compressed, and what that left "
                "out would be lost\n"
                "  save it too, as in extra={'kept': step.kept}; or forget it before: step.kept.reset()"
            )


class StepErrors:
    """The errors of a graph's compressed gradients, by names of parameters. They are saved and loaded as those of a
    scheduler is: `flow.save(..., extra={"kept": step.kept})`."""

    def __init__(self, kept: KeptErrors) -> None:
        self.kept = kept

    def __iter__(self) -> Any:
        return iter(self.kept)

    def error(self, name: str) -> GlobalTensor:
        """The error of a gradient: addends, each kept on its rank, whose sum is still to be added.

        A sum that is encoded twice loses something of a rank's share too, and that is in the rank's addend."""
        held = self.kept.rows_of(name)
        if held is None:
            raise SbpError(
                f"nothing is kept of {name!r}\n  there are errors of {', '.join(self.kept) or 'nothing yet'}"
            )
        here = owned(held.lies.placement)
        each = [left_out(kept, held.lies, rank) for kept, rank in zip(held.ranks, here, strict=True)]
        shards = tuple(x for x in each if x is not None)
        if len(shards) != len(held.ranks):
            raise SbpError(f"{held.by} keeps no error of {name}\n  it may have feedback=False, or not have begun yet")
        return wrap(shards or (torch.empty(0, dtype=held.lies.dtype, device="cpu"),), held.lies)

    def reset(self) -> None:
        """Forget all errors, such as when weights were given other values."""
        self.kept.reset()

    def state_dict(self) -> dict[str, Any]:
        """All of it: tensors with a row for each rank. Every process calls it."""
        found: dict[str, Any] = {}
        for name, rows in self.kept.rows().items():
            found[name] = {}
            for what, value in rows.items():
                if isinstance(value, tuple) and len(value) == 3:
                    layout, shards, shape = value
                    if world().rank is not None and layout.placement.size != world().size:
                        raise SbpError(
                            f"the error of {name} is kept on {layout.placement}, and others of {world().size} "
                            "processes do not know it\n"
                            "  save with one process for all ranks, or forget it: step.kept.reset()"
                        )
                    found[name][what] = [wrap(shards, layout), list(shape)]
                else:
                    found[name][what] = value
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict, on as many ranks as it is of."""
        self.kept.load({name: {what: _whole(x) for what, x in rows.items()} for name, rows in state.items()})


def _whole(value: Any) -> Any:
    """Rows whole, with the shape that each has; words as they are."""
    if isinstance(value, str):
        return value
    rows, shape = value
    return rows.full_tensor() if isinstance(rows, GlobalTensor) else rows, tuple(shape)
