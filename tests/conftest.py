"""What every test gets: a fixed seed, the --sweep option, and a check that it left nothing running."""

import gc
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import fresh, nursery, ranks4, ranks8

__all__ = ["fresh", "nursery", "ranks4", "ranks8"]  # fixtures that many tests share

# A test of tens of seconds that comes last leaves the other core idle.
LONG = {
    "test_typing.py", "test_readme.py", "test_examples.py", "test_opdb.py", "test_kills.py", "test_tasks.py",
    "test_played_card.py", "test_restarts.py",
}  # fmt: skip
GRACE = 20.0  # seconds a thread or process that was told to stop may still take


def pytest_configure() -> None:
    """Look for garbage seldom: tracing makes many objects, and to look at them all took a sixth of the time."""
    gc.set_threshold(100_000, 50, 100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweep", action="store_true", help="also run the exhaustive grids (marker `sweep`)")
    parser.addoption("--rest", action="store_true", help="also run what the sweep leaves out (marker `rest`)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item, left in beyond_the_sample(items):
        item.add_marker(left)
    items.sort(key=lambda item: item.path.name not in LONG)
    asked = {
        "sweep": config.getoption("--sweep"),
        "rest": config.getoption("--rest"),
        "hosts": "hosts" in (config.getoption("-m") or ""),
    }
    for marker in (marker for marker, wanted in asked.items() if not wanted):
        if others := [item for item in items if item.get_closest_marker(marker)]:
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if not item.get_closest_marker(marker)]


def pytest_collection_finish() -> None:
    """Freeze all that is loaded by now: to look through it for garbage takes seconds, which many tests ask for."""
    gc.collect()
    gc.freeze()


def beyond_the_sample(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.MarkDecorator]]:
    """Cases of tests marked `sampled(n)` that only the sweep runs, or `make rest` where the sweep runs so many too;
    the others are drawn by the test's name alone."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("sweep"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, each in cases.items():
        marker = each[0].get_closest_marker("sampled")
        assert marker is not None
        (few,), more = marker.args, marker.kwargs.get("sweep")
        drawn = covering([values(item) for item in each], more or few, seed=name)
        always = drawn[:few]
        for at, item in enumerate(each):
            if at not in always:
                yield item, pytest.mark.rest if more and at not in drawn else pytest.mark.sweep


def values(item: pytest.Item) -> set[tuple[str, int]]:
    """By parameter which of its values this case has: other cases have the same objects."""
    assert isinstance(item, pytest.Function)
    return {(name, id(value)) for name, value in item.callspec.params.items()}


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
    """As torch.manual_seed(0); without a card that function keeps the seed, and a traceback of it, for each kind."""
    torch.default_generator.manual_seed(0)
    if torch.accelerator.is_available():
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Session fixtures (a pool of ranks) start before this one and so belong to what was there.

    Before and after a test only numbers are read, which costs little; of those that are new it is asked what they are.
    """
    before = running()
    yield
    deadline = time.monotonic() + GRACE
    while (left := living(running() - before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"the test left running: {', '.join(f'{what} {left[what]}' for what in sorted(left))}"


def running() -> set[str]:
    """Our non-daemon threads, child processes and process group."""
    threads = {f"thread {t.ident}" for t in threading.enumerate() if not t.daemon}
    return threads | children() | ({"the default process group"} if dist.is_initialized() else set())


def children() -> set[str]:
    """Child processes of any origin, from /proc; where there is none, those of multiprocessing."""
    multiprocessing.active_children()  # reaps those that have ended
    try:
        tasks = os.listdir("/proc/self/task")
    except FileNotFoundError:
        return {f"process {child.pid}" for child in multiprocessing.active_children()}
    pids: list[str] = []
    for task in tasks:
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            pids += Path(f"/proc/self/task/{task}/children").read_text().split()
    return {f"process {pid}" for pid in pids}


def living(found: AbstractSet[str]) -> dict[str, str]:
    """Their names, without those that do not count: of multiprocessing's own, and those that have ended."""
    threads = {f"thread {t.ident}": t.name for t in threading.enumerate()}
    names = {what: command(what) if what.startswith("process") else threads.get(what, "") for what in found}
    return {what: name for what, name in names.items() if name is not None}


def command(process: str) -> str | None:
    """Of a child process; None where it does not count. One that has just started may not have its command yet."""
    home = Path("/proc", process.removeprefix("process "))
    if not Path("/proc/self/task").is_dir():
        return ""
    try:
        state = (home / "stat").read_text().rpartition(")")[2].split()[0]
        said = (home / "cmdline").read_text().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # multiprocessing's own tracker and server live until we exit; a zombie has stopped running.
    own = any(f"multiprocessing.{each}" in said for each in ("resource_tracker", "forkserver"))
    return None if state == "Z" or own else said
