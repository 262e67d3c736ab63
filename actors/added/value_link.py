"""Registers between processes whose values nobody planned: each message is led by one that says what it holds.

The first of the two has a fixed size, so that it can be posted ahead; the second is asked for when the first has come.
A value is a tensor, or a structure of such with plain values between them.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ...boxing.exchange.transport import waits
from ...boxing.exchange.value_message import packed, unpacked
from ..runtime.channel import Carrier, UnderWay, tag_of

__all__ = ["ValueLink"]


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
