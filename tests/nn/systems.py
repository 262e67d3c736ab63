"""What the op database is run on: sbpflow; plain torch, which must come out right; and broken ones, which must not."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import sbpflow as flow

__all__ = ["RANKS", "SYSTEMS", "Disagree", "System"]

RANKS = 4


class Disagree(Exception):
    """Ranks that should hold the same hold something else."""


class System:
    """Plain torch: layouts mean nothing to it."""

    def make(self, whole: Tensor, entry: str, seed: int) -> Tensor:
        """A tensor of this value that lies as the entry says, and wants a gradient if the value does."""
        return whole.detach().clone().requires_grad_(whole.requires_grad)

    def like(self, cotangent: Tensor | None) -> Tensor | None:
        """A cotangent in this system."""
        return cotangent

    def grad(self, ends: Sequence[Tensor], tensors: Sequence[Tensor], cotangents: Sequence[Any]) -> list[Any]:
        return list(torch.autograd.grad(ends, tensors, cotangents, allow_unused=True))

    def read(self, tensor: Tensor) -> Tensor:
        """The whole value."""
        return tensor

    @contextmanager
    def watch(self) -> Iterator[Callable[[], int]]:
        """The bytes sent since, as a function."""
        yield lambda: 0

    def split(self, tensor: Tensor) -> bool:
        """Whether it is split or partial."""
        return False


class Sbpflow(System):
    """Global tensors on four ranks of this process."""

    def __init__(self) -> None:
        self.placement = flow.placement("cpu", range(RANKS))

    def make(self, whole: Tensor, entry: str, seed: int) -> Tensor:
        value = whole.detach().clone()
        if entry == "P":
            made = flow.from_local(addends(value, seed), placement=self.placement, sbp=flow.P)
        else:
            sbp = flow.B if entry == "B" else flow.S(int(entry[1:]))
            made = flow.tensor(value, placement=self.placement, sbp=sbp)
        return made.requires_grad_(whole.requires_grad)

    def like(self, cotangent: Tensor | None) -> Tensor | None:
        return None if cotangent is None else flow.tensor(cotangent, placement=self.placement, sbp=flow.B)

    def grad(self, ends: Sequence[Tensor], tensors: Sequence[Tensor], cotangents: Sequence[Any]) -> list[Any]:
        """Both ways there are: `backward` where it can be called, `torch.autograd.grad` for several outputs."""
        if len(ends) > 1:
            return super().grad(ends, tensors, cotangents)
        ends[0].backward(cotangents[0])  # type: ignore[no-untyped-call]
        return [tensor.grad for tensor in tensors]

    def read(self, tensor: Tensor) -> Tensor:
        """Every rank must hold its part of the whole: copies that differ would else go unseen."""
        assert isinstance(tensor, flow.GlobalTensor), f"a plain tensor came out: {type(tensor).__name__}"
        whole = tensor.full_tensor().detach()
        layout = tensor.layout_
        if not layout.state.partial and whole.layout is torch.strided:
            for rank, held, due in zip(
                layout.placement.flat, shards(tensor), flow.boxing.scatter(whole, layout), strict=True
            ):
                if held.shape != due.shape or not torch.allclose(held, due, 1e-3, 1e-4, equal_nan=True):
                    raise Disagree(f"rank {rank} holds something else than its part")
        return whole

    @contextmanager
    def watch(self) -> Iterator[Callable[[], int]]:
        with flow.record() as moves:
            yield lambda: moves.bytes

    def split(self, tensor: Tensor) -> bool:
        state = tensor.layout_.state  # type: ignore[attr-defined]
        return bool(state.split or state.partial)


def shards(tensor: Tensor) -> list[Tensor]:
    held = tensor.detach().to_local()  # type: ignore[attr-defined]
    return list(held) if isinstance(held, list | tuple) else [held]


def addends(whole: Tensor, seed: int) -> list[Tensor]:
    """2x, -x, 0 and 0 in an order of its own for each element: no sum of any of them is rounded, in whatever order.

    Odd, even, positive and homogeneous functions all give something else if they are applied to addends.
    """
    order = torch.rand(RANKS, *whole.shape, generator=torch.Generator().manual_seed(seed)).argsort(0)
    factor = torch.tensor([2.0, -1.0] + [0.0] * (RANKS - 2))
    return [whole * factor[place].to(whole.dtype) for place in order]


class WrongValue(System):
    """All results are a little too large."""

    def read(self, tensor: Tensor) -> Tensor:
        return tensor + tensor.abs().max() + 0.1 if tensor.is_floating_point() and tensor.numel() else tensor


class WrongGradient(System):
    """Gradients come out times the ranks, as of a mean of means."""

    def grad(self, ends: Sequence[Tensor], tensors: Sequence[Tensor], cotangents: Sequence[Any]) -> list[Any]:
        return [g if g is None else RANKS * g for g in super().grad(ends, tensors, cotangents)]


class Dying(System):
    """Takes its process with it."""

    def make(self, whole: Tensor, entry: str, seed: int) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Stuck(System):
    """Never ends."""

    def make(self, whole: Tensor, entry: str, seed: int) -> Tensor:
        while True:
            time.sleep(1)


SYSTEMS: dict[str, type[System]] = {
    "sbpflow": Sbpflow,
    "plain": System,
    "wrong value": WrongValue,
    "wrong gradient": WrongGradient,
    "dying": Dying,
    "stuck": Stuck,
}
