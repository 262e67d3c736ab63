"""Values that nobody planned, as messages between processes: a text that says what they are, and the bytes of tensors.

No pickle is read, because a pickle runs whatever code is in it. The text is JSON: numbers and words as they are, all
else a list led by its kind. Beside plain structures, objects of classes that only hold values may go: named tuples,
dataclasses, enums, and classes made of list, dict or UserDict. They go by the names of their classes, which the
receiver must have imported already, and are filled as they were, without a call of the class.
"""

import json
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from ...placement.errors import ScheduleError

__all__ = ["free", "packed", "unpacked"]

ALIGNED = 64  # bytes; kernels may be made for memory that begins at a multiple
SAFE = 2**63  # integers that JSON's readers take
CHAINS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
NUMBERED: dict[str, Any] = {"complex": complex, "range": range, "slice": slice}
WORDS = (torch.dtype, torch.layout, torch.memory_format)  # those that torch has under a name each
FACTORIES = {made.__name__: made for made in (list, dict, set, tuple, int, float, str, bool, bytes)}
OTHERS = frozenset({"int", "dict", "bytes", "torch", "device", "tensor", "member", "object"})
KIND = {made: name for name, made in (CHAINS | NUMBERED).items()}


def free(x: Tensor) -> Tensor:
    """A tensor that goes to other ranks, to where no history of autograd can follow."""
    if x.requires_grad:
        raise ScheduleError(
            f"a tensor {tuple(x.shape)} with a history of autograd goes to other ranks by an added register\n"
            "  give x.detach(); and what a step keeps for its backward can go where autograd has no part in it, as in "
            "flow.compile(..., backend='code')"
        )
    return x


