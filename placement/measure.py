"""Measuring a transport: time one collective at several sizes, and fit latency and bandwidth to the times.

seconds for one hop  =  latency + bytes / bandwidth
"""

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import mul
from pathlib import Path
from subprocess import DEVNULL, Popen

import torch
import torch.distributed as dist

from .cluster import Cluster, cluster
from .errors import PlacementError, TransportError

__all__ = ["LinkTimes", "fit", "measure"]

SIZES = (*(1024 * 4**k for k in range(7)), 8 * 1024**2)  # bytes of one rank's shard, 1 KiB to 8 MiB
WARM_UP, ROUNDS = 5, 20


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Seconds that one hop of an all-gather took for each size in bytes, and the line fitted to them."""

    ranks: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    latency: float
    bandwidth: float

    def cluster(self) -> Cluster:
        """The "cpu" preset with this latency and bandwidth in place of its own."""
        preset = cluster("cpu")
        level = replace(preset.levels[0], latency=self.latency, bandwidth=self.bandwidth)
        return replace(preset, name="measured", levels=(level, *preset.levels[1:]))

    def __str__(self) -> str:
        preset = cluster("cpu").levels[0]
        rows = [
            f"  {size:>9}  {seconds * 1e6:>9.1f}  {(self.latency + size / self.bandwidth) * 1e6:>9.1f}"
            f"  {(preset.latency + size / preset.bandwidth) * 1e6:>9.1f}"
            for size, seconds in zip(self.sizes, self.seconds, strict=True)
        ]
        return "\n".join(
            [
                f"all-gather over {self.ranks} local Gloo ranks, one hop",
                "      bytes     took us     fit us  preset us",
                *rows,
                f"  latency    {self.latency * 1e6:8.1f} us    preset {preset.latency * 1e6:8.1f} us",
                f"  bandwidth  {self.bandwidth / 1e9:8.2f} GB/s  preset {preset.bandwidth / 1e9:8.2f} GB/s",
            ]
        )


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and bandwidth of the line `seconds = latency + size / bandwidth` nearest to what was measured.

    Nearest in *relative* error, so that a microsecond at 1 KiB counts as much as a millisecond at 8 MiB.
    Neither is ever negative: a slope lost in noise gives an infinite bandwidth, an intercept below zero
    gives latency 0.

    >>> latency, bandwidth = fit([1_000, 1_000_000], [11e-6, 1010e-6])
    >>> f"{latency:.6f} s, {bandwidth:.3g} bytes/s"
    '0.000010 s, 1e+09 bytes/s'
    """
    sane = all(math.isfinite(x) and x >= 0 for x in sizes) and all(math.isfinite(t) and t > 0 for t in seconds)
    if len(sizes) != len(seconds) or len(set(sizes)) < 2 or not sane:
        raise PlacementError(
            "a latency and a bandwidth need two different sizes, and for each a time above 0\n"
            f"  found sizes {list(sizes)}\n  and seconds {list(seconds)}"
        )
    # Least squares of (a + b x - t) / t, that is of a u + b v - 1 with u = 1 / t and v = x / t.
    us, vs = [1 / t for t in seconds], [x / t for x, t in zip(sizes, seconds, strict=True)]
    uu, uv, vv = (sum(map(mul, left, right)) for left, right in ((us, us), (us, vs), (vs, vs)))
    det = uu * vv - uv * uv
    latency, slope = (sum(us) * vv - sum(vs) * uv) / det, (uu * sum(vs) - uv * sum(us)) / det
    if slope <= 0:
        return sum(us) / uu, math.inf
    return (latency, 1 / slope) if latency >= 0 else (0.0, vv / sum(vs))


def measure(ranks: int = 2, sizes: Sequence[int] = SIZES, *, timeout: float = 120.0) -> LinkTimes:
    """Time all-gathers between that many Gloo processes of this machine; none of them outlives the call.

    A process that fails, or a run of more than `timeout` seconds, raises TransportError with what it said.
    """
    if ranks < 2:
        raise PlacementError(f"cannot measure between {ranks} ranks\n  a transport needs at least 2")
    with tempfile.TemporaryDirectory(prefix="sbpflow-measure-") as folder:
        job = {"ranks": ranks, "sizes": list(sizes), "folder": folder}
        # Not multiprocessing: spawn would run the caller's script a second time; fork breaks under threads.
        code = f"import importlib; importlib.import_module({__name__!r}).run_rank()"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with ExitStack() as cleanup:
            running: list[Popen[bytes]] = []
            for rank in range(ranks):
                log = cleanup.enter_context(open(Path(folder, f"{rank}.log"), "wb"))
                command = [sys.executable, "-c", code, json.dumps(job | {"rank": rank})]
                running.append(Popen(command, stdout=log, stderr=log, stdin=DEVNULL, env=environment))
                cleanup.callback(_end, running[-1])
            _wait(running, folder, timeout)
        took = [seconds / (ranks - 1) for seconds in json.loads(Path(folder, "seconds.json").read_text())]
    return LinkTimes(ranks, tuple(sizes), tuple(took), *fit(sizes, took))


def _wait(running: Sequence["Popen[bytes]"], folder: str, timeout: float) -> None:
    """Return when every process has ended well; raise when one has not, or when time is up."""
    deadline = time.monotonic() + timeout
    codes: list[int | None] = [None for _ in running]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.02)
        codes = [process.poll() for process in running]
    for rank, code in enumerate(codes):
        if code:
            said = Path(folder, f"{rank}.log").read_text(errors="replace").strip().splitlines() or ["nothing"]
            raise TransportError(f"rank {rank} of the measurement ended with code {code}\n  it said: {said[-1]}")
    if None in codes:
        late = [rank for rank, code in enumerate(codes) if code is None]
        raise TransportError(
            f"the measurement took more than {timeout:g} s\n  ranks {late} were still running\n"
            "  is the machine busy, or does its host name resolve to an unreachable address?"
        )


def _end(process: "Popen[bytes]") -> None:
    process.kill()
    process.wait()


def run_rank() -> None:
    """One measuring process: its job is the first argument, as JSON; rank 0 writes the seconds."""
    job = json.loads(sys.argv[1])
    rank, ranks, folder = job["rank"], job["ranks"], job["folder"]
    torch.set_num_threads(1)
    meet = Path(folder, "store").as_uri()  # a file, so that no port need be free
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        seconds = [_seconds(size, ranks) for size in job["sizes"]]
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))


def _seconds(size: int, ranks: int) -> float:
    """Seconds that gathering one shard of `size` bytes from every rank takes."""
    shard, whole = (torch.zeros(many, dtype=torch.uint8, device="cpu") for many in (size, size * ranks))
    times = []
    for _ in range(WARM_UP + ROUNDS):
        start = time.perf_counter()
        dist.all_gather_into_tensor(whole, shard)
        times.append(time.perf_counter() - start)
    # The lower quartile: other work on the machine only ever adds time, at 1 KiB up to 20 times the truth.
    return statistics.quantiles(times[WARM_UP:], n=4)[0]
