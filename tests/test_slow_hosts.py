"""Three played hosts, one of which has a slow link: the first rank says so, and nobody is said to be slow who is not.

Needs root and network namespaces (`make hosts`).
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbpflow.placement.cluster import cluster
from sbpflow.placement.cluster_file import written
from sbpflow.placement.hardware import Level, RankLink
from tests.test_kills_of_hosts import STEP, Running
from tools.hosts import Host, Network, lacking

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(lacking()), reason=lacking())]
PATIENCE = 200.0  # seconds that a busy machine may take for what takes half a minute
QUIET = 30.0  # seconds in which nothing may be told: six windows
OTHERS = 12.0  # in which others judge by their own windows, and a window too late in the next
HOSTS = [Host("a", ranks=1), Host("b", ranks=2), Host("c", ranks=1)]
SCRIPT = """
import os, sys, warnings
import torch, sbpflow as flow
from torch import nn
kind, out = sys.argv[1:]
flow.init(timeout=1000)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def warned(text, *_, **__):
    with open(f"{out}/warned-{rank}", "a") as file:
        print(f"after {number}: {text}", file=file, flush=True)
warnings.showwarning = warned
torch.manual_seed(0)
number, width, rows = 0, 512, 1500
model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(size)))
x, y = torch.randn(rows * size, width), torch.randn(rows * size, width)
"""
SCRIPT += STEP
SCRIPT += """\
def enough():  # all ranks end with the same step, which the file has told long before
    return os.path.exists(f"{out}/enough") and number >= int(open(f"{out}/enough").read())
while not enough():
    step(x, y)
    number += 1
    with open(f"{out}/steps-{rank}", "w") as file:
        file.write(str(number))
with open(f"{out}/writing-{rank}", "w") as file:
    file.write(step.explain().full())
os.rename(f"{out}/writing-{rank}", f"{out}/explained-{rank}")
"""


def steps(tmp_path: Path, kind: str, act: Callable[[Running], None], env: dict[str, str] | None = None) -> list[str]:
    """The warnings while something is done in the midst of steps, each with the number of steps before it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Network(HOSTS) as net, (tmp_path / "log").open("wb") as log:
        around = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)} | (env or {})
        agents = net.torchrun(str(script), kind, str(tmp_path), env=around, out=log)
        until(tmp_path, lambda: done(tmp_path) > 3)
        act(Running(net, tmp_path, agents))
        (tmp_path / "last").write_text(str(done(tmp_path) + 10))
        (tmp_path / "last").rename(tmp_path / "enough")
        until(tmp_path, lambda: len(list(tmp_path.glob("explained-*"))) == 4)
    return [line for path in sorted(tmp_path.glob("warned-*")) for line in path.read_text().splitlines()]


def until(out: Path, true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, (out / "log").read_text()[-6000:]
        time.sleep(0.05)


def done(out: Path) -> int:
    found = [path.read_text() for path in out.glob("steps-*")]
    return min([int(each or 0) for each in found], default=0) if len(found) == 4 else 0


def test_a_link_of_a_tenth_is_told_with_its_host_within_ten_steps_and_when_it_is_well_again(tmp_path: Path) -> None:
    began = []

    def act(running: Running) -> None:
        began.append(done(tmp_path))
        running.net.slow("b", 20)
        until(tmp_path, (tmp_path / "warned-0").exists)
        running.net.slow("b", 200)
        until(tmp_path, lambda: (tmp_path / "warned-0").read_text().count("\n") == 2)
        time.sleep(OTHERS)

    slow, well = steps(tmp_path, "data", act)
    told = re.fullmatch(
        r"after (\d+): host b \(ranks 1, 2\) has a slow link: it \w+ ([\d.]+) MB/s while more waits, "
        r"the others [\d.]+ MB/s, ([\d.]+) times as much",
        slow,
    )
    assert told is not None, slow
    assert int(told[1]) - began[0] <= 10
    assert 1.5 < float(told[2]) < 4  # of 2.5
    assert 5 < float(told[3]) < 20
    assert well.partition(": ")[2] == "host b (ranks 1, 2) has a link as quick as the others again"
    assert "slow link" not in (tmp_path / "explained-3").read_text()


def test_explanations_tell_of_a_slow_link_on_all_ranks(tmp_path: Path) -> None:
    def act(running: Running) -> None:
        running.net.slow("c", 20)
        until(tmp_path, (tmp_path / "warned-0").exists)
        time.sleep(OTHERS)

    steps(tmp_path, "data", act)
    for rank in range(4):
        assert "; host c (rank 3) has a slow link: it " in (tmp_path / f"explained-{rank}").read_text()


def busy(running: Running) -> None:
    """Others want the processors, and a rank is stopped for a while."""
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        for host in ("b", "c"):
            pid = running.pids(host)[-1]
            os.kill(pid, signal.SIGSTOP)
            time.sleep(7)
            os.kill(pid, signal.SIGCONT)
            time.sleep(QUIET / 2)
    finally:
        for each in spin:
            each.kill()
            each.wait()


@pytest.mark.parametrize("kind", ["data", "pipeline"])
@pytest.mark.parametrize("act", [lambda running: time.sleep(QUIET), busy], ids=["idle", "busy"])
def test_equal_hosts_are_never_told(tmp_path: Path, kind: str, act: Any) -> None:
    assert steps(tmp_path, kind, act) == []


def test_a_slow_link_that_the_cluster_file_knows_is_no_news(tmp_path: Path) -> None:
    inside = Level("host", 2, 1e-5, 2e9, groups=((0,), (1, 2), (3,)))
    levels, device = (inside, Level("network", 3, 3e-4, 1.2e7)), cluster("cpu").device
    links = [RankLink((here, there), 3e-4, 1.2e6) for here, there in ((0, 1), (0, 2), (1, 3), (2, 3))]
    file = tmp_path / "cluster.toml"
    file.write_text("\n".join(written("unequal", "", levels, device, links, ())))

    def act(running: Running) -> None:
        running.net.slow("b", 20)
        time.sleep(QUIET)

    assert steps(tmp_path, "data", act, {"SBPFLOW_CLUSTER": str(file)}) == []
