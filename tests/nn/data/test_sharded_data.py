"""Batches are those of one device on any grid; a run that goes on elsewhere sees every sample of an epoch once."""

import json
import random
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement import Placement
from sbpflow.placement.errors import DtypeError, PlacementError, SbpError, ShapeError
from tests.ranks import Ranks

from .sets import LENGTH, Drawing, Failing, Numbers, Parts, Stream

ONE, LINE = flow.placement("cpu:[0]"), flow.placement("cpu:[0-2]")
GRID = flow.placement("cpu:[0-3] as (data=2, context=2)")
GRIDS: list[tuple[Placement, Any]] = [(ONE, S(0)), (LINE, S(0)), (GRID, (S(0), S(0))), (GRID, (S(0), B))]


def ids(batch: Any) -> list[int]:
    found = batch["id"] if isinstance(batch, dict) else batch
    return [int(x) for x in found.full_tensor()]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("at", range(len(GRIDS)))
def test_batches_are_the_same_on_every_grid(at: int, shuffle: bool) -> None:
    grid, sbp = GRIDS[at]
    data = flow.data.shards(Numbers(11), grid, sbp, batch_size=4, shuffle=shuffle)
    assert len(data) == 3
    alone = flow.data.shards(Numbers(11), ONE, batch_size=4, shuffle=shuffle)
    for _ in range(2):
        for mine, wanted in zip(data, alone, strict=True):
            for name in ("id", "tokens"):
                assert torch.equal(mine[name].full_tensor(), wanted[name].full_tensor())
            assert torch.equal(mine["tokens"].full_tensor()[:, 0], mine["id"].full_tensor() * 100)
    assert (data.epoch, data.given) == (2, 0)


@pytest.mark.parametrize("case", range(12))
def test_a_run_that_goes_on_elsewhere_sees_each_sample_once(case: int) -> None:
    """Killed at random places, and resumed on other grids with other batch sizes, in one epoch and the next."""
    draw = random.Random(case)
    size, state = draw.randrange(20, 60), None
    seen: dict[int, list[int]] = {0: [], 1: []}
    while state is None or state["epoch"] < 2:
        grid, sbp = draw.choice(GRIDS)
        streams = case % 3 == 0
        source: Any = Stream(size) if streams else Numbers(size)
        shuffle = None if streams else bool(case % 2)
        data = flow.data.shards(source, grid, sbp, batch_size=draw.randrange(4, 9), shuffle=shuffle, seed=case)
        if state is not None:
            data.load_state_dict(state)
        steps, epoch = draw.randrange(1, 5), data.epoch
        for batch in data:
            seen[epoch].extend(ids(batch))
            steps -= 1
            if steps == 0:
                break
        state = json.loads(json.dumps(data.state_dict()))
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(size))
    assert (seen[0] == seen[1]) == (case % 3 == 0 or case % 2 == 0)


def test_only_what_was_given_out_counts() -> None:
    source = Numbers(40)
    data = flow.data.shards(source, LINE, batch_size=4, prefetch=3)
    assert ids(next(iter(data))) == [0, 1, 2, 3]
    assert data.state_dict() == {"epoch": 0, "given": 4, "seed": 0, "samples": 40, "shuffle": False}
    assert ids(next(iter(data))) == [4, 5, 6, 7]


def test_a_loader_is_read_as_it_is_made(recwarn: pytest.WarningsRecorder) -> None:
    def reversed_(samples: list[Any]) -> Any:
        return torch.stack([x["id"] for x in samples]) * -1

    loader = DataLoader(Numbers(10), 4, drop_last=True, collate_fn=reversed_, sampler=[9, 1, 1, 3, 5, 7, 8, 0])
    data = flow.data.shards(loader, LINE)
    assert [ids(x) for x in data] == [[-9, -1, -1, -3], [-5, -7, -8, 0]]
    assert (data.epoch, data.given) == (1, 0)


def test_workers_read_the_same(recwarn: pytest.WarningsRecorder) -> None:
    def drawn(workers: int) -> list[Any]:
        data = flow.data.shards(DataLoader(Drawing(9), 4, shuffle=True, num_workers=workers), LINE, seed=3)
        return [[x.full_tensor().tolist() for x in batch] for batch in data]

    assert drawn(0) == drawn(2)


