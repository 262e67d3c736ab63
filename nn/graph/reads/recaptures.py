"""Recaptures: a warning for a step that is captured again and again, because a value is another each time."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from .guard import ReadChange, is_plain

__all__ = ["KEPT", "SHAPES", "ArgumentKinds", "Recaptures"]

KEPT = 8  # steps for arguments of one kind, of which the last ones are kept
SHAPES = 64  # kinds of arguments that differ in more than numbers, likewise
MANY = 4


class Recaptures:
    """The values for which a graph was captured anew, and how often; it tells of each once."""

    def __init__(self, name: str) -> None:
        self.name, self.counts = name, dict[str, int]()

    def note(self, changes: Iterable[ReadChange | None]) -> None:
        """Count a capture that was made anew because no earlier step fits: each has a value that is another now."""
        changed = next((each for each in changes if each is not None), None)
        if changed is None:
            return
        title = changed.title
        self.counts[title] = self.counts.get(title, 0) + 1
        if self.counts[title] == MANY:
            fix = (
                "\n  it goes into the step as it is when that is captured: make it an argument that is a tensor, as in "
                "step(x, torch.tensor(0.1)), or a buffer, and the step runs on with each value"
                if is_plain(changed.was)
                else "\n  change it once, before many steps, or hand over what differs as tensors among the arguments"
            )
            warnings.warn(
                f"{self.name} is captured and planned anew for the {MANY}th time, which takes longer than a step: "
                f"changed was {changed}{fix}",
                stacklevel=2,
            )


class ArgumentKinds:
    """The kinds of arguments for which a graph has plans.

    All that is no tensor is part of a kind, also numbers; but kinds that differ in numbers alone are one shape. More
    shapes than are kept are told of once."""

    def __init__(self, name: str) -> None:
        self.name, self.told = name, False
        self._kinds: dict[tuple[Hashable, Hashable], dict[Hashable, dict[str, Any]]] = {}  # the last used comes last

    def used(
        self, kind: Any, modes: Hashable, names: Callable[[], Sequence[str]]
    ) -> tuple[ReadChange | None, list[tuple[Hashable, Hashable]]]:
        """Note that a step of this kind runs now; `names` are those of arguments by position.

        Returned are the number that differs from the last one's, if it is a new kind, and kinds that are too many by
        now, with their modes."""
        numbers: dict[str, Any] = {}
        shape = _without_numbers(kind, names, numbers), modes
        self._kinds[shape] = kinds = self._kinds.pop(shape, {})
        changed, last = None, next(reversed(kinds.values()), {})
        if kind not in kinds:
            differ = (name for name, value in last.items() if value != numbers[name])
            changed = next((ReadChange(name, _number(last[name]), _number(numbers[name])) for name in differ), None)
        kinds[kind] = kinds.pop(kind, numbers)
        gone = [(each, modes) for each in list(kinds)[:-KEPT]]
        for each, _ in gone:
            del kinds[each]
        for old in list(self._kinds)[:-SHAPES]:
            gone += [(each, old[1]) for each in self._kinds.pop(old)]
            self._tell()
        return changed, gone

    def _tell(self) -> None:
        if not self.told:
            self.told = True
            warnings.warn(
                f"{self.name} has plans for {SHAPES} shapes of arguments, and drops the oldest for each more: when its "
                "shape comes again it is planned again\n"
                "  pad batches to a few sizes, such as rows to a multiple of 64",
                stacklevel=2,
            )


def _number(part: tuple[type, Any]) -> Any:
    """A number of the kind, which may stand there as text."""
    kind, value = part
    return kind(value)


def _without_numbers(kind: Any, names: Callable[[], Sequence[str]], numbers: dict[str, Any]) -> Hashable:
    """A kind of arguments without their numbers, which are noted by what users call them."""

    def without(part: Any, title: str) -> Any:
        if not isinstance(part, tuple):
            return part
        if len(part) == 2 and part[0] in (int, float, complex):
            numbers[title if title not in numbers else f"{title}, {len(numbers)}"] = part
            return part[:1]
        return tuple([without(each, title) for each in part])

    given, named, *starts = kind
    known = names() if given else ()
    titles = [known[at] if at < len(known) else str(at) for at in range(len(given))]
    found = [without(each, f"the argument {title}") for each, title in zip(given, titles, strict=True)]
    return tuple(found), tuple([(name, without(each, f"the argument {name}")) for name, each in named]), *starts
