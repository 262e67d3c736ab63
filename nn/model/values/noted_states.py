"""States of optimizers that wait in files until a graph adopts the optimizer: then each process reads its part.

A model on meta has no memory for its weights, and so its optimizer has none for its states. What `flow.load` finds for
them is noted for the optimizer, and given when the graph's first run knows how they are to lie.
"""

from typing import Protocol
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

__all__ = ["Waiting", "note_states", "noted_states", "taken_states"]


class Waiting(Protocol):
    """States in files; `give` reads them for the parameters that the optimizer has by then."""

    def give(self, optimizer: Optimizer) -> None: ...


_noted: "WeakKeyDictionary[Optimizer, Waiting]" = WeakKeyDictionary()


def note_states(optimizer: Optimizer, states: Waiting | None) -> None:
    """Have an optimizer wait for states, in the place of others that it waited for; None takes them back."""
    if states is None:
        _noted.pop(optimizer, None)
    else:
        _noted[optimizer] = states


def noted_states(optimizer: Optimizer) -> Waiting | None:
    return _noted.get(optimizer)


def taken_states(optimizer: Optimizer) -> Waiting | None:
    """Those that an optimizer waits for, which it waits for no more."""
    return _noted.pop(optimizer, None)
