"""`flow.save`: a checkpoint of a model, its optimizers and whatever else a run needs to go on."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...placement.device import current_stream, on_stream, recorded, side_stream
from ...placement.errors import SbpError
from ...placement.network.hosts import Hosts
from ...placement.world import world
from ..files.held import me
from ..files.values import Region
from .commit import committed
from .content import Content, collected
from .entries import NamedTensor, pieces_of
from .hosts import agreed_hosts, pieces_by_host
from .manifest import REPLACED, WRITING
from .meeting import Meeting
from .neighbours import Files, committed_by_hosts
from .saving import Saving, finished
from .states.owners import listed
from .writing import FilePlan, planned_files

__all__ = ["save"]


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
    neighbours: int = 0,
) -> Saving:
    """Write a checkpoint to a folder of its own; every process calls it, and each writes its share.

    A model and optimizers may be plain, global, or those of a compiled step in any plan; `flow.load` gives them to any
    other. `plan` is a plan, its text, or the compiled step itself. `extra` has by name what else is to be saved:
    numbers, texts and trees of them, tensors, and all that has state_dict and load_state_dict. The random state is
    saved too; gradients are not, so a save belongs between an optimizer's step and the next backward.

    `asynchronous` copies the share of this process and returns; a thread of its own writes it. The next save waits
    for it, and the process does before it ends. `keep` removes all but so many whole checkpoints beside it, when it is
    written. What is at `path` stays until the new one is whole; an error of one process is one of all, and leaves it.

    With `neighbours` from 1 on, `path` is in each host's own memory, as in a tmpfs of each. A host's processes
    write all that its ranks hold there, and so many hosts behind it take a copy of what they do not hold themselves:
    `flow.newest` and `flow.load` with neighbours= find all of it though as many hosts were lost, and read no disk.
    """
    asked = "flow.save"
    if not isinstance(model, nn.Module):
        raise SbpError(f"{asked}: expected a module to save, found {type(model).__name__}\n  {_GRAPH}")
    if neighbours < 0:
        raise SbpError(f"{asked}: neighbours={neighbours}\n  it is how many other hosts have a copy, from 0")
    if keep is not None and keep < 1:
        raise SbpError(f"{asked}: keep={keep}\n  it is how many whole checkpoints stay, from 1")
    folder = Path(path).absolute()
    if folder.name in ("", "..") or folder.name.endswith((WRITING, REPLACED)):
        raise SbpError(
            f"{asked}: {path} is no name of a checkpoint\n  name it otherwise, such as {folder / 'step-100'}"
        )
    finished()
    meeting = Meeting(asked)
    hosts = agreed_hosts(meeting) if neighbours else None
    if hosts is not None and hosts.count <= neighbours:
        warnings.warn(_FEW.format(neighbours, hosts.count), RuntimeWarning, stacklevel=2)
    with torch.device("cpu"):  # whatever the default is: memory of files is there
        try:
            optimizers = listed(optimizer, asked)
            content = collected(model, optimizers, extra, _text(plan), int(step))
            files = _files(content, hosts, neighbours, asynchronous)
        except Exception as error:
            meeting.agree(error=error)
            raise
        work = _work(folder, content, files, keep, meeting, hosts)
        saving = finished(lambda: Saving(folder, work, asynchronous=asynchronous))
    assert saving is not None
    return saving


_GRAPH = "the model of a compiled step is saved itself: flow.save(path, model, optimizer=optimizer, plan=step.plan)"


def _this(part: Tensor) -> Callable[[], Tensor]:
    return lambda: part


_FEW = (
    "flow.save: neighbours={}, and there are so many hosts: {}; what a lost host had is lost\n"
    "  start processes on more hosts, or save to a disk (SBPFLOW_HOST= names a host where several share a machine)"
)


def _files(
    content: Content, hosts: Hosts | None, copies: int, asynchronous: bool
) -> dict[tuple[int, ...], list[FilePlan]]:
    """The files of this process, by which hosts behind its own take a copy."""
    parts: list[tuple[tuple[int, ...], NamedTensor, Region, Tensor]]
    if hosts is None:
        parts = [((), *piece) for piece in pieces_of(content.entries)]
    else:
        parts = list(pieces_by_host(content.entries, hosts, min(copies, hosts.count - 1)))
    held = [part for *_, part in parts]
    numbers = _memory.taken(held) if asynchronous else [_this(part) for part in held]
    found: dict[tuple[int, ...], list[FilePlan]] = {}
    for lack in dict.fromkeys(of for of, *_ in parts):
        mine = [(e, region, of) for (by, e, region, _), of in zip(parts, numbers, strict=True) if by == lack]
        found[lack] = planned_files(me(), mine, before=sum(map(len, found.values())))
    return found


def _work(
    folder: Path,
    content: Content,
    files: Files,
    keep: int | None,
    meeting: Meeting,
    hosts: Hosts | None,
) -> Callable[[], None]:
    if hosts is not None:
        return lambda: committed_by_hosts(folder, content, files, hosts, keep, meeting)
    limit = world().timeout
    return lambda: committed(folder, content, files.get((), []), keep, meeting, limit)


def _text(plan: object) -> str | None:
    """The text of a plan, or of that of a compiled step."""
    if plan is None or isinstance(plan, str):
        return plan
    return str(getattr(plan, "plan", plan))


class Snapshot:
    """Copies in host memory of what a process is about to write, so that training goes on; one at a time.

    The memory is kept and used again by the next one. From a card copies go by a stream of their own into pinned
    memory; kernels that come later wait for them there, the host does when it writes.
    """

    def __init__(self) -> None:
        self.memory: dict[bool, Tensor] = {}  # by whether it is pinned

    def taken(self, parts: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        """Copies of these; each waits, when it is asked for, until it is here."""
        room: dict[bool, int] = {}
        places = []
        for part in parts:
            at = room.get(not part.is_cpu, 0)
            places.append(at)
            room[not part.is_cpu] = at + -(-part.nbytes // 64) * 64
        for pinned, size in room.items():
            if pinned not in self.memory or len(self.memory[pinned]) < size:
                self.memory.pop(pinned, None)
                self.memory[pinned] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        streams: dict[torch.device, Any] = {}
        copies = [self._copy(part, at, streams) for part, at in zip(parts, places, strict=True)]
        events = []
        for device, stream in streams.items():
            event = recorded(stream)
            current_stream(device).wait_stream(stream)  # what is written to the parts later
            events.append(event)
        return [_come(copy, events) for copy in copies]

    def _copy(self, part: Tensor, at: int, streams: dict[torch.device, Any]) -> Tensor:
        copy = self.memory[not part.is_cpu][at : at + part.nbytes].view(part.dtype).view(part.shape)
        with torch.no_grad():
            if part.is_cpu:
                return copy.copy_(part)
            stream = streams.get(part.device)
            if stream is None:
                stream = streams[part.device] = side_stream(part.device, "snapshot")
                stream.wait_stream(current_stream(part.device))
            with on_stream(stream):
                copy.copy_(part, non_blocking=True)
            part.record_stream(stream)
            return copy


def _come(copy: Tensor, events: Sequence[Any]) -> Callable[[], Tensor]:
    def here() -> Tensor:
        for event in events:
            event.synchronize()
        return copy

    return here


_memory = Snapshot()
