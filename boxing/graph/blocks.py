"""Repeated blocks and stages of a graph: what belongs to each, and which are alike, so that one can stand for all.

    blocks.0  blocks.1  blocks.2  ...  blocks.11     12 alike: one is drawn, "x 12"
    a b a b a b                                      3 times a pair: both are drawn, "x 3"
    cpu:[0]  cpu:[1]  ...  cpu:[6]  cpu:[7]          stages of a pipeline: those between the first and the last, "x 6"

Alike are blocks of the same calls, layouts, moves, moves of gradients and parameters, wired the same way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from ...placement.structure import mapped
from ...sbp import Layout
from ...sbp.call import frozen
from .physical import Back, Box, GraphStep, Op, Physical, Source, Var

__all__ = ["Blocks", "Repetition", "Stages", "repeated"]

LONGEST = 6  # blocks of a pattern that repeats

BlockWire: TypeAlias = tuple[int | None, int | str]  # a block so many before (None: outside), and a value of it


class Repetition(NamedTuple):
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
    """The ops and values of one block; values are numbered in order, sources first."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.steps: list[Op | Box] = []
        self.backs: list[Back] = []

    @cached_property
    def numbers(self) -> dict[str, int]:
        made = (y.name for step in self.steps for y in step.outputs)
        return {name: n for n, name in enumerate([*(s.value.name for s in self.sources), *made])}


class Blocks:
    """The repeated blocks of a graph; a block is the steps that share one `origin.block`, and the sources under it.

    Three repeats are folded, in an overview two; fewer are drawn one by one. In an overview values from another
    placement stand before the blocks there, and blocks are alike however their inputs lie, so that the first of them is
    like the others.
    """

    def __init__(self, graph: Physical, *, overview: bool = False) -> None:
        self.graph = graph
        names = dict.fromkeys(step.origin.block for step in graph.steps if step.origin.block)
        self._blocks = {name: _Block() for name in names}
        self._home: dict[str, str] = {}  # value -> its block
        for source in graph.sources:
            block = self.around(source.value.name)
            if block:
                self._home[source.value.name] = block
                self._blocks[block].sources.append(source)
        for step in graph.steps:
            block = step.origin.block
            # A move of a value from outside stands before all blocks, because the first of them is the one to ask for
            # it.
            enters = isinstance(step, Box) and (not self.of(step.source) or (overview and _crosses(graph, step)))
            if block and not enters:
                self._home.update((y.name, block) for y in step.outputs)
                self._blocks[block].steps.append(step)
        families: dict[str, list[str]] = {}
        for name in self._blocks:
            families.setdefault(name.rpartition(".")[0], []).append(name)
        entering = (lambda of: None) if overview else (lambda of: of)
        found = _Repeats(graph, self._blocks, self._home, 2 if overview else 3, lambda of: of, entering)
        self.runs = tuple(run for listed in families.values() for run in found.runs(listed))
        self.folded, self.stand_in = found.folded(self.runs), found.stand_in(self.runs)

    def of(self, value: str) -> str:
        """The block that a value is made in, or whose parameter it is; "" outside of all."""
        return self._home.get(value, "")

    def module(self, step: GraphStep) -> str:
        """The module of a step; for a move that stands before the blocks, the module around them."""
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


class Stages:
    """The stages of a pipeline that are alike, from three on.

    A stage is all that is done on one placement, with the moves to there and the sources that are used nowhere else."""

    def __init__(self, graph: Physical) -> None:
        names = dict.fromkeys(str(step.outputs[0].layout.placement) for step in graph.steps)
        stages = {name: _Block() for name in names}
        self._home: dict[str, str] = {}
        used: dict[str, set[str]] = {}
        for step in graph.steps:
            stage = str(step.outputs[0].layout.placement)
            stages[stage].steps.append(step)
            self._home.update((y.name, stage) for y in step.outputs)
            for name in step.inputs:
                used.setdefault(name, set()).add(stage)
        for source in graph.sources:
            name, stage = source.value.name, str(source.value.layout.placement)
            if source.kind != "input" and used.get(name) == {stage}:
                self._home[name] = stage
                stages[stage].sources.append(source)
        found = _Repeats(graph, stages, self._home, 3, _anywhere, _anywhere)
        self.runs = tuple(found.runs(list(names)))
        self.folded, self.stand_in = found.folded(self.runs), found.stand_in(self.runs)

    def of(self, value: str) -> str:
        """The stage that a value is made in, or whose parameter it is."""
        return self._home.get(value, "")

    def last(self, blocks: Blocks) -> dict[str, str]:
        """For each block of a stage that stands for others, that of the last of these."""
        return {blocks.of(here): blocks.of(there) for there, here in self.stand_in.items() if blocks.of(here)}

    @property
    def titles(self) -> dict[str, str]:
        """The names of stages that stand for others."""
        return {like[0]: f"{like[0]} to {like[-1]}:  x {len(like)}" for like in self._alike}

    @property
    def ends(self) -> dict[str, str]:
        """For each of these, the last for which it stands: from there values go on."""
        return {like[0]: like[-1] for like in self._alike}

    @property
    def _alike(self) -> list[tuple[str, ...]]:
        return [run.like(at) for run in self.runs for at in range(run.period) if run.times > 1]


