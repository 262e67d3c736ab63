"""Painting: from a graph to what is drawn of it.

Steps become nodes, some of them together (`joined`), and of blocks that are alike one is shown. The parameters of a
node share a note beside it, which says how their gradients are brought together.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

from ....placement.errors import SbpError
from ...boxing import Boxing
from ...figures import duration, volume
from ..blocks import Blocks, Repetition, Stages, repeated
from ..buckets import exchange
from ..move_prices import MovePart, MovePrices
from ..move_table import buckets
from ..physical import Back, Box, GraphStep, Op, Physical, Source, vars_in
from .merged_nodes import Joined
from .scene import (
    Scene,
    SceneNode,
    brief,
    counted,
    look_of,
    numbered,
    op_name,
    shape_of,
    shape_only,
    some,
    summed,
    tip_of,
    tokens,
    words,
)
from .shown_steps import framed, shown_steps

__all__ = ["paint"]


def paint(
    graph: Physical,
    depth: int | None = None,
    focus: str | None = None,
    *,
    overview: bool = False,
    prices: MovePrices | None = None,
) -> Scene:
    """The picture of a graph, cut at a depth of modules, or of one module with its borders.

    In an overview two equal blocks are one already, and views and values that are never read are out of sight. Moves
    have the prices of their routes, unless `prices` say otherwise.
    """
    if depth is not None and depth < 1:
        raise SbpError(f"depth={depth}: modules are cut at a level from 1 on\n  leave depth out to draw every op")
    return _Painter(graph, depth, focus, overview, prices or MovePrices(graph)).paint()


class _Painter:
    """One picture in the making."""

    def __init__(
        self, graph: Physical, depth: int | None, focus: str | None, overview: bool, prices: MovePrices
    ) -> None:
        self.graph, self.depth, self.scene, self.prices = graph, depth, Scene(prices), prices
        self.blocks = Blocks(graph, overview=overview)
        whole = focus is None or not self.blocks.around(focus)
        self.stages = Stages(graph) if whole and overview else None
        self.stand_in = dict(self.blocks.stand_in) if whole else {}
        self.far = self.stages.last(self.blocks) if self.stages else {}
        for name, other in self.stages.stand_in.items() if self.stages else ():
            self.stand_in[name] = self.stand_in.get(other, other)
        self.runs: dict[str, Repetition] = {b: run for run in self.blocks.runs for b in run.members} if whole else {}
        self.steps = shown_steps(graph, focus, self._shown if whole else lambda step: True)
        self.makers: dict[str, GraphStep] = {y.name: step for step in graph.steps for y in step.outputs}
        self.sources = {s.value.name: s for s in graph.sources}
        self.users: dict[str, list[GraphStep]] = {}
        for step in graph.steps:
            if not whole or self._shown(step):
                for name in dict.fromkeys(map(self.stand, step.inputs)):
                    self.users.setdefault(name, []).append(step)
        module = self.blocks.module
        self.joined = Joined(graph, self.steps, depth, self.stand, self.users, module, overview=overview)
        self.node, self.members = self.joined.node, self.joined.members
        self.backs: dict[str, list[Back]] = {}
        for back in graph.backs:
            self.backs.setdefault(back.of, []).append(back)
        groups = [group for group in buckets(graph.backs) if group[0].bucket is not None]
        self.exchanges = {group[0].bucket: exchange(group) for group in groups}
        self.alike: dict[str, list[str]] = {}  # the values that one stands for, beside itself
        for name, other in self.stand_in.items():
            self.alike.setdefault(other, []).append(name)
        self.frames = framed(self._modules())

    def _shown(self, step: GraphStep) -> bool:
        """Whether no other step stands for this one."""
        name = step.outputs[0].name
        far = self.stages is not None and self.stages.of(name) in self.stages.folded
        return not far and self.blocks.of(name) not in self.blocks.folded

    def stand(self, name: str) -> str:
        return self.stand_in.get(name, name)

    def paint(self) -> Scene:
        for name, steps in self.members.items():
            if name.startswith("module "):
                self._module(name, steps)
            elif isinstance(steps[0], Box):
                self._move(name, steps[0])
            else:
                self._op(name, steps)
        self._notes()
        for step in self.steps:
            if id(step) in self.node:
                for name in dict.fromkeys(step.inputs):
                    self._edge(name, step)
        self._ends()
        for path in self.frames:
            self.scene.titles[path] = self._title(path)
        self.scene.titles.update(self.stages.titles if self.stages else {})
        return self.scene

    def _modules(self) -> Iterator[tuple[str, bool]]:
        """The module of each node, and whether it is an op; one drawn whole counts for the module around it."""
        for name, steps in self.members.items():
            if name.startswith("module "):
                yield name.removeprefix("module "), True
            else:
                yield self.blocks.module(steps[0]), isinstance(steps[0], Op)

    def _path(self, module: str) -> tuple[str, ...]:
        levels = tokens(module)
        return tuple(p for p in (".".join(levels[: k + 1]) for k in range(len(levels))) if p in self.frames)

    def _title(self, path: str) -> str:
        around = self._path(path)[:-1]
        title = self._repeated(path, path.removeprefix(around[-1] + "." if around else ""))
        return f"{title}, recomputed" if self._again(path) else title

    def _repeated(self, path: str, alone: str) -> str:
        run = self.runs.get(path) or (Repetition((path,), 1) if path in self.far else None)
        return alone if run is None else repeated(run, path, self.far)

    def _again(self, path: str) -> bool:
        """Whether the backward runs all ops in a module again."""
        ops = [s for s in self.steps if isinstance(s, Op) and f"{s.origin.module}.".startswith(f"{path}.")]
        return bool(ops) and all(op.origin.recompute for op in ops)

    def _place(self, step: GraphStep) -> str:
        return str(step.outputs[0].layout.placement)

    def _op(self, name: str, steps: Sequence[GraphStep]) -> None:
        """One op, or several that share a node, and the chip of what their parameters have to be moved before."""
        ops = [step for step in steps if isinstance(step, Op)]
        module = ops[0].origin.module
        path, place = self._path(module), self._place(ops[0])
        rest = module[len(path[-1]) :].removeprefix(".") if path else module
        lines = counted([op_name(op.op) for op in ops], f"{rest}: " if rest else "")
        if ops[0].origin.recompute and not (path and self._again(path[0])):
            lines = (*lines, "recomputed")
        look = "shape" if all(map(shape_only, ops)) else "op"
        if len(ops) > 3 and self.joined.plain.issuperset(y.name for op in ops for y in op.outputs):
            lines, look = (f"{len(ops)} ops of no input",), "shape"
        self.scene.add(
            SceneNode(name, lines, look, path, place, tip="\n".join([tip_of(self.graph, ops), *self._within(ops)]))
        )
        sent = [step for step in steps if isinstance(step, Box) and self.graph.boxing(step).total]
        if sent:
            parts = [part for box in sent for part in self._copied(box)]
            of = ", ".join(dict.fromkeys(self.joined.root(box.source).rpartition(".")[2] for box in sent))
            tip = "\n".join(self._told(box) for box in sent)
            chip = sent[0].output.name
            self.scene.add(
                SceneNode(chip, words(*parts, of=f"{of}: "), look_of(parts), path, place, tip=tip, parts=(*parts,))
            )
            self.scene.join(chip, name, side=True)

    def _within(self, ops: Sequence[Op]) -> Iterator[str]:
        """Moves that send nothing between ops of one node, where no edge can say so."""
        made = {y.name for op in ops for y in op.outputs}
        for name in dict.fromkeys(self.stand(n) for op in ops for n in op.inputs):
            if name in self.joined.passed and self.joined.origin(name) in made:
                yield self._told(self.joined.passed[name])

    def _told(self, box: GraphStep) -> str:
        if isinstance(box, Op):
            return tip_of(self.graph, [box])
        parts = [part for part in self._copied(box) if part.boxing.total]
        took = "".join(f"{sep}{duration(part.seconds)}" for sep, part in zip((", ", ", again "), parts, strict=False))
        return f"{box.source} to {box.output.name}\n{self.graph.boxing(box)}{took}\n{box.origin.line}".rstrip()

    def _module(self, name: str, steps: Sequence[GraphStep]) -> None:
        """All of a module in one box: how much there is of ops, parameters and moves."""
        module = name.removeprefix("module ")
        path = self._path(".".join(tokens(module)[:-1]))
        title = self._repeated(module, module.removeprefix(path[-1] + "." if path else ""))
        ops = [step for step in steps if isinstance(step, Op)]
        lines = [title, op_name(ops[0].op) if len(ops) == 1 else f"{len(ops)} ops"]
        used = dict.fromkeys(n for step in steps for n in map(self.joined.root, step.inputs) if n in self.sources)
        mine = [self.sources[n] for n in used if self._only(n) == {name}]
        held = [s.value.layout.nbytes for s in mine if s.kind == "parameter"]
        if held:
            lines.append(f"{some(len(held), 'parameter')}, {volume(sum(held))}")
        again = sum(bool(op.origin.recompute) for op in ops)
        if again:
            lines.append("recomputed" if again == len(ops) else f"{some(again, 'op')} recomputed")
        place = self._place(steps[0])
        self.scene.add(SceneNode(name, tuple(lines), "module", path, place, tip=tip_of(self.graph, ops)))
        boxes = [step for step in steps if isinstance(step, Box)]
        backs = [b for n in (*(box.output.name for box in boxes), *(s.value.name for s in mine)) for b in self._back(n)]
        inside = {
            "forward": [part for box in boxes for part in self._copied(box)],
            "backward": self._alone(backs),
            "update": [part for source in mine for part in self._updated(source)],
        }
        for direction, parts in inside.items():
            said, boxings = summed(parts), [part.boxing for part in parts]
            if direction == "backward":
                said += self._together(backs)
                boxings += self._exchanges(backs)
            if said:
                side, dashed = f"{direction} in {module}", direction == "backward"
                told = (f"{direction}:", *said)
                self.scene.add(SceneNode(side, told, look_of(boxings), path, place, dashed, parts=(*parts,)))
                self.scene.join(side, name, side=True)

    def _copied(self, box: Box) -> list[MovePart]:
        return self.prices.copied(box.output.name, self.alike.get(box.output.name, ()))

    def _updated(self, source: Source) -> list[MovePart]:
        name = source.value.name
        return [part for part in self.prices.updated(name, self.alike.get(name, ())) if part.boxing.total]

    def _alone(self, backs: Sequence[Back]) -> list[MovePart]:
        """The moves of gradients that go in no bucket."""
        found: list[MovePart] = []
        for back in backs:
            if back.bucket is None:
                at = self._back(back.of).index(back)
                alike = [other for name in self.alike.get(back.of, ()) for other in self._back(name)[at : at + 1]]
                found += self.prices.back(back, alike)
        return found

    def _back(self, name: str) -> list[Back]:
        return self.backs.get(name, [])

    def _move(self, name: str, box: Box) -> None:
        """A chip for the move, and one beside it for that of the gradient; they share one where only one sends."""
        boxing, parts = self.graph.boxing(box), self._copied(box)
        back = self._alone([back for back in self._back(name) if back.boxing.total])
        inside = boxing.src.placement is boxing.dst.placement
        place, path = self._place(box), self._path(self.blocks.module(box)) if inside else ()
        tip = self._told(box)
        if boxing.total or not back:
            self.scene.add(SceneNode(name, words(*parts), look_of(parts), path, place, tip=tip, parts=(*parts,)))
        if back:
            other = f"gradient of {name}" if boxing.total else name
            tip = "\n".join([*[tip] * (not boxing.total), *(str(part.boxing) for part in back)])
            lines, look = words(*back, of="gradient: "), look_of(back)
            self.scene.add(SceneNode(other, lines, look, path, place, dashed=True, tip=tip, parts=(*back,)))
        if back and boxing.total:
            for user in self.users.get(name, ()):
                if id(user) in self.node:
                    self.scene.join(other, self.node[id(user)], back=True)
            maker = self.makers.get(self.joined.origin(box.source))
            if maker is not None and id(maker) in self.node:
                self.scene.join(self.node[id(maker)], other, back=True)
            else:
                self.scene.join(other, name, side=True)

    def _only(self, name: str) -> set[str]:
        return self.uses.get(name, set())

    @cached_property
    def uses(self) -> dict[str, set[str]]:
        """The nodes that use each source or a copy of it."""
        found: dict[str, set[str]] = {}
        for step in self.steps:
            if id(step) in self.node and step.outputs[0].name not in self.joined.lifted:
                for name in map(self.joined.root, map(self.joined.origin, step.inputs)):
                    if name in self.sources:
                        found.setdefault(name, set()).add(self.node[id(step)])
        return found

    def _notes(self) -> None:
        """Inputs as nodes of their own; the other sources in notes beside what uses them."""
        notes: dict[str, list[Source]] = {}
        at = {name: n for n, name in enumerate(self.scene.nodes)}
        for name, source in self.sources.items():
            if name in self.stand_in:
                continue
            if source.kind == "input" and self._only(name):
                there = source.value.layout
                lines, place = (self.graph.called.get(name, name), shape_of(there)), str(there.placement)
                self.scene.add(SceneNode(name, lines, "input", (), place, tip=f"{name}\n{there}"))
                continue
            for user in sorted(self._only(name), key=at.__getitem__):
                if not user.startswith("module ") or len(self._only(name)) > 1:
                    notes.setdefault(user, []).append(source)
        told: set[str] = set()
        for user, sources in notes.items():
            self._note(user, sources, told)
            told |= {s.value.name for s in sources}

    def _note(self, user: str, sources: Sequence[Source], told: set[str]) -> None:
        """A note on sources: their users, where they lie, how they arrive, and how gradients and updates are moved."""
        node, lines, backs, moved = self.scene.nodes[user], [], [], []
        for source in sources:
            name, there = source.value.name, source.value.layout
            copies = [
                step for step in self.members[user] if isinstance(step, Box) and self.joined.root(step.source) == name
            ]
            moved += [self._told(copy) for copy in copies if not self.graph.boxing(copy).total]
            arrives = dict.fromkeys(brief(c.output.layout) for c in copies if c.output.name in self.joined.lifted)
            arrives.pop(brief(there), None)
            shared = len(self._only(name)) > 1
            line = f"{name if shared else name.rpartition('.')[2]}  {shape_of(there)}  {brief(there)}"
            lines.append(f"{line} as {', '.join(arrives)}" if arrives else line)
            of = [name] if name not in told else []
            lifted = [c.output.name for c in copies if c.output.name in self.joined.lifted or self._bucketed(c)]
            backs += [back for n in (*of, *lifted) for back in self._back(n) if back.boxing.total]
        alone = self._alone(backs)
        if alone:
            lines += words(*alone, of=f"{'gradients' if len(alone) > 1 else 'gradient'}: ")
        lines += self._together(backs)
        after = [part for source in sources if source.value.name not in told for part in self._updated(source)]
        if after:
            lines += words(*after, of="update: ")
        boxings = [*(part.boxing for part in alone), *self._exchanges(backs)]
        tip = "\n".join(
            [f"{'also ' * (s.value.name in told)}{s.value.name}: {s.value.layout}" for s in sources] + moved
        )
        name = f"parameters of {user}"
        look = look_of(boxings) if boxings else "note"
        parts = (*alone, *after)
        self.scene.add(SceneNode(name, tuple(lines), look, node.path, node.place, bool(boxings), True, tip, parts))
        self.scene.join(name, user, side=True)

    def _bucketed(self, box: Box) -> bool:
        return any(back.bucket is not None for back in self._back(box.output.name))

    def _numbers(self, backs: Sequence[Back]) -> list[int]:
        """The buckets of these gradients, and of those that they stand for."""
        names = [name for back in backs for name in (back.of, *self.alike.get(back.of, ())) if back.bucket is not None]
        return sorted({b.bucket for name in names for b in self._back(name) if b.bucket is not None})

    def _together(self, backs: Sequence[Back]) -> list[str]:
        numbers = self._numbers(backs)
        if not numbers:
            return []
        many = sum(back.bucket is not None for back in backs) > 1
        return [f"{'gradients' if many else 'gradient'} in {numbered('bucket', numbers)}"]

    def _exchanges(self, backs: Sequence[Back]) -> list[Boxing]:
        return [self.exchanges[back.bucket] for back in backs if back.bucket is not None]

    def _edge(self, name: str, step: GraphStep) -> None:
        """Draw the edge from a value's maker to a step that uses it, with the signature in which it arrives."""
        head, name = self.node[id(step)], self.stand(name)
        if name in self.joined.lifted or self.joined.origin(name) in self.joined.hidden:
            return
        origin, there = self.joined.origin(name), self.graph.layout(name)
        first = self.graph.layout(origin)
        text, tip = brief(there), f"{origin}\n{first}"
        moved = ""
        while name != origin:  # from the last of what is done on the way
            step = self.joined.passed[name]
            if isinstance(step, Box) and brief(self.graph.layout(step.source)) != brief(step.output.layout):
                moved = moved or brief(step.output.layout)
                text = f"{brief(self.graph.layout(step.source))} to {moved}"
            tip += f"\n{self._told(step)}"
            name = self.stand(step.inputs[0])
        maker = self.makers.get(origin)
        if maker is not None and id(maker) in self.node:
            self.scene.join(self.node[id(maker)], head, text, tip=tip)
        elif maker is not None:
            outside = maker.origin.module or origin
            self.scene.add(SceneNode(f"from {outside}", (f"from {outside}",), "outside", tip=f"{origin}\n{first}"))
            self.scene.join(f"from {outside}", head, text, tip=tip)
        elif origin in self.scene.nodes:  # an input
            self.scene.join(origin, head, text, tip=tip)

    def _ends(self) -> None:
        """The results, and what goes on outside of the picture."""
        given = dict.fromkeys(map(self.stand, vars_in(self.graph.result)))
        losses = {self.stand(name) for name, _ in self.graph.losses}
        for step in self.steps:
            tail = self.node.get(id(step), "")
            for y in step.outputs if tail else ():
                if y.name in given:
                    words = "result, loss" if y.name in losses else "result"
                    self.scene.add(SceneNode("result", (words,), "input"))
                    self.scene.join(tail, "result", brief(y.layout))
                for user in self.users.get(y.name, ()):
                    if id(user) not in self.node and y.name not in self.joined.lifted and not self._passes(user):
                        there = user.origin.module or user.outputs[0].name
                        self.scene.add(SceneNode(f"to {there}", (f"to {there}",), "outside"))
                        self.scene.join(tail, f"to {there}", brief(y.layout))

    def _passes(self, step: GraphStep) -> bool:
        return step.outputs[0].name in self.joined.passed
