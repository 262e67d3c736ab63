"""Recaptures: a step that is captured again and again, since a value is another each time, says so."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from .guard import ReadChange, is_plain

__all__ = ["KEPT", "NumberedKinds", "Recaptures"]

KEPT = 8  # steps for arguments of one kind, of which the last ones are kept
MANY = 4


class Recaptures:
    """The values for which a graph was captured anew, and how often; it tells of each once."""

    def __init__(self, name: str) -> None:
        self.name, self.counts = name, dict[str, int]()

    def note(self, changes: Iterable[ReadChange | None]) -> None:
        """It is captured anew, as no step that there was fits: each has something that is another now."""
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


class NumberedKinds:
    """Kinds of arguments by what they are but for numbers, which are parts of a kind as all that is no tensor."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, dict[Hashable, dict[str, Any]]] = {}  # the last that was used comes last

    def used(
        self, kind: Any, modes: Hashable, names: Callable[[], Sequence[str]]
    ) -> tuple[ReadChange | None, list[Hashable]]:
        """A step of this kind runs now: the number that is another than in the last one, if it is a kind of its own,
        and kinds that are too many by now. `names` are those of arguments by position."""
        numbers: dict[str, Any] = {}
        kinds = self._kinds.setdefault((_without_numbers(kind, names, numbers), modes), {})
        changed, last = None, next(reversed(kinds.values()), {})
        if kind not in kinds:
            differ = (name for name, value in last.items() if value != numbers[name])
            changed = next((ReadChange(name, last[name], numbers[name]) for name in differ), None)
        kinds[kind] = kinds.pop(kind, numbers)
        gone = list(kinds)[:-KEPT]
        for each in gone:
            del kinds[each]
        return changed, gone


def _without_numbers(kind: Any, names: Callable[[], Sequence[str]], numbers: dict[str, Any]) -> Hashable:
    """A kind of arguments without their numbers, which are noted by what users call them."""

    def without(part: Any, title: str) -> Any:
        if not isinstance(part, tuple):
            return part
        if len(part) == 2 and part[0] in (int, float, complex):
            numbers[title if title not in numbers else f"{title}, {len(numbers)}"] = part[1]
            return part[:1]
        return tuple([without(each, title) for each in part])

    given, named = kind
    known = names() if given else ()
    titles = [known[at] if at < len(known) else str(at) for at in range(len(given))]
    found = [without(each, f"the argument {title}") for each, title in zip(given, titles, strict=True)]
    return tuple(found), tuple([(name, without(each, f"the argument {name}")) for name, each in named])
