"""A segment's forward and backward as two graphs of ATen calls, traced together by running autograd on fakes.

    joint      inputs, cotangents -> outputs, gradients
    forward    inputs -> outputs, saved
    backward   saved, inputs it needs again, cotangents -> gradients

Inputs, cotangents and outputs lie in memory as their specs say, and whoever runs the graphs sees to that. The memory
format decides what torch does with a tensor, such as whether `contiguous` is a copy; so that is settled here.

Values that the backward needs of the forward are saved, but an input is asked for again, so that one that was gathered
for the forward need not be kept. Where only a view of a value is read, the view is saved in its place; other views are
made again.
"""

import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ....boxing.graph.memory_order import lay
from ....placement.errors import ShapeError
from ....sbp.call import map_tensors
from ...eager.capture import detached, quiet
from ..lower.localise import Local
from .recorder import Recording, record

__all__ = ["Traced", "Untraceable", "ancestors", "cut", "gradients", "trace", "traced"]

MOST = 256  # segments whose graphs are kept
aten = torch.ops.aten
# Nothing but views where autograd is off.
SAME = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default})


class Untraceable(RuntimeError):
    """A segment's ops cannot be run on fakes: one needs values, has no fake of itself, or writes to an input."""


@dataclass(frozen=True, eq=False)
class Traced:
    """The two graphs. `forward` returns its outputs and, last, a tuple of what it saves."""

    forward: Recording
    backward: Recording | None
    again: tuple[int, ...]  # the inputs that the backward takes again, behind what was saved
    saved: int
    owns: tuple[bool, ...]  # for each gradient, whether its memory is nobody else's
    fakes: FakeTensorMode


