"""`flow.save`: a checkpoint of a model, its optimizers and whatever else a run needs to go on."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...placement.errors import SbpError
from ...placement.world import world
from .commit import committed
from .content import Content, collected
from .entries import me, pieces_of
from .meeting import Meeting
from .saving import Saving, finished
from .snapshot import Snapshot
from .states.owners import listed
from .writing import FilePlan, planned_files

__all__ = ["save"]

_memory = Snapshot()


def save(
    path: str | PathLike[str],
    model: nn.Module,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    plan: object = None,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    keep: int | None = None,
) -> Saving:
    """Write a checkpoint to a folder of its own; every process calls it, and each writes its share.

    A model and optimizers may be plain, global, or those of a compiled step in any plan; `flow.load` gives them to any
    other. `plan` is a plan, its text, or the compiled step itself. `extra` has by name what else is to be saved:
    numbers, texts and trees of them, tensors, and all that has state_dict and load_state_dict. The random state is
    saved too; gradients are not, so a save belongs between an optimizer's step and the next backward.

    `asynchronous` copies the share of this process and returns; a thread of its own writes it. The next save waits
    for it, and the process does before it ends. `keep` removes all but so many whole checkpoints beside it, when it is
    written. What is at `path` stays until the new one is whole; an error of one process is one of all, and leaves it.
    """
    asked = "flow.save"
    if not isinstance(model, nn.Module):
        raise SbpError(f"{asked}: expected a module to save, found {type(model).__name__}\n  {_GRAPH}")
    if keep is not None and keep < 1:
        raise SbpError(f"{asked}: keep={keep}\n  it is how many whole checkpoints stay, from 1")
    finished()
    meeting, folder = Meeting(asked), Path(path).absolute()
    try:
        optimizers = listed(optimizer, asked)
        content = collected(model, optimizers, extra, _text(plan), int(step))
        parts = [(entry, region, part) for entry, region, part in pieces_of(content.entries)]
        numbers = _memory.taken([part for *_, part in parts]) if asynchronous else [_this(part) for *_, part in parts]
        files = planned_files(
            me(), [(entry, region, of) for (entry, region, _), of in zip(parts, numbers, strict=True)]
        )
    except Exception as error:
        meeting.agree(error=error)
        raise
    work = _work(folder, content, files, keep, meeting)
    saving = finished(lambda: Saving(folder, work, asynchronous=asynchronous))
    assert saving is not None
    return saving


_GRAPH = "the model of a compiled step is saved itself: flow.save(path, model, optimizer=optimizer, plan=step.plan)"


def _this(part: Tensor) -> Callable[[], Tensor]:
    return lambda: part


def _work(
    folder: Path, content: Content, files: Sequence[FilePlan], keep: int | None, meeting: Meeting
) -> Callable[[], None]:
    limit = world().timeout
    return lambda: committed(folder, content, files, keep, meeting, limit)


def _text(plan: object) -> str | None:
    """The text of a plan, or of that of a compiled step."""
    if plan is None or isinstance(plan, str):
        return plan
    return str(getattr(plan, "plan", plan))
