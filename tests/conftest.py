"""What every test gets: a fixed seed, the --sweep option, and a check that it left nothing running."""

import multiprocessing
import random
import threading
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import fresh, nursery, ranks4, ranks8

__all__ = ["fresh", "nursery", "ranks4", "ranks8"]  # fixtures that many tests share

# A test of tens of seconds that comes last leaves the other core idle.
LONG = {"test_typing.py", "test_readme.py", "test_examples.py", "test_opdb.py"}
GRACE = 2.0  # seconds a thread or process that was told to stop may still take


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweep", action="store_true", help="also run the exhaustive grids (marker `sweep`)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in beyond_the_sample(items):
        item.add_marker(pytest.mark.sweep)
    items.sort(key=lambda item: item.path.name not in LONG)
    if config.getoption("--sweep"):
        return
    sweeps = [item for item in items if item.get_closest_marker("sweep")]
    if sweeps:
        config.hook.pytest_deselected(items=sweeps)
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]


def beyond_the_sample(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases of tests marked `sampled(n)` that only the sweep runs; the others are drawn by the test's name alone."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("sweep"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, each in cases.items():
        marker = each[0].get_closest_marker("sampled")
        assert marker is not None
        runs = covering([values(item) for item in each], *marker.args, seed=name)
        yield from (item for at, item in enumerate(each) if at not in runs)


def values(item: pytest.Item) -> set[tuple[str, int]]:
    """By parameter which of its values this case has."""
    assert isinstance(item, pytest.Function)
    return {*item.callspec.indices.items()}


def covering(cases: Sequence[AbstractSet[object]], count: int, *, seed: str) -> list[int]:
    """So many of them, drawn so that as many values as can be occur in one."""
    left, seen = random.Random(seed).sample(range(len(cases)), len(cases)), set[object]()
    found: list[int] = []
    while left and len(found) < count:
        found.append(max(left, key=lambda at: len(cases[at] - seen)))
        left.remove(found[-1])
        seen |= cases[found[-1]]
    return found


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Session fixtures (a pool of ranks) start before this one and so belong to what was there."""
    before = running()
    yield
    deadline = time.monotonic() + GRACE
    while (left := running().keys() - before.keys()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"the test left running: {', '.join(f'{what} {running().get(what)}' for what in sorted(left))}"


def running() -> dict[str, str]:
    """Our non-daemon threads, child processes and process group, and what they are called."""
    multiprocessing.active_children()  # reaps those that have ended
    threads = {f"thread {t.ident}": t.name for t in threading.enumerate() if not t.daemon}
    return threads | children() | ({"the default process group": ""} if dist.is_initialized() else {})


def children() -> dict[str, str]:
    """Child processes of any origin, from /proc; where there is none, those of multiprocessing.

    They are told apart by their numbers alone: one that has just started may not have its command yet.
    """
    if not Path("/proc/self/task").is_dir():
        return {f"process {child.pid}": child.name for child in multiprocessing.active_children()}
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that has ended meanwhile
        for pid in pids:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # multiprocessing's own tracker and server live until we exit; a zombie has stopped running.
            if state != "Z" and not any(
                f"multiprocessing.{own}" in command for own in ("resource_tracker", "forkserver")
            ):
                found[f"process {pid}"] = command
    return found
