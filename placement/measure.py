"""Measuring links where a run is: ranks in pairs exchange messages of several sizes, round by round, at once.

    under a launcher   measure_run()    all ranks of the job; each level of its hosts
    without            measure()        a process for each card of this machine, or two, which are started for it

seconds of an exchange  =  latency + bytes / bandwidth

With `kernels`, what devices reach is timed behind that: all ranks compute at once (`compute/`).
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from math import inf
from pathlib import Path
from subprocess import DEVNULL, Popen

import torch
import torch.distributed as dist
from torch import Tensor

from .cluster import Cluster, preset_here
from .compute.hosts import devices_of, unlike
from .compute.timing import KernelTime, kernel_times
from .device import DeviceFamily, card_here, family
from .errors import PlacementError, TransportError
from .hardware import Device
from .network.fit import fit
from .network.hosts import Hosts, RunHosts
from .network.levels import PairLink, measured_levels
from .network.pairs import Round, Unit, rounds
from .world import init, store

__all__ = ["LinkTimes", "measure", "measure_run"]

# Bytes of a message, how many go one behind the other in a block, and how many blocks there are, of which the fastest
# counts, as other work on the machine only ever adds time. Messages of 32 KiB keep larger ones off a link on which one
# takes a minute.
SIZES = ((1024, 8, 16), (32 * 1024, 4, 6), (2**20, 3, 12), (8 * 2**20, 1, 12))
ENOUGH = 0.12  # seconds of a block, that say the rate of a link without larger messages
LONG = 1.5  # seconds of blocks behind which none is repeated; a first one may lose packets until TCP knows the link
BUDGET = 20.0  # seconds in all; rounds that are left then are left out
ANSWER = 15.0  # seconds in which a peer must answer
MEET = 60.0  # seconds in which all must have come


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """The measured links of hosts by themselves and in pairs, while all their ranks sent."""

    hosts: Hosts
    names: tuple[str, ...]  # of the hosts
    links: tuple[PairLink, ...]
    type: str = "cpu"
    when: str = ""
    left: int = 0  # rounds for which there was no time
    devices: tuple[Device, ...] = ()  # of each host, where kernels were timed

    def cluster(self) -> Cluster:
        """The preset of the devices with the levels, and the devices, that were found in place of its own."""
        preset = preset_here(self.type)
        levels, links = preset.levels, preset.links
        if self.links:
            levels, links = measured_levels(self.hosts, self.links, preset.levels[0])
        many = ", ".join(f"{name} ({len(g)})" for name, g in zip(self.names, self.hosts.groups, strict=True))
        origin = f"measured {self.when} on {many}" if self.when else ""
        found = replace(preset, name="measured", levels=levels, links=links, origin=origin)
        if not self.devices:
            return found
        return replace(found, device=self.devices[0], devices=unlike(self.hosts, self.devices))

    def __str__(self) -> str:
        found, preset = self.cluster(), preset_here(self.type)
        ranks = len(self.hosts.numbers)
        lines = []
        if self.links:
            lines = [f"links between {ranks} ranks on {counted(self.hosts.count, 'host')}, all sending at once"]
            lines += ["  between             latency us     MB/s a rank   Mbit/s a wire"]
        for link in self.links:
            who = " - ".join(self.names[host] for host in link.hosts)
            who = f"ranks of {who}" if len(link.hosts) == 1 else who
            rate = f"{link.wire * 8e-6:>16.0f}" if len(link.hosts) > 1 else ""
            lines.append(f"  {who:<18}  {link.latency * 1e6:>10.1f}  {link.bandwidth / 1e6:>14.1f}{rate}")
        lines += [f"  {counted(self.left, 'round')} of pairs left out, to end in time"] if self.left else []
        lines += ["levels               latency us     MB/s a rank"]
        for level in found.levels:
            lines.append(f"  {level.name:<18}  {level.latency * 1e6:>10.1f}  {level.bandwidth / 1e6:>14.1f}")
        for level in preset.levels:
            name = f"preset's {level.name}"
            lines.append(f"  {name:<18}  {level.latency * 1e6:>10.1f}  {level.bandwidth / 1e6:>14.1f}")
        for name, device in zip(self.names, self.devices, strict=False):
            lines += _reached(name, device)
        return "\n".join(lines)


def _reached(host: str, device: Device) -> list[str]:
    """Lines on what a host's device reaches."""
    found = device.fitted
    assert found is not None, "devices here were fitted"
    lines = [f"device of {host}, all ranks computing at once"]
    for dtype, peak in device.flops.items():
        lines.append(f"  {dtype:<18}  {peak * found.product / 1e9:>10.1f} GFLOP/s")
    lines.append(f"  {'memory':<18}  {device.memory_bandwidth * found.memory / 1e9:>10.1f} GB/s")
    lines.append(f"  {'launch':<18}  {found.launch * 1e6:>10.1f} us")
    if found.host:
        lines.append(f"  {'host':<18}  {found.host * 1e6:>10.1f} us a kernel, beside the card's")
    lines.append(f"  {'functions':<18}  {found.functions:>10.1f} times as long as their bytes")
    if found.update is not None:
        lines.append(f"  {'fused update':<18}  {found.update:>10.2f} times as long as its bytes")
    if found.attention is not None:
        lines.append(f"  {'attention':<18}  {found.attention * 100:>10.1f} % of the peak")
    return [*lines, f"  {'error':<18}  {found.error * 100:>10.1f} % in the median, on sizes that were left out"]