def test_random_numbers_of_a_dataset_do_not_depend_on_the_grid_and_leave_the_program_its_own() -> None:
    found = []
    before = torch.get_rng_state()
    for grid, sbp in GRIDS:
        data = flow.data.shards(Drawing(10), grid, sbp, batch_size=4, shuffle=True)
        found.append([[x.full_tensor().tolist() for x in batch] for batch in data])
        assert torch.equal(torch.get_rng_state(), before)
    assert found.count(found[0]) == len(GRIDS)
    resumed = flow.data.shards(Drawing(10), LINE, batch_size=4, shuffle=True)
    resumed.load_state_dict({"epoch": 0, "given": 4, "seed": 0, "samples": 10})
    assert [x.full_tensor().tolist() for x in next(iter(resumed))] == found[0][1]


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_of_the_dataset_comes_with_its_line_and_its_position(ahead: int) -> None:
    data, seen = flow.data.shards(Failing(20), LINE, batch_size=4, prefetch=ahead), list[int]()
    with pytest.raises(OSError, match="sample nine is torn") as caught:
        seen.extend(x for batch in data for x in ids(batch))
    assert seen == list(range(8))
    assert data.given == 8
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename.endswith("sets.py")


def test_the_thread_that_reads_ahead_ends_with_the_loop() -> None:
    data = flow.data.shards(Numbers(100), LINE, batch_size=4)
    loop: Iterator[Any] = iter(data)
    next(loop)
    next(loop)
    assert "sbpflow data" in [thread.name for thread in threading.enumerate()]
    del loop
    assert "sbpflow data" not in [thread.name for thread in threading.enumerate()]


def test_there_is_one_position_so_one_loop() -> None:
    data = flow.data.shards(Numbers(20), LINE, batch_size=4)
    first = iter(data)
    next(first)
    assert ids(next(iter(data))) == [4, 5, 6, 7]
    with pytest.raises(SbpError, match="begin a new loop"):
        next(first)


def test_a_rest_that_is_dropped_ends_the_epoch() -> None:
    data = flow.data.shards(Numbers(10), LINE, batch_size=4, drop_last=True)
    data.load_state_dict({"epoch": 0, "given": 7, "seed": 0, "samples": 10})
    assert ids(next(iter(data))) == [0, 1, 2, 3]
    assert data.epoch == 1


def test_compiled_steps_take_batches_in_turns_without_moving_them() -> None:
    net = torch.nn.Linear(LENGTH, 1)
    grid = flow.placement("cpu:[0-1]")
    step = flow.compile(
        net, lambda net, batch: net(batch["tokens"].float()).sum(), placement=grid, micro_batches=2, inputs={}
    )
    data = flow.data.shards(Numbers(16), grid, batch_size=8, micro_batches=2)
    batches = list(data)
    step(batches[0])
    with flow.record() as moves:
        step(batches[1])
    assert not [move for move in moves if move.op == "input" and move.bytes]


