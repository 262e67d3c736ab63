"""Registers between processes whose values nobody planned: each message is led by one that says what it holds.

The first of the two has a fixed size, so that it can be posted ahead; the second is asked for when the first has come.
A value is a tensor, or a structure of such, with whatever else pickle takes between them.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...boxing.exchange.transport import waits
from ...placement.errors import ScheduleError
from ...placement.structure import mapped
from ..runtime.channel import Carrier, UnderWay, tag_of

__all__ = ["ValueLink", "free"]

ALIGNED = 64  # bytes; kernels may be made for memory that begins at a multiple


class ValueLink:
    """A register between processes. `to` are the ranks that this one sends to, `of` is the one that it receives from.

    What was sent is taken when somebody waits for it here, so the wait has to be a thread's own: `pulls` says so.
    Where the maker hands it over, that is done within its firing, and nothing lies in the register on its side.
    """

    pulls: ClassVar[bool] = True

    def __init__(
        self, line: Carrier, number: int, to: Sequence[int] = (), of: int | None = None, handed: bool = False
    ) -> None:
        self.line, self.number, self.to, self.of, self.handed = line, number, to, of, handed

    def tags(self, label: int) -> tuple[int, int]:
        return tag_of(self.number, 2 * label), tag_of(self.number, 2 * label + 1)

    def hand(self, label: int, value: Any) -> None:
        """Send, and come back when it was taken."""
        with waits:
            for work in self.posted(label, value):
                work.wait()

    def send(self, label: int, value: Any) -> Sequence[UnderWay]:
        return () if self.handed else self.posted(label, value)

    def posted(self, label: int, value: Any) -> Sequence[UnderWay]:
        sizes, data = packed(value)
        first, second = self.tags(label)
        return [
            self.line.send(peer, tag, x) for peer in self.to for tag, x in ((first, sizes), (second, data)) if x.numel()
        ]

    def receive(self, label: int) -> tuple[Sequence[UnderWay], Callable[[], Any]]:
        assert self.of is not None
        peer, line = self.of, self.line
        first, second = self.tags(label)
        sizes = torch.empty(2, dtype=torch.int64, device="cpu")

        def value() -> Any:
            data = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu")
            line.receive(peer, second, data).wait()
            return unpacked(sizes, data)

        return [line.receive(peer, first, sizes)], value


class TensorPlace(tuple[int, tuple[int, ...], torch.dtype]):
    """The place of a tensor in a message, its shape and its dtype."""

    __slots__ = ()


def free(x: Tensor) -> Tensor:
    """A tensor that goes to other ranks, to where no history of autograd can follow."""
    if x.requires_grad:
        raise ScheduleError(
            f"a tensor {tuple(x.shape)} with a history of autograd goes to other ranks by an added register\n"
            "  give x.detach(); and what a step keeps for its backward can go where autograd has no part in it, as in "
            "flow.compile(..., backend='code')"
        )
    return x


def packed(value: Any) -> tuple[Tensor, Tensor]:
    """A value as two sizes and one run of bytes: what it looks like, and then its tensors."""
    tensors: list[Tensor] = []
    at = 0

    def put(x: Tensor) -> TensorPlace:
        nonlocal at
        if x.device.type != "cpu" or type(x) not in (Tensor, nn.Parameter):
            what = f"a {type(x).__name__} on {x.device} for a register that was added between processes"
            raise ScheduleError(f"{what}\n  give plain tensors of the host, such as x.cpu()")
        tensors.append(free(x).contiguous().reshape(-1).view(torch.uint8))
        place, at = at, at + -(-x.nbytes // ALIGNED) * ALIGNED
        return TensorPlace((place, tuple(x.shape), x.dtype))

    said = pickle.dumps(mapped(value, Tensor, put))
    begin = -(-len(said) // ALIGNED) * ALIGNED
    data = torch.zeros(begin + at, dtype=torch.uint8, device="cpu")
    data[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    for x in tensors:
        data[begin : begin + x.numel()] = x
        begin += -(-x.numel() // ALIGNED) * ALIGNED
    return torch.tensor([data.numel() - at, at], device="cpu"), data


def unpacked(sizes: Tensor, data: Tensor) -> Any:
    """The value of such a message; its tensors are parts of the message."""
    begin = int(sizes[0])
    found = pickle.loads(data[:begin].numpy().tobytes())
    rest = data[begin:]

    def take(held: TensorPlace) -> Tensor:
        place, shape, dtype = held
        numel = torch.Size(shape).numel()
        if not numel:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return rest[place : place + numel * dtype.itemsize].view(dtype).view(shape)

    return mapped(found, TensorPlace, take)
