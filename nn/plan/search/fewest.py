"""The fewest cards that do, where nothing fits on as many as were asked: doubled counts, from a bound upwards.

Weights and gradients stay on the cards whatever a plan says, in pieces of all of them at best; states and activations
may go to the host. So a card has that share of weights and gradients at least, and fewer cards need not be tried.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from ....boxing.figures import volume
from ....placement.errors import SbpflowError, ShortageError
from ..resting import RestingBytes

__all__ = ["FewestCards", "NothingFits", "fewest"]

TRIES = 3  # counts that are planned

Found = TypeVar("Found")


class NothingFits(ShortageError):
    """No plan that was tried fits into the memory of a rank."""

    def __init__(self, limit: float, least: str, bytes: RestingBytes) -> None:
        self.limit, self.bytes = limit, bytes
        self.needs = (
            f"no plan that was tried fits into {volume(limit)} a rank\n  the least that was tried takes {least}"
        )
        all_there, by_host = (bytes.ranks(limit, host=host) for host in (False, True))
        super().__init__(
            f"{self.needs}\n  weights and gradients are {volume(bytes.weights + bytes.gradients)}, and states "
            f"{volume(bytes.states)}: take {by_host} ranks at least, and {all_there} unless states are on the host; "
            "or a smaller batch"
        )


@dataclass(frozen=True)
class FewestCards(Generic[Found]):
    """The fewest cards for which a plan was found; without one `count` is a bound, below which none can be."""

    count: int
    found: Found | None
    tried: tuple[int, ...]


def fewest(
    short: NothingFits, counts: Iterable[int], attempt: Callable[[int], Found], told: Callable[[str], object]
) -> FewestCards[Found]:
    """The first of rising counts for which `attempt` finds a plan. Those below the bound are not tried, and of the
    others a few; what is interrupted ends with the bound."""
    least, tried = short.bytes.ranks(short.limit, host=True), list[int]()
    able = [count for count in counts if count >= least]
    try:
        for count in islice(able, TRIES):
            told(f"trying {count} cards")
            tried.append(count)
            try:
                return FewestCards(count, attempt(count), tuple(tried))
            except SbpflowError as error:
                told(f"{count} cards: {str(error).partition(chr(10))[0]}")
    except KeyboardInterrupt:
        tried = tried[:-1]
    return FewestCards(next((count for count in able if count not in tried), least), None, tuple(tried))
