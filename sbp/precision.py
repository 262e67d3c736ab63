"""Precision: which dtypes hold every number of another, so that addends may be turned into them and added up later.

1000.3 - 1000.0 = 0.3 in float32;  in bfloat16 its addends are 1000 and -1000, and their sum is 0
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from .call import Call

__all__ = ["exact_groups", "holds"]


@lru_cache(maxsize=1024)
def holds(target: torch.dtype, source: torch.dtype) -> bool:
    """Whether turning a number into `target` loses no bit of it; an imaginary part is no bit.

    >>> holds(torch.float32, torch.bfloat16), holds(torch.float16, torch.bfloat16), holds(torch.float32, torch.int64)
    (True, False, False)
    """
    if source == target:
        return True
    target, source = target.to_real(), source.to_real()
    if torch.bool in (target, source):
        return source == target
    if not target.is_floating_point:
        return not source.is_floating_point and torch.iinfo(target).bits >= torch.iinfo(source).bits
    there = torch.finfo(target)
    if not source.is_floating_point:
        return 2 / there.eps >= torch.iinfo(source).max
    here = torch.finfo(source)
    return there.eps <= here.eps and there.max >= here.max and there.tiny <= here.tiny


def exact_groups(call: Call, groups: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The groups of linear inputs whose addends the outputs hold without loss: a cast to fewer bits adds up first.

    Under autocast any op may be such a cast.
    """
    kinds = {y.dtype for y in call.outputs}
    return tuple(group for group in groups if all(holds(kind, call.inputs[i].dtype) for kind in kinds for i in group))
