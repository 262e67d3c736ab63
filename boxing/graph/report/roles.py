"""The roles of modules: how each kind of module is parallel on each axis, in the words that people use.

    model.embed_tokens                              data parallel    vocabulary parallel
    model.layers.*: self_attn.q_proj, mlp.up_proj   data parallel    column parallel

A role is read off what the chosen signatures say of an op that takes a parameter: how the parameter is kept, how the op
takes it, and how what it is applied to and what comes out lie on that axis.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ....placement import Placement
from ....sbp import Layout, Partial, Sbp, Split
from ....sbp.traits import traits
from ..blocks import Blocks
from ..physical import Box, Op, Physical, Source
from ..picture.scene import op_name

__all__ = ["Role", "axis_names", "roles_of", "together"]


@dataclass(frozen=True)
class Role:
    """A kind of module, `count` times: `words` and the signature of its largest parameter have an entry an axis."""

    module: str  # a star stands for the number of a repeated block
    words: tuple[str, ...]
    axes: tuple[str, ...]
    sbp: tuple[Sbp, ...] = ()  # none where it has no parameter
    numel: int = 0  # of all its parameters
    count: int = 1
    placements: tuple[Placement, ...] = ()

    @property
    def within(self) -> str:
        """The repeated block around it, or the module that it is in."""
        head, star, _ = self.module.rpartition(".*.")
        return f"{head}.*" if star else self.module.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Its name in there."""
        return self.module[len(self.within) :].removeprefix(".") or self.module

    def on(self, axis: str) -> str:
        """Its word on the axis of this name; "" where its placement has none."""
        return dict(zip(self.axes, self.words, strict=True)).get(axis, "")


def axis_names(place: Placement) -> dict[int, str]:
    """The axes of several ranks, by number."""
    names = place.names or [f"axis {axis}" for axis in range(place.ndim)]
    return {axis: names[axis] for axis, n in enumerate(place.shape) if n > 1}


def roles_of(graph: Physical) -> list[Role]:
    """The roles of modules with parameters, of attention and of losses, in the order of the graph. Equal ones of
    repeated blocks are one with a count."""
    blocks = Blocks(graph)
    merged: dict[tuple[object, ...], Role] = {}
    for block, role in _each(graph):
        found = replace(role, module=blocks.generic(role.module, block))
        key = found.module, found.words, found.sbp, found.axes
        known = merged.get(key)
        places = tuple(dict.fromkeys((*(known.placements if known else ()), *role.placements)))
        merged[key] = role if known is None else replace(found, count=known.count + 1, placements=places)
    return list(merged.values())


def _each(graph: Physical) -> Iterator[tuple[str, Role]]:
    """The role of every module, that of its largest parameter, and the block that it is in."""
    sources = {s.value.name: s for s in graph.sources if s.kind == "parameter"}
    derived = {name: name for name in sources}
    uses: dict[str, dict[str, tuple[Op, str]]] = {}  # by module and parameter: the first op that takes it, and as what
    for step in graph.steps:
        mine = [name for name in step.inputs if name in derived]
        if isinstance(step, Box) or (
            len(step.inputs) == len(mine) == 1 and traits(op_name(step.op)) & {"same", "permuted"}
        ):
            derived.update({y.name: derived[mine[0]] for y in step.outputs if mine})
            continue
        held = uses.setdefault(step.origin.module, {}) if mine else {}
        for name in mine:
            held.setdefault(derived[name], (step, name))
        what = "attention" if "attention" in op_name(step.op) else "loss" if _is_loss(step) else ""
        if what and not mine and step.inputs:
            uses.setdefault(f"{step.origin.module} {what}".strip(), {"": (step, step.inputs[0])})
    for module, taken in uses.items():
        largest = max(taken, key=lambda name: prod(graph.layout(taken[name][1]).shape))
        op, name = taken[largest]
        numel = sum(prod(sources[name].value.layout.shape) for name in taken if name)
        yield op.origin.block, replace(_role(graph, op, name, sources.get(largest)), module=module, numel=numel)


def _role(graph: Physical, op: Op, name: str, source: Source | None) -> Role:
    """The role of an op: how it takes a parameter, or how it is split where it takes none."""
    used = graph.layout(name)
    axes = axis_names(used.placement)
    if source is None:
        words = tuple(_split(op, used, axis) for axis in axes)
        return Role("", words, tuple(axes.values()), placements=(used.placement,))
    rest = source.value.layout, source.value.layout if source.once else source.home, source.master
    if rest[0].placement is not used.placement:
        rest = used, used, used
    others = [graph.layout(x) for x in op.inputs if x != name]
    acts = max(others, key=lambda of: prod(of.shape), default=None)
    words = tuple(_word(op, axis, used, rest, acts) for axis in axes)
    sbp = tuple(rest[0].sbp[axis] for axis in axes)
    return Role("", words, tuple(axes.values()), sbp, placements=(used.placement,))


def _word(op: Op, axis: int, used: Layout, rest: Sequence[Layout], acts: Layout | None) -> str:
    """`rest` is how the parameter, its gradient and its optimizer's state lie between their uses."""
    entry, name = used.sbp[axis], op_name(op.op)
    if isinstance(entry, Partial):
        return "addends"
    if isinstance(entry, Split):
        if "embedding" in name and entry.dim == 0:
            return "vocabulary parallel"
        if isinstance(op.outputs[0].layout.sbp[axis], Partial):
            return "row parallel"
        if len(used.shape) == 3 and entry.dim == 0:
            return "expert parallel"
        return "column parallel" if len(used.shape) > 1 else "split like its input"
    where = "replicated" if acts is None else _split(op, acts, axis)
    stored, grads, states = (isinstance(of.sbp[axis], Split) for of in rest)
    if stored:
        return {"data parallel": "ZeRO-3", "replicated": "gathered"}.get(where, f"ZeRO-3, {where}")
    return ("ZeRO-2" if grads else "ZeRO-1") if states and where == "data parallel" else where


def _split(op: Op, acts: Layout, axis: int) -> str:
    """The word for an axis where weights are whole, by how what they are applied to lies."""
    entry, many = acts.sbp[axis], len(acts.shape)
    if not isinstance(entry, Split):
        return "on addends" if isinstance(entry, Partial) else "replicated"
    if entry.dim == 0:
        return "data parallel"
    if _is_loss(op):
        return "vocabulary parallel"
    if "conv" in op_name(op.op):
        return "spatial parallel" if entry.dim > 1 else "channels split"
    if entry.dim == many - 1:
        return "features split"
    return "heads split" if many == 4 and entry.dim == 1 else "sequence parallel"


def _is_loss(op: Op) -> bool:
    name = op_name(op.op)
    return "loss" in name or "cross_entropy" in name


def together(roles: Sequence[Role]) -> Iterable[list[Role]]:
    """Roles side by side in one block that are alike in all but their names."""
    found: dict[tuple[object, ...], list[Role]] = {}
    for role in roles:
        found.setdefault((role.within, role.words, role.axes, role.count, role.placements), []).append(role)
    return found.values()


def _shown(step: Op) -> bool:
    """Whether an op gives a weight on as it is, in another dtype or order of dims."""
    return bool(traits(op_name(step.op)) & {"same", "permuted"})
