"""Repeated blocks of a graph: what belongs to each, and which of them are alike, so that one can stand for all.

    blocks.0  blocks.1  blocks.2  ...  blocks.11     12 alike: one is drawn, "x 12"
    a b a b a b                                      3 times a pair: both are drawn, "x 3"

Alike are blocks of the same calls, layouts, moves, moves of gradients and parameters, wired the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from .physical import Back, Box, Graph, Op, Source, Step, Var

__all__ = ["Blocks", "Run"]

LONGEST = 6  # blocks of a pattern that repeats

Wire: TypeAlias = tuple[int | None, int | str]  # of which block before (None: outside), and which of its values


class Run(NamedTuple):
    """Neighbouring blocks in which a pattern of `period` repeats `times`."""

    members: tuple[str, ...]
    period: int

    @property
    def times(self) -> int:
        return len(self.members) // self.period

    def like(self, at: int) -> tuple[str, ...]:
        """All that the block at this place of the pattern stands for, itself the first."""
        return self.members[at :: self.period]


class _Block:
    """What belongs to one block; values are numbered in order, sources first."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.steps: list[Op | Box] = []
        self.backs: list[Back] = []

    @cached_property
    def numbers(self) -> dict[str, int]:
        made = (y.name for step in self.steps for y in step.outputs)
        return {name: n for n, name in enumerate([*(s.value.name for s in self.sources), *made])}


class Blocks:
    """The repeated blocks of a graph; a block is what shares one `origin.block`, and the sources under that path.

    Three repeats are folded, in an overview two; of fewer each is drawn. In an overview what comes from another
    placement stands before the blocks there, so that the first of them is like the others.
    """

    def __init__(self, graph: Graph, *, overview: bool = False) -> None:
        self.graph, self.fewest = graph, 2 if overview else 3
        names = dict.fromkeys(step.origin.block for step in graph.steps if step.origin.block)
        self._blocks = {name: _Block() for name in names}
        self._home: dict[str, str] = {}  # of each value: its block
        for source in graph.sources:
            block = self.around(source.value.name)
            if block:
                self._home[source.value.name] = block
                self._blocks[block].sources.append(source)
        for step in graph.steps:
            block = step.origin.block
            # A move of what comes from outside stands before all blocks, as the first of them is the one to ask for it.
            enters = isinstance(step, Box) and (not self.of(step.source) or (overview and self._crosses(step)))
            if block and not enters:
                self._home.update((y.name, block) for y in step.outputs)
                self._blocks[block].steps.append(step)
        for back in graph.backs:
            if self.of(back.of):
                self._blocks[self.of(back.of)].backs.append(back)

    def _crosses(self, box: Box) -> bool:
        return self.graph.layout(box.source).placement is not box.output.layout.placement

    def of(self, value: str) -> str:
        """The block that a value is made in, or whose parameter it is; "" outside of all."""
        return self._home.get(value, "")

    def module(self, step: Step) -> str:
        """The module of a step; of a move that stands before the blocks the one around them."""
        if step.origin.block and not self.of(step.outputs[0].name):
            return ".".join(step.origin.block.split(".")[:-2])
        return step.origin.module

    def around(self, path: str) -> str:
        """The block that this path of a module or a parameter is in, itself included."""
        while path and path not in self._blocks:
            path = path.rpartition(".")[0]
        return path

    def generic(self, path: str, block: str) -> str:
        """A path with a star where the number of its block stands: the same for all repeats."""
        inside = block and (path == block or path.startswith(block + "."))
        return f"{block.rpartition('.')[0]}.*{path[len(block) :]}".removeprefix(".") if inside else path

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Every run of several blocks, in order."""
        families: dict[str, list[str]] = {}
        for name in self._blocks:
            families.setdefault(name.rpartition(".")[0], []).append(name)
        return tuple(run for names in families.values() for run in self._runs(names))

    @cached_property
    def folded(self) -> dict[str, str]:
        """For each block that another one stands for, that one."""
        pairs = ((like, run.members[at]) for run in self.runs for at in range(run.period) for like in run.like(at)[1:])
        return dict(pairs)

    @cached_property
    def stand_in(self) -> dict[str, str]:
        """For each value of a block that another one stands for, the value there."""
        found: dict[str, str] = {}
        for name, other in self.folded.items():
            found.update(zip(self._blocks[name].numbers, self._blocks[other].numbers, strict=True))
        return found

    def _runs(self, names: Sequence[str]) -> Iterator[Run]:
        at = {name: i for i, name in enumerate(names)}
        keys = [self._key(self._blocks[name]) for name in names]
        wires = [list(self._wires(i, name, at)) for i, name in enumerate(names)]
        start = 0
        while start < len(names):
            best = start + 1
            period = 1
            for p in range(1, min(LONGEST, (len(names) - start) // self.fewest) + 1):
                end = start + p
                while (
                    end < len(names)
                    and keys[end] == keys[end - p]
                    and _wired(wires[end], wires[end - p], end - start, p)
                ):
                    end += 1
                end -= (end - start) % p
                if end - start >= self.fewest * p and end > best:
                    best, period = end, p
            if best - start > 1:
                yield Run(tuple(names[start:best]), period)
            start = best

    def _key(self, block: _Block) -> tuple[Any, ...]:
        """All that must be equal in blocks that are alike, but for where their inputs come from."""
        outside: dict[str, Any] = {}

        def known(name: str) -> Any:
            if name in block.numbers:
                return block.numbers[name]
            return outside.setdefault(name, ("from outside", len(outside), self.graph.layout(name)))

        steps: list[tuple[Any, ...]] = []
        for step in block.steps:
            made = tuple((y.layout, y.grad) for y in step.outputs)
            if isinstance(step, Op):
                again = bool(step.origin.recompute)
                steps.append(
                    (step.op, _plain(step.args, known), _plain(dict(step.kwargs), known), made, step.grad, again)
                )
            else:
                steps.append((known(step.source), made))
        sources = tuple((s.kind, s.value.layout, s.update) for s in block.sources)
        backs = tuple((known(back.of), known(back.into), back.src, back.dst) for back in block.backs)
        return sources, tuple(steps), backs

    def _wires(self, index: int, name: str, at: dict[str, int]) -> Iterator[Wire]:
        """Where each tensor comes from that enters a block."""
        block = self._blocks[name]
        for value in dict.fromkeys(v for step in block.steps for v in step.inputs if v not in block.numbers):
            home = self.of(value)
            if home in at:
                yield index - at[home], self._blocks[home].numbers[value]
            else:
                yield None, value


def _wired(wires: Sequence[Wire], before: Sequence[Wire], at: int, period: int) -> bool:
    """Whether a block at this place of a run is wired as the one a period before it.

    What comes to the first blocks from before the run comes to later ones from the run itself.
    """
    return len(wires) == len(before) and all(
        a == b or (a[0] is not None and a[0] <= at and (b[0] is None or b[0] > at - period))
        for a, b in zip(wires, before, strict=True)
    )


def _plain(value: Any, known: Callable[[str], Any]) -> Any:
    """An argument as something to compare: tensors by what `known` calls them, lists and dicts as tuples."""
    if isinstance(value, Var):
        return "value", known(value.name)
    if isinstance(value, list | tuple):
        return tuple(_plain(part, known) for part in value)
    if isinstance(value, dict):
        return tuple((name, _plain(part, known)) for name, part in sorted(value.items()))
    return type(value), value if value.__hash__ else repr(value)
