"""A snapshot: copies in the host's memory of what a process is about to write, so that training may go on.

Its memory is kept and used again by the next one. From a card copies go by a stream of their own into pinned memory;
kernels that come later wait for them there, the host does when it writes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...placement.device import current_stream, on_stream, recorded, side_stream

__all__ = ["Snapshot"]


class Snapshot:
    """Memory of the host for one snapshot at a time."""

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
