"""Learning rates on the card: a recorded update reads them there, and they are written before each replay."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["CardRates", "rides"]

NAMES = ("params", "initial_lr", "max_lr", "min_lr")  # which no step reads, or which are looked at elsewhere


def rides(group: dict[str, Any]) -> bool:
    """Whether an optimizer steps a group by numbers that lie on the card."""
    return bool(group.get("capturable") or group.get("fused"))


def _recorded(setting: Tensor) -> Any:
    """All that a recording has of a tensor: its numbers, or of one on the card where it reads them."""
    return setting.tolist() if setting.is_cpu else (setting.data_ptr(), setting.dtype)


class CardRates:
    """The rates of some optimizers. Those that are numbers of the host have a tensor each, which the graph reads.

    A rate that is a tensor on the card is the user's, who changes it there. `numbers` stay what they were."""

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self.groups = [group for each in optimizers for group in each.param_groups]
        self.mine: list[tuple[dict[str, Any], Tensor]] = []
        for group in self.groups:
            lr = group["lr"]
            on_card = isinstance(lr, Tensor) and not lr.is_cpu
            wide = any(x.dtype is torch.float64 for x in group["params"])
            if rides(group) and not on_card and not (wide and group.get("fused")):  # whose kernel reads 32 bits
                dtype = torch.float64 if wide else torch.float32
                self.mine.append((group, torch.empty((), dtype=dtype, device=device)))
        self.written: list[float | None] = [None] * len(self.mine)
        self.numbers = self._numbers()

    def same(self) -> bool:
        """Whether all settings but these rates are those that were recorded."""
        return self.numbers == self._numbers()

    def _numbers(self) -> list[tuple[tuple[str, Any], ...]]:
        mine = {id(group) for group, _ in self.mine}
        return [
            tuple(
                (name, _recorded(value) if isinstance(value, Tensor) else value)
                for name, value in group.items()
                if name not in NAMES and not (name == "lr" and id(group) in mine)
            )
            for group in self.groups
        ]

    def write(self) -> None:
        """Have the card know the rates of the step that comes."""
        for at, (group, there) in enumerate(self.mine):
            now = float(group["lr"])
            if now != self.written[at]:
                there.fill_(now)
                self.written[at] = now

    @contextmanager
    def given(self) -> Iterator[None]:
        """Inside, optimizers have the tensors, and fused ones say that they are capturable: torch asks for the word,
        though their kernels count on the card without."""
        before = [group["lr"] for group, _ in self.mine]
        fused = [group for group in self.groups if group.get("fused") and group.get("capturable") is False]
        for group, there in self.mine:
            group["lr"] = there
        for group in fused:
            group["capturable"] = True
        try:
            yield
        finally:
            for (group, _), lr in zip(self.mine, before, strict=True):
                group["lr"] = lr
            for group in fused:
                group["capturable"] = False
