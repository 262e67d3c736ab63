"""Adding up addends (or taking their maximum or minimum) on one rank, for every dtype that has a meaning for it."""

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from ..placement.errors import DtypeError
from ..sbp.signature import Reduction

__all__ = ["check_carried", "check_reducible", "combine", "identity"]

# Integers that torch stores but does not add are carried by one that holds every result modulo their own range.
CARRIER = {torch.uint16: torch.int32, torch.uint32: torch.int64}
FLOAT8 = frozenset(dtype for name, dtype in vars(torch).items() if name.startswith("float8_"))
HALVES = frozenset({torch.float16, torch.bfloat16})
PAIRWISE: dict[Reduction, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


PLAIN = FLOAT8 | {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
}


def check_carried(dtype: torch.dtype) -> None:
    """Refuse what torch itself cannot cut and copy: quantized, packed and sub-byte types."""
    if dtype not in PLAIN:
        raise DtypeError(
            f"{dtype} cannot be boxed: it is not a plain number\n  view it as torch.uint8, or dequantize it"
        )


def check_reducible(dtype: torch.dtype, reduction: Reduction) -> None:
    """Refuse what has no exact meaning, before anything is sent."""
    if reduction == "sum" and dtype in FLOAT8:
        raise DtypeError(
            f"{dtype} cannot be summed: torch has no addition for it\n  cast it first, x.to(torch.bfloat16)"
        )
    if reduction != "sum" and dtype.is_complex:
        raise DtypeError(
            f"{dtype} has no {reduction}imum: complex numbers have no order\n  use P, or take x.abs() first"
        )


def combine(terms: Sequence[Tensor], reduction: Reduction, spare: Tensor | None = None) -> Tensor:
    """One tensor out of addends of one shape, the same bits on every rank that has them in the same order.

    It is new memory, or that of `spare`, which is one of the first two addends.

    >>> combine([torch.tensor([250, 3], dtype=torch.uint8), torch.tensor([10, 4], dtype=torch.uint8)], "sum")
    tensor([4, 7], dtype=torch.uint8)
    """
    dtype = terms[0].dtype
    check_reducible(dtype, reduction)
    if len(terms) == 1:
        return terms[0].clone()
    if dtype is torch.uint64:
        # Adding wraps alike with and without a sign; for order the top bit is turned, which makes unsigned into signed.
        top = 0 if reduction == "sum" else torch.iinfo(torch.int64).min
        signed = combine([t.view(torch.int64) ^ top for t in terms], reduction)
        return (signed ^ top).view(torch.uint64)
    if dtype in FLOAT8:
        return combine([t.float() for t in terms], reduction).to(dtype)
    if dtype is torch.bool:
        return reduce(torch.logical_and if reduction == "min" else torch.logical_or, terms)
    if dtype in CARRIER:
        return combine([t.to(CARRIER[dtype]) for t in terms], reduction).to(dtype)
    if dtype in HALVES and reduction == "sum" and len(terms) > 2:
        return torch.stack(tuple(terms)).sum(0, dtype=dtype)  # in float32, rounded once, also where autocast would not
    out = PAIRWISE[reduction](terms[0], terms[1], out=spare)
    for term in terms[2:]:
        PAIRWISE[reduction](out, term, out=out)
    return out


def identity(dtype: torch.dtype, reduction: Reduction) -> float | int | bool:
    """The addend that changes nothing.

    >>> identity(torch.float32, "max"), identity(torch.int8, "min"), identity(torch.bool, "sum")
    (-inf, 127, False)
    """
    if reduction == "sum":
        return False if dtype is torch.bool else 0
    if dtype is torch.bool:
        return reduction == "min"
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        endless = torch.tensor(float("inf"), device="cpu").to(dtype).float().item() == float("inf")
        least, most = (float("-inf"), float("inf")) if endless else (info.min, info.max)
        return least if reduction == "max" else most
    bounds = torch.iinfo(dtype)
    return bounds.min if reduction == "max" else bounds.max
