"""Precision: the type that each module works in while it is captured, and the casts on the ways in and out.

    into a cast module        every float tensor becomes of its type
    within                    tensors on the way to a module with weights of its own do, because buffers of another type
                              may have widened them
    out of it                 tensors get the type again that the modules around work in
    a parameter in use        is cast to the type that its user works in, where it rests in another

A value that was only widened on the way out, and is narrowed again on the way into the next module, is taken as it was.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence

from ....boxing.record import user_line
from ....placement.errors import SbpError
from ....placement.structure import replaced
from ....sbp.call import map_tensors, tensors_in
from ...model.cast import Types, Works, short, works_of
from .inplace import written
from .interceptor import Interceptor
from .module_state import ModuleState
from .packed import Rows
from .tape import Tape

__all__ = ["Precision"]

aten = torch.ops.aten
# The program says itself which type it wants.
_CONVERSIONS = frozenset(
    {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default, aten.type_as.default}
)
_NORMS = frozenset({aten.batch_norm.default, aten.instance_norm.default})
_PRODUCTS = frozenset(
    getattr(aten, name).default
    for name in (
        "matmul", "mm", "bmm", "mv", "dot", "addmm", "addmv", "addbmm", "baddbmm", "linear", "bilinear", "einsum",
        "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "scaled_dot_product_attention",
    )
) | {aten.conv_transpose2d.input, aten.conv_transpose3d.input}  # fmt: skip
Call = Callable[..., Any]


@dataclass
class _Crossing:
    """The casts on the way into a module: by a tensor's identity what it became, and that value's number. Arguments
    made anew for it are kept too."""

    dtype: torch.dtype
    cast: dict[int, tuple[Tensor, Tensor, int]] = field(default_factory=dict)
    anew: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _Widened:
    """A tensor that was made of a narrower one, and the numbers of both values then."""

    wide: Tensor
    narrow: Tensor
    numbers: tuple[int, int]


class Precision:
    """Stands around the calls of modules; `used` is asked about the tensors of every op."""

    def __init__(
        self, modules: Mapping[str, nn.Module], held: ModuleState, tape: Tape, watch: Interceptor, call: Call
    ) -> None:
        self.held, self.tape, self.watch, self.inner = held, tape, watch, call
        self.works = works_of(modules)
        self.needed = bool(self.works) or any(slot.types for slot in held.slots)
        self.types = {  # by the identity of fakes, for all that may have to be cast where they are used
            id(slot.fake): (slot.kind, slot.types)
            for slot in held.slots
            if slot.types or (slot.kind == "parameter" and slot.fake.is_floating_point())
        }
        self.now: Works | None = None  # of the module that is called
        self.widened: dict[int, _Widened] = {}  # by the identity of the wide one, in the call under way

    # Modules

    def call(self, run: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the module; stands in for `nn.Module.__call__`."""
        if id(module) not in self.held.paths:  # made on the way: it works as who made it
            return self.inner(run, module, args, kwargs)
        outer, mine = self.now, self.works.get(id(module))
        here = mine.dtype if mine else outer.before if outer else None
        around = outer.dtype if outer else mine.before if mine else None
        if here is None or not (here is not around or _has_weights(module)):
            return self._inside(run, module, args, kwargs, mine)
        crossing = _Crossing(here)
        given = tuple(self._taken(value, crossing) for value in args)
        named = {name: self._taken(value, crossing) for name, value in kwargs.items()}
        leaves = _leaves(crossing.anew)
        result = self._inside(run, module, given, named, mine)
        if leaves != _leaves(crossing.anew):
            self._refuse(module, here)
        for tensor, became, number in crossing.cast.values():
            if self.tape.number(became) != number:  # the module wrote to it
                tensor.copy_(became)
        return result if around is here or around is None else self._given(result, around)

    def _inside(self, run: Call, module: nn.Module, args: Any, kwargs: Any, mine: Works | None) -> Any:
        before = self.now, self.widened
        self.now, self.widened = mine, {}
        try:
            return self.inner(run, module, args, kwargs)
        finally:
            self.now, self.widened = before

    def _taken(self, value: Any, crossing: _Crossing) -> Any:
        """An argument as a module takes it; one that has nothing to cast stays the same object."""
        if isinstance(value, PackedSequence) and isinstance(value.data, Rows):
            return value._replace(data=Rows(self._taken(value.data.values, crossing)))
        if not any(_differs(x, crossing.dtype) for x in _tensors(value)):
            return value

        def change(path: str, x: Tensor) -> Tensor:
            if not _differs(x, crossing.dtype):
                return x
            if id(x) not in crossing.cast:  # one tensor of the caller's is one for the module
                y = self._narrow(x, crossing.dtype)
                crossing.cast[id(x)] = x, y, self.tape.number(y)
            return crossing.cast[id(x)][1]

        made = replaced(value, change, objects=True)
        crossing.anew.append(made)
        return made

    def _narrow(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        known = self.widened.get(id(x))
        if known is None or known.narrow.dtype is not dtype or known.narrow.requires_grad is not x.requires_grad:
            return x.to(dtype)
        same = known.numbers == (self.tape.number(x), self.tape.number(known.narrow))
        return known.narrow if same else x.to(dtype)

    def _given(self, result: Any, dtype: torch.dtype) -> Any:
        """A result in the type of the modules around."""
        if isinstance(result, PackedSequence) and isinstance(result.data, Rows):
            return result._replace(data=Rows(self._given(result.data.values, dtype)))
        if isinstance(result, tuple) and any(isinstance(part, PackedSequence) for part in result):
            return tuple(self._given(part, dtype) for part in result)
        if not any(_differs(x, dtype) for x in _tensors(result)):
            return result
        made: dict[int, Tensor] = {}

        def change(path: str, x: Tensor) -> Tensor:
            if not _differs(x, dtype):
                return x
            if id(x) not in made:
                made[id(x)] = y = x.to(dtype)
                if isinstance(x, FakeTensor) and torch.promote_types(x.dtype, dtype) is dtype:
                    self.widened[id(y)] = _Widened(y, x, (self.tape.number(y), self.tape.number(x)))
            return made[id(x)]

        return replaced(result, change, objects=True)

    def _refuse(self, module: nn.Module, dtype: torch.dtype) -> None:
        raise SbpError(
            f"capture: {self.held.paths[id(module)] or 'the model'} changes a list or object among its arguments, "
            f"which holds tensors that are cast to {short(dtype)} for it\n"
            "  values that it puts there would be lost: have it return them, or give modules around it the same type"
        )

    # Ops

    def used(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of an op, with parameters and buffers that rest in another type cast for it."""
        given = tensors_in([args, kwargs])
        if func in _CONVERSIONS or not any(id(x) in self.types for x in given):
            self._check_product(func, given)
            return args, kwargs
        if func in _NORMS and not args[5] and args[3] is not None and args[1] is not None:
            with self.watch:  # torch wants weights as running statistics are, of whatever type the input is
                args = (args[0], *(x if x is None else x.to(args[3].dtype) for x in args[1:3]), *args[3:])
            return args, kwargs
        kept = {id(x) for value in written(func, args, kwargs) for x in tensors_in(value)}

        def change(x: Tensor) -> Tensor:
            dtype = None if id(x) in kept or id(x) not in self.types else self._wanted(*self.types[id(x)])
            if dtype is None or dtype is x.dtype:
                return x
            with self.watch:
                return x.to(dtype)

        args, kwargs = map_tensors(args, change), map_tensors(kwargs, change)
        self._check_product(func, tensors_in([args, kwargs]))
        return args, kwargs

    def _check_product(self, func: Any, given: list[Tensor]) -> None:
        """A refusal of what torch multiplies on no device, though it does on fakes."""
        if func not in _PRODUCTS or self.now is None or torch._C._is_any_autocast_enabled():
            return
        types = dict.fromkeys(short(x.dtype) for x in given if x.dtype.is_floating_point)
        if len(types) > 1:
            raise SbpError(
                f"capture: a product of {' and '.join(types)}, at {user_line()}\n"
                f"  {self.watch.module or 'the model'} works in {short(self.now.dtype)}, as flow.nn.cast says, and its "
                "buffers and plain attributes keep their type\n"
                '  cast the buffer by its name, as in flow.nn.cast(model, {"path.of.buffer": ...}), or what is '
                "computed of it: x.to(weight.dtype)"
            )

    def _wanted(self, kind: str, types: Types | None) -> torch.dtype | None:
        """The type in which a parameter or buffer is used now; None where it stays as it is."""
        if kind == "buffer":
            return types and types.weights
        return self.now.dtype if self.now is not None else types and types.before


def _has_weights(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, whose type its inputs have to have."""
    return any(p is not None and p.dtype.is_floating_point for p in module._parameters.values())


def _differs(x: Tensor, dtype: torch.dtype) -> bool:
    return x.dtype is not dtype and x.dtype.is_floating_point and x.dtype.itemsize > 1


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(path: str, x: Tensor) -> Tensor:
        found.append(x)
        return x

    replaced(value, note, objects=True)
    return found


def _leaves(value: Any) -> list[int]:
    return [id(x) for x in _tensors(value)]
