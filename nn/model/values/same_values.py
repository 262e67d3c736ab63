"""The same values on all ranks: what each process has whole, before it keeps a part."""

from collections.abc import Iterable

from ....boxing.box import dense
from ....placement import Placement
from ....placement.errors import SbpError
from ...tensors.agreement import checksum, told
from ...tensors.tensor import GlobalTensor
from ..slots import TensorSlot

__all__ = ["check_same", "ranks_of"]


def ranks_of(placements: Iterable[Placement], kind: str) -> Placement | None:
    """All ranks of some placements in a line, as those that compare; None where there are none."""
    ranks = tuple(sorted({rank for where in placements for rank in where.flat}))
    return Placement(kind, ranks, (len(ranks),), None) if ranks else None


def check_same(held: Iterable[TensorSlot], placement: Placement, asked: str) -> None:
    """Refuse plain values that differ between ranks."""
    values = {slot.full: slot.value for slot in held}
    values |= {f"{name}.grad": dense(v.grad) for name, v in values.items() if v.grad is not None}
    plain = {name: v for name, v in values.items() if not isinstance(v, GlobalTensor) and not v.is_meta}
    rows = (told([checksum(value) for value in plain.values()], placement, "same values") if plain else None) or []
    for rank, row in zip(placement.flat, rows, strict=False):
        other = next((name for name, mine, first in zip(plain, row, rows[0], strict=True) if mine != first), None)
        if other is not None:
            raise SbpError(
                f"{asked}: ranks {placement.flat[0]} and {rank} have different values in {other}\n"
                "  make the model from the same seed on every rank, as by torch.manual_seed(0) before it, "
                "or load the same weights first"
            )
