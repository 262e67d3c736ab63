"""Orders of schedules whose chunks go down the devices and up again: ZB-V, V-Half and V-Min, for any p and m.

Each device has a shallow chunk s and a deep one 2p-1-s. All times being 1, the orders come from what the devices would
do of themselves under two limits: slots on a device, and micro-batches that a chunk may have begun and not taken back.

    ZB-V     2p slots     F and B in a fixed order, W where there is nothing else to do: nobody waits once begun
    V-Half   p+2 slots    half of 1F1B's memory: a micro-batch takes 6 units, and a hop and its way back 3
    V-Min    2p/3 + ...   a third of it: a hop and its way back 2

A chunk that is l units from F to B has l/6 micro-batches under way, rounded up: that is its limit.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache

from .text import Action

__all__ = ["ORDERS", "slots"]

Rows = tuple[tuple[Action, ...], ...]


def slots(name: str, p: int) -> int:
    """Slots of activations on each device, a chunk and a micro-batch each; 2p are what 1F1B's first device has."""
    return {"zb_v": 2 * p, "v_half": p + 2, "v_min": min(2 * p, 2 * ((p + 1) // 3) + 2)}[name]


@lru_cache(maxsize=64)
def zb_v(p: int, m: int) -> Rows:
    line = _Line(p, m, slots("zb_v", p))
    fixed = [deque(_waves(p, m, s)) for s in range(p)]

    def next_op(s: int) -> Action | None:
        if fixed[s] and line.ready(fixed[s][0]):
            return fixed[s].popleft()
        return Action("W", *line.pending[s][0]) if line.pending[s] else None

    return line.run(next_op)


def _waves(p: int, m: int, s: int) -> Iterator[Action]:
    """F and B of a device: fill the line, repeat shallow F, shallow B, deep F and deep B, then empty it."""
    deep = 2 * p - 1 - s
    did = {(kind, chunk): 0 for kind in "FB" for chunk in (s, deep)}

    def some(*listed: tuple[str, int]) -> Iterator[Action]:
        for kind, chunk in listed:
            number = did[kind, chunk]
            if number < (m if kind == "F" else did["F", chunk]):
                did[kind, chunk] += 1
                yield Action(kind, chunk, number)

    for _ in range(2 * (p - s) - 1):
        yield from some(("F", s))
    for _ in range(s):
        yield from some(("F", deep), ("F", s))
    for _ in range(p - s):
        yield from some(("F", deep), ("B", deep))
    while did["F", deep] < m:
        yield from some(("F", s), ("B", s), ("F", deep), ("B", deep))
    while did["B", s] < m:
        yield from some(("B", s), ("B", deep))


@lru_cache(maxsize=64)
def v_half(p: int, m: int) -> Rows:
    # What is added to the hops is the stay at the turns; of those tried these left the fewest idle units at every p.
    return _limited(p, m, slots("v_half", p), hop=3, shallow=10, deep=4 if p % 2 == 0 else 1)


@lru_cache(maxsize=64)
def v_min(p: int, m: int) -> Rows:
    # Only with this stay, by p modulo 3, do the F and B of both chunks fall on different units of the six.
    stay = 1 + 2 * ((1 - p) % 3)
    return _limited(p, m, slots("v_min", p), hop=2, shallow=stay + 2, deep=stay)


def _limited(p: int, m: int, most: int, *, hop: int, shallow: int, deep: int) -> Rows:
    """F before B before W, the deep chunk first in F and the shallow one in B, each chunk within its limit."""
    line = _Line(p, m, most)
    limits = [-(-(hop * (2 * p - 2 - s) + shallow) // 6) for s in range(p)]
    limits += [-(-(hop * s + deep) // 6) for s in reversed(range(p))]

    def next_op(s: int) -> Action | None:
        for kind, chunk in (("F", 2 * p - 1 - s), ("F", s), ("B", s), ("B", 2 * p - 1 - s)):
            op = Action(kind, chunk, line.did[kind][chunk])
            if kind == "F" and op.number - line.did["B"][chunk] >= limits[chunk]:
                continue
            if line.ready(op):
                return op
        for chunk in (2 * p - 1 - s, s):
            if line.did["W"][chunk] < line.did["B"][chunk]:
                return Action("W", chunk, line.did["W"][chunk])
        return None

    return line.run(next_op)


class _Line:
    """The devices at one instant: what each chunk has done, and when."""

    def __init__(self, p: int, m: int, most: int) -> None:
        self.p, self.m, self.most = p, m, most
        self.now = 0
        self.did = {kind: [0] * (2 * p) for kind in "FBW"}
        self.when: dict[Action, int] = {}
        self.used = [0] * p
        self.pending: list[deque[tuple[int, int]]] = [deque() for _ in range(p)]  # chunk and micro-batch, B done, W not
        self.rows: list[list[Action]] = [[] for _ in range(p)]

    def ready(self, op: Action) -> bool:
        kind, chunk, number, _ = op
        if kind == "F":
            place = chunk if chunk < self.p else 2 * self.p - 1 - chunk
            before = Action("F", chunk - 1, number)
            return number < self.m and self.used[place] < self.most and (not chunk or self._done(before))
        behind = Action("B", chunk + 1, number)
        return self._done(Action("F", chunk, number)) and (chunk == 2 * self.p - 1 or self._done(behind))

    def _done(self, op: Action) -> bool:
        return self.when.get(op, self.now) < self.now

    def run(self, next_op: Callable[[int], Action | None]) -> Rows:
        """Let every device do one thing a unit until all is done. All choose before any of them is done."""
        left = 6 * self.p * self.m
        while left:
            chosen = [(s, op) for s in range(self.p) if (op := next_op(s)) is not None]
            assert chosen, f"the order of p={self.p} m={self.m} stops at {self.now}"
            for s, op in chosen:
                self._do(s, op)
            left -= len(chosen)
            self.now += 1
        return tuple(map(tuple, self.rows))

    def _do(self, s: int, op: Action) -> None:
        kind, chunk, number, _ = op
        self.when[op] = self.now
        self.did[kind][chunk] += 1
        self.rows[s].append(op)
        if kind == "F":
            self.used[s] += 1
        elif kind == "B":
            self.pending[s].append((chunk, number))
        else:
            self.pending[s].remove((chunk, number))
            self.used[s] -= 1


ORDERS: dict[str, Callable[[int, int], Rows]] = {"zb_v": zb_v, "v_half": v_half, "v_min": v_min}
