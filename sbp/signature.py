"""Split, Broadcast, Partial-sum: how one axis of a placement holds a logical tensor.

S(d)   rank i holds the i-th piece along dim d
B      every rank holds the whole
P      every rank holds an addend; P("max") and P("min") likewise
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from ..placement.errors import SbpError

__all__ = ["B", "Broadcast", "P", "Partial", "Reduction", "S", "Sbp", "Split"]

Reduction: TypeAlias = Literal["sum", "max", "min"]


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Rank i holds the i-th piece along tensor dim `dim`; early ranks take the remainder.

    Made by `S(dim)`, one object a dim, so that equality is identity. A negative dim counts from the back.

    >>> S(1), S(-1), S(1) is S(1)
    (S(1), S(-1), True)
    """

    dim: int

    def __repr__(self) -> str:
        return f"S({self.dim})"

    def __reduce__(self) -> tuple[object, ...]:
        return S, (self.dim,)


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """Every rank holds the whole value. There is one: `B`; as in OneFlow, it may be called.

    >>> B() is B
    True
    """

    def __call__(self, *dims: object) -> "Broadcast":
        if dims:
            raise SbpError(f"B of {', '.join(map(repr, dims))}: B is whole on every rank, and has no dim\n  write B")
        return self

    def __repr__(self) -> str:
        return "B"

    def __reduce__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Every rank holds one term of a sum (or a maximum, or a minimum). Made by `P` and `P("max")`.

    >>> P, P("max"), P("sum") is P, P() is P
    (P, P("max"), True, True)
    """

    reduction: Reduction

    def __call__(self, reduction: Reduction = "sum") -> "Partial":
        if reduction not in ("sum", "max", "min"):
            raise SbpError(f'P({reduction!r}): no reduction of a partial value\n  write P("sum"), P("max") or P("min")')
        return _partial(reduction)

    def __repr__(self) -> str:
        return "P" if self.reduction == "sum" else f'P("{self.reduction}")'

    def __reduce__(self) -> tuple[object, ...]:
        return _partial, (self.reduction,)


Sbp: TypeAlias = Split | Broadcast | Partial


def S(dim: int) -> Split:
    """Split along tensor dim `dim`.

    >>> S(0)
    S(0)
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise SbpError(f"S({dim!r}): the dim is a whole number, as in S(0) or S(-1)")
    return _split(dim)


@cache
def _split(dim: int) -> Split:
    return Split(dim)


@cache
def _partial(reduction: Reduction) -> Partial:
    return Partial(reduction)


B = Broadcast()
P = _partial("sum")
