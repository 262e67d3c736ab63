"""The tape: ops as they go by, rewritten so that none writes in place.

Values have numbers, and tensors are views of memory:

    memory     what tensors share; holds one value at a time, and knows how often it was written to
    view       a tensor: the memory itself, or what a view op makes of another view

A write gives the view a new value, and by the inverse of every view op its memory too. Another view of that memory is
old by then, so its view op is put on the tape once more when the view is used.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ....placement import Placement
from ....placement.errors import SbpError
from ....sbp.call import Ref, fill, map_tensors, numbered, tensors_in
from ....sbp.logical import LogicalOp, Origin
from ....sbp.state import State
from ....sbp.text import Pin
from ....sbp.traits import traits
from .inplace import RESHAPES, Geometry, Op, back, functional, geometry, overload_like, storage_of, written

__all__ = ["Storage", "Tape", "View"]

aten = torch.ops.aten
# Ops of these namespaces that return nothing check values, of which a capture has none, or measure times.
_SILENT = ("aten", "prims", "profiler")


@dataclass(eq=False)
class Storage:
    """The memory that tensors share. `fixed` says why nothing may be written to it. Outside of
    the capture it may be a `part` of a larger one: one that starts elsewhere, or one with gaps. It is `counted` where
    the program takes places of it by their numbers."""

    born: int  # the number of its first value
    version: int = 0
    fixed: str = ""
    part: str = ""
    counted: bool = False


@dataclass(frozen=True, eq=False)
class ViewOp:
    """The op that made a view of another; in its arguments the views it took stand as Refs, `viewed` first of all."""

    op: Op
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    taken: tuple["View", ...]
    viewed: "View"
    at: int  # which of its results it is
    outputs: tuple[Tensor, ...]
    grad: bool


@dataclass(eq=False)
class View:
    """A tensor, or several that are the same: where it lies, and the number of its value as of a version."""

    fake: Tensor
    memory: Storage
    number: int  # of its value when its memory was at this version
    version: int
    where: Geometry
    step: ViewOp | None = None
    tensors: list[Any] = field(default_factory=list)  # kept alive with their memory: both are known by identity
    storage: int = field(init=False)

    def __post_init__(self) -> None:
        self.storage = storage_of(self.fake)


class Tape:
    """The ops that were recorded, and which tensor is which value."""

    def __init__(self) -> None:
        self.ops: list[LogicalOp] = []
        self.fakes: list[Tensor] = []  # by number
        self.origin = Origin()
        self.placement: Placement | None = None  # of the ops recorded now, and how their results are to lie
        self.lies: State | Pin | None = None
        self.written: list[Storage] = []  # in order, one entry for every write
        self._views: dict[int, View] = {}  # by the identity of their tensors
        self._stored: dict[int, list[View]] = {}  # by their storage
        self.leaves: dict[int, int] = {}  # values that gradients were asked for later, and the same ones before
        self._flowing: set[int] = set()  # values through which gradients flow

    # Values

    def source(self, fake: Tensor, *, fixed: str = "", part: str = "") -> View:
        """A value from outside."""
        view = self._root(fake, self._number(fake), fixed)
        view.memory.part = part
        return view

    def number(self, tensor: Tensor) -> int:
        """The value that a tensor has now."""
        return self.read(self.view(tensor))

    def stand_for(self, fake: Tensor, number: int) -> None:
        """A new tensor for a value that is on the tape already."""
        self._root(fake, number)

    def view(self, tensor: Tensor) -> View:
        """The view that a tensor is; one that torch made without an op (`x.data`) is found by where it lies."""
        view = self._views.get(id(tensor))
        if view is not None and view.storage != storage_of(tensor):
            raise SbpError(
                f"capture: the data of a tensor {tuple(tensor.shape)} was replaced (x.data = y)\n"
                f"  seen at {self.origin.line}\n"
                "  use the new tensor, or x.copy_(y)"
            )
        if view is None:
            where = geometry(tensor)
            same = next((v for v in self._stored.get(storage_of(tensor), ()) if v.where == where), None)
            if same is None:
                raise SbpError(
                    f"capture: met a tensor {tuple(tensor.shape)} of {tensor.dtype} that no captured op made\n"
                    f"  used at {self.origin.line}\n"
                    "  make it by torch functions of the inputs, or pass it in"
                )
            view = self._same(tensor, same, torch.is_grad_enabled() and tensor.requires_grad)
        return view

    def read(self, view: View) -> int:
        """The number of a view's value; if its memory was written to since, the view is taken once more."""
        memory, step = view.memory, view.step
        if view.version != memory.version:
            assert step is not None
            args, kwargs = self._again(step, [self.read(v) for v in step.taken])
            op = aten.reshape.default if step.op in (aten.view.default, aten._unsafe_view.default) else step.op
            numbers = self._put(op, args, kwargs, step.outputs, step.grad)
            view.number, view.version = numbers[step.at], memory.version
        return view.number

    def write(self, view: View, number: int) -> None:
        """Give a view a new value, and the memory that it lies in."""
        if view.memory.fixed:
            raise SbpError(view.memory.fixed.format(line=self.origin.line))
        self._write(view, number)
        self.written.append(view.memory)

    def flow(self, tensor: Tensor, pin: Pin | State) -> Tensor:
        """The same tensor in the same memory, of which it is said how it is to lie."""
        view, grad = self.view(tensor), torch.is_grad_enabled()
        made: Tensor = aten.alias.default(tensor)
        before, self.lies = self.lies, pin
        try:
            (number,) = self._put(aten.alias.default, (Ref(self.read(view)),), {}, (made,), grad and made.requires_grad)
        finally:
            self.lies = before
        step = ViewOp(aten.alias.default, (Ref(0),), {}, (view,), view, 0, (made,), grad)
        self._know(made, View(made, view.memory, number, view.memory.version, view.where, step))
        return made

    def make(self, op: Op, *args: Any, grad: bool | None = None, **kwargs: Any) -> int:
        """Put a call of one result on the tape that the program did not make itself; its tensors are Refs."""
        with torch.no_grad():
            out = op(*fill(args, self.fakes), **fill(kwargs, self.fakes))
        return self._put(op, args, kwargs, (out,), torch.is_grad_enabled() if grad is None else grad)[0]

    # Calls

    def record(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, below: bool = False) -> None:
        """A call that went by, with what it returned; seen `below` autograd, that does not show gradients yet."""
        if op._schema.is_mutable:
            self._record_write(op, args, kwargs, out, below)
        elif tensors_in(out):
            self._record(op, args, kwargs, out, below)
        elif op.namespace not in _SILENT and not op._schema.returns:
            warnings.warn(
                f"{op} gives nothing back, and the graph leaves it out, at {self.origin.line}\n"
                "  call it outside of the graph, on what the step returns",
                stacklevel=2,
            )

    def _record(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, below: bool) -> None:
        outputs = tuple(tensors_in(out))
        grad = torch.is_grad_enabled()
        if all(id(y) in self._views for y in outputs):
            return  # it returned what it was given
        taken = tensors_in([args, kwargs])
        needs = self._will_need(op, taken, outputs) if below else _needs(outputs)
        lent: dict[int, View] = {}  # by storage; the first tensor is the one that is viewed
        for x in taken:
            lent.setdefault(storage_of(x), self.view(x))
        places = [geometry(y) for y in outputs]
        over = [lent.get(storage_of(y)) for y in outputs]
        if len(outputs) == 1 and over[0] is not None:
            same = next(
                (v for x in taken if (v := self.view(x)).memory is over[0].memory and v.where == places[0]), None
            )
            if same is not None:
                self._same(outputs[0], same, grad and needs)
                return
        views = tuple(map(self.view, taken))
        values = [Ref(self.read(view)) for view in views]
        named, keyed = numbered([args, kwargs])
        numbers = self._put(op, fill(named, values), fill(keyed, values), outputs, grad and needs)
        for at, (y, number, viewed, where) in enumerate(zip(outputs, numbers, over, places, strict=True)):
            if viewed is None:
                self._root(y, number)
            else:
                step = ViewOp(op, named, keyed, views, viewed, at, outputs, grad)
                self._know(y, View(y, viewed.memory, number, viewed.memory.version, where, step))

    def _will_need(self, op: Op, taken: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
        """Whether gradients flow through what an op below autograd makes: a part of an op never shows it."""
        floats = any(y.is_floating_point() or y.is_complex() for y in outputs) and op is not aten.detach.default
        return floats and (_needs(taken) or any(self.number(x) in self._flowing for x in taken))

    def _same(self, tensor: Tensor, view: View, grad: bool) -> View:
        """A tensor that is another one; if gradients stop between the two, a `detach` says so."""
        if view.fake.requires_grad and not grad:
            view = self._detached(tensor, view)
        return self._know(tensor, view)

    def _detached(self, tensor: Tensor, view: View) -> View:
        step = ViewOp(aten.detach.default, (Ref(0),), {}, (view,), view, 0, (tensor,), False)
        (number,) = self._put(aten.detach.default, (Ref(self.read(view)),), {}, (tensor,), False)
        return View(tensor, view.memory, number, view.memory.version, view.where, step)

    def leaf(self, tensor: Tensor) -> None:
        """A tensor that gradients are asked for from now on: another value than it was, and than others that are it."""
        met = id(tensor) in self._views or storage_of(tensor) in self._stored  # else it comes to the tape as one
        if met and not (view := self.view(tensor)).memory.fixed:
            made = self._know(tensor, self._detached(tensor, view))
            self.leaves[made.number] = view.number

    def _record_write(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, below: bool) -> None:
        name = op._schema.name.partition("::")[2]
        targets = [tensors_in(value) for value in written(op, args, kwargs)]
        if name in RESHAPES:
            self._reshaped(op, RESHAPES[name], args, kwargs)
            return
        if name == "requires_grad_":
            return
        flat = [x for part in targets for x in part]
        views = [self.view(x) for x in flat]
        for x, view in zip(flat, views, strict=True):
            self._check(x, view, op)
        grad = torch.is_grad_enabled()
        made = self._copied(name, args, views[0]) if len(views) == 1 else None
        if made is None:
            needs = self._will_need(op, tensors_in([args, kwargs]), flat) if below else _needs(flat)
            made = self._functional(op, args, kwargs, flat, grad and needs)
        for x, view, number in zip(flat, views, made, strict=True):
            where = geometry(x)
            if where != view.where:  # an `out` that was made larger
                self._root(x, number)
            else:
                self.write(view, number)
        for y in tensors_in(out):
            self.view(y)

    def _copied(self, name: str, args: tuple[Any, ...], view: View) -> list[int] | None:
        """The new value of `copy_` and its kin: the other tensor, in the right shape and dtype."""
        if name not in ("copy_", "fill_") or len(args) < 2 or not isinstance(args[1], Tensor):
            return None
        other = args[1]
        number, fake = self.number(other), view.fake
        if other.dtype != fake.dtype:
            number = self.make(aten.to.dtype, Ref(number), fake.dtype)
        if other.device != fake.device:
            number = self.make(aten.to.device, Ref(number), fake.device, fake.dtype)
        if other.shape != fake.shape:
            number = self.make(aten.expand.default, Ref(number), [*fake.shape])
        if self.fakes[number].stride() != fake.stride():
            number = self.make(aten.contiguous.default, Ref(number))
        if other.requires_grad and not torch.is_grad_enabled():
            number = self.make(aten.detach.default, Ref(number), grad=False)
        return [number]

    def _functional(
        self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], flat: Sequence[Tensor], grad: bool
    ) -> list[int]:
        found = functional(op)
        if found is None:
            raise SbpError(
                f"capture: {op} writes in place, and torch has no op that makes the same anew\n"
                f"  called at {self.origin.line}\n"
                "  compute a new tensor instead"
            )
        other, outs = found
        kept = {name: value for name, value in kwargs.items() if name not in outs}
        for at, parameter in enumerate(other._schema.arguments):  # one may have a default only where it is in place
            if at >= len(args) and parameter.name not in kept and not parameter.has_default_value():
                kept[parameter.name] = op._schema.arguments[at].default_value
        named, keyed = map_tensors(args, self._ref), map_tensors(kept, self._ref)
        with torch.no_grad():
            made = tuple(tensors_in(other(*fill(named, self.fakes), **fill(keyed, self.fakes))))
        numbers = list(self._put(other, named, keyed, made, grad))
        for at, (x, y) in enumerate(zip(flat, made, strict=False)):
            if y.dtype != x.dtype:  # an op in place keeps its tensor's dtype
                numbers[at] = self.make(aten.to.dtype, Ref(numbers[at]), x.dtype)
        return numbers[: len(flat)]

    def _check(self, tensor: Tensor, view: View, op: Op) -> None:
        """Refuse what autograd would not see: then the gradients of a functional op would be others."""
        if not (torch.is_grad_enabled() and tensor.requires_grad) and not view.memory.fixed:
            at: View | None = view
            while at is not None:
                if at.fake.requires_grad:
                    raise SbpError(
                        f"capture: {op} writes to a tensor {tuple(tensor.shape)} behind autograd's back\n"
                        f"  gradients flow through it, but are off or detached at {self.origin.line}\n"
                        "  write to a copy, or compute a new tensor: torch.where, masked_fill, slice_scatter"
                    )
                at = at.step.viewed if at.step is not None else None

    def _reshaped(self, op: Op, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op in place that makes a tensor another view of what it was."""
        tensor: Tensor = args[0]
        view = self.view(tensor)
        where = geometry(tensor)
        if where == view.where and not (name == "detach" and view.fake.requires_grad):
            return
        same = overload_like(op, name)
        before = self.read(view)
        if where != view.where:  # the values so far keep a fake of the old shape
            self._stand_in(
                tensor,
                torch.empty_strided(view.where.shape, view.where.stride, dtype=tensor.dtype, device=tensor.device),
            )
        grad = torch.is_grad_enabled() and name != "detach"
        step = ViewOp(same, (Ref(0), *args[1:]), dict(kwargs), (view,), view, 0, (tensor,), grad)
        (number,) = self._put(same, (Ref(before), *args[1:]), dict(kwargs), (tensor,), grad)
        self._know(tensor, View(tensor, view.memory, number, view.memory.version, where, step))

    # Parts

    def _write(self, view: View, number: int) -> None:
        step = view.step
        if step is None:
            view.memory.version += 1
        elif view.fake.numel():  # what is written to no place changes nothing, as the empty windows of a narrow image
            turn = back(step.op, step.args, dict(step.kwargs), step.at, step.viewed.where, view.where)
            if turn is None:
                raise SbpError(
                    f"capture: a write goes through {step.op}, which has no inverse here\n"
                    f"  written to at {self.origin.line}\n"
                    "  write to the tensor itself, or compute a new one"
                )
            old = self.read(step.viewed)
            self._write(step.viewed, turn(self.make, old, number))
        view.number, view.version = number, view.memory.version

    @staticmethod
    def _again(step: ViewOp, numbers: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        refs = [Ref(n) for n in numbers]
        args, kwargs = fill((step.args, step.kwargs), refs)
        return args, kwargs

    def _put(
        self, op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: tuple[Tensor, ...], grad: bool
    ) -> tuple[int, ...]:
        numbers = tuple(self._number(y) for y in outputs)
        self._flowing.update(numbers if grad else ())
        grad = grad and "random" not in traits(op._schema.name.removeprefix("aten::"))
        self.ops.append(LogicalOp(op, args, kwargs, outputs, numbers, grad, self.origin, self.placement, self.lies))
        return numbers

    def _number(self, fake: Tensor) -> int:
        self.fakes.append(fake)
        return len(self.fakes) - 1

    def _ref(self, tensor: Tensor) -> Ref:
        return Ref(self.number(tensor))

    def _root(self, fake: Tensor, number: int, fixed: str = "") -> View:
        memory = Storage(number, fixed=fixed)
        view = View(fake, memory, number, 0, geometry(fake))
        return self._know(fake, view)

    def _know(self, tensor: Tensor, view: View) -> View:
        view.tensors.append((tensor, tensor.untyped_storage()))
        self._views[id(tensor)] = view
        self._stored.setdefault(storage_of(tensor), []).append(view)
        return view

    def _stand_in(self, tensor: Tensor, other: Tensor) -> None:
        """Let another fake stand for the values that this one did."""
        for view in self._stored[storage_of(tensor)]:
            view.fake = other if view.fake is tensor else view.fake
        self.fakes = [other if fake is tensor else fake for fake in self.fakes]
        for at, op in enumerate(self.ops):
            if any(y is tensor for y in op.outputs):
                self.ops[at] = replace(op, outputs=tuple(other if y is tensor else y for y in op.outputs))


def _needs(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd saw gradients flow through what an op made: not through what only has another's shape."""
    return any(x.requires_grad for x in tensors)
