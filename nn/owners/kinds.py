"""Optimizers that step tensor by tensor: what one of them makes of a tensor hangs on no other."""

from typing import TypeVar
from weakref import WeakSet

from torch.optim import Adafactor, Muon, Optimizer

from ...placement.errors import SbpError

__all__ = ["by_tensor", "steps_by_tensor"]

C = TypeVar("C", bound=type[Optimizer])

_kinds: WeakSet[type[Optimizer]] = WeakSet([Muon, Adafactor])


def steps_by_tensor(kind: C) -> C:
    """Say of a class of optimizers, but not of its subclasses, that it steps tensor by tensor. The class is returned.

    Each matrix is then brought to one rank for its step, and not to all. An optimizer that looks at several tensors at
    once, such as at the norm of all gradients, or that draws numbers, is none; nor need be one that treats every
    element alone. Without a word about it a class of your own gets all tensors on all ranks, which is right for any.

    >>> from torch.optim import SGD
    >>> @steps_by_tensor
    ... class Shampoo(SGD):
    ...     pass
    >>> from torch import zeros
    >>> by_tensor(Shampoo([zeros(2)], lr=0.1)), by_tensor(SGD([zeros(2)], lr=0.1))
    (True, False)
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise SbpError(
            f"steps_by_tensor({kind!r}): no class of optimizers\n  pass the class, not an optimizer: type(optimizer)"
        )
    _kinds.add(kind)
    return kind


def by_tensor(optimizer: Optimizer) -> bool:
    """Whether it is known to step tensor by tensor."""
    return type(optimizer) in _kinds
