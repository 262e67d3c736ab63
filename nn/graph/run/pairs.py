"""Pairs: a forward and the backward of another micro-batch, which a device runs by turns.

    F  computes, starts a move |           | waits, computes, starts |        | waits, ...
    B                          | the same  |                         | waits  |

Whoever has started moves and must wait for them gives way, so that they go on under what the other computes. Turns
depend on the pauses of the two alone, which are the same on all ranks of a stage, and ranks run the same pairs in one
order: so they start the same moves in the same order, and none waits for one that another has still to start.
"""

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import TypeVar

from ..instructions.overlap import goes_on
from ..tasks.chunks import Chunks
from ..tasks.task import Tasks

__all__ = ["by_turns", "moving"]

T = TypeVar("T")


def by_turns(tasks: Sequence[Generator[None, None, T]]) -> list[T]:
    """The results of tasks, of which each runs to its next pause and then gives way to the next one.

    >>> def task(name, pauses):
    ...     for at in range(pauses):
    ...         print(f"start {name}{at}", end="; ")
    ...         yield
    ...         print(f"wait {name}{at}", end="; ")
    ...     return name
    >>> by_turns([task("F", 2), task("B", 1)])
    start F0; start B0; wait F0; start F1; wait B0; wait F1; ['F', 'B']
    """
    made: dict[int, T] = {}
    turns = deque(enumerate(tasks))
    try:
        while turns:
            at, task = turns.popleft()
            try:
                next(task)
                turns.append((at, task))
            except StopIteration as end:
                made[at] = end.value
    finally:
        for _, task in turns:  # of which another has failed
            task.close()
    return [made[at] for at in range(len(tasks))]


def moving(kinds: Iterable[Sequence[tuple[Tasks, Chunks]]]) -> frozenset[str]:
    """The tasks with moves inside that others can go on beside, of any kind of micro-batch and all routes. Chunks are
    numbered route by route."""
    return frozenset(
        str(name.shifted(route * len(where.group)))
        for routes in kinds
        for route, (tasks, where) in enumerate(routes)
        for name, task in tasks.tasks.items()
        if any(goes_on(do, tasks.transfers) for do in task.todo)
    )
