"""A headless browser in which tests walk through a page, and reports whose page has everything to walk through."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sbpflow.boxing.graph.physical import Op, Physical
from sbpflow.boxing.graph.report.report import Report
from sbpflow.boxing.graph.report.walked import (
    Candidates,
    CandidateSeconds,
    MemoryCourse,
    MemoryMark,
    ScheduledTask,
    TaskSchedule,
    Walked,
)
from tests.boxing.graph.report.test_report import told

__all__ = ["opened", "walked_report"]

MIB = 2**20


@contextmanager
def opened(page: Path, width: int = 1440, *, dark: bool = False) -> Iterator[Any]:
    """A page in a browser; whatever its console says of errors fails the test when it is closed."""
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium is on PATH")
    said: list[str] = []
    with sync.sync_playwright() as playing:
        browser = playing.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        size = {"width": width, "height": 1000}
        tab = browser.new_page(viewport=size, color_scheme="dark" if dark else "light")
        tab.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on(
            "request", lambda asked: None if asked.url.startswith("file:") else said.append(f"asked for {asked.url}")
        )
        tab.goto(page.resolve().as_uri())
        tab.wait_for_selector("#app.ready .box")
        yield tab
        browser.close()
    assert said == []


def walked_report(graph: Physical) -> Report:
    """A report with candidates of each op, a course of memory, and schedules of two kinds."""
    ops = [step for step in graph.steps if isinstance(step, Op)]
    rows = tuple(CandidateSeconds(f"S({k}) -> S({k})", 1e-4 * (k + 1), 1e-5 * k) for k in range(14))
    names = [op.outputs[0].name for op in ops]
    marks = [MemoryMark(f"forward of op {k}", (name,), k * MIB, 3 * MIB) for k, name in enumerate(names)]
    half = len(names) // 2
    tasks = [
        ScheduledTask(f"device {k % 2}", f"{kind}{k}", kind, k * 1e-3, (k + 1) * 1e-3, (k % 2,))
        for k, kind in enumerate("FFBB")
    ]
    tasks.sort(key=lambda task: (task.queue, task.start))
    walked = Walked(
        lambda name: Candidates(rows, 0) if name in names else None,
        MemoryCourse(1, 20 * MIB, 40 * MIB, marks),
        (TaskSchedule("simulated", tasks), TaskSchedule("real", tasks)),
        (names[:half], names[half:]),
    )
    return replace(told(graph), walk=lambda: walked)
