"""The record: what moved, by which way, how many bytes, and which line of the user's code asked for it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sbpflow as flow
from sbpflow.boxing import Moves, between, box, box_async, gather, record, scatter
from sbpflow.boxing.record import user_line
from sbpflow.placement import placement, use_cluster
from sbpflow.sbp import B, Layout, P, S, layout

LINE = placement("cpu:[0-3]")
ROWS, COLS, WHOLE, TERMS = (layout(LINE, sbp, (8, 8)) for sbp in (S(0), S(1), B, P))


def shards(lies: Layout) -> list[torch.Tensor]:
    return [torch.ones(lies.local_shape(r)) for r in LINE.flat]


def line_above() -> str:
    """The line above the caller's, as the record tells it."""
    return f"{__file__}:{sys._getframe(1).f_lineno - 1}"


@pytest.fixture(autouse=True)
def priced_by_bytes() -> Iterator[None]:
    with use_cluster("flat"):
        yield


def test_a_record_tells_each_move_and_who_asked() -> None:
    with record() as moves:
        box(shards(ROWS), ROWS, WHOLE)
        asked = line_above()
    (move,) = moves
    assert (move.op, move.route, move.bytes, move.line) == ("box", "all_gather", 192, asked)
    assert (move.boxing.src, move.boxing.dst) == (ROWS, WHOLE)
    assert move.boxing is between(ROWS, WHOLE)


def test_moves_stand_in_the_order_they_happened() -> None:
    with record() as moves:
        box(box(box(shards(TERMS), TERMS, ROWS), ROWS, COLS), COLS, WHOLE)
    assert [move.route for move in moves] == ["reduce_scatter", "all_to_all", "all_gather"]
    assert moves.bytes == 192 + 48 + 192 == sum(move.bytes for move in moves)


def test_what_sends_nothing_is_told_too() -> None:
    with record() as moves:
        box(shards(WHOLE), WHOLE, WHOLE)
        box(shards(WHOLE), WHOLE, ROWS)
        box(shards(WHOLE), WHOLE, TERMS)
    assert [(move.route, move.bytes) for move in moves] == [("view", 0), ("slice", 0), ("to_partial", 0)]


def test_every_way_to_move_has_its_name() -> None:
    with record() as moves:
        gather(scatter(torch.ones(8, 8), ROWS), ROWS)
        box_async(shards(ROWS), ROWS, WHOLE).wait()
        box(shards(ROWS), ROWS, WHOLE, op="to_global")
    assert [move.op for move in moves] == ["scatter", "gather", "box_async", "to_global"]
    assert {move.line.rpartition(":")[0] for move in moves} == {__file__}


def test_backward_is_told_with_the_line_whose_move_it_brings_back() -> None:
    leaves = [shard.requires_grad_() for shard in shards(ROWS)]
    with record() as moves:
        moved = box(leaves, ROWS, WHOLE.to(grad_sbp=P))
        asked = line_above()
        total = sum(out.sum() for out in moved)
        assert isinstance(total, torch.Tensor)
        total.backward()  # type: ignore[no-untyped-call]
    assert [(move.op, move.route) for move in moves] == [("box", "all_gather"), ("box backward", "reduce_scatter")]
    assert moves[1].line == asked


def test_records_may_be_nested_and_each_sees_all_of_its_time() -> None:
    with record() as outer:
        box(shards(ROWS), ROWS, WHOLE)
        with record() as inner:
            box(shards(ROWS), ROWS, COLS)
        box(shards(TERMS), TERMS, WHOLE)
    assert [move.route for move in inner] == ["all_to_all"]
    assert [move.route for move in outer] == ["all_gather", "all_to_all", "all_reduce"]
    assert outer[1] is inner[0]


def test_a_record_that_is_over_stays_as_it_is() -> None:
    with record() as moves:
        pass
    box(shards(ROWS), ROWS, WHOLE)
    assert moves == []


def test_an_error_ends_the_record() -> None:
    with pytest.raises(KeyError), record() as moves:
        raise KeyError
    box(shards(ROWS), ROWS, WHOLE)
    assert moves == []


def test_a_move_that_was_refused_is_not_told() -> None:
    with record() as moves, pytest.raises(flow.SbpflowError):
        box([torch.ones(3, 3)] * 4, ROWS, WHOLE)
    assert moves == []


def test_two_equal_records_are_told_apart() -> None:
    """Lists that are equal, as empty ones are, must not end each other."""
    with record() as outer:
        with record():
            pass
        box(shards(ROWS), ROWS, WHOLE)
    assert len(outer) == 1


def test_a_record_prints_a_line_a_move() -> None:
    away = layout(placement("cpu:[5]"), B, (8, 8))
    with record() as moves:
        box(shards(ROWS), ROWS, WHOLE)
        first = line_above()
        box(shards(WHOLE), WHOLE, away)
        second = line_above()
    assert str(moves).splitlines() == [
        f"box  (S(0),) -> (B,)  all_gather  192 bytes  {first}",
        f"box  (B,) -> (B,) on cpu:[5]  transfer  256 bytes  {second}",
        "2 moves: 448 bytes to a rank, 1024 sent in all",
    ]


def test_an_empty_record_says_so() -> None:
    assert str(Moves()) == "nothing moved"
    assert Moves().bytes == 0


def test_the_facade_has_the_same_record() -> None:
    assert flow.record is record


def ask_from(file: str) -> str:
    """The line that a move asked for in this file would be told with."""
    scope: dict[str, object] = {"user_line": user_line}
    exec(compile("\n\nasked = user_line()\n", file, "exec"), scope)
    return str(scope["asked"])


@pytest.mark.parametrize(
    "file", ["/home/me/train.py", "/home/me/torch/train.py", "/home/me/boxing/train.py", "<stdin>", "<ipython-input-3>"]
)
def test_the_user_s_line_is_found_wherever_the_user_works(file: str) -> None:
    assert ask_from(file) == f"{file}:3"


def test_lines_of_torch_and_of_this_package_are_not_the_user_s() -> None:
    inside = [Path(torch.__file__), Path(flow.boxing.__file__), Path(flow.__file__)]
    assert [ask_from(str(file)).rpartition(":")[0] for file in inside] == [__file__] * 3
