"""Runs that are killed: whoever dies in whatever phase, the run goes on from its newest checkpoint as if nothing were.

A rank kills itself by signal 9, from a thread at a random moment or in the middle of a phase; the others are to end by
themselves. All are started again until the run has made its steps. Then losses and weights are, bit by bit, those of a
run that nobody killed, and every step was made from the one before it.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from sbpflow.nn.checkpoint import commit, save, writing
from sbpflow.nn.files.reading import Reading
from tests.ranks import Fresh

STEPS, EVERY = 12, 2
RANKS = 4
FEW_OR_ALL = pytest.mark.parametrize("ranks", [2, pytest.param(RANKS, marks=pytest.mark.sweep)])
Wanted: TypeAlias = tuple[dict[int, float], list[Tensor]]  # losses by step, and the weights in the end


@dataclass(frozen=True)
class Kill:
    """The rank that dies, and its moment: so many seconds after the start, or the nth time that a phase is reached."""

    victim: int
    phase: str = ""
    nth: int = 1
    seconds: float = 0.0


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(nth: int) -> Callable[..., None]:
    left = [nth]

    def count(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            die()

    return count


@contextmanager
def dying(kill: Kill | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, this rank dies as it is told to."""
    if kill is None:
        yield
        return
    if not kill.phase:
        timer = threading.Timer(kill.seconds, die)
        timer.daemon = True
        timer.start()
        yield
        return
    count = after(kill.nth)
    if kill.phase in ("forward", "backward", "update"):
        hooks: dict[str, Callable[[], Any]] = {
            "forward": lambda: model[1].register_forward_hook(count),  # type: ignore[index]
            "backward": lambda: model[2].weight.register_hook(count),  # type: ignore[index]
            "update": lambda: optimizer.register_step_post_hook(count),
        }
        hooks[kill.phase]()
        yield
        return
    where: dict[str, tuple[Any, str]] = {
        "snapshot": (save._memory, "taken"),
        "write": (writing, "write_file"),
        "manifest": (commit, "_write"),
        "rename": (commit, "synced"),
        "load": (Reading, "shards"),
    }
    owner, name = where[kill.phase]
    plain = getattr(owner, name)

    def first(*args: Any, **kwargs: Any) -> Any:
        count()
        return plain(*args, **kwargs)

    owners = [owner] if owner is not writing else [writing, commit]
    with patch.object(owners[-1], name, first):
        yield


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def training(folder: str, kill: Kill | None, ranks: int) -> None:
    """A run as a user would write it: it takes up where the newest checkpoint is."""
    flow.init(timeout=25.0)  # who dies is noticed at once; this is for a machine on which much else runs
    home = Path(folder)
    grid = flow.placement("cpu", range(ranks))
    model = flow.nn.to_global(net(), grid, {"0.weight": S(0), "2.weight": S(1)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    me = flow.boxing.owned(grid)[0]
    with dying(kill if kill is not None and kill.victim == me else None, model, optimizer):
        found = flow.newest(home)
        if found is not None:
            flow.load(found.path, model, optimizer=optimizer, extra={"schedule": schedule})
        for step in range(found.step if found else 0, STEPS):
            x = flow.tensor(batch(step), placement=grid, sbp=S(0))
            loss = (model(x) + 0.1 * torch.rand_like(x[:, :4])).square().mean()  # what is drawn is drawn again
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            told = loss.item()
            if me == 0:
                with open(home / "log.jsonl", "a") as log:
                    log.write(json.dumps([step, told]) + "\n")
            if (step + 1) % EVERY == 0:
                name = home / f"step-{step + 1}"
                flow.save(
                    name, model, optimizer=optimizer, step=step + 1, extra={"schedule": schedule},
                    asynchronous=step % 4 == 1, keep=2,
                )  # fmt: skip
        flow.save(home / "end", model, optimizer=optimizer, step=STEPS)


def batch(step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def result(home: Path) -> list[Tensor]:
    """The weights of a run that came to its end, read by one process."""
    model = net()
    flow.load(home / "end", model)
    return [x.detach() for x in model.parameters()]


@pytest.fixture(scope="module")
def unbroken(fresh: Fresh, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Wanted]:
    """The end of a run of so many ranks that nobody kills."""

    @cache
    def found(ranks: int) -> Wanted:
        home = tmp_path_factory.mktemp("unbroken")
        assert all(ended.code == 0 for ended in fresh(ranks, training, str(home), None, ranks))
        return dict(map(json.loads, (home / "log.jsonl").read_text().splitlines())), result(home)

    return found


def survived(fresh: Fresh, home: Path, kills: list[Kill], wanted: Wanted, ranks: int) -> int:
    """Have a run killed so often, and compare it; how many of the kills met somebody."""
    home.mkdir()
    met = 0
    for kill in [*kills, None]:
        before = flow.newest(home)
        ended = fresh(ranks, training, str(home), kill, ranks, timeout=60.0)
        died = [each.code for each in ended].count(-signal.SIGKILL)
        assert died <= 1, ended  # nobody else hung until he was killed
        assert kill is not None or all(each.answer and not each.answer.error for each in ended), ended
        met += died
        for path in home.glob("step-*"):  # what has the name of a checkpoint is one
            if not path.name.endswith((".writing", ".replaced")):
                assert flow.nn.checkpoint.manifest.read_manifest(path).wrong() is None
        now = flow.newest(home)
        assert before is None or (now is not None and now.step >= before.step)
        if (home / "end").exists():
            break
    losses, weights = wanted
    lines = [json.loads(line) for line in (home / "log.jsonl").read_text().splitlines()]
    assert {step for step, _ in lines} == set(range(STEPS))
    assert all(losses[step] == loss for step, loss in lines), lines  # also those that were made again
    assert all(torch.equal(a, b) for a, b in zip(result(home), weights, strict=True))
    return met


PHASES = ["forward", "backward", "update", "snapshot", "write", "manifest", "rename", "load"]


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:flow.newest")
@FEW_OR_ALL
def test_a_rank_dies_in_each_phase(fresh: Fresh, tmp_path: Path, unbroken: Callable[[int], Wanted], ranks: int) -> None:
    """All phases in one run; the manifest and its name are the first rank's."""
    kills = [
        Kill(0 if phase in ("manifest", "rename") else at % ranks, phase, 1 + at % 2) for at, phase in enumerate(PHASES)
    ]
    assert survived(fresh, tmp_path / "run", kills, unbroken(ranks), ranks) >= 6


def at_random(seed: int, ranks: int) -> list[Kill]:
    dice = Random(seed)
    return [Kill(dice.randrange(ranks), seconds=dice.uniform(0.02, 0.9)) for _ in range(4)]


@pytest.mark.filterwarnings("ignore:flow.newest")
@pytest.mark.sampled(1, sweep=12)
@FEW_OR_ALL
@pytest.mark.parametrize("seed", range(12))
def test_a_rank_dies_at_any_moment(
    fresh: Fresh, tmp_path: Path, unbroken: Callable[[int], Wanted], ranks: int, seed: int
) -> None:
    """Runs that are each killed up to four times."""
    survived(fresh, tmp_path / "run", at_random(seed, ranks), unbroken(ranks), ranks)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:flow.newest")
def test_a_run_goes_on_with_fewer_ranks(fresh: Fresh, tmp_path: Path, unbroken: Callable[[int], Wanted]) -> None:
    home = tmp_path / "run"
    home.mkdir()
    ended = fresh(RANKS, training, str(home), Kill(1, "update", 7), RANKS)
    assert [each.code for each in ended].count(-signal.SIGKILL) == 1
    assert all(each.code == 0 for each in fresh(RANKS - 1, training, str(home), None, RANKS - 1))
    losses, weights = unbroken(RANKS)
    lines = dict(map(json.loads, (home / "log.jsonl").read_text().splitlines()))
    assert lines.keys() == losses.keys()
    assert all(abs(lines[step] - losses[step]) < 1e-5 for step in losses)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(result(home), weights, strict=True))
