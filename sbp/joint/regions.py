"""Regions that a backward runs again: which values of a step are not kept until then."""

from collections import Counter

from ..logical import Logical

__all__ = ["let_go"]


def let_go(logical: Logical) -> dict[int, str]:
    """The values that a region makes and that may be let go, each with its region.

    While the backward goes through a region all of it is there, so that the largest one counts as kept; of equal ones
    the last, since repeated blocks but the last are to be alike.
    """
    regions = {n: op.origin.recompute for op in logical.ops for n in op.numbers if op.origin.recompute}
    size: Counter[str] = Counter()
    for n, region in regions.items():
        size[region] += logical.fakes[n].nbytes
    largest = max(size.values(), default=0)
    kept = next((region for region in reversed(size) if size[region] == largest), "")
    return {n: region for n, region in regions.items() if region != kept}
