"""Blocks that run again: how many of a list do so whole, how many but for products and attention, and which these are.

Of two kinds of the three (whole, partly, not at all) some blocks are one and the rest the other: what brings most bytes
for its seconds is done to all of them before the next is begun.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["ALL", "NONE", "PARTLY", "BlocksAgain"]

KEPT = "keep mm, attention"


@dataclass(frozen=True)
class BlocksAgain:
    """Of `count` blocks in a list so many run again `whole`, and so many `partly`: all but products and attention.

    >>> print(BlocksAgain(whole=3, count=8), "|", BlocksAgain(whole=3, partly=5, count=8), "|", BlocksAgain(whole=1))
    3 of 8 blocks run again | 3 of 8 blocks run again, the others but for products | blocks run again
    """

    whole: int = 0
    partly: int = 0
    count: int = 1

    def __bool__(self) -> bool:
        return self.whole + self.partly > 0

    def __str__(self) -> str:
        some = f"{self.whole or self.partly} of {self.count} " if max(self.whole, self.partly) < self.count else ""
        other = " but for products" * (not self.whole) + ", the others but for products" * self.mixed
        return f"{some}blocks run again{other}" if self else ""

    @property
    def mixed(self) -> bool:
        """Whether some run again whole and others partly."""
        return self.whole > 0 and self.partly > 0

    def some(self, many: int, count: int) -> "BlocksAgain":
        """As many of so many blocks, which run again like these.

        >>> print(BlocksAgain(whole=1, partly=1).some(3, 8))
        3 of 8 blocks run again, the others but for products
        """
        if not self.whole:
            return BlocksAgain(partly=many, count=count)
        return BlocksAgain(many, count - many if self.mixed else 0, count)

    @property
    def kinds(self) -> tuple["BlocksAgain", "BlocksAgain", float]:
        """The way of most of them, the way of some, and the share of these."""
        base = PARTLY if self.mixed or self.partly == self.count else ALL if self.whole == self.count else NONE
        some = ALL if self.whole else PARTLY if self.partly else NONE
        return base, some, 0.0 if base == some else (self.whole or self.partly) / self.count

    def lines(self, pattern: str, *, stages: bool) -> Iterator[str]:
        """The lines of a plan for the blocks that a pattern such as `layers.*` means. The first of them run again, or
        with `stages` as many in each stage as in any other."""
        some = self.whole or self.partly
        for many, which, how in (
            (self.whole, range(some), ""),
            (self.partly, range(some, self.count) if self.mixed else range(some), f" {KEPT}"),
        ):
            if many:
                spread = _spread(some, self.count)
                numbers = [n for n in range(self.count) if (n in spread) == (which.start == 0)]
                yield f"recompute {_path(pattern, numbers if stages else which, self.count)}{how}"


NONE, PARTLY, ALL = BlocksAgain(), BlocksAgain(partly=1), BlocksAgain(whole=1)


def _spread(some: int, count: int) -> Sequence[int]:
    """So many numbers of all, as far from each other as can be."""
    return [n for n in range(count) if (n + 1) * some // count > n * some // count]


def _path(pattern: str, numbers: Sequence[int], count: int) -> str:
    if len(numbers) == count:
        return pattern
    stem = pattern.removesuffix("*")
    if isinstance(numbers, range):
        return f"{stem}[{numbers.start or ''}:{numbers.stop if numbers.stop < count else ''}]"
    return f"{stem}{{{','.join(map(str, numbers))}}}" if len(numbers) > 1 else f"{stem}{numbers[0]}"
