"""Runs of examples/train.py under torchrun, of which workers or a host are killed: they go on by themselves."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from tests.ranks import free_port

ROOT = Path(__file__).resolve().parent.parent
SMALL = {"report": 1, "every": 3, "width": 32, "layers": 2, "length": 32, "warmup": 4, "lr": 2e-2, "peak": 1}
STEPS = 40
LOOKS, PAUSE = 10000, 0.02
pytestmark = pytest.mark.sweep


def launched(home: Path, *launcher: str, steps: int = STEPS, plan: str = "") -> subprocess.Popen[bytes]:
    """torchrun, in a session of its own, with a run in a folder."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCHELASTIC_ERROR_FILE": ""}
    environment = {key: value for key, value in environment.items() if value}
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, str(ROOT / "examples" / "train.py")]
    files = ["--save", str(home / "saved"), "--to", str(home / "lines.jsonl"), "--data", str(home / "tokens.bin")]
    sizes = [f"--{name}={value}" for name, value in {"steps": steps, **SMALL}.items()]
    more = [*sizes, *files, *(["--plan", plan] if plan else [])]
    with (home / "said").open("ab") as said:
        return subprocess.Popen(
            [*command, *more], env=environment, cwd=home, stdout=said, stderr=said, start_new_session=True
        )


def ended(home: Path, run: subprocess.Popen[bytes], seconds: float = 400) -> None:
    assert run.wait(seconds) == 0, (home / "said").read_text()[-6000:]


def workers(agent: int) -> list[int]:
    """The processes that an agent has started."""
    try:
        tasks = [task / "children" for task in Path(f"/proc/{agent}/task").iterdir()]
        found = [int(pid) for task in tasks for pid in task.read_text().split()]
        return [pid for pid in found if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    except FileNotFoundError:
        return []


def lines(home: Path) -> list[tuple[int, float]]:
    path = home / "lines.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["step"], line["loss"]) for line in found if "error" not in line]  # by which a run ended


def wait_until(what: str, run: subprocess.Popen[bytes], home: Path, true: Callable[..., bool], *of: object) -> None:
    """Look again and again, so often that minutes go by before it is given up."""
    for _ in range(LOOKS):
        if true(*of):
            return
        assert run.poll() is None, (home / "said").read_text()[-6000:]
        time.sleep(PAUSE)
    pytest.fail(f"{what}: {(home / 'said').read_text()[-6000:]}")


def folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def test_workers_are_killed_at_random_and_no_step_is_lost(tmp_path: Path) -> None:
    launcher = ["--standalone", "--nproc-per-node", "3"]
    whole, broken, dice = folder(tmp_path, "whole"), folder(tmp_path, "broken"), Random(1)
    ended(whole, launched(whole, *launcher))
    run = launched(broken, *launcher, "--max-restarts", "5")
    killed = 0
    while killed < 4:
        wait_until("three workers", run, broken, lambda: len(workers(run.pid)) == 3)
        begun = len(lines(broken))
        if killed % 2:  # else at any moment, also before the first step and in the middle of loading
            wait_until("a step", run, broken, lambda known: len(lines(broken)) > known, begun)
        time.sleep(dice.uniform(0, 2))
        victims = workers(run.pid)
        assert run.poll() is None
        if len(victims) == 3:
            os.kill(dice.choice(victims), signal.SIGKILL)
            killed += 1
            wait_until("the others are ended", run, broken, lambda old: not {*old} & {*workers(run.pid)}, victims)
    ended(broken, run)
    wanted, found = lines(whole), lines(broken)
    assert [step for step, _ in wanted] == list(range(1, STEPS + 1))
    assert {*found} == {*wanted}  # those that were made again are the same
    assert found[-1][0] == STEPS
    again = [at for (before, _), (at, _) in pairwise(found) if at != before + 1]
    assert all(at % 3 == 1 for at in again)  # it went on behind a checkpoint


def test_a_host_is_killed_and_the_other_goes_on(tmp_path: Path) -> None:
    """Two agents with a worker each; the plan is the planner's, anew for one."""
    whole, broken = folder(tmp_path, "whole"), folder(tmp_path, "broken")
    ended(whole, launched(whole, "--standalone", "--nproc-per-node", "2", plan="auto"))
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "run"]
    conf = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    launcher = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5", *meet, "--rdzv-conf", conf]
    stays = launched(broken, *launcher, plan="auto")
    time.sleep(1.0)  # it opens the store at which they meet
    goes = launched(broken, *launcher, plan="auto")
    try:
        wait_until("some steps", stays, broken, lambda: len(lines(broken)) > 12)
        assert "(data=2)" in (broken / "said").read_text()
        for pid in [*workers(goes.pid), goes.pid]:
            os.kill(pid, signal.SIGKILL)
        goes.wait(10)
        ended(broken, stays)
    finally:
        for each in (stays, goes):
            if each.poll() is None:
                for pid in [*workers(each.pid), each.pid]:
                    os.kill(pid, signal.SIGKILL)
                each.wait(10)
    text = (broken / "said").read_text()
    assert "(data=1)" in text
    assert "goes on at step" in text
    wanted, found = dict(lines(whole)), lines(broken)
    assert {step for step, _ in found} == wanted.keys()
    assert all(abs(loss - wanted[step]) < 1e-5 for step, loss in found)