def counted(many: int, what: str) -> str:
    return f"{many} {what}{'s' * (many != 1)}"


def measure_run(*, kernels: bool = False) -> LinkTimes:
    """Time the links of this run, on all ranks of it, and kernels where that is asked; every rank gets the same.

    Where a rank does not answer, the others get a TransportError that names it.
    """
    here = init(timeout=MEET)
    if here.rank is None or here.run is None or here.size == 1:
        raise PlacementError("measuring a run needs one with two processes or more\n  start it with torchrun")
    card = card_here()
    device = card.device(None) if card else torch.device("cpu")
    try:
        if card:
            _made_together(device)
        found, left = timed(here.rank, here.run.hosts, device)
        beside = here.run.hosts.groups[here.run.hosts.numbers[here.rank]]
        times = _each_ranks(kernel_times(device, _meet, len(beside))) if kernels else []
    except RuntimeError as error:
        raise TransportError(_silent(here.rank, here.run, error)) from error
    when = now()
    devices = devices_of(here.run.hosts, here.run.names, times, device.type, when) if times else ()
    return LinkTimes(here.run.hosts, here.run.names, found, device.type, when, left, devices)


def _made_together(device: torch.device) -> None:
    """NCCL makes its communicator with all ranks, and in a round some have no peer."""
    dist.all_reduce(torch.zeros(1, device=device))


def timed(rank: int, hosts: Hosts, device: torch.device) -> tuple[tuple[PairLink, ...], int]:
    """The links that rounds show, and how many rounds were left out for want of time. All ranks call it together."""
    began = time.monotonic()
    found: dict[tuple[int, ...], list[PairLink]] = {}
    every = list(rounds(hosts))
    for done, units in enumerate(every):
        if _most([time.monotonic() - began])[0] > BUDGET:
            every = every[done:]
            break
        for unit, (latency, bandwidth) in zip(units, _round(units, rank, device), strict=True):
            found.setdefault(unit.hosts, []).append(PairLink(unit.hosts, latency, bandwidth, len(unit.pairs)))
    else:
        every = []
    return tuple(_middle(links) for links in found.values()), len(every)


def _middle(links: Sequence[PairLink]) -> PairLink:
    return sorted(links, key=lambda link: link.bandwidth)[len(links) // 2]


def _round(units: Round, rank: int, device: torch.device) -> list[tuple[float, float]]:
    """Latency and bandwidth of each unit. A unit that took long enough is done, while others go on."""
    mine, peer = next(((at, them) for at, unit in enumerate(units) for them in _peer(unit, rank)), (-1, -1))
    times: list[dict[int, float]] = [{} for _ in units]
    going = {*range(len(units))}
    for size, many, blocks in SIZES:
        fastest, in_all = dict.fromkeys(going, inf), dict.fromkeys(going, 0.0)
        given = torch.ones(size, dtype=torch.uint8, device=device), torch.ones(size, dtype=torch.uint8, device=device)
        for _ in range(blocks):
            again = {at for at in going if in_all[at] < LONG}
            spent = _block(peer, *given, many) if mine in again else 0.0
            took = _most([spent if at == mine else 0.0 for at in range(len(units))])
            fastest |= {at: min(fastest[at], took[at]) for at in again}
            in_all |= {at: in_all[at] + took[at] for at in again}
        for at in going:
            times[at][size] = fastest[at] / many
        going = {at for at in going if fastest[at] < ENOUGH}
    return [fit(*_telling(each)) for each in times]


def _peer(unit: Unit, rank: int) -> list[int]:
    """The rank with which one exchanges, if it is in this unit."""
    return [b if a == rank else a for a, b in unit.pairs if rank in (a, b)]


def _telling(seconds: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """The largest messages, which tell the rate, and the smallest as if it had no bytes: it tells the latency, and a
    switch that holds back some bytes carries those between faster than its wire."""
    sizes = [size for size in seconds if size == SIZES[0][0] or size * 8 >= max(seconds)]
    return [0, *sizes[1:]], [seconds[size] for size in sizes]


def _block(peer: int, mine: Tensor, theirs: Tensor, many: int) -> float:
    """Seconds of so many exchanges with a peer, one behind the other."""
    kind = family(mine.device.type)
    start = time.perf_counter()
    for _ in range(many):
        # The receive first: Gloo says behind what it sends that it can receive, and the peer waits for that word.
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, theirs, peer), dist.P2POp(dist.isend, mine, peer)])
        for work in works:
            work.wait(timedelta(seconds=ANSWER))
    if kind.card:
        kind.module.synchronize()
    return time.perf_counter() - start


