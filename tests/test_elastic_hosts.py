"""Three played hosts under an elastic torchrun: one goes and comes back, and losses are those of an undisturbed run.

Needs root and network namespaces (`make hosts`).
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
from torch import nn

from tools.hosts import Host, Network, lacking

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(lacking()), reason=lacking())]
PATIENCE = 270.0  # seconds that a busy machine may take for what takes half a minute
CONF = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"
LOST = r"TransportError: host a \(rank \d\) does not answer any more"
SCRIPT = """
import os, sys, time
import torch, sbpflow as flow
from torch import nn

out = sys.argv[1]
here = flow.init(timeout=120)
def say(*words):
    if here.rank == 0:
        with open(f"{out}/said", "a") as file:
            print(*words, file=file, flush=True)

def batch(number):
    draw = torch.Generator().manual_seed(number)
    return torch.randn(12, 6, generator=draw).double(), torch.randn(12, 3, generator=draw).double()

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
found = flow.newest(f"{out}/saved")
extra = {"scheduler": scheduler}
if found:
    flow.load(found.path, model, optimizer=optimizer, extra=extra)
loss_fn = lambda model, x, y: nn.functional.mse_loss(model(x), y)
step = flow.compile(model, loss_fn, optimizer, plan="grid cpu (data=*)\\n**: data=S(0)")
number = found.step if found else 0
say("start", here.size, number)
while not os.path.exists(f"{out}/enough"):
    loss = step(*batch(number)).item()
    scheduler.step()
    number += 1
    say("loss", number, loss)
    if number % 3 == 0:
        flow.save(f"{out}/saved/step-{number}", model, optimizer=optimizer, plan=step, step=number, keep=2, extra=extra)
        say("saved", here.size, number)
    time.sleep(0.3)
say("end", here.size, number)
flow.boxing.close()
"""


def undisturbed(steps: int) -> list[float]:
    """The losses of plain torch."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    found = []
    for number in range(steps):
        draw = torch.Generator().manual_seed(number)
        x, y = (torch.randn(12, n, generator=draw).double() for n in (6, 3))
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step()
        found.append(loss.item())
    return found


class Elastic:
    """Agents of torchrun, and what the first rank of each start of them said."""

    def __init__(self, net: Network, out: Path, log: Any) -> None:
        self.net, self.out, self.log = net, out, log
        self.agents: dict[str, Popen[Any]] = {}

    def start(self, host: str, endpoint: str = "a", port: int = 29400) -> None:
        words = [
            "--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.net.address(endpoint)}:{port}", f"--local-addr={self.net.address(host)}",
            f"--rdzv-conf=is_host={str(host == endpoint).lower()},{CONF}",
        ]  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", *words, str(self.out / "script.py"), str(self.out)]
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.agents[host] = self.net.start(host, command, env, self.log)

    def vanish(self, host: str) -> None:
        self.net.cut(host)
        self.agents.pop(host).kill()

    def back(self, host: str) -> None:
        self.net.mend(host)
        self.start(host)

    @property
    def said(self) -> list[list[str]]:
        path = self.out / "said"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def saved_by(self, size: int, times: int = 2) -> Callable[[], bool]:
        """Whether so many ranks have saved so often since they started."""

        def true() -> bool:
            said = self.said
            last = max((at for at, words in enumerate(said) if words[0] == "start"), default=0)
            return sum(words[:2] == ["saved", str(size)] for words in said[last:]) >= times

        return true

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < end, f"{self.said[-5:]}\n{(self.out / 'log').read_text()[-6000:]}"
            time.sleep(0.05)

    def check(self, sizes: list[int]) -> None:
        """Whoever took part: no step is missing, nothing saved was lost, and the losses are those of plain torch."""
        said = self.said
        losses = [(int(words[1]), float(words[2])) for words in said if words[0] == "loss"]
        assert [*dict(losses)] == [*range(1, max(losses)[0] + 1)]
        right = undisturbed(max(losses)[0])
        assert all(abs(loss - right[step - 1]) < 1e-10 for step, loss in losses)
        saved = 0
        for words in said:
            assert words[0] != "start" or int(words[2]) >= saved
            saved = int(words[2]) if words[0] == "saved" else saved
        assert [int(words[1]) for words in said if words[0] == "start"] == sizes


@contextmanager
def elastic(out: Path) -> Iterator[Elastic]:
    (out / "script.py").write_text(SCRIPT)
    with Network([Host(name, ranks=1) for name in "abc"]) as net, (out / "log").open("wb") as log:
        made = Elastic(net, out, log)
        for host in "abc":
            made.start(host)
        made.until(made.saved_by(3))
        yield made


def ended(run: Elastic) -> None:
    (run.out / "enough").touch()
    run.until(lambda: any(words[0] == "end" for words in run.said))


@pytest.mark.parametrize("host", ["b", "c"])
def test_a_host_that_goes_and_comes_back_loses_nothing_that_was_saved(tmp_path: Path, host: str) -> None:
    with elastic(tmp_path) as run:
        run.vanish(host)
        run.until(run.saved_by(2))
        run.back(host)
        run.until(run.saved_by(3))
        ended(run)
        run.check([3, 2, 3])


def test_without_the_host_of_the_store_the_others_name_it_and_go_on_when_started_at_another(tmp_path: Path) -> None:
    """All that the agents knew of each other was there, and those of torch wait for it by limits of their own."""
    with elastic(tmp_path) as run:
        run.vanish("a")
        run.until(lambda: len(re.findall(LOST, (tmp_path / "log").read_text(errors="replace"))) >= 2)
        for host in "bc":
            run.agents[host].kill()
            run.agents[host].wait()
        for host in "bc":
            run.start(host, endpoint="b")
        run.until(run.saved_by(2))
        run.net.mend("a")
        run.start("a", endpoint="b")
        run.until(run.saved_by(3))
        ended(run)
        run.check([3, 2, 3])


def test_a_rank_that_is_killed_is_started_again(tmp_path: Path) -> None:
    with elastic(tmp_path) as run:
        space = Path(f"/var/run/netns/{run.net.space('b')}").stat().st_ino
        for each in Path("/proc").glob("[0-9]*"):
            words = (each / "cmdline").read_bytes() if (each / "cmdline").exists() else b""
            if b"script.py" in words and b"distributed.run" not in words and (each / "ns/net").stat().st_ino == space:
                os.kill(int(each.name), signal.SIGKILL)
        run.until(run.saved_by(3, 3))
        ended(run)
        run.check([3, 3])
