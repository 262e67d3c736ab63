"""Sources: a dataset or a torch DataLoader as it is given, and what of it is kept to read samples by."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from ...placement.errors import SbpError
from .order import shuffled
from .own_random import drawn, seeded

__all__ = ["DataSource", "GivenData", "batches_of", "source_of"]

GivenData: TypeAlias = "DataLoader[Any] | Dataset[Any] | Iterable[Any]"


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Samples, the order in which they come, and how a list of them becomes a batch."""

    dataset: Any
    batch_size: int
    shuffle: bool = False
    drop_last: bool = False
    sampler: Any = None  # of the user, which says the order of samples
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 0
    loading: dict[str, Any] = field(default_factory=dict)  # what else a DataLoader was told of its workers

    @property
    def streams(self) -> bool:
        """Whether samples only come one behind the other."""
        return not hasattr(self.dataset, "__getitem__") or isinstance(self.dataset, IterableDataset)

    @property
    def plain(self) -> bool:
        """Whether batches are made as torch makes them, of samples that are alike."""
        return self.collate is default_collate

    def order(self, seed: int, epoch: int) -> Callable[[int, int], NDArray[np.int64]]:
        """The samples from a place of an epoch to another; as a function, since nobody wants all at once."""
        if self.sampler is not None:
            with drawn():
                seeded(seed, epoch)
                listed = np.array(_listed(self.sampler, epoch), dtype=np.int64)
            return lambda lo, hi: listed[lo:hi]
        size = len(self.dataset)
        if not self.shuffle:
            return lambda lo, hi: np.arange(lo, hi)
        return lambda lo, hi: shuffled(np.arange(lo, hi), size, seed, epoch)

    @property
    def size(self) -> int | None:
        """The samples of an epoch, if that is known."""
        return None if self.streams else len(self.dataset if self.sampler is None else self.sampler)


def _listed(sampler: Any, epoch: int) -> list[int]:
    """The order that a sampler gives; a generator of its own is put back behind."""
    own = getattr(sampler, "generator", None)
    before = None if own is None else own.get_state()
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if own is not None:
        own.manual_seed(int(np.random.randint(1 << 31)))  # of the numbers that seed and epoch give
    try:
        return [int(index) for index in sampler]
    finally:
        if own is not None:
            own.set_state(before)


def source_of(
    given: GivenData, batch_size: int | None, shuffle: bool | None, drop_last: bool | None, collate: Any
) -> DataSource:
    """A dataset with options, or a loader that has them."""
    if isinstance(given, DataLoader):
        said = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last, "collate_fn": collate}
        for name, value in said.items():
            if value is not None:
                raise SbpError(
                    f"flow.data.shards({name}=) beside a DataLoader, which says it too\n"
                    f"  leave {name}= out, or give it the loader's dataset"
                )
        return _of_loader(given)
    if not (hasattr(given, "__iter__") or (hasattr(given, "__getitem__") and hasattr(given, "__len__"))):
        raise SbpError(
            f"flow.data.shards of {type(given).__name__}, which is no dataset\n"
            "  give it a torch Dataset with __getitem__ and __len__, one to iterate over, or a DataLoader"
        )
    if type(batch_size) is not int or batch_size < 1:
        raise SbpError(
            f"flow.data.shards(batch_size={batch_size!r})\n"
            "  say how many samples a batch has on all ranks together, as in batch_size=32"
        )
    made = DataSource(
        dataset=given,
        batch_size=batch_size,
        shuffle=bool(shuffle),
        drop_last=bool(drop_last),
        collate=collate or default_collate,
    )
    if made.streams and shuffle:
        raise SbpError(
            f"flow.data.shards(shuffle=True) of {type(given).__name__}, whose samples come one behind the other\n"
            "  shuffle them where they are made, or give it a dataset with __getitem__ and __len__"
        )
    return made


def _of_loader(loader: "DataLoader[Any]") -> DataSource:
    """A DataLoader's dataset, and all that it was told."""
    sampler: Any = loader.sampler
    if isinstance(sampler, DistributedSampler) or isinstance(
        getattr(loader.batch_sampler, "sampler", None), DistributedSampler
    ):
        raise SbpError(
            "flow.data.shards of a DataLoader with a DistributedSampler: each rank would get its share of a share\n"
            "  leave sampler= out, say shuffle=True, and multiply batch_size by the ranks: it counts all of them"
        )
    if loader.batch_size is None or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        found = "batch_size=None" if loader.batch_sampler is None else type(loader.batch_sampler).__name__
        raise SbpError(
            f"flow.data.shards of a DataLoader with {found}: batches have to be cut into the ranks' rows\n"
            "  give the loader a batch_size, and the order of samples by sampler=, one index at a time"
        )
    streams = isinstance(loader.dataset, IterableDataset)
    one_each = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    told = streams or one_each or type(sampler) is SequentialSampler
    more = {"worker_init_fn": loader.worker_init_fn, "timeout": loader.timeout}
    if loader.num_workers:
        more |= {"prefetch_factor": loader.prefetch_factor, "multiprocessing_context": loader.multiprocessing_context}
    return DataSource(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        shuffle=not streams and one_each,
        drop_last=loader.drop_last,
        sampler=None if told else sampler,
        collate=loader.collate_fn,
        workers=loader.num_workers,
        loading=more,
    )


def batches_of(size: int, batch_size: int, start: int, drop_last: bool) -> Iterator[tuple[int, int]]:
    """The bounds of an epoch's batches, from a place on.

    >>> list(batches_of(10, 4, 3, drop_last=False))
    [(3, 7), (7, 10)]
    """
    for lo in range(start, size, batch_size):
        if lo + batch_size <= size or not drop_last:
            yield lo, min(size, lo + batch_size)