def _most(seconds: Sequence[float]) -> list[float]:
    """For each place the most that any rank says; all have come to here when it is known."""
    said = torch.tensor(seconds, dtype=torch.float64, device="cpu")
    work = dist.all_reduce(said, dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait(timedelta(seconds=ANSWER))
    found: list[float] = said.tolist()
    return found


def _meet() -> None:
    """Return once all ranks have come to here."""
    _most([0.0])


def _each_ranks(mine: Sequence[KernelTime]) -> list[list[KernelTime]]:
    """The times of each rank, which all have timed the same kernels."""
    said = torch.tensor([time.seconds for time in mine], dtype=torch.float64, device="cpu")
    every = [torch.empty_like(said) for _ in range(dist.get_world_size())]
    work = dist.all_gather(every, said, async_op=True)
    assert work is not None
    work.wait(timedelta(seconds=ANSWER))
    return [[time._replace(seconds=s) for time, s in zip(mine, each.tolist(), strict=True)] for each in every]


def _silent(rank: int, run: RunHosts, error: Exception) -> str:
    """The ranks that do not answer, by what those who do have left in the store."""
    hosts, size = run.hosts, len(run.hosts.numbers)
    silent: list[int] | None = None
    with suppress(RuntimeError):  # the store may be what is gone
        meeting = store()
        meeting.set(f"measure/{rank}", "")
        end = time.monotonic() + ANSWER + 1
        silent = [*range(size)]
        while silent and time.monotonic() < end:
            silent = [each for each in silent if not meeting.check([f"measure/{each}"])]
            time.sleep(0.05)
    if silent is None:
        return "the links were not measured: the store at which all meet is gone, and with it rank 0 or its host"
    if not silent:
        said = str(error).partition("\n")[0]
        return f"the links were not measured: all ranks are there, but a connection broke\n  {said}"
    who = ", ".join(f"rank {each} on {run.names[hosts.numbers[each]]}" for each in silent)
    return f"the links were not measured: no answer of {who}\n  ended, stuck, or its host cannot be reached"


def measure(ranks: int | None = None, *, timeout: float = 120.0, kernels: bool = False) -> LinkTimes:
    """Time exchanges between that many processes of this machine, and kernels where that is asked; no process outlives
    the call.

    Each process has a card of its own where there are cards, by default all of them. One card has its kernels alone.
    A process that fails, or a run of more than `timeout` seconds, raises TransportError with what it said.
    """
    kind = card_here() or family("cpu")
    ranks = _checked(kind, ranks, kernels)
    with tempfile.TemporaryDirectory(prefix="sbpflow-measure-") as folder:
        job = {"ranks": ranks, "folder": folder, "kernels": kernels, "type": kind.name}
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
        said = json.loads(Path(folder, "found.json").read_text())
    links = tuple(PairLink(tuple(hosts), *figures) for hosts, *figures in said["links"])
    hosts, names, when = Hosts((0,) * ranks), ("this machine",), now()
    times = [[KernelTime(*time) for time in each] for each in said["times"]]
    devices = devices_of(hosts, names, times, kind.name, when) if times else ()
    return LinkTimes(hosts, names, links, kind.name, when, devices=devices)


def _checked(kind: DeviceFamily, ranks: int | None, kernels: bool) -> int:
    """How many processes measure, which these devices and what is asked of them allow."""
    many = ranks if ranks is not None else kind.count if kind.card else 2
    if many < 1 or (many == 1 and not (kind.card and kernels)):
        raise PlacementError(f"cannot measure between {many} ranks\n  a transport needs at least 2")
    if kind.card and many > kind.count:
        raise PlacementError(
            f"cannot measure between {many} ranks: this machine has {counted(kind.count, 'card')}, of {kind.title}\n"
            f"  try --ranks {kind.count}"
        )
    return many


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


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
    """One measuring process: its job is the first argument, as JSON; rank 0 writes what it found."""
    job = json.loads(sys.argv[1])
    rank, ranks, folder, kind = job["rank"], job["ranks"], job["folder"], family(job["type"])
    torch.set_num_threads(1)
    device, backend = kind.device(rank), kind.backend
    if kind.card:
        kind.module.set_device(device)
        backend = f"cpu:gloo,{kind.name}:{backend}"
    meet = Path(folder, "store").as_uri()  # a file, so that no port need be free
    dist.init_process_group(backend, init_method=meet, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        if kind.card:
            _made_together(device)
        links, _ = timed(rank, Hosts((0,) * ranks), device)
        times = _each_ranks(kernel_times(device, _meet, ranks)) if job["kernels"] else []
    finally:
        dist.destroy_process_group()
    if rank == 0:
        said = [(link.hosts, link.latency, link.bandwidth, link.ranks) for link in links]
        Path(folder, "found.json").write_text(json.dumps({"links": said, "times": times}))
