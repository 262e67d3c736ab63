"""Recaptures: a step that is captured again and again, since a value is another each time, says so."""

import warnings
from collections.abc import Iterable

from .guard import ReadChange, is_plain

__all__ = ["KEPT", "Recaptures"]

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
