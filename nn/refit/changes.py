"""Changes since a refit: tensors that differ from what was sent last; and numbers that another dtype cannot hold.

Ranks look at what they hold themselves and tell the others, since what one of them has to send all have to know.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...placement import Placement
from ...placement.errors import DtypeError
from ..tensors.agreement import told
from .names import WeightPair, lies

__all__ = ["RankShards", "changed", "refuse_overflow", "sent"]

RankShards: TypeAlias = Mapping[int, Tensor]  # of a tensor, by the ranks that this process owns

CHUNK = 1 << 20  # bytes that are looked at at once

# What source and target had after the last time, by the names in the target.
_last: "WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, dict[str, bytes]]]" = WeakKeyDictionary()


def changed(
    source: nn.Module,
    target: nn.Module,
    pairs: Sequence[WeightPair],
    held: Sequence[tuple[RankShards, RankShards]],
    everybody: Placement,
) -> list[bool]:
    """Whether some rank has each tensor otherwise than behind the last refit of these two models, in source or target.
    Values are compared and not counts of writes, which do not see all that changes memory."""
    last = _last.get(target, WeakKeyDictionary[nn.Module, dict[str, bytes]]()).get(source, {})
    row = [last.get(pair.called) != _digest(pair, shards) for pair, shards in zip(pairs, held, strict=True)]
    rows = told(list(map(int, row)), everybody, "what has changed") or [list(map(int, row))]
    return [any(each) for each in zip(*rows, strict=True)]


def sent(
    source: nn.Module,
    target: nn.Module,
    pairs: Sequence[WeightPair],
    held: Sequence[tuple[RankShards, RankShards]],
) -> None:
    """Remember what both have now."""
    known = _last.setdefault(target, WeakKeyDictionary()).setdefault(source, {})
    known.update({pair.called: _digest(pair, shards) for pair, shards in zip(pairs, held, strict=True)})


def refuse_overflow(
    pairs: Sequence[WeightPair], held: Sequence[tuple[RankShards, RankShards]], everybody: Placement
) -> None:
    """Raise, on every rank alike, where a finite number would become infinite or none in the target's dtype."""
    narrower = [at for at, pair in enumerate(pairs) if _most(pair.target.dtype) < _most(pair.source.dtype) / 2]
    if not narrower:
        return
    row = [any(_overflows(x, pairs[at].target.dtype) for x in held[at][0].values()) for at in narrower]
    rows = told(list(map(int, row)), everybody, "what fits a dtype") or [list(map(int, row))]
    for at, each in zip(narrower, zip(*rows, strict=True), strict=True):
        if any(each):
            name, source, called, target = pairs[at]
            raise DtypeError(
                f"flow.refit: {name} has numbers that {target.dtype} does not hold, which {called} of the target is\n"
                f"  it holds up to {_most(target.dtype):g}; the source is {source.dtype}\n"
                "  make the target's dtype bfloat16 or float32"
            )


def _most(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max if dtype.is_floating_point else float("inf")


def _overflows(x: Tensor, dtype: torch.dtype) -> bool:
    if not x.numel():
        return False
    least, most = (float(end) for end in torch.aminmax(x.detach().to(torch.float32) if x.itemsize == 1 else x))
    if abs(least) < float("inf") and abs(most) < float("inf"):  # not if one is no number, either
        return max(-least, most) > _most(dtype)
    finite = x[x.isfinite()]
    return bool((finite.abs() > _most(dtype)).any())


def _digest(pair: WeightPair, sides: tuple[RankShards, RankShards]) -> bytes:
    """A number of all bits that this process has of both, and of how they lie. It differs in practice where they do."""
    found = blake2b(f"{pair.name} {lies(pair.source)} {lies(pair.target)}".encode(), digest_size=16)
    for side in sides:
        for rank, shard in side.items():
            found.update(rank.to_bytes(8))
            line = shard.detach().contiguous().reshape(-1).view(torch.uint8)
            for chunk in torch.split(line, CHUNK):
                found.update(chunk.cpu().numpy().data)
    return found.digest()
