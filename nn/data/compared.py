"""Compared: do ranks read the same data? Checksums that all tell each other, so that a difference has a rank's name."""

from collections.abc import Sequence
from zlib import crc32

from torch import Tensor

from ...placement.errors import SbpError
from ...placement.world import owned, world
from ...sbp.signature import Split
from ..tensors.agreement import checksum, told
from .batches import values_by_path
from .reading import Read
from .shares import BatchShares

__all__ = ["same_position", "same_samples"]


def same_position(numbers: dict[str, int], shares: BatchShares) -> None:
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


def same_samples(read: Read, shares: BatchShares, values: bool) -> None:
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
