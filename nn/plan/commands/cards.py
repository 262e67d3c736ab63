"""Cards by their names: `8xH100` is so many of a kind, in the nodes of a cluster that is known by name.

The kinds are those of the presets: one that is called h100x8 has 8 H100 in a node.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ....placement import Cluster
from ....placement.cluster import presets
from ....placement.errors import SbpError, nearest

__all__ = ["CardKind", "card_kinds", "cards_of"]


@dataclass(frozen=True)
class CardKind:
    """A card, and the cluster of one node or many that has such."""

    name: str
    nodes: Cluster

    @property
    def in_node(self) -> int:
        return self.nodes.levels[0].size

    def cluster(self, count: int) -> str:
        """The cluster of so many, by the name of its preset."""
        return f"{self.nodes.name}*{max(1, count // self.in_node)}"

    def whole(self, count: int) -> int:
        """So many, or as many more as whole nodes have."""
        node = self.in_node
        return count if count <= node else -(-count // node) * node

    def doubled(self, first: int, last: int | None = None) -> Iterator[int]:
        """Counts from one to another, each twice the one before, in whole nodes.

        >>> list(card_kinds()["H100"].doubled(2, 32)), list(card_kinds()["GB200"].doubled(32, 300))
        ([2, 4, 8, 16, 32], [32, 64, 144, 288])
        """
        most = self.nodes.capacity[-1] if last is None else last
        count = self.whole(first)
        while count <= most:
            yield count
            count = self.whole(2 * count)


def card_kinds() -> Mapping[str, CardKind]:
    """The cards that are known by name.

    >>> [name for name in ("A100", "GB200", "unit") if name in card_kinds()]
    ['A100', 'GB200']
    """
    found = dict[str, CardKind]()
    for name, each in presets().items():
        device = each.device.name
        if name == f"{device.lower()}x{each.levels[0].size}":
            found.setdefault(device, CardKind(device, each))
    return found


def cards_of(said: str) -> tuple[int | None, CardKind]:
    """The number and the kind that `8xH100` says; `xH100` says no number.

    >>> count, kind = cards_of("16xh100")
    >>> count, kind.name, kind.cluster(count)
    (16, 'H100', 'h100x8*2')
    """
    many, _, name = said.partition("x")
    known = card_kinds()
    kind = {each.lower(): of for each, of in known.items()}.get(name.lower())
    if kind is None or (many and (not many.isdigit() or int(many) < 1)):
        near = kind.name if kind else [*nearest(name, known), *known][0]
        raise SbpError(
            f"--gpus {said} is not understood\n"
            f"  write so many cards of a kind, as in 8x{near}; known are {', '.join(known)}\n"
            "  for others describe a cluster: --cluster mine.toml"
        )
    if not many:
        return None, kind
    count, node, most = int(many), kind.in_node, kind.nodes.capacity[-1]
    if count > most:
        raise SbpError(f"--gpus {said}: {kind.nodes.name} has {most} cards at most\n  take as many, or fewer")
    if kind.whole(count) != count:
        raise SbpError(f"--gpus {said}: nodes have {node} cards\n  take {count // node * node} or {kind.whole(count)}")
    return count, kind
