"""Copies on the host of values for the backward: there and back on queues of their own, in memory used again.

    compute   run 3 | run 4 | ...            grad 4 | grad 3
    out             | saved 3 ->
    back                               -> saved 3   |

On a card each way is a stream: the copy out waits for what the compute stream has got so far, the copy back begins
where the compute stream has come to, and the compute stream waits for it where it is read; the host waits for neither.
Files are written and read by a thread, by way of pinned memory. On a CPU all is one memory, and copied at once.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import count
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....placement.device import current_stream, on_stream, recorded, side_stream
from ....sbp.logical import OffloadPlace
from .memory import Folder, empty

__all__ = ["Coming", "Copies", "Stowed"]

KEY = "_sbpflow_on_host"  # of a tensor: the copy of it that there is already


class Memory(NamedTuple):
    """Bytes of the host, and the event behind which nobody uses them any more."""

    bytes: Tensor
    read: Any = None


class Copies:
    """The copies that one function makes, and the memory that they have used."""

    def __init__(self, to: OffloadPlace, name: str) -> None:
        self.to, self.title = to, name
        self.free: dict[tuple[int, bool, bool], list[Memory]] = defaultdict(list)
        self.numbers = count()

    def stow(self, tensors: Sequence[Tensor]) -> "Stowed":
        """Copies of these; one that is kept twice is copied once."""
        return Stowed([self.copy(x) for x in tensors])

    def copy(self, x: Tensor) -> "HostCopy":
        known = vars(x).get(KEY)
        there: HostCopy | None = known and known()
        if there is None or there.copies.to != self.to:
            there = HostCopy(self, x)
            vars(x)[KEY] = weakref.ref(there)  # for as long as somebody needs it: so none outlives its step
        return there

    def take(self, size: int, *, pinned: bool = False, mapped: bool = False) -> Memory:
        """Memory of so many bytes, that is free or new."""
        held = self.free[size, pinned, mapped]
        try:
            return held.pop()  # by whatever thread
        except IndexError:
            if mapped:
                return Memory(self.folder.empty(f"saved.{next(self.numbers)}", (size,), torch.uint8))
            return Memory(empty((size,), torch.uint8, pinned=pinned))

    def give(self, memory: Memory, *, pinned: bool = False, mapped: bool = False) -> None:
        self.free[memory.bytes.numel(), pinned, mapped].append(memory)

    @cached_property
    def folder(self) -> Folder:
        return Folder(self.title)

    @cached_property
    def thread(self) -> ThreadPoolExecutor:
        """The one that reads and writes files beside a card."""
        made = ThreadPoolExecutor(1, "offload")
        weakref.finalize(self, made.shutdown, wait=False)
        return made


class HostCopy:
    """One tensor on the host."""

    def __init__(self, copies: Copies, x: Tensor) -> None:
        flat, self.stride = _flat(x)
        self.copies, self.shape, self.dtype, self.device = copies, x.shape, x.dtype, x.device
        self.mapped, self.pinned = copies.to == "disk", not x.is_cpu
        self.numel = flat.numel()
        self.memory: Memory | None = None
        self.written: Future[None] | None = None  # where a thread writes it
        self.event: Any = None
        if self.pinned:
            self.from_card(flat)
        elif self.numel:
            self.memory = copies.take(self.size, mapped=self.mapped)
            self.seen(self.memory).copy_(flat)

    @property
    def size(self) -> int:
        return self.numel * self.dtype.itemsize

    def seen(self, memory: Memory) -> Tensor:
        """Memory as numbers of this dtype."""
        return memory.bytes.view(self.dtype)

    def from_card(self, flat: Tensor) -> None:
        held = self.copies.take(self.size, pinned=True)
        stream = side_stream(self.device, "offload out")
        stream.wait_stream(current_stream(self.device))
        if held.read is not None:
            stream.wait_event(held.read)
        with on_stream(stream):
            self.seen(held).copy_(flat, non_blocking=True)
        flat.record_stream(stream)
        self.event = recorded(stream)
        self.memory = Memory(held.bytes, self.event)
        if self.mapped:
            self.memory = self.copies.take(self.size, mapped=True)
            self.written = self.copies.thread.submit(self.write, held, self.memory, self.event)

    def write(self, held: Memory, file: Memory, event: Any) -> None:
        event.synchronize()
        file.bytes.copy_(held.bytes)
        self.copies.give(Memory(held.bytes), pinned=True)

    def fetch(self) -> "Landing":
        if not self.pinned:
            flat = torch.empty(self.numel, dtype=self.dtype, device="cpu")
            if self.memory is not None:
                flat.copy_(self.seen(self.memory))
            return Landing(self.placed(flat))
        stream, here = side_stream(self.device, "offload back"), current_stream(self.device)
        if not self.mapped:
            assert self.memory is not None
            stream.wait_event(self.event)
            return Landing(*self.back(self.memory, stream, recorded(here)), stream)
        return Landing(self.copies.thread.submit(self.read, stream, recorded(here)), None, stream)

    def read(self, stream: Any, begin: Any) -> tuple[Tensor, Any]:
        """From the file, by way of pinned memory."""
        assert self.memory is not None
        assert self.written is not None
        self.written.result()
        held = self.copies.take(self.size, pinned=True)
        if held.read is not None:
            held.read.synchronize()
        held.bytes.copy_(self.memory.bytes)
        made, event = self.back(held, stream, begin)
        self.copies.give(Memory(held.bytes, event), pinned=True)
        return made, event

    def back(self, memory: Memory, stream: Any, begin: Any) -> tuple[Tensor, Any]:
        stream.wait_event(begin)
        with on_stream(stream):
            flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            flat.copy_(self.seen(memory), non_blocking=True)
        event = recorded(stream)
        if not self.mapped:
            self.memory = Memory(memory.bytes, event)
        return self.placed(flat), event

    def placed(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride)

    def __del__(self) -> None:
        memory = getattr(self, "memory", None)
        if memory is not None:
            self.copies.give(memory, pinned=self.pinned and not self.mapped, mapped=self.mapped)


class Landing:
    """A tensor on its way back; `wait` has the current stream wait for it."""

    def __init__(self, made: "Tensor | Future[tuple[Tensor, Any]]", event: Any = None, stream: Any = None) -> None:
        self.made, self.event, self.stream = made, event, stream

    def wait(self) -> Tensor:
        made, event = (self.made, self.event) if isinstance(self.made, Tensor) else self.made.result()
        if event is not None:
            here = current_stream(made.device)
            here.wait_event(event)
            made.record_stream(here)
        return made


class Stowed:
    """Tensors on the host, as one register holds them."""

    def __init__(self, copies: Sequence[HostCopy]) -> None:
        self.copies = copies

    def fetch(self) -> "Coming":
        return Coming([copy.fetch() for copy in self.copies])


class Coming:
    """The same on their way back."""

    def __init__(self, landings: Sequence[Landing]) -> None:
        self.landings = landings

    def wait(self) -> tuple[Tensor, ...]:
        return tuple([landing.wait() for landing in self.landings])


def _flat(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A tensor as a row of its memory, and its strides in that row. One with gaps is copied first."""
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    numel = prod(x.shape)
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if numel else 0
    if reach > numel:
        x = x.contiguous()
        reach = numel
    return x.as_strided((reach,), (1,)), x.stride()
