"""Repeated blocks: nodes at the same place of them choose alike, but for the first and the last block.

Blocks are equal whose neighbours are: of blocks that run again in turns, those between two of the same kinds, and in a
pipeline the first ones of equal stages, the last ones, and those between. Where memory is short, blocks next to others
and those of other stages choose apart.
"""

from collections.abc import Hashable, Mapping, Sequence

from ..logical import Logical

__all__ = ["ties"]

# A node's kind, its number among its like, what equal nodes share, and in which stage it is.
Kind = tuple[str, int, Hashable, Hashable]


def ties(
    logical: Logical, nodes: Sequence[Kind], producers: Mapping[int, tuple[int, int]], *, short: bool
) -> tuple[list[int], list[int]]:
    """For each node the number of its tie (-1: none), and which of the repeated blocks it belongs to (-1: none)."""
    known = {op.origin.block for op in logical.ops if op.origin.block}
    blocks = [_block(logical, known, node, nodes, producers) for node in nodes]
    members: dict[str, list[int]] = {}
    for at, block in enumerate(blocks):
        if block:
            members.setdefault(block, []).append(at)
    order = list(members)
    shape: dict[str, Hashable] = {b: tuple((nodes[at][0], nodes[at][2]) for at in members[b]) for b in order}
    stage: dict[str, Hashable] = {b: tuple(dict.fromkeys(nodes[at][3] for at in members[b])) for b in order}
    tied, instance = [-1] * len(nodes), [-1] * len(nodes)
    numbers: dict[Hashable, int] = {}
    for k, block in enumerate(order):
        for at in members[block]:
            instance[at] = k
        around = [order[i] for i in (k - 1, k + 1) if 0 <= i < len(order) and _family(order[i]) == _family(block)]
        looks = tuple((shape[b], stage[b] == stage[block]) for b in around)
        if len(around) == 2 and not (short and any(look != (shape[block], True) for look in looks)):
            mine = _family(block), shape[block], looks, stage[block] if short else None
            for place, at in enumerate(members[block]):
                tied[at] = numbers.setdefault((mine, place), len(numbers))
    return tied, instance


def _family(block: str) -> str:
    return block.rpartition(".")[0]


def _block(
    logical: Logical, known: set[str], node: Kind, nodes: Sequence[Kind], producers: Mapping[int, tuple[int, int]]
) -> str:
    kind, index, *_ = node
    if kind == "op":
        return logical.ops[index].origin.block
    if kind == "source":
        return _owner(logical.sources[index].name, known)
    if kind == "copy":
        return _block(logical, known, nodes[producers[index][0]], nodes, producers)
    return ""


def _owner(name: str, blocks: set[str]) -> str:
    """The repeated block that a parameter belongs to, by its name."""
    parts = name.split(".")
    return next((path for k in range(1, len(parts)) if (path := ".".join(parts[:k])) in blocks), "")
