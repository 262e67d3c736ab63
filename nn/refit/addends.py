"""Addends: tensors that groups of ranks have apart, seen as one tensor that is their sum. Nothing is sent for that."""

from collections.abc import Sequence

from torch import Tensor

from ...boxing.exchange.execute import token
from ...placement import Placement
from ...placement.errors import SbpError
from ...placement.world import owned
from ...sbp import Layout, State
from ..tensors.tensor import GlobalTensor, wrap

__all__ = ["addends"]


def addends(parts: Sequence[Tensor], placement: Placement, axis: str) -> GlobalTensor:
    """The sum of tensors that lie alike on the groups of ranks along an axis: P along it, and else as they do.

    Each is on its own `placement.at(axis=i)`, such as the weights of each group in local SGD. `to_global` of the result
    adds them up on the way, and to `S(0)` along the axis each rank gets its piece of the sum. Gradients do not go
    through.

    >>> from ...sbp import S
    >>> from ..tensors.factories import tensor
    >>> p = Placement("cpu", (0, 1, 2, 3), (2, 2), ("data", "tensor"))
    >>> apart = [tensor([1.0 + i, 2.0], placement=p.at(data=i), sbp=S(0)) for i in range(2)]
    >>> both = addends(apart, p, "data")
    >>> both.sbp, both.full_tensor()
    ((P, S(0)), tensor([3., 4.]))
    """
    at = placement.axis(axis)
    groups = [placement.at(**{axis: i}) for i in range(placement.shape[at])]
    held = [x for x in parts if isinstance(x, GlobalTensor)]
    first = held[0]._layout if held else None
    wrong = len(held) != len(groups) or first is None or any(
        x.placement is not where
        or (x._layout.shape, x._layout.dtype, x._layout.state) != (first.shape, first.dtype, first.state)
        or x._layout.state.partial
        for x, where in zip(held, groups, strict=True)
    )  # fmt: skip
    if wrong or first is None:
        found = "\n".join(f"  {x._layout!r}" if isinstance(x, GlobalTensor) else f"  {type(x).__name__}" for x in parts)
        raise SbpError(
            f"addends along {axis} of {placement!r} are one tensor of each of its {len(groups)} groups, alike\n"
            f"{found}\n"
            f"  make each on its group: flow.nn.to_global(model, placement.at({axis}=i), sbp)"
        )
    alone = placement.ndim == 1  # a group of one rank has an axis of its own
    axes = [a for a in range(placement.ndim) if a != at]
    dims = tuple(tuple(axes[f] if f >= 0 else f for f in cut if not alone or f < 0) for cut in first.state.dims)
    of = Layout(placement, State(dims, (at,)), first.shape, first.dtype)
    shards = {r: s.detach() for x in held for r, s in zip(owned(x.placement), x._shards, strict=False)}
    return wrap(tuple(shards[rank] for rank in owned(placement)) or (token(of),), of)
