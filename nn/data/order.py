"""The order of samples in an epoch: a function of seed and epoch alone, equal on every grid and in every version.

Nothing is made of the size of the dataset: the sample at a place is computed. Places are written in two halves, which
scramble each other in turns; where that leads outside of the dataset, it is done again, until it leads inside.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["mixed", "shuffled"]

ROUNDS = 8
MASK = (1 << 64) - 1


def mixed(*numbers: int) -> int:
    """A number of 64 bits that depends on all bits of these.

    >>> mixed(1, 2) == mixed(1, 2), mixed(1, 2) == mixed(2, 1)
    (True, False)
    """
    found = 0
    for number in numbers:
        found = (found ^ (number & MASK)) + 0x9E3779B97F4A7C15 & MASK
        found = (found ^ found >> 30) * 0xBF58476D1CE4E5B9 & MASK
        found = (found ^ found >> 27) * 0x94D049BB133111EB & MASK
        found ^= found >> 31
    return found


def shuffled(places: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The samples at these places of an epoch, of a dataset of so many.

    >>> sorted(shuffled(np.arange(5), 5, seed=0, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = [np.uint64(mixed(seed, epoch, number)) for number in range(ROUNDS)]
    found = _scrambled(places.astype(np.uint64), half, keys)
    outside = np.flatnonzero(found >= size)
    while len(outside):
        found[outside] = _scrambled(found[outside], half, keys)
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def _scrambled(places: NDArray[np.uint64], half: np.uint64, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of the numbers of two halves of so many bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = places >> half, places & mask
    for key in keys:
        word = (right ^ key) * np.uint64(0xBF58476D1CE4E5B9)  # wraps, as is wanted
        word = (word ^ word >> np.uint64(29)) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((word ^ word >> np.uint64(32)) & mask)
    return left << half | right
