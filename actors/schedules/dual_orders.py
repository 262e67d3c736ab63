"""Orders in which a device runs a forward together with a backward of another micro-batch: DualPipe and DualPipeV.

Every device has two chunks, and micro-batches come to it from two sides: near ones, which have come a short way when
they are here for the first time, and far ones. In DualPipe these are the two routes through two copies of the model; in
DualPipeV they are one line, which goes down the devices and up again: half of a DualPipe, with half the copies.

    fill     near forwards, two for each device that is nearer to the middle
    cross    near and far forwards by turns
    return   far backwards come in, their W at once, as there is nothing else to do
    main     a near forward with a far backward, a far forward with a near backward
    leave    the same from the end: far backwards, then near ones, of which late ones leave W for the gaps

What two tasks send while they run, such as the all-to-alls of experts, goes on under what the other one computes.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache

from .text import Action

__all__ = ["DUAL_ORDERS", "dualpipe", "dualpipe_v"]

Rows = tuple[tuple[Action, ...], ...]


@lru_cache(maxsize=64)
def dualpipe(p: int, m: int) -> Rows:
    """Rows of two routes. Fewer than 2p micro-batches leave out the last of so many."""
    half, many = (p + 1) // 2, max(p, (m + 1) // 2)  # many: of each route
    counts, routes = ((m + 1) // 2, m // 2), min(2, m)
    rows = []
    for s in range(p):
        inside = min(s, p - 1 - s)
        chunks = (s, 2 * p - 1 - s) if s < half else (2 * p - 1 - s, s)
        device = _Device(chunks, half - inside - 1, inside + 1, many - 2 * half + inside + 1)
        row = (op for op in device.row() if op.number < counts[op.chunk // p])
        rows.append(_joined(tuple(op._replace(number=op.number * routes + op.chunk // p) for op in row)))
    return tuple(rows)


@lru_cache(maxsize=64)
def dualpipe_v(p: int, m: int) -> Rows:
    """Rows of a line down and up again. Fewer than 2p micro-batches leave out the last of so many."""
    many = max(m, 2 * p)
    rows = []
    for s in range(p):
        device = _Device((s, 2 * p - 1 - s), p - s - 1, s + 1, many - 2 * p + s + 1)
        rows.append(_joined(tuple(op for op in device.row() if op.number < m)))
    return tuple(rows)


def _joined(row: tuple[Action, ...]) -> tuple[Action, ...]:
    """The row, in which a forward is together with the backward behind it only where that was not left out."""
    behind = (*row[1:], None)
    return tuple(
        op._replace(joined=op.joined and next_op is not None and next_op.kind == "B")
        for op, next_op in zip(row, behind, strict=True)
    )


class _Device:
    """One device with its near and its far chunk, and how many rounds it has of each part."""

    def __init__(self, chunks: tuple[int, int], fill: int, cross: int, main: int) -> None:
        self.chunks, self.fill, self.cross, self.main = chunks, fill, cross, main
        self.did = {(kind, far): 0 for kind in "FBW" for far in (0, 1)}
        self.late: deque[Action] = deque()  # W whose B is done

    def row(self) -> Iterator[Action]:
        near, far = 0, 1
        for _ in range(2 * self.fill):
            yield self.next("F", near)
        for _ in range(self.cross):
            yield self.next("F", near)
            yield self.next("F", far)
        for _ in range(self.fill):
            yield from self.back(far)
            yield self.next("F", far)
        for turn in range(self.main):
            # In the middle, where both routes turn, the first two are not together: each would wait for the other.
            yield self.next("F", near)._replace(joined=bool(turn or self.fill))
            yield from self.back(far)
            yield self.next("F", far)._replace(joined=True)
            yield from self.back(near)
        for _ in range(self.fill):
            yield from self.back(far)
            yield self.next("F", far)._replace(joined=True)
            yield from self.back(near)
        yield from self.leave()

    def leave(self) -> Iterator[Action]:
        """Backwards only: from half of the crossing on W is left for later."""
        at = 0
        for _ in range(self.cross):
            for far in (1, 0):
                yield from self.back(far, late=at >= self.cross)
                at += 1
        for _ in range(self.fill):
            yield self.late.popleft()
            yield from self.back(0, late=True)
        yield from self.late

    def next(self, kind: str, far: int) -> Action:
        number = self.did[kind, far]
        self.did[kind, far] += 1
        return Action(kind, self.chunks[far], number)

    def back(self, far: int, *, late: bool = False) -> Iterator[Action]:
        yield self.next("B", far)
        weights = self.next("W", far)
        if late:
            self.late.append(weights)
        else:
            yield weights


DUAL_ORDERS: dict[str, Callable[[int, int], Rows]] = {"dualpipe": dualpipe, "dualpipe_v": dualpipe_v}
