"""Replay of attention's core alone: an eager forward after which what its core made is let go, until it is needed.

Calls below autograd are noted while the forward runs. Of what autograd saved, what some core made is then dropped; the
first who asks for any of it has the core run again from its query, key, value and mask, with the random numbers that it
drew. A value is known by where it lies, as autograd saves views, and by how often that memory was written to.
"""

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ....placement.device import family
from ....placement.errors import SbpError
from ....sbp.call import fill, map_tensors, numbered, tensors_in
from .attention_core import CoreCall, cores
from .replay import real

__all__ = ["core_replayed"]


class Lying(NamedTuple):
    """A tensor by where it lies."""

    memory: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "Lying":
        return cls(_memory(x), x.shape, x.stride(), int(x.storage_offset()), x.dtype)


class NotedCall(NamedTuple):
    """A call that went by, with its results, and the states of the generators that it drew from."""

    op: Any
    args: Any
    kwargs: Any
    outputs: Sequence[Tensor]
    drew: dict[torch.device, Tensor]


class _Again(NamedTuple):
    """A call to make again. Its arguments have numbers in the place of tensors, which are given, or made by another."""

    op: Any
    said: Any
    given: Sequence[Tensor | Lying]
    outputs: Sequence[int]
    drew: dict[torch.device, Tensor]


class _CoreNotes(TorchDispatchMode):
    """Notes calls, and gives the value of a memory a new number whenever it is written to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[NotedCall] = []
        self.nodes: list[CoreCall] = []
        self.numbers: dict[int, int] = {}  # of memories
        self.count = 0
        self.held: list[torch.UntypedStorage] = []  # so that no other memory is where one was

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not real((args, kwargs)):
            return func(*args, **kwargs)
        drew = {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            drew = {x.device: family(x.device.type).random_state(x.device) for x in tensors_in([args, kwargs])}
        taken = [self.number(x) for x in tensors_in([args, kwargs])]
        out = func(*args, **kwargs)
        made = tensors_in(out)
        writes = func._schema.is_mutable
        fresh = [x for x in made if writes or _memory(x) not in self.numbers]
        for x in fresh:
            self.numbers[_memory(x)] = self.count = self.count + 1
        if fresh:
            held: Any = map_tensors([args, kwargs], Tensor.detach)
            self.calls.append(NotedCall(func, held[0], held[1], tuple(map(Tensor.detach, made)), drew))
            self.nodes.append(CoreCall(func, taken, [self.number(x) for x in fresh]))
        return out

    def number(self, x: Tensor) -> int:
        key = _memory(x)
        if key not in self.numbers:
            self.held.append(x.untyped_storage())
            self.numbers[key] = self.count = self.count + 1
        return self.numbers[key]


class _Core:
    """Calls to make again, with what comes from outside; what they make comes and goes."""

    def __init__(self, calls: Sequence[NotedCall]) -> None:
        self.made = {_memory(x) for call in calls for x in call.outputs}
        self.calls: list[_Again] = []
        known: set[int] = set()
        for op, args, kwargs, outputs, drew in calls:
            taken = tensors_in([args, kwargs])
            if op._schema.is_mutable and any(_memory(x) not in known for x in outputs):
                raise SbpError(
                    f"recompute: the core of attention writes by {op} to what it was given\n"
                    "  leave out only=, so that all of the module is run again, or run it in a graph"
                )
            given = [Lying.of(x) if _memory(x) in known else x for x in taken]
            self.calls.append(_Again(op, numbered([args, kwargs]), given, [_memory(x) for x in outputs], drew))
            known.update(map(_memory, outputs))
        self.turn = RLock()
        self.memories: dict[int, torch.UntypedStorage] = {}
        self.asked = 0  # how many tensors of it autograd saved, and how many of these it has not taken yet
        self.left = 0

    def value(self, lying: Lying) -> Tensor:
        """A tensor that the core made; the last one that is asked for lets all go."""
        with self.turn:  # autograd has a thread for each card, some of which may be of this process
            if not self.memories:
                self._run()
                self.left = self.asked
            found = self._put(lying)
            self.left -= 1
            if not self.left:
                self.memories = {}
            return found

    @torch.no_grad()
    def _run(self) -> None:
        drawing = {device for call in self.calls for device in call.drew}
        cards = [device for device in drawing if family(device.type).card]
        kind = cards[0].type if cards else "cpu"
        with torch._C._DisableAutocast(), torch.random.fork_rng(cards, enabled=bool(drawing), device_type=kind):
            for op, said, given, outputs, drew in self.calls:
                for device, state in drew.items():
                    family(device.type).set_random_state(state, device)
                args, kwargs = fill(said, [self._put(x) for x in given])
                made = tensors_in(op(*args, **kwargs))
                self.memories.update({key: x.untyped_storage() for x, key in zip(made, outputs, strict=True)})

    def _put(self, x: Tensor | Lying) -> Tensor:
        if isinstance(x, Tensor):
            return x
        memory = self.memories[x.memory]
        made = torch.empty(0, dtype=x.dtype, device=memory.device)
        return made.set_(memory, x.offset, x.shape, x.stride)


class _Saved:
    """A tensor that autograd saved, or how to have it again."""

    __slots__ = ("core", "lying", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.core: _Core | None = None
        self.lying: Lying | None = None

    def drop(self, core: _Core) -> None:
        assert self.tensor is not None
        self.core, self.lying, self.tensor = core, Lying.of(self.tensor), None
        core.asked += 1

    def value(self) -> Tensor:
        if self.core is None or self.lying is None:
            assert self.tensor is not None
            return self.tensor
        return self.core.value(self.lying)


def core_replayed(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The result of a module's forward, of whose attention the backward runs the core again.

    Where what autograd saves is somebody else's already, as inside of a region, it stays so.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return run(*args, **kwargs)
    saved: list[_Saved] = []

    def pack(x: Tensor) -> _Saved:
        saved.append(_Saved(x))
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, _Saved.value), _CoreNotes() as notes:
        result = run(*args, **kwargs)
    found = [_Core([notes.calls[at] for at in sorted(places)]) for places in cores(notes.nodes)]
    if not found:
        raise SbpError(
            f"recompute: {name} has no attention\n"
            "  there is neither a fused one in it nor a softmax between products\n"
            "  leave out only=, so that all of it is run again"
        )
    of = {memory: core for core in found for memory in core.made}
    for each in saved:
        assert each.tensor is not None
        core = of.get(_memory(each.tensor))
        if core is not None:
            each.drop(core)
    return result


def _memory(x: Tensor) -> int:
    found: int = x.untyped_storage()._cdata
    return found