def repeated(run: Repetition, path: str, last: Mapping[str, str]) -> str:
    """The name of a block that stands for those like it, also on other stages, of which `last` has the last.

    >>> layers = Repetition(("h.2", "h.3"), 1)
    >>> repeated(layers, "h.2", {}), repeated(layers, "h.2", {"h.3": "h.13"})
    ('h.2 to 3:  x 2', 'h.2 to 13:  x 2 each')
    """
    like = run.like(run.members.index(path))
    end = last.get(like[-1], "").rpartition(".")[2]
    if run.times == 1:
        return f"{path} to {end}:  one each" if end else path
    between = f", {like[1].rpartition('.')[2]}, ..., " if run.period > 1 else " to "
    return f"{like[0]}{between}{end or like[-1].rpartition('.')[2]}:  x {run.times}{' each' * bool(end)}"


def _crosses(graph: Physical, box: Box) -> bool:
    return graph.layout(box.source).placement is not box.output.layout.placement


def _anywhere(of: Layout) -> Any:
    """A layout, on whatever ranks."""
    return (
        of.placement.type,
        of.placement.shape,
        of.placement.names,
        of.sbp,
        of.state,
        of.shape,
        of.dtype,
        of.grad_partial,
    )


class _Repeats:
    """Blocks in which values have their homes, and which of them are alike, where layouts are equal by `like`, and
    those of values from outside by `entering`."""

    def __init__(
        self,
        graph: Physical,
        blocks: Mapping[str, _Block],
        home: Mapping[str, str],
        fewest: int,
        like: Callable[[Layout], Any],
        entering: Callable[[Layout], Any],
    ) -> None:
        self.graph, self.blocks, self.home, self.fewest = graph, blocks, home, fewest
        self.like, self.entering = like, entering
        for back in graph.backs:
            if back.of in home:
                blocks[home[back.of]].backs.append(back)

    def folded(self, runs: Sequence[Repetition]) -> dict[str, str]:
        """For each block that another one stands for, that one."""
        pairs = ((like, run.members[at]) for run in runs for at in range(run.period) for like in run.like(at)[1:])
        return dict(pairs)

    def stand_in(self, runs: Sequence[Repetition]) -> dict[str, str]:
        """For each value of a block that another one stands for, the value there."""
        found: dict[str, str] = {}
        for name, other in self.folded(runs).items():
            found.update(zip(self.blocks[name].numbers, self.blocks[other].numbers, strict=True))
        return found

    def runs(self, names: Sequence[str]) -> Iterator[Repetition]:
        """Every run of several of these blocks, in order."""
        at = {name: i for i, name in enumerate(names)}
        keys = [self._key(self.blocks[name]) for name in names]
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
                yield Repetition(tuple(names[start:best]), period)
            start = best

    def _key(self, block: _Block) -> tuple[Any, ...]:
        """All that must be equal in blocks that are alike, but for where their inputs come from."""
        outside: dict[str, Any] = {}

        def known(name: str) -> Any:
            if name in block.numbers:
                return block.numbers[name]
            return outside.setdefault(name, ("from outside", len(outside), self.entering(self.graph.layout(name))))

        steps: list[tuple[Any, ...]] = []
        for step in block.steps:
            made = tuple((self.like(y.layout), y.grad) for y in step.outputs)
            if isinstance(step, Op):
                args = frozen(mapped((step.args, step.kwargs), Var, lambda var: ("value", known(var.name))))
                steps.append((step.op, args, made, step.grad, bool(step.origin.recompute), bool(step.origin.kept_of)))
            else:
                steps.append((known(step.source), made, step.encoder))
        like = self.like
        sources = tuple(
            (s.kind, like(s.value.layout), like(s.home), like(s.master), s.whole, s.once) for s in block.sources
        )
        backs = tuple(
            (known(back.of), known(back.into), like(back.src), like(back.dst), back.encoder)
            + ((back.encoding.encoder, back.encoding.axes) if back.encoding else ())
            for back in block.backs
        )
        return sources, tuple(steps), backs

    def _wires(self, index: int, name: str, at: dict[str, int]) -> Iterator[BlockWire]:
        """The origin of each tensor that enters a block."""
        block = self.blocks[name]
        for value in dict.fromkeys(v for step in block.steps for v in step.inputs if v not in block.numbers):
            home = self.home.get(value, "")
            if home in at:
                yield index - at[home], self.blocks[home].numbers[value]
            else:
                yield None, value


def _wired(wires: Sequence[BlockWire], before: Sequence[BlockWire], at: int, period: int) -> bool:
    """Whether a block at this place of a run is wired as the one a period before it.

    A value that the first blocks get from before the run comes to later ones from the run itself.
    """
    return len(wires) == len(before) and all(
        a == b or (a[0] is not None and a[0] <= at and (b[0] is None or b[0] > at - period))
        for a, b in zip(wires, before, strict=True)
    )
