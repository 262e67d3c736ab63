"""The context that `checkpoint(use_reentrant=False)` of torch has around the function that it calls, and ours instead.

Here it is `around(function, args, kwargs, **settings)`, a generator that yields once, while the function runs. Torch
has it so since 2.14, and before under another name, with settings and arguments in one row.
"""

import inspect
from collections.abc import Callable, Iterator
from itertools import islice
from threading import RLock
from typing import Any, TypeAlias

from torch.utils import checkpoint

from ...tensors.tensor import GlobalTensor, wrap

__all__ = ["replace_around", "saved_by_turns", "saving_shards"]

Around: TypeAlias = Callable[..., Iterator[None]]

_NAME = next(
    name
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    if hasattr(checkpoint, name)
)
_parameters = list(inspect.signature(getattr(checkpoint, _NAME)).parameters.values())[1:]
_SETTINGS = [each.name for each in _parameters if each.kind is each.POSITIONAL_OR_KEYWORD]  # in a row with arguments
_IN_A_ROW = any(each.kind is each.VAR_POSITIONAL for each in _parameters)


def replace_around(make: Callable[[Around], Around]) -> Callable[[], None]:
    """Puts `make(of the one that is there)` in its place; what comes back undoes that."""
    there: Around = getattr(checkpoint, _NAME)
    made = make(_of_row(there)) if _IN_A_ROW else make(there)

    def in_a_row(function: Callable[..., Any], *given: Any, **kwargs: Any) -> Iterator[None]:
        settings = dict(zip(_SETTINGS, given, strict=False))
        return made(function, given[len(_SETTINGS) :], kwargs, **settings)

    setattr(checkpoint, _NAME, in_a_row if _IN_A_ROW else made)
    return lambda: setattr(checkpoint, _NAME, there)


def _of_row(there: Around) -> Around:
    def around(function: Callable[..., Any], args: Any, kwargs: Any, **settings: Any) -> Iterator[None]:
        return there(function, *(settings[name] for name in _SETTINGS), *args, **kwargs)

    return around


def saving_shards(recomputing: Around) -> Around:
    """A recomputation that saves its arguments' shards. A checkpoint around it may hand out saved tensors anew; a
    global tensor's shell would come back without its values, and without knowing whether it requires grad."""

    def around(function: Callable[..., Any], args: Any, kwargs: Any, **settings: Any) -> Iterator[None]:
        if not any(isinstance(x, GlobalTensor) for x in args):
            return recomputing(function, args, kwargs, **settings)
        kinds = [(x._layout, len(x._shards)) if isinstance(x, GlobalTensor) else None for x in args]

        def again(*saved: Any, **named: Any) -> Any:
            held = iter(saved)
            whole = [next(held) if of is None else wrap(tuple(islice(held, of[1])), of[0]) for of in kinds]
            return function(*whole, **named)

        parts = [part for x in args for part in (x._shards if isinstance(x, GlobalTensor) else (x,))]
        return recomputing(again, tuple(parts), kwargs, **settings)

    return around


def saved_by_turns() -> None:
    """Hand out what a region saved to one thread at a time.

    Autograd has a thread for each card, and those of cards in one process would run a region again at the same time.
    """
    checkpoint._checkpoint_hook = _ByTurns  # type: ignore[misc]


class _ByTurns(checkpoint._checkpoint_hook):
    def __init__(self, frame: Any) -> None:
        super().__init__(frame)
        unpack, turn = self.unpack_hook, RLock()

        def unpack_by_turns(held: Any) -> Any:
            with turn:
                return unpack(held)

        self.unpack_hook = unpack_by_turns