def packed(value: Any) -> tuple[Tensor, Tensor]:
    """A value as two sizes and one run of bytes: the text, and then its tensors."""
    writer = _MessageWriter()
    text = json.dumps({"value": writer.put(value), "classes": writer.names}, separators=(",", ":")).encode()
    begin = _aligned(len(text))
    data = torch.zeros(begin + writer.at, dtype=torch.uint8, device="cpu")
    data[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for place, x in writer.pieces:
        data[begin + place : begin + place + x.numel()] = x
    return torch.tensor([begin, writer.at], device="cpu"), data


def unpacked(sizes: Tensor, data: Tensor) -> Any:
    """The value of such a message; its tensors are parts of the message."""
    begin = int(sizes[0])
    said = json.loads(data[:begin].numpy().tobytes().rstrip(b"\0"))
    return _MessageReader(data[begin:], said["classes"]).take(said["value"])


class _MessageWriter:
    """The text of a value, and the pieces of memory that it names by their places."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, Tensor]] = []
        self.names: list[tuple[str, str]] = []  # of classes, which the text calls by their numbers
        self.at = 0
        self._numbers: dict[type, int] = {}
        self._around: set[int] = set()

    def put(self, x: Any) -> Any:
        kind = type(x)
        if x is None or kind in (bool, float, str) or (kind is int and -SAFE < x < SAFE):
            return x
        if kind is int:
            return ["int", hex(x)]
        if isinstance(x, Tensor):
            return self._tensor(x)
        if kind is bytes:
            return ["bytes", self._piece(torch.frombuffer(bytearray(x or b"\0"), dtype=torch.uint8)), len(x)]
        if isinstance(x, WORDS):
            return ["torch", str(x).removeprefix("torch.")]
        if kind is torch.device:
            return ["device", str(x)]
        if kind in NUMBERED.values():
            names = ("real", "imag") if kind is complex else ("start", "stop", "step")
            return [KIND[kind], *(self.put(getattr(x, name)) for name in names)]
        if isinstance(x, Enum):
            return ["member", self._class(x), x.name]
        if id(x) in self._around:
            raise ScheduleError(f"a {kind.__name__} that is in itself cannot go to other ranks\n  give its parts")
        self._around.add(id(x))
        try:
            return self._structure(x)
        finally:
            self._around.discard(id(x))

    def _structure(self, x: Any) -> list[Any]:
        kind = type(x)
        if kind in CHAINS.values():
            return [KIND[kind], *map(self.put, x)]
        if kind is dict:
            return ["dict", *self._pairs(x)]
        if _base(kind) is None:
            raise _refused(x)
        held = dict(getattr(x, "__dict__", {}))
        if is_dataclass(kind):
            held |= {field.name: getattr(x, field.name) for field in fields(x) if hasattr(x, field.name)}
        made = ["object", self._class(x), {name: self.put(part) for name, part in held.items()}]
        if isinstance(x, defaultdict):
            if (x.default_factory and FACTORIES.get(x.default_factory.__name__)) is not x.default_factory:
                raise ScheduleError(
                    f"a defaultdict of {x.default_factory!r} cannot go to other ranks\n  give dict(x), or take one of "
                    f"{', '.join(FACTORIES)} for it"
                )
            made.append(x.default_factory and x.default_factory.__name__)
        if isinstance(x, dict):
            return [*made, *self._pairs(x)]
        return [*made, *map(self.put, x)] if isinstance(x, list | tuple) else made

    def _pairs(self, x: "dict[Any, Any]") -> Iterable[Any]:
        return [self.put(each) for pair in dict.items(x) for each in pair]

    def _tensor(self, x: Tensor) -> list[Any]:
        if x.device.type != "cpu" or type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided:
            what = f"a {type(x).__name__} on {x.device} for a register that was added between processes"
            raise ScheduleError(f"{what}\n  give plain tensors of the host, such as x.cpu()")
        whole = free(x).resolve_conj().resolve_neg().contiguous()
        return ["tensor", self._piece(whole.reshape(-1).view(torch.uint8)), list(x.shape), self.put(x.dtype)]

    def _piece(self, x: Tensor) -> int:
        self.pieces.append((self.at, x))
        self.at += _aligned(x.numel())
        return self.pieces[-1][0]

    def _class(self, x: Any) -> int:
        kind = type(x)
        if kind not in self._numbers:
            if _class_here(kind.__module__, kind.__qualname__) is not kind:
                raise ScheduleError(
                    f"a {kind.__qualname__} cannot go to other ranks, which find it by name in {kind.__module__}\n"
                    "  define the class at the top of a module, under its own name"
                )
            self._numbers[kind] = len(self.names)
            self.names.append((kind.__module__, kind.__qualname__))
        return self._numbers[kind]


class _MessageReader:
    """A value made of its text, with tensors that are parts of `data`."""

    def __init__(self, data: Tensor, names: Iterable[tuple[str, str]]) -> None:
        self.data = data
        self.classes = [_found(*name) for name in names]

    def take(self, said: Any) -> Any:
        if not isinstance(said, list):
            return said
        kind, *rest = said
        if kind in CHAINS:
            return CHAINS[kind](map(self.take, rest))
        if kind in NUMBERED:
            return NUMBERED[kind](*map(self.take, rest))
        if kind not in OTHERS:
            raise ScheduleError(f"a message from another rank has a {kind!r}, which is nothing that is sent")
        made: Callable[..., Any] = getattr(self, f"_{kind}")
        return made(*rest)

    def _int(self, digits: str) -> int:
        return int(digits, 16)

    def _dict(self, *pairs: Any) -> dict[Any, Any]:
        each = map(self.take, pairs)
        return dict(zip(each, each, strict=True))

    def _bytes(self, place: int, size: int) -> bytes:
        found: bytes = self.data[place : place + size].numpy().tobytes()
        return found

    def _torch(self, name: str) -> Any:
        found = vars(torch)[name]
        assert isinstance(found, WORDS)
        return found

    def _device(self, name: str) -> torch.device:
        return torch.device(name)

    def _tensor(self, place: int, shape: list[int], dtype: Any) -> Tensor:
        of, numel = self.take(dtype), torch.Size(shape).numel()
        if not numel:
            return torch.empty(shape, dtype=of, device="cpu")
        return self.data[place : place + numel * of.itemsize].view(of).view(shape)

    def _member(self, number: int, name: str) -> Any:
        found: Any = self.classes[number]
        return found.__members__[name]

    def _object(self, number: int, held: Mapping[str, Any], *rest: Any) -> Any:
        kind: Any = self.classes[number]
        base = _base(kind)
        if base is None or issubclass(kind, Enum):
            raise ScheduleError(f"a {kind.__qualname__} came from another rank, which is no class that holds values")
        if base is tuple and kind.__module__ == "torch.return_types":
            return kind(list(map(self.take, rest)))
        made = tuple.__new__(kind, map(self.take, rest)) if base is tuple else base.__new__(kind)
        if base is list:
            list.extend(made, map(self.take, rest))
        if base is defaultdict:
            defaultdict.__init__(made, rest[0] and FACTORIES[rest[0]])
            rest = rest[1:]
        if issubclass(kind, dict):
            for key, part in self._dict(*rest).items():
                base.__setitem__(made, key, part)
        for name, part in held.items():
            slot = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
            if isinstance(slot, MemberDescriptorType):
                slot.__set__(made, self.take(part))
            else:  # by no method of the class: one of its properties would be code
                vars(made)[name] = self.take(part)
        return made


def _base(kind: type) -> Any:
    """The builtin that holds the parts of such an object; None of a class that does more than hold values."""
    if issubclass(kind, nn.Module | type) or hasattr(kind, "__del__"):
        return None
    for base in (OrderedDict, defaultdict, dict, list, UserDict):
        if issubclass(kind, base):
            return object if base is UserDict else base
    if issubclass(kind, tuple):
        return tuple if hasattr(kind, "_fields") or kind.__module__ == "torch.return_types" else None
    return object if is_dataclass(kind) else None


def _class_here(module: str, name: str) -> Any:
    """The thing of this name in a module that is loaded, or None. Nothing is imported and nothing run."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if found is not None else None
    return found


def _found(module: str, name: str) -> type:
    found = _class_here(module, name)
    if not isinstance(found, type):
        raise ScheduleError(
            f"a {name} of {module} came from another rank, and nothing here has imported it\n"
            f"  import {module} on every rank"
        )
    return found


def _refused(x: Any) -> ScheduleError:
    fix = "give its numbers and tensors, in lists, dicts, named tuples or a dataclass"
    if type(x).__module__ == "numpy":
        fix = "give x.item()" if getattr(x, "ndim", 1) == 0 else "give torch.from_numpy(x)"
    return ScheduleError(
        f"a {type(x).__qualname__} cannot go to other ranks, because only tensors and plain values do, and what holds "
        f"them: a pickle could run any code\n  {fix}"
    )


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
