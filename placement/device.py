"""Device families: a row for each kind of device that a placement may name, with all in which they differ.

The rest of the package asks a row, or torch's word for the memory of the host (`x.is_cpu`), and never for a kind by its
name. What torch has for each kind of card under one name (streams, events, memory, random numbers) comes from torch's
module of that name, so that another kind of card is another row.
"""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "FAMILIES",
    "DeviceFamily",
    "card_here",
    "card_of",
    "current_stream",
    "family",
    "on_stream",
    "usable_cores",
    "recorded",
    "side_stream",
]


@dataclass(frozen=True)
class DeviceFamily:
    """A kind of device. A `card` has memory of its own, and kernels on it run behind the host, on streams."""

    name: str  # in placements and in torch
    title: str  # in prose
    card: bool
    backend: str  # of torch.distributed
    autocast: torch._C.DispatchKey
    bucket: int  # bytes of gradients that are brought together in one exchange
    preset: str  # the cluster by which it is priced where nobody says which
    eights: tuple[int, int] | None = None  # the least compute capability with products of 8 bits, where that is asked
    graphs: str | None = None  # the class of the module that records what a stream is given, to be run again
    described: tuple[int, int] | None = None  # that of the preset, which programs are told where no card is here

    @property
    def module(self) -> Any:
        """Torch's module for this kind, such as torch.cuda; None where this torch has none."""
        return getattr(torch, self.name, None)

    @property
    def here(self) -> bool:
        """Whether torch finds such a device on this machine."""
        return not self.card or (self.module is not None and bool(self.module.is_available()))

    @property
    def count(self) -> int:
        return int(self.module.device_count()) if self.here else 0

    def properties(self) -> list[Any]:
        """The name and memory of each device here, as torch has them."""
        return [self.module.get_device_properties(k) for k in range(self.count)]

    def device(self, rank: int | None) -> torch.device:
        """The device of a simulated rank, which share those there are, or the one that this process has taken."""
        if not self.card:
            return torch.device(self.name)
        at = self.module.current_device() if rank is None else rank % self.count
        return torch.device(self.name, at)

    def random_state(self, device: torch.device | None = None) -> Tensor:
        """The state of torch's generator for a device, by default the current one of this kind."""
        if not self.card:
            return torch.get_rng_state()
        state: Tensor = self.module.get_rng_state(device or self.name)
        return state

    def set_random_state(self, state: Tensor, device: torch.device | None = None) -> None:
        if self.card:
            self.module.set_rng_state(state, device or self.name)
        else:
            torch.set_rng_state(state)

    def seed(self) -> int:
        """The number by which torch's generator was seeded last."""
        return int((self.module if self.card else torch).initial_seed())

    def generator(self, device: torch.device) -> torch.Generator:
        """Torch's own generator for a device."""
        if not self.card:
            return torch.default_generator
        made: torch.Generator = self.module.default_generators[device.index or 0]
        return made

    def without_eights(self) -> str:
        """The compute capability of the card here, if it has no products of 8 bits."""
        if self.eights is None or not self.here or self.module.get_device_capability() >= self.eights:
            return ""
        return ".".join(map(str, self.module.get_device_capability()))

    def communicator(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """A process group of this kind's backend, which torch.distributed does not know of."""
        from torch._C import _distributed_c10d as c10d

        kind = getattr(c10d, f"ProcessGroup{self.backend.upper()}")
        options = kind.Options()
        options._timeout = timeout
        return kind(store, rank, size, options)


# The size of buckets on a CPU: what is packed, sent and added up should stay in its cache, but an exchange has a price
# of its own. Processor time of a step of 14 MB of gradients, beside DDP's, in pieces of 1, 4 and 16 MB: 1.08 1.07 1.15
# on two ranks of two cores, 1.17 1.07 1.03 on four.
FAMILIES = {
    row.name: row
    for row in (
        DeviceFamily("cpu", "a CPU", False, "gloo", torch._C.DispatchKey.AutocastCPU, 4 * 2**20, "cpu"),
        DeviceFamily(
            "cuda",
            "CUDA",
            True,
            "nccl",
            torch._C.DispatchKey.AutocastCUDA,
            25 * 2**20,
            "h100x8",
            eights=(8, 9),
            graphs="CUDAGraph",
            described=(9, 0),
        ),
    )
}

_side: dict[tuple[torch.device, str], Any] = {}
_making = Lock()


def family(type: str) -> DeviceFamily:
    """The row of a kind of device.

    >>> family("cuda").backend
    'nccl'
    """
    return FAMILIES[type]


def card_here() -> DeviceFamily | None:
    """The kind of card that this machine has, if it has one."""
    return next((row for row in FAMILIES.values() if row.card and row.here), None)


def card_of(tensors: Iterable[Tensor]) -> str | None:
    """The kind of card on which the first of some tensors lies that is on one."""
    rows = (FAMILIES.get(x.device.type) for x in tensors)
    return next((row.name for row in rows if row is not None and row.card), None)


def side_stream(device: torch.device, use: str) -> Any:
    """The stream of a device for one use, made when that is first asked for and kept.

    CUDA has 32 of a device at once, and gives them out again from the first.
    """
    with _making:
        stream = _side.get((device, use))
        if stream is None:
            stream = _side[device, use] = family(device.type).module.Stream(device)
        return stream


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread's kernels for a device go."""
    return family(device.type).module.current_stream(device)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Inside, this thread's kernels go to the stream; None changes nothing."""
    if stream is None:
        return nullcontext()
    inside: AbstractContextManager[Any] = family(stream.device.type).module.stream(stream)
    return inside


def recorded(stream: Any) -> Any:
    """An event that happens once all is done that the stream has got so far."""
    event = family(stream.device.type).module.Event()
    event.record(stream)
    return event


def usable_cores() -> int:
    """The cores that this process may use: a container or a job may be given fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
