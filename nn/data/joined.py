"""Batches that processes have read by themselves, such as by a trainer's loader, as one; and results taken apart."""

from typing import TypeVar

from torch import Tensor

from ...placement import Placement
from ...placement.errors import SbpError
from ...placement.structure import mapped
from ...placement.world import world
from ...sbp import S
from ..tensors.factories import from_local
from ..tensors.tensor import GlobalTensor

__all__ = ["joined", "parted"]

T = TypeVar("T")


def joined(batch: T, where: Placement | None) -> T:
    """The batches that processes have read by themselves as one, in which each has its rows, in the order of ranks.

    Tensors have samples along dim 0, of which processes have equally many, as loaders of trainers see to; other shares
    are an error. In one process, which plays all ranks, the batch is whole and stays what it is.

    >>> import torch
    >>> from ...placement import placement
    >>> joined({"x": torch.ones(4, 2)}, placement("cpu:[0-3]"))["x"].shape
    torch.Size([4, 2])
    """

    def rows(x: Tensor) -> Tensor:
        if isinstance(x, GlobalTensor):
            return x
        if not x.ndim:
            raise SbpError(
                "joined: a number in the batch of a process has no rows\n"
                "  pass it beside the batch, the same on all processes, such as gathered and added up"
            )
        there = _given(where, "joined")
        return from_local(x.detach(), placement=there, sbp=(S(0),) * there.ndim)

    if world().size is None:
        return batch
    made: T = mapped(batch, Tensor, rows)
    return made


def parted(result: T, where: Placement | None) -> T:
    """The result of a step as plain tensors: the rows that `joined` took from this process, and whole numbers.

    In one process, which plays all ranks, all is whole.
    """

    def mine(x: GlobalTensor) -> Tensor:
        x = x.detach()
        if world().size is None or not x.ndim:
            return x.full_tensor()
        there = _given(where, "parted")
        local = x.to_global(placement=there, sbp=(S(0),) * there.ndim).to_local()
        assert isinstance(local, Tensor)
        return local

    made: T = mapped(result, GlobalTensor, mine)
    return made


def _given(where: Placement | None, what: str) -> Placement:
    if where is None:
        raise SbpError(
            f"{what}: the step has no placement that is said\n  say it by placement= or plan= of flow.compile, or here"
        )
    return where
