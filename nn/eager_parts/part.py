"""An eager part as an op of a graph: its signature, and its run on global tensors, forward and backward.

    forward     inputs as they lie become leaves of torch's autograd; the part runs on them, and what it gives back is
                moved to where the graph has it
    backward    torch's autograd of that run, from gradients of what it gave back to those of the inputs

Whatever moves inside it is eager's own business, so any layout of the inputs is right. Samples stay in pieces where
they come so, because eager ops go on with them.
"""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ...boxing.exchange.execute import token
from ...placement import Placement
from ...placement.device import family
from ...placement.errors import SbpError, ShapeError
from ...placement.structure import ATOMS, replaced
from ...placement.world import owned, world
from ...sbp import Layout
from ...sbp.call import NEVER, Call, Match
from ...sbp.logical import PART
from ..tensors.factories import whole_everywhere
from ..tensors.moves import own_shards, run_by, to_all, whole
from ..tensors.tensor import GlobalTensor, wrap
from .held import HeldTensors
from .marks import EagerMark

__all__ = ["EagerPart", "Made", "PartCall", "PartTensor", "SavedPass", "leaves_of", "of_all"]

Shards = tuple[Tensor, ...]
# Stages that one process plays have a thread each, and modules hold one part's tensors at a time.
_one_at_a_time = threading.RLock()
SavedPass = tuple[list[Shards], list[Shards]]  # the shards of leaves, and those of results


@dataclass(frozen=True, slots=True)
class PartTensor:
    """In a structure: the so manyth tensor stands here. With slots it has no parts where objects have."""

    number: int


