"""Datasets whose samples are their numbers, and that note what they were asked for."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

LENGTH = 8


class Numbers(Dataset[Any]):
    """Sample i is i, and a row of tokens of it."""

    def __init__(self, size: int) -> None:
        self.size, self.asked = size, list[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        return {"id": torch.tensor(index), "tokens": index * 100 + torch.arange(LENGTH)}


class Parts(Numbers):
    """Rows of which any part can be had."""

    length = LENGTH

    def part(self, index: int, lo: int, hi: int) -> dict[str, Tensor]:
        self.asked.append(index)
        self.parts = lo, hi
        return {"tokens": index * 100 + torch.arange(lo, hi)}


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.size))


class Drawing(Numbers):
    """Samples with a random number."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), torch.rand(())


class Failing(Numbers):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 9:
            raise OSError("sample nine is torn")
        return super().__getitem__(index)
