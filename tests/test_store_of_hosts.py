"""Three played hosts, of which one goes while others wait for it, or for an answer, at the store: they are told by
heartbeats, long before the limit.

Needs root and network namespaces (`make hosts`).
"""

from pathlib import Path
from typing import Any

import pytest

from tests.test_kills_of_hosts import RANKS, Running, told, until
from tools.hosts import Host, Network, lacking

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(lacking()), reason=lacking())]
HOSTS = [Host("a", ranks=1), Host("b", ranks=2), Host("c", ranks=1)]
SCRIPT = """
import ctypes, os, sys, time
import torch, sbpflow as flow
from torch import nn
kind, late, out = sys.argv[1:]
flow.init(timeout=1000)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
p = flow.placement("cpu", range(size))
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(size)))
x = torch.randn(4 * size, 8)
loss = lambda model, x: model(x).square().mean()
if kind == "pipeline":
    flow.nn.pipeline(model, [flow.placement("cpu", [each]) for each in range(size)])
    step = flow.compile(model, loss, torch.optim.SGD(model.parameters(), 0.1), micro_batches=2)
    step(x)
else:
    step = flow.compile(model, loss, torch.optim.SGD(model.parameters(), 0.1), placement=p)
    step(flow.tensor(x, placement=p, sbp=flow.S(0)))
open(f"{out}/ready-{rank}", "w").close()
try:
    if kind == "held" and str(rank) in late.split(","):
        ctypes.PyDLL(None).sleep(10)  # which lets no other thread of Python have a turn
    elif str(rank) in late.split(","):
        time.sleep(10**6)
    if kind == "save":
        flow.save(f"{out}/saved/step-1", model, step=1)
    elif kind == "pipeline":
        step(x[: 2 * size])  # another kind of batch has another network, on which ranks agree
    for _ in range(3 * (kind == "held")):
        step(flow.tensor(x, placement=p, sbp=flow.S(0)))
    said = "went on"
except Exception as error:
    said = f"{type(error).__name__}: {error}"
with open(f"{out}/told-{rank}", "w") as file:
    file.write(said + "\\n.")
"""


def waits(tmp_path: Path, kind: str, late: list[int], gone: str | None) -> dict[int, str]:
    """The words of the ranks that are left, of which `late` do not come to where the others wait."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    left = [
        rank for host, ranks in RANKS.items() for rank in ranks if host != gone and (kind == "held" or rank not in late)
    ]
    with Network(HOSTS) as net, (tmp_path / "log").open("wb") as log:
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        words = [str(script), kind, ",".join(map(str, late)), str(tmp_path)]
        running = Running(net, tmp_path, net.torchrun(*words, env=env, out=log))
        until("no steps", lambda: len(list(tmp_path.glob("ready-*"))) == 4, tmp_path)
        if gone:
            running.vanish(gone)
        until("nothing told", lambda: all(told(tmp_path, rank) for rank in left), tmp_path)
    return {rank: told(tmp_path, rank) for rank in left}


@pytest.mark.parametrize("kind", ["save", "pipeline"])
@pytest.mark.parametrize("host", ["a", "c"])
def test_who_waits_at_the_store_is_told_of_a_host_that_is_gone(tmp_path: Path, kind: str, host: str) -> None:
    """Host a has the store itself."""
    ranks = RANKS[host]
    for said in waits(tmp_path, kind, ranks, host).values():
        assert said.startswith("TransportError: "), said
        assert f"host {host} (rank {ranks[0]}) does not answer any more" in said


@pytest.mark.parametrize("late", [[0], [1, 2], [0, 1, 2, 3]], ids=["one", "a host", "all"])
def test_who_holds_the_interpreter_for_ten_seconds_is_not_taken_for_dead(tmp_path: Path, late: Any) -> None:
    """Its heartbeats need a turn too, but its kernel answers in its place."""
    assert {*waits(tmp_path, "held", late, None).values()} == {"went on"}
