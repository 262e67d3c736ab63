"""Data for the ranks of a placement: an iterable of global batches, of which each process loads only its own samples.

    data = flow.data.shards(dataset, grid, sbp=dict(data=S(0)), batch_size=32, shuffle=True)
    for epoch in range(3):
        for text, following in data:
            step(text, following)

The position is counted in samples of an order that all grids share. So what `state_dict` says is good for another
placement, another number of processes and another batch size: no sample is left out or seen twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any
from zlib import crc32

from torch import Tensor

from ...placement import Placement
from ...placement.errors import PlacementError, SbpError
from ...placement.world import owned, world
from ...sbp import S, SbpLike
from ...sbp.signature import Split
from ..tensors.agreement import checksum, told
from .batches import global_batch, values_by_path
from .order import mixed
from .reading import Read, Reader
from .shares import BatchShares, shares_of
from .sources import DataSource, GivenData, batches_of, source_of

__all__ = ["ShardedData", "shards"]

FIRST, EVERY = 3, 64  # batches whose values ranks compare: so many, and then one of so many
ROWS = S(0)
KEYS = "epoch", "given", "seed"


class ShardedData:
    """Batches of a source; each loop over it is the rest of an epoch. `flow.data.shards` makes it.

    `epoch` and `given` say what comes next: so many samples of this epoch were given out. What was only read ahead does
    not count.
    """

    def __init__(self, source: DataSource, shares: BatchShares, seed: int, ahead: int) -> None:
        self.source, self.shares, self.seed, self.ahead = source, shares, seed, ahead
        self.epoch = self.given = 0
        self._loop = self._count = 0

    def __len__(self) -> int:
        """The batches of a whole epoch."""
        if self.source.size is None:
            raise TypeError(
                f"{type(self.source.dataset).__name__} has no length, as its samples come behind each other"
            )
        return sum(1 for _ in batches_of(self.source.size, self.source.batch_size, 0, self.source.drop_last))

    def __iter__(self) -> Iterator[Any]:
        self._loop += 1
        return self._batches(self._loop)

    def _batches(self, loop: int) -> Iterator[Any]:
        self._begin()
        reader = Reader(self.source, self.shares, self.seed, self.ahead)
        with closing(reader.read(self.epoch, self.given)) as reads:
            for read in reads:
                self._compare(read)
                batch = global_batch(read, self.shares)
                if loop != self._loop:
                    raise SbpError(
                        "a loop over flow.data.shards goes on behind another one, or behind load_state_dict\n"
                        "  there is one position: begin a new loop, which continues there"
                    )
                self.epoch, self.given = (self.epoch + 1, 0) if read.last else (self.epoch, read.stop)
                yield batch

    def _begin(self) -> None:
        """The next epoch, if less than a batch is left of this one; ranks compare where they are."""
        size, source = self.source.size, self.source
        if size is not None and next(batches_of(size, source.batch_size, self.given, source.drop_last), None) is None:
            self.epoch, self.given = self.epoch + 1, 0
        numbers = {"epoch": self.epoch, "samples given": self.given, "seed": self.seed, "samples": size or 0}
        numbers["batch_size"] = source.batch_size
        if source.sampler is not None:
            numbers["order of samples"] = mixed(*source.order(self.seed, self.epoch)(0, size or 0).tolist())
        _same_position(numbers, self.shares)

    def _compare(self, read: Read) -> None:
        self._count += 1
        due = self._count <= FIRST or self._count % EVERY == 0
        if due or not self.source.plain:  # padding may make a batch longer on one rank than on others
            _same_samples(read, self.shares, values=due)

    def state_dict(self) -> dict[str, Any]:
        """The position, in numbers."""
        said = {"epoch": self.epoch, "given": self.given, "seed": self.seed, "samples": self.source.size}
        return {**said, "shuffle": self.source.shuffle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run was; loops that are under way end with an error."""
        lacks = next((key for key in (*KEYS, "samples") if key not in state), None)
        if lacks is not None:
            raise SbpError(
                f"flow.data.shards: a position without {lacks}: {dict(state)}\n  give it what state_dict() returned"
            )
        if state["samples"] != self.source.size:
            raise SbpError(
                f"flow.data.shards: the position is of a dataset of {state['samples']} samples, this one has "
                f"{self.source.size}\n  give it the dataset that it was saved with, or begin anew without loading"
            )
        if state["given"] and state.get("shuffle", self.source.shuffle) != self.source.shuffle:
            was, now = (f"shuffle={said}" for said in (state["shuffle"], self.source.shuffle))
            raise SbpError(
                f"flow.data.shards: the position is within an epoch in the order of {was}, and this is {now}\n"
                "  in another order some samples would be given twice, and others never\n"
                f"  say {was}, as it was saved"
            )
        self.epoch, self.given, self.seed = (int(state[key]) for key in KEYS)
        self._loop += 1

    def __repr__(self) -> str:
        of = f"{type(self.source.dataset).__name__}" + ("" if self.source.size is None else f" of {self.source.size}")
        return f"shards of {of} on {self.shares.placement}: epoch {self.epoch}, {self.given} samples given"


