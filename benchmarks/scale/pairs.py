"""Pairs of published runs of one model: how often the quicker one is named.

Two rows of a table are compared if they train the same model on as many cards. Where their batches differ, seconds a
sample decide. Pairs whose published figures are within 5 % are left out: two papers on one plan differ by more.
"""

from collections.abc import Sequence
from itertools import combinations

from .setting import Published

__all__ = ["APART", "named"]

APART = 0.05


def named(rows: Sequence[Published], seconds: Sequence[float]) -> tuple[int, int]:
    """How many of the pairs have their quicker row named by these seconds, and how many pairs there are. Two that are
    told to take equally long are not named."""
    right = pairs = 0
    for (one, at), (other, too) in combinations(zip(rows, seconds, strict=True), 2):
        if one.architecture == other.architecture and one.run.gpus == other.run.gpus:
            samples = other.run.batch / one.run.batch
            published, told = one.seconds / other.seconds * samples, at / too * samples
            if max(published, 1 / published) > 1 + APART:
                pairs += 1
                right += (told - 1) * (published - 1) > 0
    return right, pairs
