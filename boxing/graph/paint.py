"""From a graph to what is drawn of it.

Steps become nodes one by one, but for these: of blocks that are alike one is shown; shape changes in a row share a
node; below `depth` all of a module is one node; parameters used in one place share a note beside it.
"""

from collections.abc import Iterable, Iterator, Sequence

from ...placement.errors import SbpError
from ..look import volume
from .blocks import Blocks, Run
from .ledger import update_of
from .physical import Back, Box, Graph, Op, Source, Step, vars_in
from .scene import Node, Scene, lie, look_of, op_name, shape_of, shape_only, some, summed, tip_of, tokens, words

__all__ = ["paint"]


def paint(graph: Graph, depth: int | None = None, focus: str | None = None) -> Scene:
    """The picture of a graph, cut at a depth of modules, or of one module with its borders."""
    if depth is not None and depth < 1:
        raise SbpError(f"depth={depth}: modules are cut at a level from 1 on\n  leave depth out to draw every op")
    return _Painter(graph, depth, focus).paint()


class _Painter:
    """One picture in the making."""

    def __init__(self, graph: Graph, depth: int | None, focus: str | None) -> None:
        self.graph, self.depth, self.scene = graph, depth, Scene()
        self.blocks = Blocks(graph)
        whole = focus is None or not self.blocks.around(focus)
        self.stand_in = self.blocks.stand_in if whole else {}
        self.runs: dict[str, Run] = {b: run for run in self.blocks.runs for b in run.members} if whole else {}
        self.steps = _chosen(graph, focus, self.blocks.folded if whole else {})
        self.makers: dict[str, Step] = {y.name: step for step in graph.steps for y in step.outputs}
        self.sources = {s.value.name: s for s in graph.sources}
        self.users: dict[str, list[Step]] = {}
        for step in graph.steps:
            if not whole or step.origin.block not in self.blocks.folded:
                for name in dict.fromkeys(map(self.stand, step.inputs)):
                    self.users.setdefault(name, []).append(step)
        self.node: dict[int, str] = {}  # of each step that is drawn
        self.members: dict[str, list[Step]] = {}  # of each node
        for step in self.steps:
            name = self._node_of(step)
            self.node[id(step)] = name
            self.members.setdefault(name, []).append(step)
        self.backs: dict[str, list[Back]] = {}
        for back in graph.backs:
            self.backs.setdefault(back.of, []).append(back)
        self.frames = _frames(name for name in self._modules())

    def stand(self, name: str) -> str:
        return self.stand_in.get(name, name)

    def paint(self) -> Scene:
        for name, steps in self.members.items():
            if name.startswith("module "):
                self._module(name, steps)
            elif isinstance(steps[0], Box):
                self._move(name, steps[0])
            else:
                self._op(name, [step for step in steps if isinstance(step, Op)])
        self._notes()
        for step in self.steps:
            for name in dict.fromkeys(map(self.stand, step.inputs)):
                self._edge(name, step)
        self._ends()
        for path in self.frames:
            self.scene.titles[path] = self._title(path)
        return self.scene

    def _node_of(self, step: Step) -> str:
        path = tokens(step.origin.module)
        if self.depth is not None and len(path) >= self.depth:
            return "module " + ".".join(path[: self.depth])
        name = step.outputs[0].name
        before = self.makers.get(step.inputs[0]) if shape_only(step) and len(set(step.inputs)) == 1 else None
        if before is not None and id(before) in self.node and shape_only(before) and len(before.outputs) == 1:
            alone = len(self.users[self.stand(step.inputs[0])]) == 1
            if alone and before.origin.module == step.origin.module:
                return self.node[id(before)]
        return name

    def _modules(self) -> Iterator[str]:
        """The module of each drawn node that is an op; one drawn whole stands in the one around it."""
        for name, steps in self.members.items():
            if name.startswith("module "):
                yield ".".join(tokens(name.removeprefix("module "))[:-1])
            elif isinstance(steps[0], Op):
                yield steps[0].origin.module

    def _path(self, module: str) -> tuple[str, ...]:
        levels = tokens(module)
        return tuple(p for p in (".".join(levels[: k + 1]) for k in range(len(levels))) if p in self.frames)

    def _title(self, path: str) -> str:
        run = self.runs.get(path)
        if run is None:
            around = self._path(path)[:-1]
            return path.removeprefix(around[-1] + ".") if around else path
        return _repeated(run, path)

    def _place(self, step: Step) -> str:
        return str(step.outputs[0].layout.placement)

    def _op(self, name: str, steps: Sequence[Op]) -> None:
        module = steps[0].origin.module
        path = self._path(module)
        rest = module[len(path[-1]) :].removeprefix(".") if path else module
        words = [op_name(step.op) for step in steps]
        words[0] = f"{rest}: {words[0]}" if rest else words[0]
        look = "shape" if all(map(shape_only, steps)) else "op"
        self.scene.add(Node(name, tuple(words), look, path, self._place(steps[0]), tip=tip_of(self.graph, steps)))

    def _module(self, name: str, steps: Sequence[Step]) -> None:
        """All of a module in one box: how much there is of ops, parameters and moves."""
        module = name.removeprefix("module ")
        run = self.runs.get(module)
        path = self._path(".".join(tokens(module)[:-1]))
        title = _repeated(run, module) if run else module.removeprefix(path[-1] + "." if path else "")
        ops = [step for step in steps if isinstance(step, Op)]
        lines = [title, op_name(ops[0].op) if len(ops) == 1 else f"{len(ops)} ops"]
        used = dict.fromkeys(n for step in steps for n in step.inputs if n in self.sources)
        mine = [self.sources[n] for n in used if self._only(n) == {name}]
        held = [s.value.layout.nbytes for s in mine if s.kind == "parameter"]
        if held:
            lines.append(f"{some(len(held), 'parameter')}, {volume(sum(held))}")
        place = self._place(steps[0])
        self.scene.add(Node(name, tuple(lines), "module", path, place, tip=tip_of(self.graph, ops)))
        boxes = [step for step in steps if isinstance(step, Box)]
        backs = [b for n in (*(box.output.name for box in boxes), *(s.value.name for s in mine)) for b in self._back(n)]
        inside = {"forward": [self.graph.plan(box) for box in boxes], "backward": [back.plan for back in backs]}
        for direction, plans in inside.items():
            said = summed(plans)
            if said:
                side, dashed = f"{direction} in {module}", direction == "backward"
                self.scene.add(Node(side, (f"{direction}:", *said), look_of(plans), path, place, dashed))
                self.scene.join(side, name, side=True)

    def _back(self, name: str) -> list[Back]:
        return self.backs.get(name, [])

    def _move(self, name: str, box: Box) -> None:
        """A chip for the move, and one beside it for that of the gradient; they share one where only one sends."""
        plan = self.graph.plan(box)
        back = [b.plan for b in self._back(name) if b.plan.total]
        path = self._path(box.origin.module)
        inside = plan.src.placement is plan.dst.placement
        place, path = (self._place(box), path) if inside else ("", ())
        tip = f"{box.source} to {name}\n{plan}\n{box.origin.line}".rstrip()
        if plan.total or not back:
            self.scene.add(Node(name, words(plan), look_of([plan]), path, place, tip=tip))
        else:
            lines = ("forward: nothing sent", *words(*back, of="gradient: "))
            tip = "\n".join([tip, *map(str, back)])
            self.scene.add(Node(name, lines, look_of(back), path, place, dashed=True, tip=tip))
            return
        if back:
            other = f"gradient of {name}"
            tip = "\n".join(map(str, back))
            self.scene.add(Node(other, words(*back, of="gradient: "), look_of(back), path, place, dashed=True, tip=tip))
            for user in self.users.get(name, ()):
                if id(user) in self.node:
                    self.scene.join(other, self.node[id(user)], back=True)
            maker = self.makers.get(self.stand(box.source))
            if maker is not None and id(maker) in self.node:
                self.scene.join(self.node[id(maker)], other, back=True)
            else:
                self.scene.join(other, name, side=True)

    def _only(self, name: str) -> set[str]:
        """The nodes that use a source."""
        return {self.node[id(step)] for step in self.users.get(name, ()) if id(step) in self.node}

    def _notes(self) -> None:
        """Sources: inputs as nodes of their own; the others beside the one that uses them, or between several."""
        notes: dict[str, list[Source]] = {}
        for name, source in self.sources.items():
            users = self._only(name)
            if not users or name in self.stand_in:
                continue
            if source.kind == "input":
                there = source.value.layout
                lines = (name, shape_of(there))
                self.scene.add(Node(name, lines, "input", (), str(there.placement), tip=f"{name}\n{there}"))
            elif len(users) > 1:
                self._note(name, [source])
            elif not next(iter(users)).startswith("module "):
                notes.setdefault(next(iter(users)), []).append(source)
        for user, sources in notes.items():
            self._note(f"parameters of {user}", sources)
            self.scene.join(f"parameters of {user}", user, side=True)

    def _note(self, name: str, sources: Sequence[Source]) -> None:
        first = self.users[sources[0].value.name]
        node = self.scene.nodes[self.node[next(id(step) for step in first if id(step) in self.node)]]
        named = [
            s.value.name if len(self._only(s.value.name)) > 1 else s.value.name.rpartition(".")[2] for s in sources
        ]
        lines = [f"{n}  {shape_of(s.value.layout)}  {lie(s.value.layout)}" for n, s in zip(named, sources, strict=True)]
        backs = [b for s in sources for b in self._back(s.value.name) if b.plan.total]
        if backs:
            lines += words(*(b.plan for b in backs), of=f"{'gradients' if len(backs) > 1 else 'gradient'}: ")
            lines += [f"in bucket {n}" for n in dict.fromkeys(b.bucket for b in backs if b.bucket is not None)]
        after = [way for way in map(update_of, sources) if way is not None]
        if after:
            lines += words(*after, of="update: ")
        look = look_of([b.plan for b in backs]) if backs else "note"
        tip = "\n".join(f"{s.value.name}: {s.value.layout}" for s in sources)
        self.scene.add(Node(name, tuple(lines), look, node.path, node.place, bool(backs), True, tip))

    def _edge(self, name: str, step: Step) -> None:
        """From what makes a value to a step that uses it, with the signature in which it arrives."""
        head = self.node[id(step)]
        there = self.graph.layout(name)
        maker = self.makers.get(name)
        if maker is not None and id(maker) in self.node:
            self.scene.join(self.node[id(maker)], head, lie(there))
        elif maker is not None:
            outside = maker.origin.module or name
            self.scene.add(Node(f"from {outside}", (f"from {outside}",), "outside", tip=f"{name}\n{there}"))
            self.scene.join(f"from {outside}", head, lie(there))
        elif name in self.scene.nodes:  # an input, or what several use
            self.scene.join(name, head, lie(there) if self.sources[name].kind == "input" else "")

    def _ends(self) -> None:
        """What is returned, and what goes on outside of the picture."""
        given = dict.fromkeys(map(self.stand, vars_in(self.graph.result)))
        losses = {self.stand(name) for name, _ in self.graph.losses}
        for step in self.steps:
            tail = self.node[id(step)]
            for y in step.outputs:
                if y.name in given:
                    words = "result, loss" if y.name in losses else "result"
                    self.scene.add(Node("result", (words,), "input"))
                    self.scene.join(tail, "result", lie(y.layout))
                for user in self.users.get(y.name, ()):
                    if id(user) not in self.node:
                        there = user.origin.module or user.outputs[0].name
                        self.scene.add(Node(f"to {there}", (f"to {there}",), "outside"))
                        self.scene.join(tail, f"to {there}", lie(y.layout))


