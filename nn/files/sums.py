"""Sums of what was read of pieces, against those that were written: by one process, or by several together.

Each process adds up a share of what it reads, so that of what many have read each element counts once.
"""

from collections.abc import Sequence

from torch import Tensor

from ...placement import Placement
from ...placement.errors import FileError
from ...placement.world import owned
from ..tensors.agreement import added
from .checksums import BITS, checksum
from .pieces import intersection
from .values import Pieced, Region, StoredPiece

__all__ = ["PieceSums", "altered"]


class PieceSums:
    """Sums so far. `counting` are the boxes of the value that is being read that count here."""

    def __init__(self) -> None:
        self.counting: Sequence[Region] = ()
        self.alone = _Expected()  # what this process reads whole
        self.together = _Expected()  # what all of them read, in the order in which they do
        self.now = self.alone

    def expect(self, of: Pieced, *, alone: bool) -> None:
        """All of this value is to be read, once more than before."""
        self.now = self.alone if alone else self.together
        self.now.values[id(of)] = of
        self.now.times[id(of)] = self.now.times.get(id(of), 0) + 1

    def note(self, of: Pieced, number: int, block: Tensor, region: Region) -> None:
        """A block of a piece has been read."""
        found = self.now.found
        for box in self.counting:
            inside = intersection(box, region)
            if inside is not None:
                part = block[tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(inside, region, strict=True))]
                more = checksum(part, [lo for lo, _ in inside], of.shape)
                found[id(of), number] = (found.get((id(of), number), 0) + more) % (1 << BITS)

    def wrong_here(self) -> FileError | None:
        """Why what this process has read by itself is not what was written."""
        return self.alone.wrong(self.alone.sums())

    def compare(self, everybody: Placement | None) -> None:
        """Raise, on every rank, where what they have read together is not what was written."""
        if everybody is not None and not owned(everybody):
            return
        sums = self.together.sums()
        error = self.together.wrong(sums if everybody is None else added(sums, everybody, "flow.load"))
        if error is not None:
            raise error


class _Expected:
    """Values that are to be read, so many times each, and the sums of what was read of them."""

    def __init__(self) -> None:
        self.values: dict[int, Pieced] = {}
        self.times: dict[int, int] = {}
        self.found: dict[tuple[int, int], int] = {}  # by value and number of its piece

    def sums(self) -> list[int]:
        return [self.found.get((key, at), 0) for key, of in self.values.items() for at in range(len(of.pieces))]

    def wrong(self, sums: Sequence[int]) -> FileError | None:
        pieces = [(of, piece, self.times[key]) for key, of in self.values.items() for piece in of.pieces]
        both = zip(pieces, sums, strict=True)
        wrong = ((of, piece) for (of, piece, times), total in both if total != piece.sum * times % (1 << BITS))
        return next((altered(of, piece) for of, piece in wrong), None)


def altered(of: Pieced, piece: StoredPiece) -> FileError:
    """The error that says of a piece that it is not what was written."""
    where = ", ".join(f"{lo}:{hi}" for lo, hi in piece.region)
    return FileError(
        f"flow.load: {piece.file} has other numbers than were written to it\n"
        f"  of {of.name} {of.shape} {of.dtype} the part [{where}] has another checksum; "
        f"do not go on with what was loaded of it\n  {of.advice()}"
    )
