"""Merged nodes: steps that share a node of a picture, so that one sees calls and moves, not each small ATen op.

    module     below a depth, all of a module is one node, if it runs on one placement
    joined     ops of one line of the user's code but layers with parameters; a module that has few ops and no parts
    lifted     a move of a parameter stands with what uses it
    passed     a move that sends nothing, nor does its gradient, is written on the edges behind it; an overview leaves
               out views in the same way, and values that are never read
    plain      in an overview values that are made of no input stand together

Ops are joined only where no way leads out of their node and back into it: a picture has no cycles.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from ....sbp.traits import traits
from ..physical import Back, Box, GraphStep, Op, Physical, vars_in
from .scene import op_name, shape_only, tokens

__all__ = ["Joined"]

FEW = 8  # ops of a module that share a node


class Joined:
    """The node of each drawn step, and the steps of each node."""

    def __init__(
        self,
        graph: Physical,
        steps: Sequence[GraphStep],
        depth: int | None,
        stand: Callable[[str], str],
        users: Mapping[str, Sequence[GraphStep]],
        module: Callable[[GraphStep], str],
        *,
        overview: bool = False,
    ) -> None:
        self.overview = overview
        self.hidden: set[str] = set()  # what nobody reads the values of
        self.plain: set[str] = set()  # values made of no input
        self.graph, self.depth, self.stand, self.users, self.module = graph, depth, stand, users, module
        self.node: dict[int, str] = {}
        self.members: dict[str, list[GraphStep]] = {}
        self.lifted: dict[str, Box] = {}  # by the name of the copy
        self.passed: dict[str, GraphStep] = {}
        self._makers = {y.name: step for step in graph.steps for y in step.outputs}
        self._backs: dict[str, list[Back]] = {}
        for back in graph.backs:
            self._backs.setdefault(back.of, []).append(back)
        self._few = _few(steps)
        self._places: dict[str, set[str]] = {}  # where the ops of each module run, with all that is in it
        for step in steps:
            path = tokens(module(step))
            for k in range(len(path)):
                here = self._places.setdefault(".".join(path[: k + 1]), set())
                here.update([str(step.outputs[0].layout.placement)] if isinstance(step, Op) else [])
        self._outside = {s.value.name for s in graph.sources if s.kind != "input"}  # and copies of them
        self._above: dict[str, set[str]] = {}  # node -> the nodes that it hangs on
        self._join(steps)

    def origin(self, name: str) -> str:
        """The node at which the edge to a user of this value begins: before the moves that are written on it."""
        name = self.stand(name)
        while name in self.passed:
            name = self.stand(self.passed[name].inputs[0])
        return name

    def root(self, name: str) -> str:
        """The parameter that this value is a copy of, or the value itself."""
        name = self.stand(name)
        while name in self.lifted:
            name = self.stand(self.lifted[name].source)
        return name

    def _join(self, steps: Sequence[GraphStep]) -> None:
        drawn = {id(step) for step in steps}
        kept = set(map(self.stand, vars_in(self.graph.result)))  # a result has a node to come from
        outside = self._outside
        copies: list[Box] = []
        latest: dict[tuple[str, ...], str] = {}
        for step in steps:
            name, key, into = step.outputs[0].name, None, self._whole(step)
            if isinstance(step, Box):
                inside = name not in kept and name in self.users and all(id(u) in drawn for u in self.users[name])
                if step.source in outside:
                    copies.append(step)
                    outside.add(name)
                    continue
                if not into and inside and self._free(step):
                    self.passed[name] = step
                    continue
            elif not into:
                if self.overview and self._out_of_sight(step, kept, drawn):
                    continue
                key = self._key(step)
                near = (latest.get(key) if key else None) or self._seen_as(step)
                into = near if near and self._joins(step, near) else ""
            self._put(step, into or name)
            if key:
                latest[key] = into or name
        for box in reversed(copies):
            name = box.output.name
            nodes = list(dict.fromkeys(self.node.get(id(user), "") for user in self.users.get(name, ())))
            # A move that sends nothing needs no chip of its own, even where several use it.
            one = len(nodes) == 1 or (nodes and not self.graph.boxing(box).total)
            into = nodes[0] if one and name not in kept and "" not in nodes else ""
            if into and any(isinstance(step, Op) for step in self.members[into]):
                self.lifted[name] = box
            self._put(box, into if name in self.lifted else self._whole(box) or name)

    def _out_of_sight(self, step: Op, kept: set[str], drawn: set[int]) -> bool:
        """Whether an overview leaves an op out; and note what is made of no input."""
        names = [y.name for y in step.outputs]
        if "empty" in traits(op_name(step.op)) and kept.isdisjoint(names):
            self.hidden.update(names)
            return True
        if self.plain.issuperset(map(self.origin, step.inputs)):
            self.plain.update(names)
        if not shape_only(step) or len(set(step.inputs)) != 1 or step.inputs[0] in self._outside:
            return False
        users = [user for name in names for user in self.users.get(name, ())]
        if not kept.isdisjoint(names) or not all(id(user) in drawn for user in users):
            return False
        self.passed.update(dict.fromkeys(names, step))
        return True

    def _put(self, step: GraphStep, into: str) -> None:
        self.node[id(step)] = into
        self.members.setdefault(into, []).append(step)
        self._above.setdefault(into, set()).update(node for node in self._feeds(step) if node != into)

    def _feeds(self, step: GraphStep) -> Iterator[str]:
        for name in step.inputs:
            maker = self._makers.get(self.origin(name))
            if maker is not None and id(maker) in self.node:
                yield self.node[id(maker)]

    def _joins(self, step: GraphStep, node: str) -> bool:
        """Whether a step may join a node: none of what it hangs on, but the node itself, hangs on the node."""
        if self._large(step) and any(map(self._large, self.members[node])):
            return False
        stack = [name for name in self._feeds(step) if name != node]
        seen = set(stack)
        while stack:
            above = self._above[stack.pop()]
            if node in above:
                return False
            stack.extend(above - seen)
            seen |= above
        return True

    def _seen_as(self, step: Op) -> str:
        """The node of the shape changes in the same module that this one is the next of, if it is."""
        if not shape_only(step) or len(set(step.inputs)) != 1:
            return ""
        source = self.stand(step.inputs[0])
        before = self._makers.get(source)
        if before is None or before.origin.module != step.origin.module or len(self.users[source]) > 1:
            return ""
        node = self.node.get(id(before), "")
        return node if node and all(map(shape_only, self.members[node])) else ""

    def _whole(self, step: GraphStep) -> str:
        if self.depth is None or (isinstance(step, Box) and self._crosses(step)):
            return ""
        path = tokens(self.module(step))
        levels = (".".join(path[:k]) for k in range(self.depth, len(path) + 1))
        return next((f"module {name}" for name in levels if len(self._places[name]) < 2), "")

    def _crosses(self, box: Box) -> bool:
        return self.graph.layout(box.source).placement is not box.output.layout.placement

    def _key(self, step: GraphStep) -> tuple[str, ...] | None:
        """Steps of one key may share a node."""
        of, place = step.origin, str(step.outputs[0].layout.placement)
        if step.outputs[0].name in self.plain:
            return "plain", of.module, place
        if of.module in self._few:
            return of.module, place
        return (of.module, of.line, place) if of.line and not self._large(step) else None

    def _large(self, step: GraphStep) -> bool:
        """Whether this is a layer: more than a small op, with parameters, or a whole attention."""
        if not isinstance(step, Op) or _small(step):
            return False
        return "attention" in step.op._schema.name or any(name in self._outside for name in step.inputs)

    def _free(self, box: Box) -> bool:
        """Whether nothing is sent by a move, nor by that of its gradient."""
        backs = self._backs.get(box.output.name, ())
        return not self.graph.boxing(box).total and not any(back.boxing.total for back in backs)


def _few(steps: Sequence[GraphStep]) -> Collection[str]:
    """The modules of few ops that have no parts."""
    ops = [step.origin.module for step in steps if isinstance(step, Op)]
    around = {".".join(parts[:k]) for parts in (m.split(".") for m in set(ops)) for k in range(len(parts))}
    return {module for module in set(ops) if module not in around and ops.count(module) <= FEW}


def _small(step: Op) -> bool:
    """Whether an op takes next to no time beside a product of matrices."""
    tags = set(step.op.tags)
    said = traits(op_name(step.op)) & {"same", "like", "new", "small"}
    cheap = torch.Tag.pointwise in tags or torch.Tag.reduction in tags or said
    return bool(cheap) or shape_only(step) or not step.inputs
