"""A thread reads ahead as far as it is told, hands errors on with their line, and ends with who reads."""

import threading
import traceback
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from sbpflow.nn.data.read_ahead import ReadAhead
from tests.ranks import Answer, Fresh


def counted(read: list[int], fails: int = 99) -> Iterator[int]:
    for number in range(10):
        if number == fails:
            raise OSError("torn")
        read.append(number)
        yield number


def test_items_come_in_their_order() -> None:
    assert list(ReadAhead(counted([]), 3, "reader")) == list(range(10))


def test_so_many_are_read_ahead_and_no_more() -> None:
    read: list[int] = []
    with closing(ReadAhead(counted(read), 2, "reader")) as ahead:
        assert next(iter(ahead)) == 0
        assert len(read) <= 4  # one given, two that wait, one that waits for room


def test_an_error_comes_when_it_is_its_turn_with_the_line_that_raised_it() -> None:
    found = list[int]()
    with pytest.raises(OSError, match="torn") as caught:
        found.extend(ReadAhead(counted([], fails=2), 5, "reader"))
    assert "counted" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_ends_the_reading_reaches_who_reads(error: type[BaseException]) -> None:
    def items() -> Iterator[int]:
        yield 0
        raise error

    with pytest.raises(error):
        list(ReadAhead(items(), 2, "reader"))


@pytest.mark.parametrize("left", [True, False], ids=["left", "read"])
def test_what_is_read_is_closed_by_the_thread_that_reads_it(left: bool) -> None:
    class Items:
        def __init__(self) -> None:
            self.items, self.closed = iter(range(9)), list[str]()

        def __iter__(self) -> Iterator[int]:
            return self.items

        def close(self) -> None:
            self.closed.append(threading.current_thread().name)

    held: Any = Items()
    with closing(ReadAhead(held, 2, "reader")) as ahead:
        for _ in iter(ahead):
            if left:
                break
    assert held.closed == ["reader"]


def test_the_thread_ends_with_who_reads() -> None:
    ahead = ReadAhead(counted([]), 1, "reader that is left")
    for _ in iter(ahead):
        break
    ahead.close()
    assert "reader that is left" not in [thread.name for thread in threading.enumerate()]


def left() -> None:
    items = iter(ReadAhead(iter(range(9)), 2, "reader"))
    assert next(items) == 0
    threading.left = items  # type: ignore[attr-defined] # a module that goes late: so it may be with any name


def test_a_program_that_ends_in_the_middle_of_a_loop_says_nothing(fresh: Fresh) -> None:
    (end,) = fresh(1, left, freed=True)
    assert (end.answer, end.code, end.stderr) == (Answer(), 0, "")
