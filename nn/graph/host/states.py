"""States on the host: the values that an optimizer changes and what it keeps of them, away from the device.

    device    gradient  --copy-->  buffer            parameter  <--copy--  master
    host                           buffer, master, states: one step of the optimizer

The gradient goes by a stream of its own into a pinned buffer, which is the same in every step; the host waits for its
event, and nothing else, before the optimizer steps. The master is pinned too, so that the way back needs no wait: the
next kernel on the parameter's own stream waits for it there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....placement.device import current_stream, on_stream, recorded, side_stream
from ....sbp.logical import OffloadPlace
from ...tensors.tensor import GlobalTensor, wrap
from .memory import Folder, empty

__all__ = ["KeptState", "StateMemory"]


class StateMemory:
    """The host's memory for one parameter, of which this process owns the shards of these ranks."""

    def __init__(self, to: OffloadPlace, name: str, ranks: Sequence[int], folder: Folder | None) -> None:
        assert (folder is not None) == (to == "disk")
        self.to, self.name, self.ranks, self.folder = to, name, tuple(ranks), folder
        self.buffers: tuple[Tensor, ...] = ()  # for gradients
        self.events: list[Any] = []  # of copies that the host has not waited for

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a tensor that lies here does not."""
        return None

    def put(self, name: str, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copies of shards here, under a name: those of the master, or of a state."""
        return tuple([self.put_shard(name, at, x) for at, x in enumerate(shards[: len(self.ranks)])]) or tuple(shards)

    def put_shard(self, name: str, at: int, shard: Tensor) -> Tensor:
        if self.folder is not None:
            there = self.folder.empty(f"{self.name}.rank{self.ranks[at]}.{name}", shard.shape, shard.dtype)
        else:
            there = empty(shard.shape, shard.dtype, pinned=not shard.is_cpu)
        with torch.no_grad():
            return there.copy_(shard)

    def brought(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """A gradient on its way here; `arrive` waits for it."""
        if not self.ranks:
            return tuple(grads)
        if not self.buffers:
            self.buffers = tuple([empty(x.shape, x.dtype, pinned=not x.is_cpu) for x in grads])
        for buffer, grad in zip(self.buffers, grads, strict=True):
            if not grad.is_cpu:
                stream = side_stream(grad.device, "offload out")
                stream.wait_stream(current_stream(grad.device))
                with on_stream(stream):
                    buffer.copy_(grad, non_blocking=True)
                grad.record_stream(stream)
                self.record(stream)
            else:
                buffer.copy_(grad)
        return self.buffers

    def sent(self, shards: Sequence[Tensor], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Shards of the master on their way to the devices where these are; kernels behind this see them."""
        out = []
        for shard, there in zip(shards, like, strict=True):
            if not there.is_cpu:
                stream, here = side_stream(there.device, "offload back"), current_stream(there.device)
                with on_stream(stream):
                    moved = shard.to(there.device, non_blocking=True)
                here.wait_stream(stream)
                moved.record_stream(here)
                self.record(stream)
                out.append(moved)
            else:
                out.append(shard)
        return tuple(out)

    def record(self, stream: Any) -> None:
        self.events.append(recorded(stream))

    def arrive(self) -> None:
        """Wait until the gradient is here, and sent values have gone: then the optimizer may read and write."""
        for event in self.events:
            event.synchronize()
        self.events.clear()

    def kept(self, state: Mapping[str, Any]) -> "KeptState":
        """The state that an optimizer keeps of the parameter, here."""
        made = KeptState(self)
        for name, part in state.items():
            made[name] = part
        return made

    def of_shard(self, at: int, state: Mapping[str, Any]) -> "KeptState":
        """The state of one shard; the values given are here already."""
        return KeptState(self, at, state)


class KeptState(dict[str, Any]):
    """An optimizer's state of a parameter, or of one shard of it. Tensors that are put in are copied one after the
    other to the host's memory for them. Copies and pickles of it are plain dicts."""

    def __init__(self, memory: StateMemory, at: int | None = None, state: Mapping[str, Any] = {}) -> None:
        super().__init__(state)
        self.memory, self.at = memory, at

    def __setitem__(self, name: str, part: Any) -> None:
        if isinstance(part, Tensor) and part.ndim and self.get(name) is not part:
            part = self.put(name, part)
        super().__setitem__(name, part)

    def put(self, name: str, part: Tensor) -> Tensor:
        if isinstance(part, GlobalTensor):
            return wrap(self.memory.put(name, [x.detach() for x in part._shards]), part._layout)
        return part if self.at is None else self.memory.put_shard(name, self.at, part)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)
