"""Seeds: ranks that were seeded differently would draw different numbers for what is one tensor.

Every rank draws the numbers of the whole tensor and keeps its part. So before the first draw after a change of the seed
the ranks of a placement tell each other theirs; as long as it stays the same, nothing is sent.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...placement import Placement
from ...placement.device import family
from ...placement.errors import SbpError, TransportError
from ...placement.world import at_close, world
from .agreement import told

__all__ = ["agree", "watched"]

_agreed: dict[Placement, int] = {}  # the seed that all ranks of a placement have


def agree(where: Placement) -> None:
    """Refuse to draw from torch's own generator where ranks have different seeds."""
    if world().rank is None:
        return
    seed = _seed(where)
    if _agreed.get(where) == seed:
        return
    try:
        rows = told([seed], where, "seeds")
    except TransportError as error:
        raise TransportError(
            f"{error}\n  ranks compare their seeds at the first draw after torch.manual_seed; call it on all of them"
        ) from None
    seeds = [row[0] for row in rows or [[seed]]]
    if len(set(seeds)) > 1:
        said = "".join(f"\n  rank {r}: {n}" for r, n in list(zip(where.flat, seeds, strict=True))[:8])
        raise SbpError(
            f"ranks of {where!r} draw random numbers from different seeds{said}\n"
            "  seed every rank alike, as in torch.manual_seed(0); each keeps its part of the same numbers"
        )
    if not _agreed:
        at_close(_agreed.clear)
    _agreed[where] = seed


@contextmanager
def watched(where: Placement) -> Iterator[None]:
    """Around a function of which nothing is known: if it drew numbers, ranks must have had the same seed."""
    if world().rank is None or _agreed.get(where) == _seed(where):
        yield
        return
    kind = family(where.type)
    before = kind.random_state()
    yield
    if not torch.equal(kind.random_state(), before):
        agree(where)


def _seed(where: Placement) -> int:
    return family(where.type).seed()
