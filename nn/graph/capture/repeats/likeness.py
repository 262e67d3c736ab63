"""Likeness: values to compare, by which Python code could tell two modules, or the arguments of two calls, apart."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache, partial
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .....placement.structure import ATOMS, ByIdentity
from .....sbp.call import frozen
from ....model.annotate import PLACES
from ....model.reading import begin_forward, end_forward
from ....model.recompute.recomputation import Recomputing

__all__ = [
    "ALL", "Number", "Unlike", "attributes_noted", "blocks_of", "of_module", "of_value", "read_name", "reader",
    "unnoted",
]  # fmt: skip

_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(...), range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, Recomputing,
)  # fmt: skip
_SAME = (type, FunctionType, BuiltinFunctionType, ModuleType, Enum, torch._ops.OpOverloadPacket)
_TENSORS = frozenset({"_parameters", "_buffers", "_modules"})
_OWN = (nn.Module.__getattr__.__code__, nn.Module.__setattr__.__code__, nn.Module.__delattr__.__code__)
_TABLES = (
    nn.Module.register_buffer.__code__,
    nn.Module.register_parameter.__code__,
)  # which ask whether these are there
_WHOLE = frozenset({"__dict__", "__getstate__", "__reduce__", "__reduce_ex__"})  # from which all else can be read
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code has made
ALL = "*"
_unnoted = 0
_PACKAGE = f"{__name__.partition('.')[0]}."


class Unlike(Exception):
    """Something that is like nothing else, because it may change or do more than it shows."""


class Number(NamedTuple):
    """A whole number among a module's settings, such as that of its layer; code that reads it may go another way."""

    module: nn.Module
    name: str
    value: int


def _of_readers(module: nn.Module) -> set[int]:
    """The hooks by which refits wait for forwards, which compute nothing."""
    tables = module._forward_pre_hooks, module._forward_hooks
    return {at for hooks in tables for at, hook in hooks.items() if hook in (begin_forward, end_forward)}


def of_value(value: Any, tensors: list[Tensor], objects: list[Any] | None = None) -> Any:
    """A value of plain data alone; its tensors are collected, and stand there by shape and kind alone. So are objects
    of classes written in Python, which count by identity, if a list is given for them."""
    return _Looking(tensors, objects=False, handed=objects).value(value)


def of_module(module: nn.Module, constants: list[Tensor], numbers: list[Number]) -> Any:
    """The likeness of a module: classes, settings, and parameters by shape. Plain tensor attributes are collected, and
    so are whole numbers, which stand there by name alone.

    Objects among the settings count by identity and what they hold.
    """
    return _Looking(constants, objects=True, numbers=numbers).module(module)


@contextmanager
def attributes_noted(
    classes: Iterable[type], note: Callable[[Any, str], object], found: Callable[[Any], object] | None = None
) -> Iterator[Callable[[type], bool]]:
    """Until the end, call `note(object, name)` when an attribute of an instance of these classes is read, and
    `found(value)` with its value. Gives what has one more class noted, and tells whether that can be."""
    before: dict[type, Any] = {}

    def watched(cls: type) -> Any:
        get: Any = cls.__getattribute__

        def noted(self: Any, name: str) -> Any:
            if (
                _unnoted or name == "__class__"
            ):  # asked by each isinstance that is not so; what a class is, its type says
                return get(self, name)
            note(self, name)
            value = get(self, name)
            if found is not None:
                found(value)
            return value

        noted.__wrapped__ = get  # type: ignore[attr-defined]
        return noted

    def watch(cls: type) -> bool:
        own = vars(cls).get("__getattribute__")
        try:
            cls.__getattribute__ = watched(cls)  # type: ignore[method-assign]
        except (TypeError, AttributeError):  # a class that lets nobody change it
            return False
        before[cls] = own
        return True

    try:
        for cls in dict.fromkeys(classes):
            watch(cls)
        yield watch
    finally:
        for cls, own in reversed(before.items()):
            if own is None:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = own  # type: ignore[method-assign]


@contextmanager
def unnoted() -> Iterator[None]:
    """Inside, reads of attributes are not noted: what runs there is run anew at each step."""
    global _unnoted
    _unnoted += 1
    try:
        yield
    finally:
        _unnoted -= 1


def read_name(name: str) -> str | None:
    """The attribute that a read of this one is about, where `attributes_noted` tells of it. Torch looks into a module's
    dict to find or set one of another name; `ALL` stands for the whole dict in the reader's hand. None where this
    package reads its notes of modules there, or torch looks for its tables."""
    if name not in _WHOLE:
        return name
    frame = reader(sys._getframe(1))
    if frame is not None and name == "__dict__":
        if frame.f_code in _OWN:
            return str(frame.f_locals["name"])
        if frame.f_code in _TABLES:
            return None
        if str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
            return None
    return ALL


def reader(note: FrameType) -> FrameType | None:
    """The frame whose code reads the attribute that a function of this frame is told of."""
    frame = note.f_back
    while frame is not None and frame.f_code.co_name == "noted" and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


