"""The world: who owns what, alone and among real ranks; joined late, left cleanly, and nothing stays behind."""

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import sbpflow as flow
from sbpflow.boxing import box
from sbpflow.boxing.exchange.execute import transport
from sbpflow.placement import PlacementError, TransportError, placement
from sbpflow.placement import world as module
from sbpflow.placement.world import DEFAULT_TIMEOUT, close, device, init, owned, process_group, world
from sbpflow.sbp import B, P, S, layout
from tests.ranks import ROOT, Answer, Fresh, Ranks, free_port

SHARED = Path("/dev/shm")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world not joined yet, by a process that nobody launched."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "_world", None)


def works() -> bool:
    """Whether all ranks of this world can make a move together."""
    size = world().size or 0
    src = layout(placement("cpu", range(size)), P, (3,))
    return box([torch.ones(3)], src, src.to(B))[0].tolist() == [size] * 3


def strays() -> set[str]:
    return {path.name for path in SHARED.glob("sbpflow-*")}


# -- one process --


@pytest.mark.usefixtures("alone")
def test_a_process_that_nobody_launched_owns_every_rank() -> None:
    assert (world().rank, world().size, world().timeout) == (None, None, DEFAULT_TIMEOUT)
    assert owned(placement("cpu", [[7, 3], [900, 0]])) == (7, 3, 900, 0)
    assert not dist.is_initialized()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_of_a_launchers_environment_is_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0")
    assert world().rank is None


@pytest.mark.usefixtures("alone")
def test_joining_again_changes_the_options_of_the_one_world() -> None:
    first = init(timeout=5)
    assert first.timeout == 5
    assert init() is first
    assert first.timeout == 5
    assert init(timeout=0.5) is world() is first
    assert first.timeout == 0.5
    close()
    assert world() is not first


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("timeout", [0, -1.0, math.nan])
def test_a_time_limit_is_above_0(timeout: float) -> None:
    with pytest.raises(PlacementError, match="seconds, above 0"):
        init(timeout=timeout)


@pytest.mark.usefixtures("alone")
def test_one_process_has_no_process_group() -> None:
    with pytest.raises(TransportError, match="one process owns every rank"):
        process_group([0, 1])


@pytest.mark.usefixtures("alone")
def test_closing_a_world_that_was_never_joined_does_nothing() -> None:
    close()
    close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without")
def test_a_cuda_placement_without_cuda_says_what_to_do() -> None:
    assert device(placement("cpu", 3), 3) == torch.device("cpu")
    with pytest.raises(PlacementError, match="sbpflow doctor"):
        device(placement("cuda", 0), 0)


# -- real ranks --


def joined() -> tuple[object, ...]:
    before = dist.is_initialized()
    mine = owned(placement("cpu", [[2, 0], [1, 3]]))
    return before, world().rank, world().size, mine, owned(placement("cpu", [2, 3])), dist.get_rank(), works()


def said(text: str) -> str:
    """The output of a process, without the leaks that the triton of a CUDA build counts as it ends."""
    return text.partition("nanobind: leaked")[0]


def test_a_launched_process_owns_its_rank_from_the_first_use_on(fresh: Fresh) -> None:
    for rank, end in enumerate(fresh(4, joined, freed=True)):
        assert end.answer is not None, end.stderr
        assert end.answer.value == (False, rank, 4, (rank,), (rank,) if rank > 1 else (), rank, True)
        assert (end.code, said(end.stderr)) == (0, "")


def groups() -> list[object]:
    """Ranks that made different numbers of groups before meet in a new one nevertheless."""
    works()
    flow.init(native=True)
    rank, everybody = world().rank or 0, process_group(range(4))
    found: list[object] = [everybody is dist.group.WORLD, everybody is process_group([3, 1, 0, 2])]
    for members in [(0, 1), (1, 2), (0, 2, 3), (0, 1), (1, 2, 3), (3, 0)]:
        if rank in members:
            made = process_group(members)
            found.append(made is process_group(members[::-1]) and made.size() == len(members))
            lie = layout(placement("cpu", members), S(0), (6,))
            found.append(box([torch.full(lie.local_shape(rank), 1.0)], lie, lie.to(B))[0].tolist() == [1.0] * 6)
    flow.init(native=None)
    return found


def test_a_process_group_is_made_once_for_a_set_of_ranks(ranks4: Ranks) -> None:
    assert all(all(found) for found in ranks4(groups))


def come_and_go() -> list[object]:
    """Leave and join again, with groups of a part of the world each time."""
    found: list[object] = []
    for _ in range(3):
        flow.init(timeout=20, native=True)
        pair = layout(placement("cpu", [0, 1]), P, (2,))
        here = owned(pair.placement)
        box([torch.ones(2) if here else torch.empty(0)], pair, pair.to(B))
        found.append(works())
        flow.init()
        found.append(works())
        first = transport()
        flow.boxing.close()
        found += [not dist.is_initialized(), works(), transport() is not first]
        flow.boxing.close()
        flow.boxing.close()
    return found


def test_a_world_that_was_left_can_be_joined_again(fresh: Fresh) -> None:
    for end in fresh(3, come_and_go, freed=True):
        assert end.answer is not None, end.stderr
        assert end.answer.error is None, end.answer.error
        assert all(end.answer.value)
        assert (end.code, said(end.stderr)) == (0, "")


