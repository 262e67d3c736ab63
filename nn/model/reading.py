"""Reading: the times in which threads compute with a model's weights, and a refit does not change them.

    generates    | forward |  | forward |           | forward |  with new weights
    refits                  asks ...... | refit    |

Many threads may read at once. A refit waits until nobody reads what it writes, and whoever comes then waits for it. All
goes by tensors, so that models which share some share the wait, and those which share none know nothing of each other.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ...boxing.record import user_line
from ...placement.errors import SbpError
from .slots import slots

__all__ = [
    "begin_forward", "begin_reading", "end_forward", "end_reading", "read_by_forwards", "reading", "rewriting",
]  # fmt: skip

# A read that finds a refit waiting lets it go first, or one that follows another would keep it out for ever. But the
# refit may wait for a forward that waits for this very read, in another thread; so it is for so many seconds at most.
COURTESY = 1.0


@dataclass(eq=False, slots=True)
class Claim:
    """A thread that reads, or is to write or writes, tensors by their identities."""

    thread: int
    tensors: frozenset[int]
    module: nn.Module | None = None
    writes: bool = False  # now; before, it waits

    def meets(self, other: "Claim") -> bool:
        return self.thread != other.thread and not self.tensors.isdisjoint(other.tensors)


_lock = threading.RLock()
_changed = threading.Condition(_lock)
_reads: list[Claim] = []
_writes: list[Claim] = []
_tensors: "WeakKeyDictionary[nn.Module, frozenset[int]]" = WeakKeyDictionary()  # of models whose forwards read


@contextmanager
def reading(*models: nn.Module) -> Iterator[None]:
    """Inside, the weights of these models are of one version: a refit of another thread waits for the end.

    A compiled step reads for as long as it runs, and so does a forward of a model that was refitted before. This is for
    what takes several of them, such as an answer of many tokens, and for forwards before the first refit.

    >>> import torch
    >>> model = nn.Linear(2, 2)
    >>> with reading(model):
    ...     answer = model(model(torch.ones(2)))
    """
    wrong = next((each for each in models if not isinstance(each, nn.Module)), None)
    if wrong is not None or not models:
        found = "nothing" if wrong is None else f"a {type(wrong).__name__}"
        raise SbpError(
            f"flow.nn.reading at {user_line()} got {found}, and no model\n"
            "  pass modules; for a compiled step, the model that it was compiled with: flow.nn.reading(model)"
        )
    claim = begin_reading(_held(dict(zip(map(str, range(len(models))), models, strict=True))))
    try:
        yield
    finally:
        end_reading(claim)


@contextmanager
def rewriting(written: Iterable[Tensor], read: Iterable[Tensor]) -> Iterator[None]:
    """Inside no other thread reads what is written here. Nor what is read: a compiled step that does may train it."""
    own = frozenset(map(id, written))
    claim = Claim(threading.get_ident(), own.union(map(id, read)))
    with _changed:
        if any(each.thread == claim.thread and not own.isdisjoint(each.tensors) for each in _reads):
            raise SbpError(
                f"flow.refit at {user_line()} is inside a forward of its target, or inside flow.nn.reading of it,"
                " which would be of two versions\n  refit before it, or behind it"
            )
        _writes.append(claim)
        try:
            _changed.wait_for(lambda: not any(each.meets(claim) for each in (*_reads, *_writing())))
            claim.writes = True
        except BaseException:
            _writes.remove(claim)
            _changed.notify_all()
            raise
    try:
        yield
    finally:
        with _changed:
            _writes.remove(claim)
            _changed.notify_all()


def read_by_forwards(model: nn.Module) -> None:
    """From now on each forward of a model reads what it holds now."""
    _tensors[model] = _held({"": model})
    if begin_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(begin_forward, prepend=True)
        model.register_forward_hook(end_forward, always_call=True)


def begin_forward(model: nn.Module, args: Any) -> None:
    """A hook: functions of a module, so that copies of the model have them, and files name them."""
    held = _tensors.get(model)
    if held is not None:
        begin_reading(held, model)


def end_forward(model: nn.Module, args: Any, result: Any) -> None:
    """The hook behind a forward, also one that failed."""
    me = threading.get_ident()
    with _changed:
        claim = next((each for each in reversed(_reads) if each.module is model and each.thread == me), None)
    if claim is not None:
        end_reading(claim)


def begin_reading(tensors: frozenset[int], module: nn.Module | None = None) -> Claim:
    """This thread reads tensors, by their identities, until the end of what comes back."""
    claim = Claim(threading.get_ident(), tensors, module)
    with _lock:
        if _writes:
            inside = any(each.thread == claim.thread for each in _reads)  # what it is inside of keeps refits waiting
            if not inside:
                _changed.wait_for(lambda: not any(each.meets(claim) for each in _writes), COURTESY)
            _changed.wait_for(lambda: not any(each.meets(claim) for each in _writing()))
        _reads.append(claim)
    return claim


def end_reading(claim: Claim) -> None:
    """It reads them no more."""
    with _lock:
        _reads.remove(claim)
        if _writes:
            _changed.notify_all()


def _writing() -> list[Claim]:
    return [each for each in _writes if each.writes]


def _held(models: dict[str, nn.Module]) -> frozenset[int]:
    return frozenset(id(slot.value) for slot in slots(models, once=True))
