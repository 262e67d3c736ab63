"""`torch.cuda` over a played card: what a build of torch without CUDA lacks of it, in terms of torch's own classes.

install()                          once, after the card was loaded and before anybody uses torch.cuda
count("syncs") -> int              how often the host waited for values; also launched, waited, races, allocations,
                                   and communicators of NCCL
"""

import contextlib
import ctypes
import itertools
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch

from .build import nccl

__all__ = ["count", "install"]

MEMORY = 80 * 2**30
CUDA = 1  # as torch counts kinds of devices


def card() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["PLAYED_CARD"])
    library.card_count.restype = ctypes.c_int64
    library.card_count.argtypes = [ctypes.c_char_p]
    for name in ("begin", "end", "replay"):
        getattr(library, f"card_graph_{name}").restype = ctypes.c_char_p
    library.card_graph_begin.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    return library


def count(what: str) -> int:
    return int(card().card_count(what.encode()))


def cards() -> int:
    return int(os.environ["PLAYED_CARDS"])


def index(device: Any = None) -> int:
    if device is None or device == -1:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    return torch.accelerator.current_device_index() if device.index is None else int(device.index)


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, torch.device("cuda", index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return 0 if self.stream_id == 0 else 1000 * self.device_index + self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        return super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing)

    def __init__(self, enable_timing: bool = False, *_: Any, **__: Any) -> None:
        super().__init__()
        self.timed = enable_timing
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = perf_counter()
        super().record(*filter(None, [stream]))

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds between the launches: when a kernel runs is nobody's measure here."""
        if not self.timed or not end.timed:
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        self.synchronize()
        end.synchronize()
        return max(float(end.at - self.at) * 1e3, 1e-3)


def own(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=CUDA)


def current_stream(device: Any = None) -> Stream:
    return own(torch.accelerator.current_stream(torch.device("cuda", index(device))))


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=index(device), device_type=CUDA)


@contextlib.contextmanager
def stream(of: Any) -> Iterator[None]:
    if of is None:
        yield
        return
    with on_device(of.device):
        before = current_stream(of.device)
        torch.accelerator.set_stream(of)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


class on_device:
    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else index(device)

    def __enter__(self) -> None:
        self.before = exchange_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        exchange_device(self.before)


def exchange_device(device: int) -> int:
    before = torch.accelerator.current_device_index()
    if device >= 0:
        torch.accelerator.set_device_index(device)
    return before


def properties(device: Any = None) -> Any:
    return SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        total_memory=MEMORY,
        multi_processor_count=132,
        index=index(device),
    )


class CUDAGraph:
    """Torch's class of this name, of which a build for CPUs has none."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.number = card().card_graph_made()
        self.handle: Any = None

    def register_generator_state(self, generator: torch.Generator) -> None:
        card().card_graph_draws(self.number, ctypes.c_int64(getattr(generator, "_cdata")))  # noqa: B009  # torch types it not

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        modes = ["global", "thread_local", "relaxed"]
        self.handle = pool or graph_pool_handle()
        told(card().card_graph_begin(self.number, self.handle[1], modes.index(capture_error_mode)))

    def capture_end(self) -> None:
        told(card().card_graph_end(self.number))

    def replay(self) -> None:
        told(card().card_graph_replay(self.number))

    def reset(self) -> None:
        card().card_graph_gone(self.number)
        self.number = card().card_graph_made()

    def pool(self) -> Any:
        return self.handle

    def __del__(self) -> None:
        card().card_graph_gone(self.number)


def told(error: bytes | None) -> None:
    if error:
        raise (
            torch.AcceleratorError(error.decode()) if error.startswith(b"CUDA error") else RuntimeError(error.decode())
        )


handles = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(handles)


def is_current_stream_capturing() -> bool:
    return bool(card().card_recording())


SYNCS = {"default": 0, 0: 0, "warn": 1, 1: 1, "error": 2, 2: 2}
mode = 0


def set_sync_debug_mode(how: int | str) -> None:
    global mode
    mode = SYNCS[how]
    card().card_forbid_syncs(mode)


def generators() -> tuple[torch.Generator, ...]:
    """Torch's own of each card, which it is made to hand out."""
    card().card_hand_out(1)
    made = tuple(torch.Generator(f"cuda:{k}") for k in range(cards()))
    card().card_hand_out(0)
    return made


def cloned(storage: Any) -> Any:
    """A copy of a storage; torch that is built for CPUs makes none on cards by itself."""
    if storage.device.type != "cuda":
        return plain_clone(storage)
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage()
    return made.copy_(storage)


plain_clone: Any = torch.UntypedStorage.clone


def connected(store: Any, key: str, rank: int, size: int, device: int, timeout: Any) -> Any:
    """The way between the ranks of a communicator, which are told apart by card and host as NCCL does."""
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

    way = PrefixStore(f"played/{key}", store)
    here = f"{os.environ.get('NCCL_HOSTID', socket.gethostname())}, cuda:{device}"
    way.set(f"card/{rank}", here)
    for other in range(size):
        if other != rank and way.get(f"card/{other}").decode() == here:
            raise RuntimeError(f"Duplicate GPU detected: rank {rank} and rank {other} both on {here} (played NCCL)")
    return ProcessGroupGloo(way, rank, size, timedelta(days=30))


def install_nccl() -> None:
    """NCCL as torch.distributed looks for it, where this torch has distributed at all."""
    library = Path(os.environ["PLAYED_CARD"])
    sys.path.append(str(nccl(library).parent))
    c10d: Any = torch._C._distributed_c10d
    from played_nccl import ProcessGroupNCCL, connect_by  # type: ignore[import-not-found]

    connect_by(connected)
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    named: Any = torch.distributed.distributed_c10d
    named.ProcessGroupNCCL, named._NCCL_AVAILABLE = ProcessGroupNCCL, True


def install() -> None:
    cuda: Any = torch.cuda
    storage: Any = torch.UntypedStorage
    storage.clone = cloned
    given = {
        "_lazy_init": lambda: None,
        "_initialized": True,  # by which torch's checkpoint knows whether cards have drawn
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": cards,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: exchange_device(index(device)),
        "device": on_device,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "set_stream": torch.accelerator.set_stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(index(device)),
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "default_generators": generators(),
        "memory_allocated": lambda device=None: count("allocated"),
        "max_memory_allocated": lambda device=None: count("peak"),
        "memory_reserved": lambda device=None: count("reserved"),
        "max_memory_reserved": lambda device=None: count("reserved"),
        "reset_peak_memory_stats": lambda device=None: card().card_reset_peak(),
        "mem_get_info": lambda device=None: (MEMORY - count("reserved"), MEMORY),
        "empty_cache": lambda: None,
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": graph_pool_handle,
        "is_current_stream_capturing": is_current_stream_capturing,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: mode,
    }
    for name, value in given.items():
        setattr(cuda, name, value)
    for name in ("current_device", "is_initialized", "_lazy_init", "device_count"):  # under these names there as well
        for module in (cuda.random, cuda.memory, cuda.streams, cuda.graphs):
            if hasattr(module, name):
                setattr(module, name, given[name])
    torch._C._cuda_getDevice = torch.accelerator.current_device_index
    cuda.graphs.is_current_stream_capturing = is_current_stream_capturing
    torch._C._host_emptyCache = lambda: None
    torch.backends.cuda.is_built = lambda: True  # which optimizers ask before they look whether a graph is recorded
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # which warns that this build has none
    cuda.random.default_generators = cuda.default_generators
    cuda.memory.memory_allocated = given["memory_allocated"]
    if torch.distributed.is_available():
        install_nccl()