def trace(
    local: Local, decompositions: dict[Any, Callable[..., Any]] | None = None, *, strided: bool = False
) -> Traced:
    """The graphs of a local segment; with `strided` views stay what torch called them.

    Raises `Untraceable` for what only autograd can run; any other error is a mistake.
    """
    fakes = FakeTensorMode(allow_non_fake_inputs=True, shape_env=_symbols() if strided else None, static_shapes=True)
    specs = local.makes
    with fakes:
        inputs = [spec.empty() for spec in local.inputs]
        cotangents = [specs[at].empty() for at in local.returns]
    try:
        with quiet():
            whole = record(_joint(local), (inputs, cotangents), fakes, decompositions)
            if _writes(whole.graph):  # a cut by what depends on what would lose these
                with torch.no_grad():
                    pure = torch.func.functionalize(whole.module)
                    whole = record(lambda *given: pure(*given[0], *given[1]), (inputs, cotangents), fakes)
    except RuntimeError as error:  # torch's errors for what fakes cannot do are all of this class
        raise Untraceable(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
    if _writes(whole.graph):
        raise Untraceable("an input is written to")
    _clean(whole.graph, strided=strided)
    _forget_autograd(whole.graph)
    nodes = [node for node in whole.graph.nodes if node.op == "placeholder"]
    flat: Any = whole.graph.output_node().args[0]
    outputs, gradients = flat[: len(specs)], flat[len(specs) :]
    before = ancestors(outputs)
    # One of several results that only the backward reads is the forward's all the same.
    before |= {node for node in whole.graph.nodes if node.target is operator.getitem and node.args[0] in before}
    again, saved, behind = _needed(gradients, before, nodes[: len(inputs)])
    if not strided:
        saved = [_as_read(node, before, behind, {*outputs, *gradients}) for node in saved]
    forward = cut(whole, nodes[: len(inputs)], before, (*outputs, tuple(saved)))
    if not local.wants:
        return Traced(forward, None, (), 0, (), fakes)
    taken = [*saved, *again, *nodes[len(inputs) :]]
    backward = cut(whole, taken, behind, tuple(gradients))
    others = {_memory(node) for node in (*nodes, *outputs, *saved)}
    owns = tuple(_owned(node, gradients, others) for node in gradients)
    return Traced(forward, backward, tuple(nodes.index(node) for node in again), len(saved), owns, fakes)


def traced(local: Local) -> Traced:
    """The same as `trace` says, of whatever rank, plan or step an equal segment was: one is traced for all who ask.

    Nobody may change these graphs.
    """
    found = _traced(local)
    if isinstance(found, str):
        raise Untraceable(found)
    return found


@lru_cache(MOST)
def _traced(local: Local) -> Traced | str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its own parts
        try:
            return trace(local)
        except Untraceable as error:
            return str(error)


def _symbols() -> Any:
    """Inductor keeps what it compiled only of graphs with an environment of shapes, though all are known."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # loads sympy, which takes as long as half of this

    return ShapeEnv()


def _memory(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)


def _owned(node: fx.Node, gradients: Sequence[fx.Node], others: set[int]) -> bool:
    """Whether a gradient may be changed in place: no other tensor shares its memory, nor do two of its elements."""
    value, mine = node.meta["val"], _memory(node)
    alone = sum(_memory(other) == mine for other in gradients) == 1
    return alone and mine not in others and value.nbytes == value.untyped_storage().nbytes()


def _writes(graph: fx.Graph) -> bool:
    """Whether a node changes a tensor in place."""
    ops = (node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload))
    return any(op._schema.is_mutable for op in ops)


def _joint(local: Local) -> Callable[[list[Tensor], list[Tensor]], list[Tensor]]:
    wants = frozenset(local.wants)

    def joint(inputs: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
        with torch.set_grad_enabled(bool(wants)):
            leaves = [x.detach().requires_grad_() if i in wants else x for i, x in enumerate(inputs)]
            outputs = local.run(leaves)
            _check(local, outputs)
            found = gradients(local, leaves, outputs, cotangents) if wants else ()
        with torch.no_grad():
            return [*map(lay, outputs, [spec.order for spec in local.makes]), *found]

    return joint


def gradients(
    local: Local,
    leaves: Sequence[Tensor],
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    wants: Sequence[int] | None = None,
    keep: bool = False,
) -> list[Tensor]:
    """Those of the wanted inputs, or of some of them, zeros where nothing depends on one."""
    wanted = [leaves[i] for i in (local.wants if wants is None else wants)]
    pairs = [(outputs[at], c) for at, c in zip(local.returns, cotangents, strict=True) if outputs[at].requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in wanted]
    ends, starts = zip(*pairs, strict=True)
    found = torch.autograd.grad(ends, wanted, starts, allow_unused=True, retain_graph=keep)
    return [
        x.new_zeros(x.shape) if g is None else g.to_dense() if g.layout is not torch.strided else g
        for x, g in zip(wanted, found, strict=True)
    ]


def _check(local: Local, outputs: Sequence[Tensor]) -> None:
    for y, spec in zip(outputs, local.makes, strict=True):
        if tuple(y.shape) != spec.shape or y.dtype is not spec.dtype:
            names = ", ".join(str(getattr(call.function, "__name__", call.function)) for call in local.calls)
            raise ShapeError(
                f"a segment made {y.dtype} {tuple(y.shape)} on a rank\n"
                f"  its layout says {spec.dtype} {spec.shape}; it runs {names}\n"
                "  the rule of one of these is wrong; flow.check_rule tells which"
            )


def _clean(graph: fx.Graph, *, strided: bool) -> None:
    for node in list(graph.nodes):
        if node.target in SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in VIEWS and not strided:
            node.target = aten.reshape.default
            node.args = node.args[:2]
    graph.eliminate_dead_code()


def _forget_autograd(graph: fx.Graph) -> None:
    """Values as they are outside of autograd, which would keep all that they were made of."""
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = map_tensors(node.meta["val"], lambda x: detached(x) if x.requires_grad else x)


def ancestors(ends: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    ahead = list(ends)
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead.extend(node.all_input_nodes)
    return found


def _needed(
    gradients: Sequence[fx.Node], before: set[fx.Node], inputs: Sequence[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node], set[fx.Node]]:
    """The inputs and the values of the forward that the backward needs, and the nodes that it runs itself."""
    given = set(inputs)
    again: dict[fx.Node, None] = {}
    saved: dict[fx.Node, None] = {}
    behind: set[fx.Node] = set()
    ahead = list(gradients)
    while ahead:
        node = ahead.pop()
        if node in given:
            again[node] = None
        elif node in before and not _is_view(node):
            saved[node] = None
        elif node not in behind:
            behind.add(node)
            ahead.extend(node.all_input_nodes)
    return sorted(again), sorted(saved), behind


def _as_read(node: fx.Node, before: set[fx.Node], behind: set[fx.Node], ends: Collection[fx.Node]) -> fx.Node:
    """A saved value as the view of it that the forward made, where that is all that the backward reads of it."""
    while node not in ends:
        readers = [user for user in node.users if user in behind]
        if len(readers) != 1 or readers[0] not in before or _nbytes(readers[0]) != _nbytes(node):
            break
        (node,) = readers
        behind.remove(node)
    return node


def _nbytes(node: fx.Node) -> int | None:
    """The bytes of a value; none of a list of values."""
    found: int | None = getattr(node.meta["val"], "nbytes", None)
    return found


def _is_view(node: fx.Node) -> bool:
    """Whether a node only looks at its input's memory in another way."""
    if node.op == "get_attr":
        return True
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    if node.target is aten.reshape.default:
        return _memory(node) == _memory(node.args[0])  # type: ignore[arg-type]
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def cut(whole: Recording, given: Sequence[fx.Node], nodes: set[fx.Node], result: Any) -> Recording:
    """The part of a graph that makes these nodes of these."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for at, node in enumerate(given):
        known[node] = graph.placeholder(f"a{at}")
        known[node].meta = dict(node.meta)
    for node in whole.graph.nodes:
        if node in nodes and node not in known:
            known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(fx.map_arg(result, known.__getitem__))
    graph.eliminate_dead_code()
    return Recording(graph, whole.constants)
