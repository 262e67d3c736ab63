"""The registry of composites: by name, with the ops each stands for. Users add theirs as those here are added."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias, TypeVar

from ...placement.errors import SbpError

__all__ = ["Composite", "composite", "composite_named"]

Written: TypeAlias = Callable[..., Any]  # of an Axis and the op's arguments; gives the op's results
W = TypeVar("W", bound=Written)


@dataclass(frozen=True)
class Composite:
    """A way to compute some ops along an axis; `noun` says in errors what it was looking for."""

    name: str
    ops: frozenset[str]  # as rules name them
    written: Written
    noun: str
    axes: tuple[int, ...] = (1,)  # over how many it may be


_known: dict[str, Composite] = {}


def _place(written: Callable[..., Any]) -> tuple[str, str]:
    return written.__module__, written.__qualname__


def composite(
    name: str, *, of: str | Iterable[str], noun: str | None = None, axes: int | Iterable[int] = 1
) -> Callable[[W], W]:
    """A decorator: this function is the composite of that name, and stands for these ops, named as rules name them.

    It is called with an `Axis` and the op's own arguments, tensors as `AxisValue`s, and returns what the op would.
    With `axes` it is over so many axes of a placement, or over one of these numbers of them.
    """
    counts = (axes,) if isinstance(axes, int) else tuple(axes)
    ops = frozenset([of] if isinstance(of, str) else of)
    if not (isinstance(name, str) and name.isidentifier()) or not ops:
        raise SbpError(
            f"composite {name!r} of {', '.join(sorted(ops)) or 'no op'}\n"
            '  give it a word for a name and the ops it stands for, as in @flow.nn.composite("ring", of="linear")'
        )

    def put(written: W) -> W:
        if name in _known and _place(_known[name].written) != _place(written):  # a cell of a notebook may run twice
            raise SbpError(f"there is a composite {name!r} already\n  give this one another name")
        _known[name] = Composite(name, ops, written, noun or " or ".join(sorted(ops)), counts)
        return written

    return put


def composite_named(name: str) -> Composite:
    """The composite of a name."""
    found = _known.get(name) if isinstance(name, str) else None
    if found is None:
        near = get_close_matches(str(name), _known, 2, 0.5)
        fix = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(map(repr, _known))}"
        raise SbpError(f"there is no composite {name!r}\n  {fix}; flow.nn.composite adds one")
    return found
