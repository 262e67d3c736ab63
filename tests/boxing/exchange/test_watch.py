"""What goes wrong on real ranks is an error on every rank that is left, in time and in words; no abort, no hang."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow.boxing import box, box_async, layout_of
from sbpflow.boxing.exchange import watch
from sbpflow.boxing.exchange.dist import Dist
from sbpflow.boxing.exchange.execute import transport
from sbpflow.boxing.exchange.transport import Turn
from sbpflow.placement import PlacementError, SbpflowError, ShapeError, placement
from sbpflow.placement.world import world
from sbpflow.sbp import B, Layout, P, S, layout
from tests.ranks import Ended, Fresh, Ranks

Move: TypeAlias = tuple[Layout, Layout]
Death: TypeAlias = Literal["exit", "kill"]
Hosts: TypeAlias = Callable[[int], dict[str, str]]

LIMIT = (
    60.0  # seconds: longer than all of a test may take, so that nothing is told by the limit but where it is shorter
)
WAYS = {"shared": None, "messages": False, "collectives": True}
WHERE = re.compile(r"at \S*test_watch\.py:\d+")


class Told(NamedTuple):
    """How it went on a rank: the error's kind, empty if there was none, and its text."""

    kind: str
    text: str


def line(ranks: int) -> flow.Placement:
    return placement("cpu", range(ranks))


def move(ranks: int, src: object, dst: object, shape: tuple[int, ...] = (8, 8)) -> Move:
    p = line(ranks)
    return layout(p, str(src), shape), layout(p, str(dst), shape)


def words(asked: Move) -> str:
    """A move as errors name it."""
    src, dst = asked
    return f"{src} -> {dst.lie} on {dst.placement}"


def shards(lies: Layout, rank: int) -> list[Tensor]:
    return [torch.ones(lies.local_shape(rank)) if rank in lies.placement else torch.empty(0)]


def meet() -> int:
    """Join, and make one move all together, so that what comes is not about starting."""
    here = flow.init(timeout=60)
    assert here.rank is not None
    assert here.size is not None
    src, dst = move(here.size, S(0), B)
    box(shards(src, here.rank), src, dst)
    return here.rank


def told(limit: float, action: Callable[[], object], native: bool | None = None) -> Told:
    """Do it under this limit, and tell."""
    flow.init(timeout=limit, native=native)
    try:
        action()
    except SbpflowError as error:
        return Told(type(error).__name__, str(error))
    return Told("", "")


def make(moves: Sequence[Move], rank: int) -> None:
    for src, dst in moves:
        box(shards(src, rank), src, dst)


def ask(moves: Sequence[Sequence[Move]], limit: float, native: bool | None = None) -> list[Told]:
    """Make the moves meant for this rank, then one that all agree on."""
    rank = meet()
    last = move(len(moves), P, B)
    return [told(limit, lambda m=m: make(m, rank), native) for m in (moves[rank], [last])]  # type: ignore[misc]


def survivors(ended: Sequence[Ended], *, lost: Sequence[int] = ()) -> dict[int, list[Told]]:
    """What the ranks told that were not lost; each of them ended by itself, in peace and at once."""
    found = {}
    for rank, end in enumerate(ended):
        if rank not in lost:
            assert end.answer is not None, f"rank {rank} gave no answer\n{end.stderr}"
            assert end.answer.error is None, end.answer.error
            assert end.code == 0, f"rank {rank} ended with {end.code}\n{end.stderr}"
            found[rank] = end.answer.value if isinstance(end.answer.value, list) else [end.answer.value]
    return found


def assert_told(said: Told, *parts: str, kind: str = "TransportError", by_limit: bool = False) -> None:
    """That it was told so and, but `by_limit`, not because nothing came for long."""
    assert said.kind == kind, said
    for part in parts:
        assert part in said.text, said.text
    if kind == "TransportError":
        assert WHERE.search(said.text), said.text
    assert by_limit or "no answer within" not in said.text, said.text


def assert_broken(said: Told) -> None:
    """After an error between ranks, each of them refuses to go on, and waits for nobody."""
    assert said.kind == "TransportError"
    assert "no longer talk to each other since an earlier move failed" in said.text


# -- ranks that ask for different things --