def as_guest() -> list[object]:
    """torch.distributed was set up by others: it is used, and left as it was."""
    dist.init_process_group("gloo")
    mine = torch.ones(2)
    found: list[object] = []
    for _ in range(2):
        flow.init(timeout=20, native=True)
        pair = layout(placement("cpu", [0, 1]), P, (2,))
        box([torch.ones(2) if owned(pair.placement) else torch.empty(0)], pair, pair.to(B))
        found.append(works())
        flow.boxing.close()
        dist.all_reduce(mine)
        found.append(dist.is_initialized())
    found.append(mine.tolist() == [9.0, 9.0])
    dist.destroy_process_group()
    return found


def test_a_world_that_others_set_up_is_left_to_them(fresh: Fresh) -> None:
    for end in fresh(3, as_guest, freed=True):
        assert end.answer is not None, end.stderr
        assert end.answer.error is None, end.answer.error
        assert all(end.answer.value)
        assert end.code == 0


# -- starting badly --


def late(limit: float) -> str:
    """Rank 1 never comes: it ends before it joins the world, or before its first move."""
    with pytest.raises(TransportError) as error:
        flow.init(timeout=limit) and works()
    return str(error.value)


def absent(limit: float) -> str | None:
    return None if os.environ["RANK"] == "1" else late(limit)


def joined_only(limit: float) -> str | None:
    if os.environ["RANK"] == "1":
        flow.init(timeout=limit)
        os._exit(5)
    return late(limit)


@pytest.mark.alone  # it looks at what is in shared memory, where others come and go
@pytest.mark.parametrize("start", [absent, joined_only])
def test_a_rank_that_never_comes_is_an_error_by_the_limit(fresh: Fresh, start: object) -> None:
    before = strays()
    assert callable(start)
    ended = fresh(2, start, 2.0)
    assert ended[0].answer is not None, ended[0].stderr
    assert ended[0].answer.error is None, ended[0].answer.error
    text = ended[0].answer.value
    assert ("rank 0 of 2 did not meet" if start is absent else "rank 1 did not come to the first move") in text
    assert ("others did not come to 127.0.0.1:" in text) == (start is absent)
    assert "flow.init(timeout=...)" in text
    assert ended[0].code == 0
    assert strays() == before


@pytest.mark.sweep  # it waits for ten seconds
def test_who_never_came_is_named_where_the_store_was_up_before(tmp_path: Path) -> None:
    """As under torchrun, whose own store it is."""
    script = tmp_path / "late.py"
    script.write_text(
        "import os, sys, sbpflow as flow\n"
        "if os.environ['RANK'] == '2': sys.exit()\n"
        "try: flow.init(timeout=4)\n"
        "except flow.SbpflowError as error: print(f'<{error}>', flush=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.count("rank 2 did not come: not started, ended before") == 2, done.stdout + done.stderr


# -- nothing stays behind --


def crash_in_a_move() -> None:
    works()
    if world().rank == 1:
        os.kill(os.getpid(), 9)
    works()


@pytest.mark.alone
@pytest.mark.skipif(not SHARED.is_dir(), reason="no /dev/shm here")
@pytest.mark.parametrize("life", [works, crash_in_a_move])
def test_no_file_stays_in_shared_memory(fresh: Fresh, life: object) -> None:
    before = strays()
    assert callable(life)
    fresh(2, life, freed=True)
    assert strays() == before


SCRIPT = """
import torch
import sbpflow as flow
from sbpflow import B, S

p = flow.placement("cpu", range(2))
rows = flow.layout(p, S(0), (3,))
for _ in range(2):
    (rank,) = flow.boxing.owned(p)
    whole, = flow.box([torch.full(rows.local_shape(rank), float(rank))], rows, rows.to(B))
    flow.boxing.close()
print(f"rank {rank} has {whole.tolist()}\\n", end="")  # the line and its end at once, or two ranks' may mix
"""


def run_script(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


def agent(script: str) -> None:
    """As torchrun, but for its workers, which it forks: each would load torch anew."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    at = f"127.0.0.1:{free_port()}"
    how = LaunchConfig(
        1, 1, 2, run_id="one", rdzv_endpoint=at, rdzv_backend="static", rdzv_configs={"rank": 0}, start_method="fork"
    )
    elastic_launch(how, run_script)(script)


def test_a_script_runs_and_ends_by_itself_as_torchruns_agent_has_it(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (done,) = fresh(1, agent, str(tmp_path / "script.py"), timeout=90)
    assert (done.answer, done.code) == (Answer(), 0), done
    assert sorted(done.stderr.splitlines()) == [f"rank {r} has [0.0, 0.0, 1.0]" for r in range(2)]


@pytest.mark.sweep
def test_a_script_under_torchrun_runs_and_ends_by_itself(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = [*launcher, str(tmp_path / "script.py")]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {r} has [0.0, 0.0, 1.0]" for r in range(2)]


def summed(value: int) -> list[float]:
    """A move among ranks, for which they meet at their store."""
    grid = flow.placement("cpu", range(2))
    moved = flow.tensor(torch.full((2,), float(value)), placement=grid, sbp=S(0)).to_global(sbp=B).to_local()
    return [float(x) for x in moved]


def test_ranks_that_are_started_again_do_not_hear_what_the_store_has_of_others(fresh: Fresh) -> None:
    """The store of torchrun's agent stays: there are addresses and files of processes that have ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    said = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for value in (1, 2):
        ended = fresh(2, summed, value, environment=lambda rank: said)
        assert [each.code for each in ended] == [0, 0], ended
        assert [each.answer.value for each in ended if each.answer] == [[float(value)] * 2] * 2
