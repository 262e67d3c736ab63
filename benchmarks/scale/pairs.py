"""Pairs of published runs of one model: how often the quicker one is named; and groups of them: how quick is the best.

Two rows of a table are compared if they train the same model on as many cards. Where their batches differ, seconds a
sample decide. Pairs whose published figures are within 5 % are left out: two papers on one plan differ by more. Runs of
one model, of one batch and on as many cards are a group, whatever their plans are.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

from .setting import Published

__all__ = ["APART", "named", "picked"]

APART = 0.05
GROUP = 5  # runs from which on a group is one to pick from


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


def picked(rows: Sequence[Published], seconds: Sequence[float]) -> list[float]:
    """By how much longer than the best of its group the run takes that is told to be the quickest, as a share."""
    groups: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for row, told in zip(rows, seconds, strict=True):
        groups[row.architecture, row.run.gpus, row.run.batch].append((told, row.seconds))
    each = [group for group in groups.values() if len(group) >= GROUP]
    return [min(group)[1] / min(published for _, published in group) - 1 for group in each]