DIFFERENT: Mapping[str, Callable[[int], tuple[list[Move], list[Move]]]] = {
    "other target": lambda n: ([move(n, "S(0)", "S(1)")], [move(n, "S(0)", "B")]),
    "other source": lambda n: ([move(n, "S(0)", "B")], [move(n, "P", "B")]),
    "other size": lambda n: ([move(n, "S(0)", "B")], [move(n, "S(0)", "B", (80, 80))]),
    "other order": lambda n: (
        [move(n, "S(0)", "B"), move(n, "P", "S(1)")],
        [move(n, "P", "S(1)"), move(n, "S(0)", "B")],
    ),
    "skips one": lambda n: (
        [move(n, "S(0)", "B"), move(n, "S(0)", "S(1)")],
        [move(n, "S(0)", "S(1)")],
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_differ_are_told_at_once(fresh: Fresh, case: str, size: int, way: str) -> None:
    many, one = DIFFERENT[case](size)
    odd = size - 1
    moves = [one if rank == odd else many for rank in range(size)]
    for rank, (first, after) in survivors(fresh(size, ask, moves, LIMIT, WAYS[way])).items():
        other = 0 if rank == odd else odd
        assert_told(first, words(moves[rank][0]), words(moves[other][0]), "different moves")
        assert re.search(rf"rank \d: in {re.escape(words(moves[other][0]))} at \S*test_watch.py:\d+", first.text)
        assert_broken(after)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 4])
def test_a_move_that_others_do_not_make_ends_by_the_limit(fresh: Fresh, size: int) -> None:
    many, more = [move(size, "S(0)", "B")], [move(size, "S(0)", "B"), move(size, "S(0)", "S(1)")]
    ended = survivors(fresh(size, ask_only, [more, *[many] * (size - 1)], 2.0))
    assert_told(ended[0][0], "no answer within 2 s", words(more[1]), words(many[0]), by_limit=True)
    assert all(told.kind == "" for rank in range(1, size) for told in ended[rank])


def ask_only(moves: Sequence[Sequence[Move]], limit: float) -> Told:
    rank = meet()
    return told(limit, lambda: make(moves[rank], rank))


def ask_and_leave(moves: Sequence[Sequence[Move]], limit: float) -> Told:
    said = ask_only(moves, limit)
    flow.boxing.close()
    return said


def test_a_move_with_ranks_that_have_left_ends_by_the_limit(fresh: Fresh) -> None:
    many, more = [move(2, "S(0)", "B")], [move(2, "S(0)", "B"), move(2, "S(0)", "S(1)")]
    ended = survivors(fresh(2, ask_and_leave, [more, many], 2.0))
    assert_told(ended[0][0], words(more[1]), "rank 1", by_limit=True)


def test_ranks_that_differ_within_a_part_of_the_world(fresh: Fresh) -> None:
    """Two rows of a grid; in one of them ranks differ, the other goes on."""
    ended = survivors(fresh(4, ask_in_rows, LIMIT))
    for rank in (2, 3):
        assert_told(ended[rank][0], "ranks 2 and 3" if rank == 2 else "ranks 3 and 2", "different moves")
    assert [ended[rank][0].kind for rank in (0, 1)] == ["", ""]


def ask_in_rows(limit: float) -> Told:
    rank = meet()
    p = placement("cpu", [[0, 1], [2, 3]])
    a, b, c = (layout(p, sbp, (8, 8)) for sbp in ("(B, S(0))", "(B, B)", "(B, S(1))"))
    return told(limit, lambda: make([(a, c if rank == 3 else b)] * 2, rank))


def test_ranks_that_differ_in_moves_under_way(fresh: Fresh) -> None:
    moves = [move(2, "S(0)", "B"), move(2, "P", "B"), move(2, "S(1)", "S(0)")]
    ended = survivors(fresh(2, ask_async, [moves, [moves[0], moves[2], moves[1]]], LIMIT))
    for rank in (0, 1):
        assert_told(ended[rank][0], "different moves")


def ask_async(moves: Sequence[Sequence[Move]], limit: float) -> Told:
    rank = meet()

    def act() -> None:
        for pending in [box_async(shards(src, rank), src, dst) for src, dst in moves[rank]]:
            pending.wait()

    return told(limit, act)


def test_a_backward_that_others_do_not_make(fresh: Fresh) -> None:
    ended = survivors(fresh(2, back, LIMIT))
    for rank in (0, 1):
        assert_told(ended[rank][0], "different moves")


def back(limit: float) -> Told:
    rank = meet()
    src, dst = move(2, "S(0)", "B")
    (x,) = shards(src, rank)
    (out,) = box([x.requires_grad_()], src, dst.to(B, grad_sbp=P))
    other = move(2, "P", "B")
    return told(limit, (lambda: torch.autograd.backward(out.sum())) if rank else (lambda: make([other], rank)))


# -- ranks that die --


def die(how: Death) -> None:
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