def test_bad_input_is_refused() -> None:
    data = flow.data.shards(Numbers(9), LINE, batch_size=4)
    with pytest.raises(SbpError, match="a dataset of 8 samples, this one has 9"):
        data.load_state_dict({"epoch": 0, "given": 4, "seed": 0, "samples": 8})
    with pytest.raises(SbpError, match=r"(?s)order of shuffle=True.*say shuffle=True"):
        data.load_state_dict({**data.state_dict(), "given": 4, "shuffle": True})
    data.load_state_dict({**data.state_dict(), "given": 0, "shuffle": True})
    with pytest.raises(SbpError, match="a position without given"):
        data.load_state_dict({"epoch": 0})
    with pytest.raises(PlacementError, match=r"make one"):
        flow.data.shards(Numbers(9), "cpu", batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(SbpError, match=r"seed=-1"):
        flow.data.shards(Numbers(9), LINE, batch_size=4, seed=-1)
    with pytest.raises(SbpError, match="never fill a batch of 10"):
        flow.data.shards(Numbers(9), LINE, batch_size=10, drop_last=True)
    with pytest.raises(TypeError, match="Stream has no length"):
        len(flow.data.shards(Stream(9), LINE, batch_size=4))
    with pytest.raises(DtypeError, match=r"has 0, a str, of which no rank"):
        next(iter(flow.data.shards(["a", "b", "c"], LINE, batch_size=3)))
    with pytest.raises(ShapeError, match=r"has a value \(5,\) for 3 samples"):
        next(iter(flow.data.shards(Numbers(9), LINE, batch_size=3, collate_fn=lambda samples: torch.ones(5))))


# Real ranks


def asked(parts: bool) -> tuple[list[int], Any, list[list[list[int]]]]:
    """On a rank: the samples that it loaded, the part of them, and its shards of two batches of 4."""
    source = Parts(8) if parts else Numbers(8)
    data = flow.data.shards(source, GRID, (S(0), S(1)), batch_size=4)
    shards = [batch["tokens"].to_local() for batch in data]
    return sorted(set(source.asked)), getattr(source, "parts", None), [x.tolist() for x in shards]


@pytest.mark.parametrize("parts", [False, True])
def test_each_process_loads_its_own_samples_and_tokens(parts: bool, ranks4: Ranks) -> None:
    for rank, (loaded, part, shards) in enumerate(ranks4(asked, parts)):
        rows = [0, 1, 4, 5] if rank < 2 else [2, 3, 6, 7]
        tokens = (0, 4) if rank % 2 == 0 else (4, 8)
        assert loaded == rows
        assert part == (tokens if parts else None)
        wanted = [[row * 100 + token for token in range(*tokens)] for row in rows]
        assert shards == [wanted[:2], wanted[2:]]


def half_an_epoch() -> tuple[Any, list[int]]:
    data, seen = flow.data.shards(Numbers(21), GRID, (S(0), S(0)), batch_size=6, shuffle=True), list[int]()
    for batch in data:
        seen += ids(batch)
        if len(seen) == 12:
            return data.state_dict(), seen
    raise AssertionError


def rest(state: Any, sbp: Any) -> list[int]:
    data, seen = flow.data.shards(Numbers(21), GRID, sbp, batch_size=5, shuffle=True), list[int]()
    data.load_state_dict(state)
    for batch in data:
        seen += ids(batch)
    return seen


def test_four_processes_and_one_go_on_for_each_other(ranks4: Ranks) -> None:
    state, first = ranks4(half_an_epoch)[0]
    assert (state, first) == half_an_epoch()
    data = flow.data.shards(Numbers(21), LINE, batch_size=4, shuffle=True)
    data.load_state_dict(state)
    alone = [x for batch in data for x in ids(batch)]
    (mine, *others) = ranks4(rest, state, (S(0), B))  # a last batch of four, and ranks without a row of it
    assert all(other == mine for other in others)
    assert mine == alone
    assert sorted(first + alone) == list(range(21))


class Apart(Numbers):
    """A dataset that differs from rank to rank."""

    def __init__(self, kind: str) -> None:
        rank = flow.init().rank or 0
        super().__init__(8 + (kind == "size" and rank == 2))
        self.kind, self.wrong = kind, rank == 3

    def __getitem__(self, index: int) -> Any:
        found = super().__getitem__(index)["tokens"]
        if self.wrong:
            found = {"shape": found[:-1], "values": found + 1, "dtype": found.float()}.get(self.kind, found)
        return found


def differs(kind: str) -> str:
    try:
        for _ in flow.data.shards(Apart(kind), GRID, (S(0), B), batch_size=4):
            pass
    except SbpError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("size", "ranks 0 and 2 differ in samples: 8 and 9"),
        ("shape", "samples of ranks 0 and 3 differ in shape or dtype"),
        ("values", "ranks 2 and 3 have the same part of samples 0:4, and read different values"),
    ],
)
def test_a_rank_whose_data_differs_is_named_on_all(kind: str, said: str, ranks4: Ranks) -> None:
    assert all(said in found for found in ranks4(differs, kind))
