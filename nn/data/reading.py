"""Reading: the samples of a batch that the ranks of this process hold, as one batch of theirs.

Of a dataset with places only those samples are asked for, and of sequences that are split, where the dataset has a
method `part`, only tokens that are held here. Samples that come one behind the other are read by every process, which
keeps its own.
"""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from .order import mixed
from .own_random import OwnRandom, drawn, seeded
from .read_ahead import ReadAhead
from .shares import BatchShares
from .sources import DataSource, batches_of

__all__ = ["Read", "Reader"]


@dataclass(frozen=True)
class Read:
    """A batch as far as this process has it. Rows without any rank here are one sample, which only tells shapes."""

    start: int
    stop: int
    last: bool  # of the epoch
    value: Any
    rows: NDArray[np.int64]
    part: tuple[int, int] | None = None  # of dim 1 of tensors that were read in part
    length: int = 0  # of that dim


@dataclass(frozen=True)
class Picked:
    """A dataset for workers: samples by their place in an epoch and their number."""

    dataset: Any
    numbers: tuple[int, int] | None  # seed and epoch, where each sample draws numbers of its own
    part: tuple[int, int] | None

    def __getitem__(self, at: tuple[int, int]) -> Any:
        place, index = at
        if self.numbers is not None:
            seeded(*self.numbers, place)
        return self.dataset[index] if self.part is None else self.dataset.part(index, *self.part)


class Streamed(IterableDataset[Any]):
    """Samples that come one behind the other, each with its number, as torch's workers give them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


@dataclass(frozen=True)
class Reader:
    """The reader of a source, of the rows that shares say."""

    source: DataSource
    shares: BatchShares
    seed: int
    ahead: int  # batches that a thread reads ahead, where no workers do

    def read(self, epoch: int, given: int) -> Generator[Read, None, None]:
        """The batches of an epoch behind so many samples."""
        return self._stream(epoch, given) if self.source.streams else self._places(epoch, given)

    # By places

    def _places(self, epoch: int, given: int) -> Generator[Read, None, None]:
        """The program itself reads the first batch, because a dataset that draws random numbers is not read beside it.
        Such a one is given numbers that a sample's place tells."""
        source = self.source
        order, size = source.order(self.seed, epoch), source.size or 0
        _, end = next(batches_of(size, source.batch_size, given, source.drop_last))
        if source.workers:
            yield from self._batches(epoch, given, order, size, seeds=True)
            return
        with drawn() as told:
            first = list(islice(self._batches(epoch, given, order, size, seeds=False, until=end), 1))
        if told[0]:
            with closing(self._batches(epoch, given, order, size, seeds=True)) as batches:
                yield from _apart(batches, OwnRandom(self.seed, epoch))
            return
        yield from first
        yield from self._ahead(self._batches(epoch, first[0].stop, order, size, seeds=False))

    def _batches(
        self, epoch: int, given: int, order: Any, size: int, *, seeds: bool, until: int | None = None
    ) -> Generator[Read, None, None]:
        source, shares = self.source, self.shares
        length = int(getattr(source.dataset, "length", 0)) if hasattr(source.dataset, "part") else 0
        part = shares.part(length) if length and shares.axes(1) else None
        part = None if part in (None, (0, length), (0, 0)) else part
        picked: Any = Picked(source.dataset, (self.seed, epoch) if seeds else None, part)
        loader = DataLoader(
            picked,
            batch_sampler=_Wanted(self, given, order, size, until),
            collate_fn=source.collate,
            num_workers=source.workers,
            generator=_generator(self.seed, epoch),  # else it would draw one of the program's numbers
            **source.loading,
        )
        spans = batches_of(size, source.batch_size, given, source.drop_last)
        for (lo, hi), value in zip(spans, loader, strict=False):
            last = hi + (source.batch_size if source.drop_last else 1) > size
            yield Read(lo, hi, last, value, self.shares.rows(hi - lo), part, length)

    def _ahead(self, batches: Iterator[Read]) -> Generator[Read, None, None]:
        if not self.ahead:
            yield from batches
            return
        with closing(ReadAhead(batches, self.ahead, "sbpflow data")) as ahead:
            yield from ahead

    # One behind the other

    def _stream(self, epoch: int, given: int) -> Generator[Read, None, None]:
        with closing(self._rows(epoch, given)) as batches:
            if self.source.workers:
                yield from batches
            else:
                yield from _apart(batches, OwnRandom(self.seed, epoch))

    def _rows(self, epoch: int, given: int) -> Generator[Read, None, None]:
        """Batches of which this process keeps its rows; one is read ahead, to know which is the last."""
        source = self.source
        if hasattr(source.dataset, "set_epoch"):
            source.dataset.set_epoch(epoch)
        loader = DataLoader(
            Streamed(source.dataset),
            batch_size=None,
            collate_fn=_itself,
            num_workers=source.workers,
            generator=_generator(self.seed, epoch),
            **source.loading,
        )
        samples = islice(loader, given, None)
        batch, start = list(islice(samples, source.batch_size)), given
        while batch and (len(batch) == source.batch_size or not source.drop_last):
            after = list(islice(samples, source.batch_size))
            last = not after or (source.drop_last and len(after) < source.batch_size)
            rows = self.shares.rows(len(batch))
            value = source.collate([batch[row] for row in rows] or batch[:1])
            yield Read(start, start + len(batch), last, value, rows)
            batch, start = after, start + len(batch)


class _Wanted:
    """The samples of each batch that this process loads; where it holds none, one that tells their shapes."""

    def __init__(self, reader: Reader, given: int, order: Any, size: int, until: int | None) -> None:
        self.reader, self.given, self.order = reader, given, order
        self.size, self.until = size, until

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        source = self.reader.source
        for lo, hi in batches_of(self.size, source.batch_size, self.given, source.drop_last):
            if self.until is not None and hi > self.until:
                return
            indices, rows = self.order(lo, hi), self.reader.shares.rows(hi - lo)
            yield [(lo + int(row), int(indices[row])) for row in (rows if len(rows) else [0])]


def _apart(batches: Iterator[Read], own: OwnRandom) -> Generator[Read, None, None]:
    """Batches that are read by the program itself, with random numbers of their own."""
    while True:
        with own():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _itself(sample: Any) -> Any:
    return sample


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(mixed(seed, epoch) >> 1)
