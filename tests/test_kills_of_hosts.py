"""Three played hosts, of which one loses its cable, goes down or is stopped in the middle of steps: all others say so.

Needs root and network namespaces (`make hosts`). The limit of moves is longer than a test may take, so that heartbeats
tell what is told.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import pytest

from tools.hosts import Host, Network, lacking

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(lacking()), reason=lacking())]
HOSTS = [Host("a", ranks=1), Host("b", ranks=2), Host("c", ranks=1)]
PATIENCE = 150.0  # seconds that a busy machine may take for what takes a few; the limit of moves is above them all
# Of a script that has a model, a batch and its ranks: a step in data parallel, or in a pipeline.
STEP = """\
loss = lambda model, x, y: nn.functional.mse_loss(model(x), y)
p, how = flow.placement("cpu", range(size)), {}
if kind == "data":
    x, y = (flow.tensor(each, placement=p, sbp=flow.S(0)) for each in (x, y))
    how = {"placement": p}
else:
    flow.nn.pipeline(model, [flow.placement("cpu", [each]) for each in range(size)])
    how = {"micro_batches": 2 * size}
step = flow.compile(model, loss, torch.optim.SGD(model.parameters(), 0.1), **how)
"""
SCRIPT = """
import os, sys, time
import torch, sbpflow as flow
from torch import nn
kind, out = sys.argv[1:]
flow.init(timeout=1000)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with open(f"{out}/pid-{rank}", "w") as said:
    said.write(str(os.getpid()))
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(size)))
x, y = torch.randn(4 * size, 8), torch.randn(4 * size, 8)
"""
SCRIPT += STEP
SCRIPT += """\
try:
    for number in range(10**6):
        step(x, y)
        if number == 3:
            open(f"{out}/ready-{rank}", "w").close()
        if os.path.exists(f"{out}/enough"):
            break
        time.sleep(0.02)
    said = "went on"
except Exception as error:
    said = f"{type(error).__name__}: {error}"
with open(f"{out}/told-{rank}", "w") as file:
    file.write(said + "\\n.")
"""


class Running(NamedTuple):
    net: Network
    out: Path
    agents: "dict[str, Popen[Any]]"

    def cut(self, host: str) -> None:
        self.net.cut(host)

    def vanish(self, host: str) -> None:
        self.net.cut(host)
        self.agents[host].kill()

    def kill(self, host: str) -> None:
        """One rank of it, the last."""
        os.kill(self.pids(host)[-1], signal.SIGKILL)

    def pids(self, host: str) -> list[int]:
        """The processes of a host's ranks, as this machine numbers them, in the order of the ranks."""
        space = Path(f"/var/run/netns/{self.net.space(host)}").stat().st_ino
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words, there = (each / "cmdline").read_bytes(), (each / "ns/net").stat().st_ino
                if there == space and b"script.py" in words and b"torch.distributed.run" not in words:
                    found.append(int(each.name))
        return sorted(found)


def until(what: str, true: Callable[[], bool], out: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"{what}\n{(out / 'log').read_text()[-6000:]}"
        time.sleep(0.05)


def told(out: Path, rank: int) -> str:
    path = out / f"told-{rank}"
    said = path.read_text() if path.exists() else ""
    return said.removesuffix("\n.") if said.endswith("\n.") else ""


def steps(tmp_path: Path, kind: str, act: Callable[[Running], None], left: list[int]) -> dict[int, str]:
    """The words of the ranks that are left on what is done in the midst of their steps."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Network(HOSTS) as net, (tmp_path / "log").open("wb") as log:
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        agents = net.torchrun(str(script), kind, str(tmp_path), env=env, out=log)
        until("no steps", lambda: len(list(tmp_path.glob("ready-*"))) == 4, tmp_path)
        act(Running(net, tmp_path, agents))
        until("nothing told", lambda: all(told(tmp_path, rank) for rank in left), tmp_path)
    return {rank: told(tmp_path, rank) for rank in left}


RANKS = {"a": [0], "b": [1, 2], "c": [3]}


@pytest.mark.parametrize("kind", ["data", "pipeline"])
@pytest.mark.parametrize("host", ["a", "b", "c"])
@pytest.mark.parametrize("act", [Running.cut, Running.vanish])
def test_a_host_that_is_cut_off_is_named_on_all_others(tmp_path: Path, kind: str, host: str, act: Any) -> None:
    """Host a has the store at which all met."""
    left = [rank for of, ranks in RANKS.items() for rank in ranks if of != host]
    found = steps(tmp_path, kind, lambda running: act(running, host), left + RANKS[host] * (act is Running.cut))
    ranks = ", ".join(map(str, RANKS[host]))
    for rank in left:
        assert f"host {host} (rank{'s' * (len(RANKS[host]) > 1)} {ranks}) does not answer any more" in found[rank]
    for rank in RANKS[host] if act is Running.cut else ():
        assert f"the cable of this host, {host}, is out: " in found[rank]


@pytest.mark.parametrize("kind", ["data", "pipeline"])
@pytest.mark.parametrize("host", ["a", "b", "c"])
def test_a_rank_that_is_killed_is_named_on_all_others(tmp_path: Path, kind: str, host: str) -> None:
    victim = RANKS[host][-1]
    left = [rank for ranks in RANKS.values() for rank in ranks if rank != victim]
    for said in steps(tmp_path, kind, lambda running: running.kill(host), left).values():
        assert re.search(rf"\brank {victim} died\b", said), said


@pytest.mark.parametrize("kind", ["data", "pipeline"])
def test_who_is_stopped_for_half_a_minute_is_not_taken_for_dead(tmp_path: Path, kind: str) -> None:
    """By a signal, as a process is that computes for long and lets no other thread of Python have a turn."""

    def act(running: Running) -> None:
        pids = running.pids("b")
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(30)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(2)
        (running.out / "enough").touch()

    for said in steps(tmp_path, kind, act, [0]).values():
        assert said == "went on" or "died" in said or "gave up" in said, said
        assert "does not answer" not in said