@dataclass(frozen=True)
class Made:
    """A tensor that a part gives back: shape and dtype, the same at each step."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class PartCall:
    """A call of a part as it was captured. In `given`, its arguments, and `result` tensors stand as `PartTensor`s."""

    mark: EagerMark
    given: Any
    many: int  # tensors among the arguments
    held: HeldTensors
    result: Any
    made: tuple[Made, ...]
    written: tuple[int, ...]  # held buffers that it writes to, of which the new values are given back last
    grad: bool  # whether autograd was on
    draws: bool  # whether it drew random numbers
    autocast: tuple[tuple[str, torch.dtype], ...]
    place: str  # its path and line


class EagerPart:
    """A part as rules look at an op. Each call has one of its own."""

    tags: tuple[()] = ()
    _overloadname = "default"
    namespace = PART

    def __init__(self, call: PartCall) -> None:
        self.call = call
        self.name = call.mark.name
        takes = ", ".join(f"Tensor {'held' if n >= call.many else 'arg'}{n}" for n in range(self.takes))
        gives = ", ".join(["Tensor"] * self.gives)
        word = re.sub(r"\W", "_", self.name.replace("<", "").replace(">", ""))
        said = gives if self.gives == 1 else f"({gives})"
        self._schema = torch._C.parse_schema(f"{PART}::{word}({takes}) -> {said}")

    @property
    def takes(self) -> int:
        return self.call.many + len(self.call.held.tensors)

    @property
    def gives(self) -> int:
        return len(self.call.made) + len(self.call.written)

    def _can_decompose(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"eager {self.name}"

    def answer(self, call: Call) -> Match | None:
        """The first dims of arguments of one size may be split together, and with them those of results.

        This tells how tensors lie at its ends, and nothing of what it does to samples."""
        sizes = dict.fromkeys(x.shape[0] for x in call.inputs[: self.call.many] if x.ndim and x.shape[0] > 1)
        number = {size: at for at, size in enumerate(sizes)}

        def factors(x: Tensor, *, held: bool = False) -> tuple[int, ...]:
            return tuple(number.get(n, NEVER) if not (d or held) else NEVER for d, n in enumerate(x.shape))

        ins = tuple(factors(x, held=at >= self.call.many) for at, x in enumerate(call.inputs))
        outs = tuple(factors(y, held=at >= len(self.call.made)) for at, y in enumerate(call.outputs))
        return Match(ins, outs, tuple(sizes), hollow=True) if sizes else None

    # A run

    def forward(
        self,
        inputs: Sequence[Shards],
        lies: Sequence[Layout],
        wants: Sequence[bool],
        gives: Sequence[Layout],
        slots: Sequence[int],
    ) -> tuple[list[Shards], SavedPass]:
        """The shards of what it gives back, as they are to lie, and what its backward needs. Of the inputs in `wants`
        gradients will be asked, and `slots` are the inputs that stand for its tensors."""
        leaves = [
            tuple(x.detach().requires_grad_() if wanted else x.detach() for x in shards)
            for shards, wanted in zip(inputs, wants, strict=True)
        ]
        tensors = [wrap(shards, of) for shards, of in zip(leaves, lies, strict=True)]
        with ExitStack() as stack:
            stack.enter_context(_one_at_a_time)
            for kind, dtype in self.call.autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            stack.enter_context(torch.set_grad_enabled(self.call.grad))
            made = self._called([tensors[at] for at in slots])
            results = [self._lying(y, of) for y, of in zip(made, gives, strict=True)]
        return [tuple(y.detach() for y in shards) for shards in results], (leaves, results)

    def _called(self, tensors: Sequence[GlobalTensor]) -> list[GlobalTensor]:
        call, where = self.call, tensors[0].placement
        versions = [x._shards[0]._version for x in tensors]
        held = list(tensors[call.many :])
        for at in call.written:
            held[at] = wrap(tuple(x.clone() for x in held[at]._shards), held[at]._layout)
        args, kwargs = replaced(call.given, lambda _, ref: tensors[ref.number], objects=True, kind=PartTensor)
        with call.held.holding(held), run_by(where), self._drawing_alike(where):
            result = call.mark(*args, **kwargs)
            now = [call.held.now(at) for at in range(len(held))]
        after = [x._shards[0]._version for x in tensors]
        changed = [at for at, (old, new) in enumerate(zip(versions, after, strict=True)) if old != new]
        changed += [call.many + at for at, x in enumerate(now) if x is not held[at] and at not in call.written]
        if changed:
            inner = changed[0] - call.many
            what = call.held.names[inner] if inner >= 0 else "a tensor that it is given"
            raise SbpError(
                f"the eager part {self.name} writes to {what}, and did not when the step was captured\n"
                f"  it is called at {call.place}\n  have it return a new tensor"
            )
        found = self._checked(result)
        return [_global(y, where) for y in (*found, *(now[at] for at in call.written))]

    def check_draws(self, where: Placement) -> None:
        """Refuse random numbers that other processes would not draw: theirs would be others from then on."""
        if self.call.draws and not of_all(where):
            raise self._draws_alone(where)

    @contextmanager
    def _drawing_alike(self, where: Placement) -> Iterator[None]:
        """Around a run: refuse numbers that are drawn, which the capture did not see, where others do not run it."""
        kind = family(where.type)
        before = None if of_all(where) else kind.random_state()
        yield
        if before is not None and not torch.equal(kind.random_state(), before):
            raise self._draws_alone(where)

    def _draws_alone(self, where: Placement) -> SbpError:
        return SbpError(
            f"the eager part {self.name}, called at {self.call.place}, draws random numbers on {where!r}\n"
            "  other processes do not run it, and would draw others from then on\n"
            "  draw them before it, and pass them to it, or place it on all ranks"
        )

    def _checked(self, result: Any) -> list[Tensor]:
        """The tensors of a result that is as it was captured."""
        call, found, known = self.call, leaves_of(result), leaves_of(self.call.result)
        if len(found) != len(known):
            raise self._other(f"{len(found)} values", f"{len(known)}")
        tensors = []
        for (path, value), (_, before) in zip(found, known, strict=True):
            if isinstance(before, PartTensor):
                made = call.made[before.number]
                if not isinstance(value, Tensor):
                    raise self._other(f"a {type(value).__name__}{_at(path)}", "a tensor")
                if (tuple(value.shape), value.dtype) != (made.shape, made.dtype):
                    raise self._other(
                        f"{_said(tuple(value.shape), value.dtype)}{_at(path)}", _said(made.shape, made.dtype)
                    )
                tensors.append(value)
            elif not _same(value, before):
                raise self._other(f"{_told(value)}{_at(path)}", _told(before))
        return tensors

    def _other(self, found: str, known: str) -> ShapeError:
        return ShapeError(
            f"the eager part {self.name} gave back {found}, and {known} when the step was captured\n"
            f"  it is called at {self.call.place}; the graph around it is made for that\n"
            "  give back tensors of one size, padded where values decide it, and numbers that change as tensors"
        )

    def _lying(self, y: GlobalTensor, of: Layout) -> Shards:
        """The shards of a result as the graph has it; the gradient comes back as its dual lies."""
        if not y.requires_grad:
            of = of.with_state(of.state)
        there = y
        if y._layout.placement is not of.placement:
            there = y.to_global(placement=of.placement)
        return own_shards(there, of, f"eager {self.name}")

    def backward(
        self, saved: SavedPass, cotangents: Sequence[Shards], returns: Sequence[int], wants: Sequence[int]
    ) -> list[Shards]:
        """The gradients of the inputs in `wants`, of those of results in `returns`."""
        leaves, results = saved
        asked = [x for at in wants for x in leaves[at]]
        pairs = [
            (y, g)
            for at, come in zip(returns, cotangents, strict=True)
            for y, g in zip(results[at], come, strict=True)
            if y.requires_grad
        ]
        found: Sequence[Tensor | None] = [None] * len(asked)
        if pairs:
            ends, starts = zip(*pairs, strict=True)
            with _one_at_a_time:
                found = torch.autograd.grad(ends, asked, starts, allow_unused=True)
        dense = iter(_dense(x, g) for x, g in zip(asked, found, strict=True))
        return [tuple(next(dense) for _ in leaves[at]) for at in wants]


def of_all(where: Placement) -> bool:
    """Whether every process has a rank of a placement."""
    here = world()
    return here.rank is None or len({*where.flat}) == here.size


def _dense(x: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _global(y: Tensor, where: Placement) -> GlobalTensor:
    """A tensor that a part gives back: a plain one is whole on every rank."""
    if isinstance(y, GlobalTensor):
        return y
    if not y.requires_grad:
        return whole_everywhere(y, where)
    of = whole(y, where)
    return wrap(to_all(y, len(owned(where))) or (token(of),), of)


def leaves_of(value: Any) -> list[tuple[str, Any]]:
    """All that has no parts in a structure, or in an object there, with its path."""
    found: list[tuple[str, Any]] = []

    def note(path: str, leaf: Any) -> Any:
        found.append((path, leaf))
        return leaf

    replaced(value, note, objects=True, kind=None)
    return found


def _same(value: Any, before: Any) -> bool:
    if type(value) in ATOMS or isinstance(value, Enum):
        return type(value) is type(before) and bool(value == before or (value != value and before != before))
    return value is before


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _said(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"a tensor {shape} of {str(dtype).removeprefix('torch.')}"


def _told(value: Any) -> str:
    return repr(value) if type(value) in ATOMS else f"a {type(value).__name__}"