class _Looking:
    def __init__(
        self,
        tensors: list[Tensor],
        *,
        objects: bool,
        numbers: list[Number] | None = None,
        handed: list[Any] | None = None,
    ) -> None:
        self.tensors, self.objects, self.numbers, self.handed = tensors, objects, numbers, handed
        self.around: set[int] = set()  # objects being looked at: one may be in itself

    def value(self, value: Any) -> Any:
        if type(value) in ATOMS:
            return frozen(value)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return of_tensor(value)
        if isinstance(value, _PLAIN):
            return frozen(value)
        if isinstance(value, list | tuple):
            return type(value), tuple([self.value(part) for part in value])
        if type(value) is dict or (isinstance(value, Mapping) and dataclasses.is_dataclass(value)):
            return type(value), tuple([(self.value(name), self.value(part)) for name, part in value.items()])
        if isinstance(value, set | frozenset) and all(isinstance(part, _PLAIN) for part in value):
            return frozen(value)
        if isinstance(value, FunctionType):
            return self.function(value)
        if isinstance(value, MethodType):
            return self.value(value.__func__), self.value(value.__self__)
        if isinstance(value, nn.Module):
            return self.outside(value)
        if isinstance(value, _SAME):
            return ByIdentity(value)
        if isinstance(value, partial):
            return "partial", self.value(value.func), self.value(value.args), self.value(value.keywords)
        if self.handed is not None and _is_written(type(value)):
            self.handed.append(value)
            return ByIdentity(value)
        if not self.objects:
            raise Unlike(type(value).__name__)
        return self.object(value)

    def function(self, value: FunctionType) -> Any:
        """A function, with what it has closed over and its defaults: these may be others at the next call."""
        kept = value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__
        if not any(kept):
            return ByIdentity(value)
        try:
            held = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:  # a cell that nothing was put into yet
            raise Unlike(value.__qualname__) from None
        return self.with_parts(value, zip(("closure", "defaults", "named", "own"), (held, *kept[1:]), strict=True))

    def outside(self, module: nn.Module) -> Any:
        """A module that is no part of the one looked at, and is the same for all, with what it is set to now."""
        of = (item for part in module.modules() for item in part.__dict__.items())
        return self.with_parts(module, ((name, x) for name, x in of if name not in _TENSORS and name not in PLACES))

    def object(self, value: Any) -> Any:
        held = getattr(value, "__dict__", None)
        found = ByIdentity(value) if held is None else self.with_parts(value, held.items())
        if (
            dataclasses.is_dataclass(value)
            and isinstance(found, tuple)
            and len(found[1]) == len(dataclasses.fields(value))
        ):
            return type(value), found[1]
        return found

    def with_parts(self, value: Any, parts: Iterable[tuple[str, Any]]) -> Any:
        """The identity of a value, and what it holds now; of one that is in itself the identity alone."""
        if id(value) in self.around:
            return ByIdentity(value)
        self.around.add(id(value))
        found = tuple([(name, self.value(part)) for name, part in parts])
        self.around.discard(id(value))
        return ByIdentity(value), found

    def module(self, module: nn.Module) -> Any:
        held = module.__dict__
        settings = []
        for name, value in held.items():
            if name in _TENSORS or name in PLACES:
                continue
            if _is_hooks(name):
                if value and not value.keys() <= _of_readers(module):
                    raise Unlike("a hook")
                continue
            if type(value) is int and self.numbers is not None and _reads_plainly(type(module)):
                self.numbers.append(Number(module, name, value))
                settings.append((name, int))
            else:
                settings.append((name, self.value(value)))
        own = [
            (name, None if x is None else of_tensor(x))
            for kind in ("_parameters", "_buffers")
            for name, x in held[kind].items()
        ]
        inner = [(name, None if child is None else self.module(child)) for name, child in held["_modules"].items()]
        return type(module), tuple(settings), tuple(own), tuple(inner)


@lru_cache(1024)
def _is_hooks(name: str) -> bool:
    """Whether a module's attribute is a table of hooks."""
    return name.endswith("_hooks") or name.startswith(("_forward_hooks", "_forward_pre_hooks"))


def _reads_plainly(cls: type) -> bool:
    """Whether reads of attributes are what they say. A function of the class's own, but for those that note, may read
    another."""
    get: Any = cls.__getattribute__
    while hasattr(get, "__wrapped__"):
        get = get.__wrapped__
    return get is object.__getattribute__


def _is_written(cls: type) -> bool:
    """Whether a class and all that it inherits from are written in Python, so that its reads and writes can be seen."""
    return _reads_plainly(cls) and all(base is object or base.__flags__ & _HEAP for base in cls.__mro__)


def of_tensor(x: Tensor) -> Any:
    """A tensor by what code may ask of it without its values."""
    bits = x.is_conj(), x.is_neg()
    return Tensor, tuple(x.shape), x.stride(), x.dtype, x.requires_grad, str(x.device), bits


def blocks_of(modules: Mapping[int, str], held: list[nn.Module]) -> dict[int, str]:
    """The repeated modules: those of a list or a sequence of which another there has the same parts and shapes."""
    found: dict[int, str] = {}
    for container in held:
        if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        alike: dict[Any, list[nn.Module]] = {}
        for child in container.children():
            if next(child.children(), None) is not None or not type(child).__module__.startswith("torch.nn."):
                alike.setdefault(_shape_of(child), []).append(child)
        for group in alike.values():
            if len(group) > 1:
                found.update((id(child), modules[id(child)]) for child in group)
    return found


def _shape_of(module: nn.Module) -> Any:
    return tuple((name, type(part), tuple(_shapes(part))) for name, part in module.named_modules())


def _shapes(module: nn.Module) -> Iterator[Any]:
    for name, x in (*module._parameters.items(), *module._buffers.items()):
        yield name, None if x is None else (tuple(x.shape), x.dtype)
