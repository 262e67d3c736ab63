"""Pairs of ranks that send at once, round by round, so that each level of the links shows alone.

    inside    ranks of one host in pairs, on all hosts at once      0-1  2-3 | 4-5
    between   hosts in pairs, all ranks of both                     0-4  1-5 | 2-6  3-7

In a round every host takes part that has a partner. So all ranks of a host share its wire, and pairs of hosts what lies
between them, as they do in a step.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .hosts import Hosts

__all__ = ["Round", "Unit", "rounds"]

EVERY = 16  # hosts, or ranks of a host, of which every two are tried


class Unit(NamedTuple):
    """Pairs of ranks that share what they send by: those of a host, or of two hosts."""

    hosts: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]


Round = tuple[Unit, ...]  # all that send at once


def rounds(hosts: Hosts) -> Iterator[Round]:
    """Rounds inside of hosts first, then between them; none that is empty.

    >>> for each in rounds(Hosts((0, 0, 1, 1, 2))):
    ...     print(*(unit.pairs for unit in each))
    ((0, 1),) ((2, 3),)
    ((0, 2), (1, 3))
    ((0, 4),)
    ((2, 4),)
    """
    groups = hosts.groups
    for stride in _strides(max(map(len, groups))):
        inside = [Unit((host,), tuple(_pairs(members, stride))) for host, members in enumerate(groups)]
        yield from [tuple(unit for unit in inside if unit.pairs)]
    for stride in _strides(len(groups)):
        units = ((i, j) for i, j in _pairs(range(len(groups)), stride))
        yield tuple(Unit((i, j), tuple(zip(groups[i], groups[j], strict=False))) for i, j in units)


def _pairs(members: "range | tuple[int, ...]", stride: int) -> Iterator[tuple[int, int]]:
    """Each with the one whose place differs in the bits of the stride."""
    for at, member in enumerate(members):
        if at < at ^ stride < len(members):
            yield member, members[at ^ stride]


def _strides(many: int) -> list[int]:
    """With every stride below a power of two all meet; of many the nearest do, and some of those far away."""
    whole = 1 << max(many - 1, 0).bit_length()
    return [k for k in range(1, whole) if whole <= EVERY or k < EVERY // 2 or k & (k - 1) == 0]
