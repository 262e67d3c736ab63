"""The registry of composites, by name and with the ops each stands for: users add theirs as those here are added."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ...placement.errors import SbpError
from ...sbp.logical import LogicalOp
from ..model.inside import COMPOSITES, Composite, CompositeSite, Left
from .written_calls import calls_of

__all__ = ["composite"]

Written: TypeAlias = Callable[..., Any]  # takes an Axis and the op's arguments, and gives the op's results
W = TypeVar("W", bound=Written)


@dataclass(frozen=True)
class WrittenComposite(Composite):
    """A composite that is written as a function of an `Axis`."""

    written: Written

    def calls(self, site: CompositeSite) -> list[LogicalOp] | Left:
        return calls_of(self.written, site)


def _place(written: Callable[..., Any]) -> tuple[str, str]:
    return written.__module__, written.__qualname__


def composite(
    name: str,
    *,
    of: str | Iterable[str],
    noun: str | None = None,
    axes: int | Iterable[int] = 1,
    takes: Iterable[str] = (),
    alone: bool = False,
) -> Callable[[W], W]:
    """A decorator: this function is the composite of that name, and stands for these ops, named as rules name them.

    It is called with an `Axis` and the op's own arguments, tensors as `AxisValue`s, and returns what the op would.
    With `axes` it is over so many axes of a placement, or over one of these numbers of them. What it `takes` is said
    behind its name, as in "capacity(1.25)", and given to it by name. One that computes something else than the op does
    so `alone` too, where its axis has one rank.
    """
    counts = (axes,) if isinstance(axes, int) else tuple(axes)
    ops = frozenset([of] if isinstance(of, str) else of)
    if not (isinstance(name, str) and name.isidentifier()) or not ops:
        raise SbpError(
            f"composite {name!r} of {', '.join(sorted(ops)) or 'no op'}\n"
            '  give it a word for a name and the ops it stands for, as in @flow.nn.composite("ring", of="linear")'
        )

    def put(written: W) -> W:
        known = COMPOSITES.get(name)
        if isinstance(known, WrittenComposite) and _place(known.written) != _place(written):  # a cell may run twice
            raise SbpError(f"there is a composite {name!r} already\n  give this one another name")
        COMPOSITES[name] = WrittenComposite(
            name, ops, noun or " or ".join(sorted(ops)), counts, tuple(takes), alone, written
        )
        return written

    return put