def shards(
    source: GivenData,
    placement: Placement,
    sbp: SbpLike = ROWS,
    *,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    micro_batches: int = 1,
    prefetch: int = 2,
) -> ShardedData:
    """Batches of a dataset, or of a DataLoader, as global tensors, of which each process loads what its ranks hold.

    `sbp` says how batches lie: S(0) on axes over which samples are shared out, S(1) where each rank has a part of every
    sample, such as its tokens, and B where ranks have the same. `batch_size` counts the samples of all ranks. Give
    `micro_batches` as the step has it, and every rank has its share of each, so that none has to be moved.

    `prefetch` batches are read ahead by a thread; a DataLoader's workers do that by themselves. A dataset that draws
    random numbers in this process is not read ahead; it draws numbers that depend on seed, epoch and the sample alone,
    in workers too. The order of samples is given by seed and epoch; that of a sampler of one's own is kept.

    Samples that can only be iterated over are read by every process, and each keeps its own; to resume, what was given
    out is read again. All processes must see them in one order.
    """
    if not isinstance(placement, Placement):
        raise PlacementError(
            f"flow.data.shards(placement={placement!r})\n  make one, as in flow.placement('cpu:[0-3]')"
        )
    for name, number, least in (("seed", seed, 0), ("prefetch", prefetch, 0), ("micro_batches", micro_batches, 1)):
        if type(number) is not int or number < least:
            raise SbpError(f"flow.data.shards({name}={number!r})\n  give it a whole number from {least}")
    made = source_of(source, batch_size, shuffle, drop_last, collate_fn)
    if made.size is not None and made.size < (made.batch_size if made.drop_last else 1):
        raise SbpError(
            f"flow.data.shards: {made.size} samples never fill a batch of {made.batch_size}\n"
            "  give it more samples, a smaller batch_size, or drop_last=False"
        )
    return ShardedData(made, shares_of(placement, sbp, micro_batches, made.batch_size), seed, prefetch)


def _same_position(numbers: dict[str, int], shares: BatchShares) -> None:
    """Refuse ranks that are about to read other samples, as they were given other datasets, seeds or positions."""
    rows = _told([*numbers.values()], shares, "data position")
    for at, name in enumerate(numbers):
        for rank, row in zip(shares.placement.flat, rows, strict=False):
            if row[at] != rows[0][at]:
                raise SbpError(
                    f"flow.data.shards: ranks {shares.placement.flat[0]} and {rank} differ in {name}: "
                    f"{rows[0][at]} and {row[at]}\n"
                    "  give every rank the same dataset, seed and position; each reads its own part of it by itself"
                )


def _same_samples(read: Read, shares: BatchShares, values: bool) -> None:
    """Refuse a batch that differs between ranks in shapes or dtypes or, if told to look, in rows that several have."""
    if len(owned(shares.placement)) != 1:
        return
    tensors = {path: x for path, x in values_by_path(read.value).items() if isinstance(x, Tensor)}
    kinds = {path: (str(x.dtype), tuple(x.shape[1:])) for path, x in tensors.items()}
    in_parts = read.part is not None  # of a sample, which may be of different lengths
    sums = [checksum(x) for x in tensors.values()] if values and len(read.rows) else []
    rows = _told([0 if in_parts else crc32(repr(kinds).encode()), crc32(repr(sums).encode())], shares, "data")
    cut = [axis for axis, entry in enumerate(shares.entries) if isinstance(entry, Split)]
    same: dict[tuple[int, ...], tuple[int, int]] = {}  # of ranks with the same part the first, and its sum
    for rank, (kind, value) in zip(shares.placement.flat, rows, strict=False):
        if kind != rows[0][0]:
            raise SbpError(
                f"flow.data.shards: samples of ranks {shares.placement.flat[0]} and {rank} differ in shape or dtype\n"
                f"  here {', '.join(f'{path} {shape} {dtype}'.strip() for path, (dtype, shape) in kinds.items())}\n"
                "  give all samples one shape, as by padding to a fixed length in the dataset or its collate_fn"
            )
        where = shares.placement.coords(rank)
        first, known = same.setdefault(tuple(where[axis] for axis in cut), (rank, value))
        if value != known:
            raise SbpError(
                f"flow.data.shards: ranks {first} and {rank} have the same part of samples {read.start}:{read.stop}, "
                "and read different values\n"
                "  look at the files that they read, and at random numbers that the dataset draws by itself\n"
                "  flow.init(check=False) leaves out this comparison"
            )


def _told(row: Sequence[int], shares: BatchShares, op: str) -> list[list[int]]:
    """The numbers of all ranks, where there are others."""
    if world().rank is None or not world().check:
        return [list(row)]
    return told(row, shares.placement, op) or [list(row)]
