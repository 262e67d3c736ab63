"""The ATen calls of a function on tensors without values, as a graph.

torch's make_fx makes the same one, in twice the time: it takes a copy of each result and is ready for symbols, for
functions as arguments and for calls of Python that are to be nodes, none of which is here.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed

from ....sbp.call import map_tensors, tensors_in
from ...eager.capture import made_of

__all__ = ["Recording", "record"]

Decompositions = Mapping[Any, Callable[..., Any]]
aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Recording:
    """A graph of calls, and the tensors with values that it reads, by the names of its `get_attr` nodes."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    constants: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def module(self) -> fx.GraphModule:
        """It as Python code."""
        return fx.GraphModule(self.constants, self.graph)

    def __call__(self, *values: Tensor) -> Any:
        return self.module(*values)


def record(
    function: Callable[..., Sequence[Tensor]],
    given: Sequence[Sequence[Tensor]],
    fakes: FakeTensorMode,
    decompositions: Decompositions | None = None,
) -> Recording:
    """The calls that a function of lists of tensors makes; an input of the graph is a tensor of these lists.

    A node's value without values is its `meta["val"]`. Raises a RuntimeError for what has no form without values.
    """
    recorder = _Recorder(fakes, decompositions or {})
    for x in tensors_in(given):
        recorder.note(x, recorder.graph.placeholder(f"a{len(recorder.alive)}"))
    with _no_cached_casts(), fakes, recorder:
        made = function(*given)
    recorder.graph.output([recorder.node(x) for x in made])
    return recorder.recording


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each call, and has it run by the mode below, that of the fakes."""

    def __init__(self, fakes: FakeTensorMode, decompositions: Decompositions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes, self.decompositions = fakes, decompositions
        self.recording = Recording()
        self.graph = self.recording.graph
        self.node_of: dict[int, fx.Node] = {}  # by id
        self.alive: list[Tensor] = []  # so that no other tensor gets the id of one that was noted

    def __torch_dispatch__(
        self, op: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(each is not FakeTensor for each in types):  # a subclass, which takes the call apart first
            return NotImplemented
        if op.namespace == "prim":  # a question, such as for the device
            return op(*args, **kwargs)
        if op in self.decompositions:
            with self:
                made = self.decompositions[op](*args, **kwargs)
            if made is not NotImplemented:
                return made
        if op._can_decompose() and autograd_would_have_decomposed(op, tensors_in((args, kwargs))):  # in inference mode
            with self:
                return made_of(op, args, kwargs)
        given, named = map_tensors(args, self.node), map_tensors(kwargs, self.node)
        made = op(*args, **kwargs)
        if made is None or isinstance(made, Tensor | list | tuple):
            # A constant that is lifted may be written to, so each run has its own.
            noted = aten.lift_fresh_copy.default if op is aten.lift_fresh.default else op
            self.note(made, self.graph.create_node("call_function", noted, given, named, op.overloadpacket.__name__))
        return made

    def note(self, made: Any, node: fx.Node) -> None:
        """Remember by which node something was made."""
        node.meta["val"] = made
        if isinstance(made, Tensor):
            self.node_of[id(made)] = node
            self.alive.append(made)
        elif isinstance(made, list | tuple):
            for at, part in enumerate(made):
                self.note(part, self.graph.call_function(operator.getitem, (node, at)))

    def node(self, value: Tensor) -> fx.Node:
        """The node that made a tensor, or that fetches one from outside."""
        return self.node_of.get(id(value)) or self._constant(value)

    def _constant(self, value: Tensor) -> fx.Node:
        if isinstance(value, FakeTensor):
            raise RuntimeError("a tensor without values that no call of this function made")
        name = f"_constant{len(self.recording.constants)}"
        self.recording.constants[name] = value
        node = self.graph.get_attr(name)
        self.note(value, node)
        node.meta["val"] = self.fakes.from_tensor(value)
        return node


@contextmanager
def _no_cached_casts() -> Iterator[None]:
    """autocast would hand out what it cast for another graph."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
