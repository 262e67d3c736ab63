"""Pathways with several clients: processes of their own, whose programs an island of two ranks runs in one order."""

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow.__main__ import main
from sbpflow.nn.islands import pickles
from sbpflow.nn.islands.client import Island
from sbpflow.nn.islands.serve import serve
from sbpflow.placement.errors import FileError, SbpError, TransportError
from tests.ranks import Answer, Fresh, Nursery, free_port
from tests.systems.changing import island_clients as programs

SCRIPT = Path(programs.__file__)
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SCRIPT.parents[3]), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def where(fresh: Fresh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file of an island that is there for all tests; each must leave it as good as it was."""
    path, ended = tmp_path_factory.mktemp("island") / "island.json", list[Any]()
    ranks = threading.Thread(target=lambda: ended.extend(fresh(2, serve, "localhost:0", path, timeout=900)))
    ranks.start()
    while not path.exists() and ranks.is_alive():
        time.sleep(0.02)
    try:
        yield path
        flow.island(path).end()
    finally:
        ranks.join()
    assert [each.code for each in ended] == [0, 0], ended
    assert not path.exists()


@pytest.fixture
def island(where: Path) -> Iterator[Island]:
    with flow.island(where) as made:
        yield made


def client(*arguments: object) -> None:
    """A client's life, as that of `python SCRIPT ...`; the process is forked, as each would load torch anew."""
    sys.argv[:] = [str(SCRIPT), *map(str, arguments)]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def lines(log: Path) -> list[list[str]]:
    return [Path(f"{log}.{rank}").read_text().split() for rank in range(2)]


def test_two_clients_train_on_the_same_ranks_as_each_alone_and_take_turns(
    where: Path, tmp_path: Path, fresh: Fresh
) -> None:
    with flow.island(where) as island:
        gate = island.run(programs.until, 1 + 2 * 7, 3)
        clients = fresh(2, client, "train", where, tmp_path / "order", 3, timeout=120)
        gate.result()
    losses = [json.loads(each.stderr) for each in clients]
    assert losses[0] == pytest.approx(programs.alone(3, 4), abs=1e-6)
    assert losses[1] == pytest.approx(programs.alone(4, 4), abs=1e-6)
    order, other = lines(tmp_path / "order")
    assert order == other
    assert len(order) == 2 * 6
    assert all(abs(order[:n].count("3") - order[:n].count("4")) <= 1 for n in range(len(order) + 1))


def test_a_result_is_an_argument_without_coming_home_and_is_freed_with_its_handle(
    island: Island, tmp_path: Path
) -> None:
    marked = island.run(programs.Marked, str(tmp_path / "log"), torch.arange(6.0))
    found = island.run(programs.total, marked, times=2.0).result()
    assert (found["sum"], found["x"].tolist(), found["rank"]) == (30.0, [0, 1, 2, 3, 4, 5], 0)
    assert type(found["x"]) is torch.Tensor
    with pytest.raises(SbpError, match="cannot come home: it came home"):
        marked.result()
    assert not (tmp_path / "log.0").exists()
    del marked
    island.run(programs.rank).result()
    assert lines(tmp_path / "log") == [["freed"], ["freed"]]


def test_a_client_that_is_killed_has_nothing_left_there_and_others_go_on(
    where: Path, tmp_path: Path, fresh: Fresh
) -> None:
    with flow.island(where) as island:
        (other,) = fresh(1, client, "doomed", where, tmp_path / "log", timeout=120)
        assert (other.code, other.stderr) == (-signal.SIGKILL, "")
        assert island.run(programs.rank).result() == 0
        island.run(programs.until, 0, 1).result()
        assert island.run(programs.rank).result() == 0  # ranks are told that a client is gone, and then of this
    assert all(each.count("freed") == 1 and each.count("late") <= 1 for each in lines(tmp_path / "log"))


def test_an_error_comes_with_its_result_and_with_all_made_of_it_and_others_go_on(where: Path, tmp_path: Path) -> None:
    first, second = flow.island(where), flow.island(where)
    trainer, other = (
        each.run(programs.Trainer, seed, str(tmp_path / "log")) for each, seed in ((first, 3), (second, 4))
    )
    losses = [second.run(programs.Trainer.step, other, programs.batch(0))]
    failed = first.run(programs.broken, trainer, -1)
    behind = first.run(programs.stacked, "", 0, [failed])
    losses.append(second.run(programs.Trainer.step, other, programs.batch(1)))
    for each in (failed, behind):
        with pytest.raises(ValueError, match="no luck at -1") as caught:
            each.result()
        assert "on rank 0 of the island, in broken, sent as 1 at" in (told := caught.value.__notes__[0])
        assert f'{SCRIPT}", line' in told
    found = [first.run(programs.Trainer.step, trainer, programs.batch(at)) for at in range(2)]
    assert [each.result().item() for each in found] == pytest.approx(programs.alone(3, 2), abs=1e-6)
    first.close()
    assert [each.result().item() for each in losses] == pytest.approx(programs.alone(4, 2), abs=1e-6)
    second.run(programs.broken, other, -1)
    with pytest.raises(ValueError, match="no luck"), second:
        pass


@pytest.mark.parametrize(("at", "kind"), [(0, programs.Trainer), (1, programs.Staged)])
def test_an_error_on_one_rank_ends_the_exchange_of_the_other_and_what_it_wrote_to(
    where: Path, tmp_path: Path, at: int, kind: type[programs.Trainer]
) -> None:
    first, second = flow.island(where), flow.island(where)
    trainer = first.run(programs.Trainer, 3, str(tmp_path / "log"))
    other = second.run(kind, 4, str(tmp_path / "log"))
    losses = [second.run(programs.Trainer.step, other, programs.batch(0))]
    with pytest.raises(ValueError, match=f"no luck at {at}") as caught:
        first.run(programs.broken, trainer, at).result()
    assert f"on rank {at} of the island" in caught.value.__notes__[0]
    losses.append(second.run(programs.Trainer.step, other, programs.batch(1)))
    assert [each.result().item() for each in losses] == pytest.approx(programs.alone(4, 2, kind.drop), abs=1e-6)
    with pytest.raises(ValueError, match=f"no luck at {at}"):  # its weights may differ between ranks
        first.run(programs.Trainer.step, trainer, programs.batch(0)).result()
    again = first.run(programs.Trainer, 3, str(tmp_path / "log"))
    assert first.run(programs.Trainer.step, again, programs.batch(0)).result().item() == pytest.approx(
        programs.alone(3, 1)[0], abs=1e-6
    )
    first.close()
    second.close()


def test_no_more_than_so_many_programs_of_a_client_are_under_way(where: Path) -> None:
    with flow.island(where, most=1) as island:
        handles = [island.run(programs.rank) for _ in range(4)]
        assert [each.done for each in handles[:3]] == [True] * 3
        assert repr(handles[0]).startswith("rank, sent as 0 at")


def test_what_an_island_cannot_take_is_refused(island: Island, where: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(json.loads(where.read_text()) | {"key": "00" * 32}))
    with pytest.raises(TransportError, match=r"has another key\n  take the file"):
        flow.island(wrong)
    wrong.write_text(json.dumps(json.loads(where.read_text()) | {"port": 1}))
    with pytest.raises(TransportError, match=r"no island answers at (.|\n)*torchrun"):
        flow.island(wrong)
    with pytest.raises(FileError, match=r"is not there(.|\n)*torchrun"):
        flow.island(tmp_path / "none.json")
    with pytest.raises(SbpError, match=r"most=0\n"):
        flow.island(where, most=0)
    with pytest.raises(SbpError, match=r"must stand at the top of a file"):
        island.run(lambda: 1)
    with pytest.raises(SbpError, match=r"island.run\(int\): that is no function"):
        island.run(1)  # type: ignore[arg-type]
    with pytest.raises(SbpError, match=r"x.full_tensor\(\)"):
        island.run(programs.stacked, flow.tensor([1.0], placement=flow.placement("cpu", [0]), sbp=flow.B))
    with flow.island(where) as another, pytest.raises(SbpError, match=r"of another island(.|\n)*handle.result\(\)"):
        island.run(programs.stacked, another.run(programs.rank))
    with pytest.raises(TransportError, match=r"was closed\n  make another"):
        another.run(programs.rank)
    with pytest.raises(SbpError, match=r"by a worker(.|\n)*__main__"):
        island.run(programs.client_here, str(where)).result()


def test_a_function_that_workers_cannot_import_or_that_was_changed_is_an_error(
    where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "island_module_of_a_user.py"
    module.write_text("def f():\n    return 1\n")
    import island_module_of_a_user as users  # type: ignore[import-not-found]

    with flow.island(where) as island:  # which tells workers of the folder
        assert island.run(users.f).result() == 1
        module.write_text("def f():\n    return 2\n")
        pickles.file_digest.cache_clear()  # as in a client that begins now
        with pytest.raises(SbpError, match=r"is not the one that the island has imported(.|\n)*start the island anew"):
            island.run(users.f).result()


def commanded(path: Path) -> int:
    """`python -m sbpflow island`, by a process that nobody launched."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return main(["island", "--file", str(path)])


def ended_by(interrupt: Callable[[], None], path: Path) -> None:
    """A result is on its way home while the island is interrupted."""
    with flow.island(path) as client:
        value = client.run(torch.ones, 3)
        assert value.result().tolist() == [1, 1, 1]
        interrupt()
        with pytest.raises(TransportError, match=r"has ended\n  start it anew"):
            value.result()
    assert not path.exists()


def test_ctrl_c_ends_an_island(tmp_path: Path, nursery: Nursery) -> None:
    path = tmp_path / "island.json"
    (island,) = nursery.world(1)
    island.give(commanded, path, freed=True)
    while not path.exists() and not island.ended():
        time.sleep(0.02)

    def interrupt() -> None:
        os.kill(island.pid, signal.SIGINT)
        island.pipe.poll(20)

    ended_by(interrupt, path)
    answer = island.take()
    island.pipe.close()
    assert (answer, island.end()) == (Answer(0), 0), island.said()
    assert "island of 1 ranks at localhost:" in island.tail


@pytest.mark.sweep  # each process loads torch anew
@pytest.mark.parametrize(
    "launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]], ids=["alone", "torchrun"]
)
def test_ctrl_c_ends_an_island_by_its_command(tmp_path: Path, launcher: list[str]) -> None:
    path, said = tmp_path / "island.json", tmp_path / "said"
    more = ["--master-port", str(free_port())] if launcher else []
    command = [sys.executable, *launcher, *more, "-m", "sbpflow", "island", "--file", str(path)]
    with said.open("w") as out:
        # Tests that run in the background ignore the signal, and so would what they start.
        heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        island = subprocess.Popen(
            command, env=ENVIRONMENT, stdout=out, stderr=out, start_new_session=True, preexec_fn=heeds
        )
    while not path.exists() and island.poll() is None:
        time.sleep(0.02)
    assert f"island of {1 + bool(launcher)} ranks at localhost:" in said.read_text(), said.read_text()

    def interrupt() -> None:
        os.killpg(island.pid, signal.SIGINT)
        island.wait()

    ended_by(interrupt, path)
    assert launcher or island.returncode == 0
