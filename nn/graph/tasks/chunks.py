"""Chunks: the parts of a graph that run one after the other on groups of ranks, as layers were placed.

Placements that share a rank are one group: a move between them is a collective and not a hop. A chunk begins where
something comes in from another group, so that layers placed on A, B, A, B are four chunks on two groups. Values made of
inputs alone, such as shifted labels, wait for the chunk that needs them. A weight that another group needs goes there
*once* a step, and not with every micro-batch; so does one that is only seen in another way, such as under data
parallelism: its gradients are added up, and brought together once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ....boxing.graph.physical import Box, Physical
from ....placement import Placement
from ..lower.segments import Segment, Stage, made_by

__all__ = ["Chunks", "chunks", "groups"]


@dataclass(frozen=True)
class Chunks:
    """The chunk of each stage, `of`, None for a hop between groups; and the `group` of each chunk.

    Groups are numbered in the order in which they first run."""

    of: tuple[int | None, ...]
    group: tuple[int, ...]
    placements: tuple[tuple[Placement, ...], ...]  # of each group
    once: frozenset[int]  # the stages that are hops of weights
    given: frozenset[int]  # those of arguments, which ranks take from the caller and not from each other
    hops: frozenset[int]  # those of values that are computed
    home: dict[str, int]  # the chunk that makes a value, or that first takes it from a hop
    weights: frozenset[str]  # what does not change within a step: parameters, buffers, constants, and hops of these
    gathers: int = 0  # in how many parts weights in pieces are gathered once a step; 0: with every micro-batch
    alone: bool = False  # one chunk that a step runs once: gradients come home and are added up where they are made

    @classmethod
    def whole(cls, graph: Physical, stages: Sequence[Stage]) -> "Chunks":
        """All of a graph as the one chunk of one micro-batch, whatever groups it is on."""
        nothing = frozenset[int]()
        home, places = dict.fromkeys(graph.values, 0), (tuple(dict.fromkeys(map(_place, stages))),)
        of = (0,) * len(stages)
        return cls(of, (0,), places, nothing, nothing, nothing, home, frozenset(), alone=True)

    def homeward(self, stages: Sequence[Stage]) -> dict[str, int]:
        """The weights whose gradients are added up over a step and then brought home, with the chunk that first reads
        each. It is all but those that are moved to their readers anew for every micro-batch."""
        found: dict[str, int] = {}
        for at, stage in enumerate(stages):
            for name in stage.inputs:
                chunk = self.of[at]
                if chunk is not None and name in self.weights:
                    found.setdefault(name, chunk)
        for at in sorted(self.once, reverse=True):
            for name, made in zip(stages[at].inputs, made_by(stages[at]), strict=True):
                if made in found:
                    found.setdefault(name, found[made])
        return found

    def ranks(self, group: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(rank for place in self.placements[group] for rank in place.flat))


def chunks(
    graph: Physical,
    stages: Sequence[Stage],
    said: Mapping[str, int] | None = None,
    placed: Collection[str] = (),
    *,
    gathers: int = 0,
) -> Chunks:
    """The chunks of a graph's stages; `said` has the chunk of modules, where layers of one placement are of several.

    With `gathers` every move of a weight is made once a step, for each chunk in so many parts. An op that is in none of
    the modules `placed` opens no chunk of its own where a chunk on its ranks can take it in.
    """
    made = _Chunker(graph, stages, said or {}, placed, gathers)
    made.levels()
    made.delay()
    made.join()
    return made.numbered()


def groups(placements: Iterable[Placement]) -> dict[Placement, int]:
    """A number for each placement, the same for those that share ranks."""
    listed = list(dict.fromkeys(placements))
    group = list(range(len(listed)))
    for i, a in enumerate(listed):
        for j, b in enumerate(listed[:i]):
            if group[i] != group[j] and not set(a.flat).isdisjoint(b.flat):
                old, new = sorted((group[i], group[j]))[::-1]
                group = [new if g == old else g for g in group]
    return dict(zip(listed, group, strict=True))


def _place(stage: Stage) -> Placement:
    if isinstance(stage, Segment):
        return stage.placement
    if isinstance(stage, Box):
        return stage.output.layout.placement
    return stage.op.outputs[0].layout.placement


def _module(stage: Stage) -> str:
    return (stage.ops[0] if isinstance(stage, Segment) else stage if isinstance(stage, Box) else stage.op).origin.module


class _Chunker:
    def __init__(
        self,
        graph: Physical,
        stages: Sequence[Stage],
        said: Mapping[str, int],
        placed: Collection[str],
        gathers: int,
    ) -> None:
        self.graph, self.stages, self.said, self.placed = graph, stages, said, placed
        self.gathers = gathers
        # A source that nothing reads, such as a buffer that a model only keeps, lies on all ranks, and would make one
        # group of them.
        read = {name for stage in stages for name in stage.inputs}
        sources = [s.value.layout.placement for s in graph.sources if s.value.name in read]
        self.groups = groups([*map(_place, stages), *sources])
        self.makers = {name: at for at, stage in enumerate(stages) for name in made_by(stage)}
        weights = {s.value.name for s in graph.sources if s.kind != "input"}
        inputs = {s.value.name for s in graph.sources if s.kind == "input"}
        self.once: set[int] = set()
        self.given: set[int] = set()
        self.hops: set[int] = set()
        far = self.of_weights(weights)
        for at, stage in enumerate(stages):
            if not isinstance(stage, Box):
                continue
            crosses = self.crosses(stage)
            if at in far or (stage.source in weights and (crosses or gathers or not graph.boxing(stage).sends)):
                self.once.add(at)
                weights.add(stage.output.name)
            elif stage.source in inputs and not graph.values[stage.source].grad:
                inputs.add(stage.output.name)  # a copy of an argument, which the caller has as well
                self.given.update([at] if crosses else [])
            elif crosses:
                self.hops.add(at)
        self.weights = weights
        self.level: dict[int, int] = {}

    def of_weights(self, weights: Collection[str]) -> set[int]:
        """The moves by which a weight gets to another group, those inside of its own group too."""
        found: set[int] = set()
        for at, stage in enumerate(self.stages):
            chain, box = [at], stage
            while isinstance(box, Box) and self.makers.get(box.source, at) < chain[-1]:
                chain.append(self.makers[box.source])
                box = self.stages[chain[-1]]
            if isinstance(stage, Box) and isinstance(box, Box) and box.source in weights and self.crosses(stage):
                found.update(chain)
        return found

    def crosses(self, box: Box) -> bool:
        return self.groups[self.graph.layout(box.source).placement] != self.groups[box.output.layout.placement]

    def levels(self) -> None:
        """Put every stage as early as it can run: one level behind a hop, or behind an earlier chunk by its note, also
        where it waits for nothing there, such as a decoder's first layer with its own words."""
        said: dict[int, int] = {}
        highest: dict[int, int] = {}  # level of each chunk that is noted
        for at, stage in enumerate(self.stages):
            if at in self.once or at in self.given:
                continue
            makers = [self.makers[name] for name in stage.inputs if self.makers.get(name, -1) in self.level]
            # A value from another group is behind its chunk, and so in a later one.
            before = [said[maker] + (maker in self.hops) for maker in makers if maker in said]
            noted = mine = self.said.get(_module(stage)) if at not in self.hops else None
            if mine is None and before:
                mine = max(before)
            if mine is not None:
                said[at] = mine
            level = 0
            for maker in makers:
                next_one = maker in self.hops or (mine is not None and said.get(maker, mine) < mine)
                level = max(level, self.level[maker] + next_one)
            if noted is not None:
                level = max(level, *(high + 1 for chunk, high in highest.items() if chunk < noted), 0)
                highest[noted] = max(level, highest.get(noted, 0))
            self.level[at] = level

    def delay(self) -> None:
        """Put stages that depend on arguments or weights alone as late as their users on this group allow.

        Stages that depend on both, and have no gradient, go late too."""
        plain = {**dict.fromkeys(self.weights, "weights")}
        plain.update({s.value.name: "inputs" for s in self.graph.sources if s.kind == "input"})
        movable: set[int] = set()
        for at, stage in enumerate(self.stages):
            kinds = {plain.get(name, "") for name in stage.inputs}
            mixed = len(kinds) > 1 and any(self.graph.values[name].grad for name in made_by(stage))
            if not mixed and "" not in kinds and at not in self.hops:
                movable.add(at)
                plain.update(dict.fromkeys(made_by(stage), "weights" if kinds == {"weights"} else "inputs"))
        users = self.users()
        for at in reversed(range(len(self.stages))):
            if at in movable and at in users and at in self.level:
                last = min(self.level[user] - (at in self.hops) for user in users[at])
                self.level[at] = max(self.level[at], last)

    def join(self) -> None:
        """Put stages that are in no layer, such as a skip connection's sum, into the next chunk of layers there."""
        layers: dict[int, list[int]] = {}
        for at, level in self.level.items():
            if at not in self.hops and _module(self.stages[at]) in self.placed:
                layers.setdefault(self.groups[_place(self.stages[at])], []).append(level)
        users = self.users()
        for at in reversed(range(len(self.stages))):
            if at not in self.level:
                continue
            level = self.level[at]
            last = min((self.level[user] for user in users.get(at, ())), default=level)
            if at in self.hops:
                self.level[at] = max(level, last - 1)
            elif _module(self.stages[at]) not in self.placed:
                known = layers.get(self.groups[_place(self.stages[at])], ())
                self.level[at] = min((one for one in known if level <= one <= last), default=level)

    def users(self) -> dict[int, list[int]]:
        """The stages that read what a stage makes, by its number."""
        found: dict[int, list[int]] = {}
        for at, stage in enumerate(self.stages):
            for name in stage.inputs:
                if name in self.makers and at in self.level:
                    found.setdefault(self.makers[name], []).append(at)
        return found

    def numbered(self) -> Chunks:
        """Chunks by level, and groups by when they first run."""
        found = sorted(
            {
                (self.level[at], self.groups[_place(stage)])
                for at, stage in enumerate(self.stages)
                if at in self.level and at not in self.hops
            }
        )
        number = {key: n for n, key in enumerate(found)}
        order = list(dict.fromkeys(group for _, group in found))
        of: list[int | None] = []
        home: dict[str, int] = {}
        for at, stage in enumerate(self.stages):
            if at not in self.level or at in self.hops:
                of.append(None)
                continue
            chunk = number[self.level[at], self.groups[_place(stage)]]
            of.append(chunk)
            home.update(dict.fromkeys(made_by(stage), chunk))
            for name in stage.inputs:
                if self.makers.get(name) in self.hops:
                    home[name] = min(home.get(name, chunk), chunk)
        placements = tuple(tuple(place for place, group in self.groups.items() if group == wanted) for wanted in order)
        groups = tuple(order.index(group) for _, group in found)
        sets = frozenset(self.once), frozenset(self.given), frozenset(self.hops)
        return Chunks(tuple(of), groups, placements, *sets, home, frozenset(self.weights), self.gathers)
