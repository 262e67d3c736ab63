"""A traced graph made quicker to run as Python: fewer views, and torch's own functions in the place of ATen ops.

Tracing leaves a chain of views at every transpose and reshape, and a call through an op costs microseconds more than
through torch's binding of it. Both together were a third of a small model's step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .recorder import Recording

__all__ = ["tidied"]

aten = torch.ops.aten
VIEWS = frozenset({aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default})
METHODS: dict[Any, Callable[..., Any]] = {
    aten.reshape.default: torch.reshape,
    aten.expand.default: torch.Tensor.expand,
    aten.view.default: torch.Tensor.view,
}
SPACES = (torch._C._VariableFunctions, torch._C._nn)
# Torch's function for an op and kinds of arguments, if it was seen to do the same. That of index_put takes no None.
_bindings: dict[Any, Callable[..., Any] | None] = {}


def tidied(calls: Recording, fakes: FakeTensorMode) -> Recording:
    """Calls that do the same."""
    graph, seen = fx.Graph(), dict[Any, fx.Node]()
    graph.output(graph.graph_copy(calls.graph, {}))
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in VIEWS:
            _shorten(node)
            same = _nothing_but(node) or seen.setdefault((node.target, str(node.args)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            _say_reduction(node)
            node.target = _binding(node, fakes) or node.target
    return Recording(graph, calls.constants)


def _shorten(node: fx.Node) -> None:
    """A reshape of a reshape is one, unless that copies: then what comes behind counts on the order of the copy."""
    if node.target is aten.reshape.default:
        x = node.args[0]
        while isinstance(x, fx.Node) and x.target is aten.reshape.default and _shares(x, x.args[0]):
            x = x.args[0]
        node.args = (x, *node.args[1:])


def _shares(view: fx.Node, x: Any) -> bool:
    """Whether a node is a view of another."""
    return bool(view.meta["val"].untyped_storage()._cdata == x.meta["val"].untyped_storage()._cdata)


def _nothing_but(node: fx.Node) -> fx.Node | None:
    """The tensor that a view gives back as it was."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if node.target is aten.t.default and x.target is aten.t.default:
        return x.args[0]  # type: ignore[return-value]
    if node.target is aten.reshape.default and _place(x) == _place(node):
        return x
    return None


def _place(node: fx.Node) -> tuple[Any, ...]:
    """The shape and strides of a node's value."""
    return tuple(node.meta["val"].shape), node.meta["val"].stride()


def _say_reduction(node: fx.Node) -> None:
    """torch's bindings of losses do not know the op's own default: where no reduction is said, they take any."""
    op: Any = node.target
    for at, argument in enumerate(op._schema.arguments):
        if argument.name == "reduction" and at >= len(node.args) and "reduction" not in node.kwargs:
            node.kwargs = {**node.kwargs, "reduction": argument.default_value}


def _binding(node: fx.Node, fakes: FakeTensorMode) -> Callable[..., Any] | None:
    """torch's own function for an op, tried once on tensors without values."""
    op: Any = node.target
    key = op, _kinds_given(node.args), _kinds_given(node.kwargs)
    if key not in _bindings:
        name = op._schema.name.removeprefix("aten::")
        spaces = (getattr(space, name, None) for space in SPACES)
        function = METHODS.get(op) or (next(filter(None, spaces), None) if op.namespace == "aten" else None)
        if getattr(function, "__module__", None) == "torch":
            function = getattr(torch, name)  # generated code calls it by this name: torch.block_diag takes no list
        _bindings[key] = function if function is not None and _does(function, node, fakes) else None
    return _bindings[key]


def _kinds_given(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, _kinds_given(part)) for name, part in value.items())
    if isinstance(value, tuple):
        return tuple(map(_kinds_given, value))
    return frozenset(map(_kinds_given, value)) if isinstance(value, list) else type(value)


def _does(function: Callable[..., Any], node: fx.Node, fakes: FakeTensorMode) -> bool:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    try:
        with fakes:
            made = function(*args, **kwargs)
    except Exception:  # its arguments are others
        return False
    return bool(_kinds(made) == _kinds(node.meta["val"]))


def _kinds(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return [_kinds(part) for part in value] if isinstance(value, list | tuple) else value
