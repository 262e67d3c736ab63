"""A graph as a page draws it: ops and moves in groups that fold, where equal blocks are told once.

group   a stage, a module, or a block that stands for others: `layers.0 to 31`, 32 times
node    an op, a move of a value, an input or the result; copies of parameters stand with the op that takes them
edge    a value on its way from one node to another, as it arrives there
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import TypeAlias

from ....placement import Placement
from ..blocks import Blocks, repeated
from ..physical import Back, Box, GraphStep, Op, Physical, Source, vars_in
from ..picture.scene import op_name, shape_only, tokens

__all__ = ["FoldedGraph", "GraphEdge", "GraphGroup", "GraphNode", "MoveKey"]

FEW = 4  # ops of no module that share a group

MoveKey: TypeAlias = tuple[str, str]  # a direction, and the value at the end of a move


@dataclass(frozen=True)
class GraphGroup:
    """A box of the drawing that opens; `times` is for how many equal ones it stands."""

    title: str
    path: str
    parent: int | None
    kind: str  # stage, module, block, file
    times: int = 1


@dataclass
class GraphNode:
    """A node, and the step or the source that it is of."""

    kind: str  # op, move, input, result
    label: str
    group: int | None
    times: int
    step: GraphStep | None = None
    source: Source | None = None
    view: bool = False  # whether it only reads its input in another shape, or hangs on no input
    values: tuple[str, ...] = ()  # names of the values that it makes, itself
    parameters: list[str] = field(default_factory=list)
    moves: list[MoveKey] = field(default_factory=list)


@dataclass(frozen=True)
class GraphEdge:
    """A value from a node to one that uses it."""

    tail: int
    head: int
    value: str


class FoldedGraph:
    """The groups, nodes and edges of a graph."""

    def __init__(self, graph: Physical) -> None:
        self.graph = graph
        self.blocks = Blocks(graph, overview=True)
        self.groups: list[GraphGroup] = []
        self.nodes: list[GraphNode] = []
        self.edges: list[GraphEdge] = []
        self._known: dict[tuple[str, tuple[str, ...]], int] = {}
        self._runs = {member: run for run in self.blocks.runs for member in run.members}
        self._sources = {source.value.name: source for source in graph.sources}
        self._backs: dict[str, list[Back]] = {}
        for back in graph.backs:
            self._backs.setdefault(back.of, []).append(back)
        self._plain = {name for name, source in self._sources.items() if source.kind in ("buffer", "constant")}
        self._from: dict[str, int] = {}  # value -> the node that it comes from
        self._via: dict[str, str] = {}  # value that a free move makes -> the one before it
        self._made = set[tuple[int, int, str]]()
        self.stages = _stages(graph)
        self._files = Counter(map(_file_of, self.graph.steps))
        self._inputs()
        self._steps()
        self._result()

    def stand(self, name: str) -> str:
        """The value that is shown for this one."""
        return self.blocks.stand_in.get(name, name)

    @cached_property
    def node_of(self) -> dict[str, int]:
        """By value, also those that others stand for, the node that makes it."""
        made = {name: at for at, node in enumerate(self.nodes) for name in node.values}
        alike = {name: made[other] for name, other in self.blocks.stand_in.items() if other in made}
        return made | alike

    def _inputs(self) -> None:
        for name, source in self._sources.items():
            if source.kind == "input" and any(name in step.inputs for step in self.graph.steps):
                stage = self._stage(source.value.layout.placement)
                self._from[name] = len(self.nodes)
                label = self.graph.called.get(name, name)
                group = self._group(stage, ())
                self.nodes.append(GraphNode("input", label, group, 1, source=source, values=(name,)))

    def _steps(self) -> None:
        alone = self._alone()
        for step in self.graph.steps:
            name = step.outputs[0].name
            if self.blocks.of(name) in self.blocks.folded:
                continue
            if isinstance(step, Box) and (self._is_parameter(step.source) or self._free(step)):
                self._via[name] = step.source
                continue
            self._put(step, alone)

    def _put(self, step: GraphStep, alone: set[str]) -> None:
        """A node for a step, with its edges."""
        module, at = self.blocks.module(step), len(self.nodes)
        path = tokens(module) or self._file(step)
        label = op_name(step.op) if isinstance(step, Op) else "move"
        if path and module in alone and module not in self._runs:
            label, path = f"{path[-1]}: {label}" if isinstance(step, Op) else label, path[:-1]
        group = self._group(self._stage(step.outputs[0].layout.placement), path)
        times = 1 if group is None else self._times(group)
        names = tuple(y.name for y in step.outputs)
        node = GraphNode("op" if isinstance(step, Op) else "move", label, group, times, step, values=names)
        self.nodes.append(node)
        self._from.update(dict.fromkeys(names, at))
        if isinstance(step, Box):
            node.moves += [("forward", names[0]), ("again", names[0]), *self._back_keys(names[0])]
        elif self._plain.issuperset(step.inputs):
            self._plain.update(names)
        node.view = shape_only(step) or self._plain.issuperset(names)
        for name in dict.fromkeys(step.inputs):
            self._enters(self.stand(name), at, node)

    def _enters(self, name: str, at: int, node: GraphNode) -> None:
        """A value that a step takes: an edge, or a parameter with the moves that bring it."""
        value, passed = name, []
        while value in self._via:
            passed.append(value)
            value = self.stand(self._via[value])
        source = self._sources.get(value)
        for copy in passed:
            node.moves += [("forward", copy), ("again", copy), *self._back_keys(copy)]
        if source is not None and source.kind != "input":
            if value not in node.parameters:
                node.parameters.append(value)
                node.moves += [*self._back_keys(value), ("update", value)]
        elif value in self._from:
            self._join(self._from[value], at, name)

    def _join(self, tail: int, head: int, value: str) -> None:
        if (tail, head, value) not in self._made:
            self._made.add((tail, head, value))
            self.edges.append(GraphEdge(tail, head, value))

    def _result(self) -> None:
        found = dict.fromkeys(self.stand(name) for name in vars_in(self.graph.result))
        losses = {self.stand(name) for name, _ in self.graph.losses}
        for name in found:
            origin = name
            while origin in self._via:
                origin = self.stand(self._via[origin])
            if origin in self._from:
                label = "result, loss" if name in losses else "result"
                group = self._group(self._stage(self.graph.layout(name).placement), ())
                self.nodes.append(GraphNode("result", label, group, 1))
                self._join(self._from[origin], len(self.nodes) - 1, name)

    def _back_keys(self, name: str) -> list[MoveKey]:
        return [("backward", name)] if name in self._backs else []

    def _is_parameter(self, name: str) -> bool:
        name = self.stand(name)
        while name in self._via:
            name = self.stand(self._via[name])
        return name in self._sources and self._sources[name].kind != "input"

    def _free(self, box: Box) -> bool:
        """Whether nothing is sent by a move, nor by that of its gradient."""
        backs = self._backs.get(box.output.name, ())
        return not self.graph.boxing(box).total and not any(back.boxing.total for back in backs)

    def _alone(self) -> set[str]:
        """The modules with one op and no parts."""
        ops = [step.origin.module for step in self.graph.steps if isinstance(step, Op)]
        around = {".".join(parts[:k]) for parts in (m.split(".") for m in {*ops}) for k in range(len(parts))}
        return {module for module in {*ops} if module not in around and ops.count(module) == 1}

    def _file(self, step: GraphStep) -> tuple[str, ...]:
        """Ops of no module are in a group of their file, if there are several: those of a loss, say."""
        name = _file_of(step)
        return (name,) if name and self._files[name] >= FEW else ()

    def _stage(self, place: Placement) -> str:
        return self.stages.get(frozenset(place.flat), "")

    def _times(self, group: int | None) -> int:
        """How many equal blocks a group stands for, with those around it."""
        found = 1
        while group is not None:
            found *= self.groups[group].times
            group = self.groups[group].parent
        return found

    def _group(self, stage: str, path: Sequence[str]) -> int | None:
        """The innermost group of a path of modules on a stage."""
        at = self._known_group(stage, (), None) if stage else None
        for k in range(len(path)):
            at = self._known_group(stage, tuple(path[: k + 1]), at)
        return at

    def _known_group(self, stage: str, path: tuple[str, ...], parent: int | None) -> int:
        key = stage, path
        if key not in self._known:
            self._known[key] = len(self.groups)
            self.groups.append(self._made_group(stage, path, parent))
        return self._known[key]

    def _made_group(self, stage: str, path: tuple[str, ...], parent: int | None) -> GraphGroup:
        if not path:
            return GraphGroup(stage, "", parent, "stage")
        whole = ".".join(path)
        run = self._runs.get(whole)
        if run is None or run.times == 1:
            return GraphGroup(path[-1], whole, parent, "file" if whole in self._files else "module")
        title = repeated(run, whole, {}).partition(":")[0]
        before = whole.removesuffix(path[-1])
        return GraphGroup(title.removeprefix(before), whole, parent, "block", run.times)


def _stages(graph: Physical) -> dict[frozenset[int], str]:
    """The names of groups of ranks on which ops run, where there are several."""
    found: dict[frozenset[int], str] = {}
    for step in graph.steps:
        place = step.outputs[0].layout.placement
        found.setdefault(frozenset(place.flat), _ranks(place))
    return found if len(found) > 1 else {}


def _file_of(step: GraphStep) -> str:
    """The name of the file of a step of no module, else none."""
    return "" if step.origin.module else PurePath(step.origin.line.rpartition(":")[0]).name


def _ranks(place: Placement) -> str:
    """The ranks of a placement, in short.

    >>> from ....placement import placement
    >>> _ranks(placement("cpu:[4-7] as (data=2, tensor=2)"))
    'cpu:[4-7]'
    """
    return str(place).partition(" as ")[0]
