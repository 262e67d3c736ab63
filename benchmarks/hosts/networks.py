"""Networks of hosts that are played: shapes, what a cluster file says of them, and the counters of interfaces."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sbpflow as flow
from sbpflow.placement.hardware import Level, RankLink
from tools.hosts import Host

__all__ = ["SHAPES", "Counters", "Shape", "put_whole"]


@dataclass(frozen=True)
class Shape:
    """A shape of network; `mesh` is that of HSDP, and `cluster` what a file says of it."""

    hosts: tuple[Host, ...]
    cluster: flow.Cluster
    mesh: tuple[int, int] | None = None
    trunk: float = 200.0
    slow: tuple[str, ...] = ()  # ends of the slow link; else those of all hosts

    @property
    def ranks(self) -> int:
        return sum(host.ranks for host in self.hosts)


def _cluster(levels: Sequence[Level], links: Sequence[RankLink] = ()) -> flow.Cluster:
    """A cluster of CPUs that share two cores, with these levels."""
    preset = flow.cluster("cpu")
    device = replace(preset.device, flops={name: rate / 2 for name, rate in preset.device.flops.items()})
    return flow.Cluster("played", tuple(levels), device, tuple(links))


def _rate(mbits: float, ranks: int = 1) -> float:
    """Bytes a second that are left of a rate for each rank that shares it, below the heads of packets."""
    return mbits * 1e6 / 8 * 0.95 / ranks


HOP = 3e-4  # seconds
INSIDE = Level("host", 2, 1e-4, 5e8)
SHAPES = {
    "two": Shape(
        (Host("a", 2, 200), Host("b", 2, 200)),
        _cluster([INSIDE, Level("network", 2, HOP, _rate(200, 2))]),
        mesh=(2, 2),
    ),
    "unequal": Shape(
        (Host("a", 2, 400), Host("b", 1, 200), Host("c", 1, 100)),
        _cluster(
            [INSIDE, Level("network", 2, HOP, _rate(400, 2))],
            [
                RankLink((a, b), HOP, _rate(rate, ranks))
                for a, b, rate, ranks in (
                    (0, 2, 200, 2), (1, 2, 200, 2), (0, 3, 100, 2), (1, 3, 100, 2), (2, 3, 100, 1)
                )
            ],
        ),
    ),
    "pairs": Shape(
        tuple(Host(name, 1, 400, switch) for name, switch in (("a", 0), ("b", 0), ("c", 1), ("d", 1))),
        _cluster([Level("pair", 2, HOP, _rate(400)), Level("trunk", 2, 2 * HOP, _rate(100, 2))]),
        mesh=(2, 2),
        trunk=100.0,
        slow=("up0", "down0"),
    ),
}  # fmt: skip


class Counters:
    """The counters of all interfaces, which whoever plays the hosts reads when the first rank asks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, 0

    def during(self, step: Callable[[], object], steps: int) -> tuple[float, dict[str, float]]:
        """Seconds of a step, of the slowest rank, and bytes of a step by interface."""
        before = self.now()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = torch.tensor((time.perf_counter() - begin) / steps)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        after = self.now()
        return seconds.item(), {name: (after[name] - before[name]) / steps for name in before}

    def now(self) -> dict[str, int]:
        dist.barrier()
        told: dict[str, int] = {}
        if dist.get_rank() == 0:
            time.sleep(0.05)  # what the barrier sent has gone by then
            put_whole(self.folder / f"asked{self.asked}", None)
            answer = self.folder / f"answer{self.asked}"
            while not answer.exists():
                time.sleep(0.002)
            told = json.loads(answer.read_text())
        self.asked += 1
        given: list[Any] = [told]
        dist.broadcast_object_list(given)
        counters: dict[str, int] = given[0]
        return counters


def put_whole(path: Path, value: object) -> None:
    """Write a file that others never see in part."""
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").rename(path)