def _chosen(graph: Graph, focus: str | None, folded: dict[str, str]) -> list[Step]:
    """The steps to draw: without those that others stand for; with a focus those inside, and moves at its border."""
    steps = [step for step in graph.steps if step.origin.block not in folded]
    if focus is None:
        return steps
    inside = [s for s in steps if s.origin.module == focus or s.origin.module.startswith(focus + ".")]
    if not inside:
        known = dict.fromkeys(tokens(s.origin.module)[0] for s in graph.steps if s.origin.module)
        raise SbpError(
            f"focus={focus!r}: the graph {graph.name!r} has no op in a module of this path\n"
            f"  its outermost modules are {', '.join(known) or 'none'}\n"
            f"  name one of them, or what is inside it, as in focus={next(iter(known), '')!r}"
        )
    made = {y.name for step in inside for y in step.outputs}
    used = {name for step in inside for name in step.inputs}
    kept = {id(step) for step in inside}
    return [s for s in steps if id(s) in kept or (isinstance(s, Box) and (s.source in made or s.output.name in used))]


def _frames(modules: Iterable[str]) -> set[str]:
    """The modules that are worth a frame: those with several nodes in them."""
    counts: dict[str, int] = {}
    for module in modules:
        levels = tokens(module)
        for k in range(len(levels)):
            path = ".".join(levels[: k + 1])
            counts[path] = counts.get(path, 0) + 1
    return {path for path, n in counts.items() if n > 1}


def _repeated(run: Run, path: str) -> str:
    like = run.like(run.members.index(path))
    if run.times == 1:
        return path
    between = f", {like[1].rpartition('.')[2]}, ..., " if run.period > 1 else " to "
    return f"{like[0]}{between}{like[-1].rpartition('.')[2]}:  x {run.times}"