def lose_before(victim: int, how: Death, limit: float) -> list[Told]:
    rank = meet()
    if rank == victim:
        die(how)
    move_ = move(world().size or 0, "P", "B")
    return [told(limit, lambda: make([move_], rank)) for _ in range(2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["exit", "kill"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_died_before_a_move(fresh: Fresh, victim: int, how: Death, size: int) -> None:
    ended = fresh(size, lose_before, victim, how, LIMIT)
    assert ended[victim].code == (7 if how == "exit" else -signal.SIGKILL)
    for first, after in survivors(ended, lost=[victim]).values():
        assert_told(first, f"rank {victim} died", words(move(size, "P", "B")))
        assert_broken(after)


def lose_inside(how: Death, size: int, limit: float, native: bool | None) -> list[Told]:
    """Rank 1 dies while it waits in a move for the last rank, which comes late."""
    rank = meet()
    if rank == 1:
        threading.Timer(0.5, die, [how]).start()
    if rank == (0 if size == 2 else size - 1):
        time.sleep(1.0)
    # Small enough to be sent before the death, so the first may still succeed on those that come late.
    return [told(limit, lambda: make([move(size, "P", "B")] * 2, rank), native) for _ in range(2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["exit", "kill"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_dies_inside_a_move(fresh: Fresh, how: Death, size: int, way: str) -> None:
    ended = fresh(size, lose_inside, how, size, LIMIT, WAYS[way])
    assert ended[1].code == (7 if how == "exit" else -signal.SIGKILL)
    for first, after in survivors(ended, lost=[1]).values():
        assert_told(first, "rank 1", words(move(size, "P", "B")))
        assert_broken(after)


def lose_midway(delay: float, limit: float) -> Told:
    """Rank 1 dies with 64 MiB on the wire."""
    rank = meet()
    move_ = move(2, "P", "B", (4096, 4096))
    data = shards(move_[0], rank)
    if rank == 1:
        threading.Timer(delay, die, ["kill"]).start()

    def act() -> None:
        while True:
            box(data, *move_)

    return told(limit, act)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("delay", [0.02, 0.2])
def test_a_rank_that_dies_with_data_on_the_wire(fresh: Fresh, delay: float) -> None:
    ended = survivors(fresh(2, lose_midway, delay, LIMIT), lost=[1])
    assert_told(ended[0][0], "rank 1 died")


class Kernel:
    """An exchange that was given to a card."""

    def __init__(self, done: bool) -> None:
        self.done = done

    def is_completed(self) -> bool:
        return self.done


def lose_on_cards(done: bool) -> bool:
    """Rank 1 dies when rank 0's card has a move with it, which ends on the card or does not."""
    rank = meet()
    told(LIMIT, lambda: make([move(2, "P", "B")], rank))
    if rank == 1:
        die("kill")
    wire = transport()
    assert isinstance(wire, Dist)
    watch.GRACE = 0.3
    turn = Turn(1, 1, 1, (0, 1), b"a move\nline 7")
    wire.watch.on_cards[turn.key] = turn, [Kernel(done)]
    time.sleep(1.5)
    return wire.watch.broken is None


@pytest.mark.parametrize("done", [True, False])
def test_a_rank_that_dies_while_cards_wait_for_it(fresh: Fresh, done: bool) -> None:
    """No wait of the host ends with numbers that nobody computed: the process is ended, and says why."""
    end = fresh(2, lose_on_cards, done)[0]
    if done:
        assert end.answer is not None
        assert end.answer.value is True, end
        return
    assert end.code == -signal.SIGABRT
    assert "rank 1 died\n  in a move\n  at line 7" in end.stderr
    assert "rank 0 is ended: its cards wait for what will not come" in end.stderr


def part(limit: float) -> Told:
    """Rank 1 does its part of a move and ends at once, while rank 0, which waits for it, gets no processor."""
    rank = meet()
    src, dst = move(2, "S(0)", "B")
    pids = [int(x) for x in box([torch.tensor([os.getpid()])], *of_pids(2))[0]]

    def act() -> None:
        if rank == 1:
            time.sleep(0.3)
            subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {pids[0]}"])
            os.kill(pids[0], signal.SIGSTOP)
        box(shards(src, rank), src, dst)
        if rank == 1:
            os._exit(0)

    return told(limit, act)


def of_pids(ranks: int) -> Move:
    lie = layout(line(ranks), S(0), (ranks,), torch.int64)
    return lie, lie.to(B)


def test_a_rank_that_did_its_part_may_end(fresh: Fresh) -> None:
    """What it sent is there, however late the others look."""
    ended = survivors(fresh(2, part, LIMIT), lost=[1])
    assert ended[0][0].kind == "", ended[0][0].text


def stumble(limit: float) -> Told:
    rank = meet()
    if rank == 2:
        raise ValueError("a mistake of the user's own")
    return told(limit, lambda: make([move(4, "S(0)", "B")], rank))


def test_a_rank_that_ends_with_an_error_of_its_own(fresh: Fresh) -> None:
    ended = fresh(4, stumble, LIMIT)
    assert ended[2].code == 1
    assert ended[2].answer is not None
    assert "a mistake of the user's own" in (ended[2].answer.error or "")
    for (only,) in survivors(ended, lost=[2]).values():
        assert_told(only, words(move(4, "S(0)", "B")), "rank 2")


# -- ranks that are stuck --


def stop(victim: int, limit: float, native: bool | None) -> Told:
    rank = meet()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    return told(limit, lambda: make([move(world().size or 0, "P", "B")], rank), native)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_stuck_is_told_by_the_limit(fresh: Fresh, size: int, victim: int, way: str) -> None:
    ended = fresh(size, stop, victim, 2.0, WAYS[way])
    assert ended[victim].code is None, "it was to be stopped until it is killed"
    for (only,) in survivors(ended, lost=[victim]).values():
        assert_told(only, "no answer within 2 s", f"rank {victim}: in float32 (8, 8) as (S(0),)", by_limit=True)


# -- shards that do not fit, on one rank --

MISFITS: Mapping[str, tuple[str, str, Callable[[Tensor], list[Tensor]]]] = {
    "dtype": ("DtypeError", "torch.float64 (2, 8)", lambda x: [x.double()]),
    "shape": ("ShapeError", "torch.float32 (3, 8)", lambda x: [torch.ones(3, 8)]),
    "dims": ("ShapeError", "torch.float32 (16,)", lambda x: [x.reshape(-1)]),
    "device": ("DtypeError", "on meta", lambda x: [x.to("meta")]),
    "number": ("ShapeError", "2 shards for 1 ranks", lambda x: [x, x]),
}


def misfit(kind: str, pause: float, limit: float) -> list[Told]:
    rank = meet()
    src, dst = move(4, "S(0)", "B")
    (piece,) = shards(src, rank)
    given = MISFITS[kind][2](piece) if rank == 1 else [piece]
    first = told(limit, lambda: box(given, src, dst))
    time.sleep(pause)
    return [first, told(limit, lambda: box([piece], src, dst))]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", MISFITS)
@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_a_shard_that_does_not_fit_on_one_rank_is_told_to_all(fresh: Fresh, kind: str, pause: float) -> None:
    """Also where its rank goes on at once; what was wrong is then no longer written anywhere."""
    error, found, _ = MISFITS[kind]
    for rank, (first, after) in survivors(fresh(4, misfit, kind, pause, LIMIT)).items():
        if rank == 1:
            assert_told(first, found, "float32 (8, 8) as (S(0),) on cpu:[0-3]", kind=error)
        else:
            assert_told(first, words(move(4, "S(0)", "B")), "rank 1 gave up", found if pause else "")
        assert after.kind == "TransportError", "all are out of step now"
        assert "no answer within" not in after.text


# -- errors that are the same on all ranks, after which they still work together --


def together() -> bool:
    here = world()
    src, dst = move(here.size or 0, P, B)
    return bool((box(shards(src, here.rank or 0), src, dst)[0] == (here.size or 0)).all())


def beyond_the_dims() -> tuple[str, ...]:
    said = []
    for dim in (2, 7, -3):
        with pytest.raises(ShapeError) as error:
            layout(line(4), S(dim), (8, 8))
        said.append(str(error.value))
    return (*said, str(together()))


def test_a_dim_out_of_range_is_the_same_error_everywhere(ranks4: Ranks) -> None:
    (said,) = set(ranks4(beyond_the_dims))
    for dim, text in zip((2, 7, -3), said, strict=False):
        assert text == f"S({dim}) is out of range for a tensor of shape (8, 8)\n  dims are -2 to 1"
    assert said[-1] == "True"


def beyond_the_world() -> tuple[str, ...]:
    far = layout(placement("cpu", [3, 4]), S(0), (8,))
    near = layout(line(4), B, (8,))
    said = []
    for src, dst in ((far, near), (near, far), (far, far.to(B))):
        with pytest.raises(PlacementError) as error:
            box([torch.ones(8)], src, dst)
        said.append(str(error.value))
    return (*said, str(together()))


def test_a_placement_beyond_the_world_is_the_same_error_everywhere(ranks4: Ranks) -> None:
    (said,) = set(ranks4(beyond_the_world))
    for text in said[:-1]:
        assert text.startswith('rank 4 of placement("cpu:[3-4]") does not exist\n  4 processes were started')
        assert "torchrun --nproc-per-node 5" in text
    assert said[-1] == "True"


def misfit_everywhere() -> tuple[str, ...]:
    src, dst = move(4, "S(0)", "B")
    said = []
    for kind, (_, _, spoil) in MISFITS.items():
        with pytest.raises(SbpflowError) as error:
            box(spoil(torch.ones(2, 8)), src, dst)
        said.append(f"{kind}: {error.value}".replace(f"rank {world().rank}", "rank r"))
        said.append(str(together()))
    return tuple(said)


def test_a_misfit_on_all_ranks_leaves_them_together(ranks4: Ranks) -> None:
    said = ranks4(misfit_everywhere)
    assert said[0][1::2] == ("True",) * len(MISFITS)
    assert len({tuple(text.partition("\n")[0] for text in each) for each in said}) == 1


def without_cuda() -> tuple[str, ...]:
    src = layout(placement("cuda", range(4)), S(0), (8,))
    with pytest.raises(SbpflowError) as error:
        box([torch.ones(2)], src, src.to(B))
    return str(error.value), str(together())


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without")
def test_cuda_where_there_is_none_is_the_same_error_everywhere(ranks4: Ranks) -> None:
    ((text, still),) = set(ranks4(without_cuda))
    assert "needs CUDA, which torch does not find here" in text
    assert still == "True"


PIECES: Mapping[str, tuple[str, Callable[[int], Tensor]]] = {
    "rows": ("ShapeError", lambda rank: torch.ones(2 + (rank == 1), 8)),
    "columns": ("ShapeError", lambda rank: torch.ones(2, 8 + (rank == 1))),
    "dims": ("ShapeError", lambda rank: torch.ones(2, 8, *[1] * (rank == 1))),
    "dtype": ("DtypeError", lambda rank: torch.ones(2, 8, dtype=torch.float64 if rank == 1 else None)),
}


def adopt(kind: str) -> tuple[str, str, str]:
    with pytest.raises(SbpflowError) as error:
        layout_of([PIECES[kind][1](world().rank or 0)], line(4), S(0))
    return type(error.value).__name__, str(error.value), str(together())


@pytest.mark.parametrize("kind", PIECES)
def test_unequal_pieces_are_the_same_error_everywhere(ranks4: Ranks, kind: str) -> None:
    ((name, text, still),) = set(ranks4(adopt, kind))
    assert name == PIECES[kind][0]
    assert "rank" in text
    assert still == "True"


# -- ranks on hosts of their own, which hear of each other by heartbeats --


def own_host(rank: int) -> dict[str, str]:
    return {"SBPFLOW_HOST": f"host{rank}"}


def two_hosts(rank: int) -> dict[str, str]:
    return {"SBPFLOW_HOST": f"host{rank // 2}"}


@pytest.mark.sweep
@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("hosts", [own_host, two_hosts])
def test_ranks_of_many_hosts_that_differ_are_told(fresh: Fresh, case: str, hosts: Hosts) -> None:
    many, one = DIFFERENT[case](4)
    moves = [many, many, one, many]
    for rank, (first, after) in survivors(fresh(4, ask, moves, LIMIT, environment=hosts)).items():
        assert_told(first, words(moves[rank][0]), "different moves")
        assert_broken(after)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("hosts", [own_host, two_hosts])
def test_a_rank_of_many_hosts_that_dies(fresh: Fresh, victim: int, hosts: Hosts) -> None:
    """Rank 0 also keeps the store, at which they met."""
    ended = survivors(fresh(4, lose_before, victim, "kill", LIMIT, environment=hosts), lost=[victim])
    for first, after in ended.values():
        assert_told(first, words(move(4, "P", "B")), f"rank {victim} died")
        assert_broken(after)


@pytest.mark.sweep
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_of_many_hosts_that_is_stuck(fresh: Fresh, victim: int) -> None:
    ended = survivors(fresh(4, stop, victim, 2.0, False, environment=own_host), lost=[victim])
    for (only,) in ended.values():
        assert_told(only, "no answer within 2 s", words(move(4, "P", "B")), by_limit=True)


@pytest.mark.sweep
def test_a_misfit_on_one_of_many_hosts(fresh: Fresh) -> None:
    for rank, (first, _) in survivors(fresh(4, misfit, "shape", 0.0, 2.0, environment=own_host)).items():
        assert_told(first, kind="ShapeError" if rank == 1 else "TransportError", by_limit=True)
