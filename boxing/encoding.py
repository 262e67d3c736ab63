"""Encodings: moves in fewer bytes, by encoders from boxing/encoders/ or from users.

A sum over ranks has an encoding: the encoder, and along which axes it adds up. A hop, a value that goes to other ranks,
has an encoder alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import ClassVar, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

from ..placement.errors import SbpError
from ..sbp import Layout
from .boxing import Boxing, between
from .kept import KeptErrors

__all__ = ["EncodedHops", "EncodedSums", "Encoding", "FilledRows", "MoveEncoder", "ShardsHere", "encoded_boxings"]

ShardsHere: TypeAlias = tuple[Tensor, ...]


class SumsUnderWay(Protocol):
    """Encoded sums that were begun."""

    def wait(self) -> list[ShardsHere]: ...


class EncodedSums(Protocol):
    """The sums of one bucket, encoded alike: made by `now`, or begun by `start`."""

    @property
    def boxings(self) -> tuple[Boxing, ...]:
        """The boxings of what is sent, in the long run."""

    @property
    def ends(self) -> tuple[tuple[Layout, Layout], ...]:
        """The layouts of all its plain moves in the long run."""

    def now(self, kept: KeptErrors, *members: ShardsHere) -> list[ShardsHere]: ...

    def start(self, kept: KeptErrors, *members: ShardsHere) -> SumsUnderWay: ...


class EncodedHops(Protocol):
    """A hop from one layout to another; `code` is how its bytes lie before and behind it."""

    @property
    def code(self) -> tuple[Layout, Layout]: ...

    def encode(self, shards: Sequence[Tensor]) -> ShardsHere: ...

    def decode(self, rows: Sequence[Tensor]) -> ShardsHere: ...


@dataclass(frozen=True, kw_only=True)
class MoveEncoder:
    """An encoder: the methods that moves call. `flow.encoders.Encoder` explains `feedback` and `twice`."""

    feedback: bool = True
    twice: bool = False

    name: ClassVar[str] = ""  # as texts of graphs and plans call it; the class's own, if it has none

    def sums(self, pairs: Sequence[tuple[Layout, Layout]], encodings: Sequence["Encoding"]) -> EncodedSums:
        """The sums of a bucket from one layout to another each, all by this encoder."""
        raise NotImplementedError(f"{type(self).__name__} encodes no sums")

    def hop(self, src: Layout, dst: Layout) -> EncodedHops:
        """A value's way to other ranks."""
        raise NotImplementedError(f"{type(self).__name__} encodes no hops")

    def payload_bytes(self, src: Layout, dst: Layout, axes: tuple[int, ...]) -> int:
        """The bytes of a tensor as it is encoded, by which buckets are filled."""
        raise NotImplementedError(f"{type(self).__name__} encodes no sums")

    def kept_bytes(self, src: Layout, dst: Layout, axes: tuple[int, ...], rank: int) -> int:
        """The bytes that are kept of a tensor on a rank from one step to the next."""
        raise NotImplementedError(f"{type(self).__name__} encodes no sums")

    @property
    def hops(self) -> bool:
        """Whether a value can be encoded by itself, such as one that hops from stage to stage."""
        return True

    def expected(self, src: Layout, dst: Layout) -> Boxing | None:
        """The boxing of a move of values as they are, in bytes known only as it runs; None for other encoders."""
        return None

    def hop_boxing(self, src: Layout, dst: Layout) -> Boxing:
        """The boxing of a hop's encoded bytes, or of the values expected to go where it sends values."""
        return self.expected(src, dst) or between(*self.hop(src, dst).code)

    def check(self, dtype: torch.dtype, of: str) -> None:
        """Refuse a tensor that has no form in fewer bytes."""
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise SbpError(
                f"{of} is {str(dtype).removeprefix('torch.')}, and {self} encodes floating point of 16 bits or more\n"
                "  leave it out of the pattern, or cast it first"
            )

    def check_sum(self, src: Layout, dst: Layout, axes: Sequence[int], of: str) -> None:
        """Refuse what is no sum over these axes of one placement, or not of numbers that can be encoded."""
        names = src.placement.names or tuple(map(str, range(src.placement.ndim)))
        said = ", ".join(names[a] for a in axes)
        if src.placement is not dst.placement:
            raise SbpError(
                f"{of} goes from {src.placement} to {dst.placement}, and {self} encodes sums of one placement\n"
                "  sum it where it is, x.to_global(sbp=B, encoder=...); hops are encoded by "
                "flow.nn.compress(kind='hops')"
            )
        if src.state.partial and src.state.reduction != "sum":
            raise SbpError(
                f'{of} is P("{src.state.reduction}"), and {self} encodes addends of sums\n'
                "  a maximum of what was rounded is another maximum: leave the encoder out"
            )
        if not axes or not set(axes) <= set(src.state.partial) or set(axes) & set(dst.state.partial):
            raise SbpError(
                f"{of} is no sum over {said or 'any axis'}: it goes from {src.lie} to {dst.lie}\n"
                "  encode the move that adds it up, from P to B or S, or leave the encoder out"
            )
        self.check(src.dtype, of)
        if len({src.local_shape(rank) for rank in src.placement.flat}) > 1:
            raise SbpError(
                f"{of} {src.shape} is cut unevenly over other axes, and {self} needs as many bytes of every rank\n"
                "  cut it along a dim that the ranks divide, or leave the encoder out"
            )

    def check_hop(self, src: Layout, dst: Layout, of: str) -> None:
        """Refuse a hop whose pieces would be cut anew on their way, and what cannot be encoded by itself."""
        if src.state.partial and src.state.reduction != "sum":
            raise SbpError(
                f'{of} is P("{src.state.reduction}"), and {self} encodes values\n  leave it out of the pattern'
            )
        if src.placement.shape != dst.placement.shape:
            raise SbpError(
                f"{of} hops from {src.placement} to {dst.placement}, whose shapes differ\n"
                f"  the bytes of {self} go from each rank to the one opposite\n"
                "  place both on grids of one shape, or leave it out of the pattern"
            )
        if not self.hops:
            raise SbpError(
                f"{of} hops, and {self} encodes sums over ranks\n"
                "  take one that encodes a value by itself, such as flow.encoders.int8()"
            )
        if self.twice:
            raise SbpError(
                f"{of} hops, and {self} would encode a sum once more, where none is made\n  leave out twice=True"
            )
        self.check(src.dtype, of)

    def __str__(self) -> str:
        said = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        given = ", ".join(
            f"{name}={value if isinstance(value, MoveEncoder) else repr(value)}"
            for name, value, usual in said
            if value != usual
        )
        return f"{self.name or type(self).__name__}({given})"


@dataclass(frozen=True)
class Encoding:
    """The encoding of a move: its encoder, the axes along which addends are, and the name under which errors are
    kept."""

    encoder: MoveEncoder
    axes: tuple[int, ...]
    name: str = ""


def encoded_boxings(pairs: Sequence[tuple[Layout, Layout]], encodings: Sequence[Encoding]) -> tuple[Boxing, ...]:
    """The boxings of what an encoded bucket sends."""
    return encodings[0].encoder.sums(pairs, encodings).boxings


@dataclass(frozen=True)
class FilledRows(MoveEncoder):
    """Sends only rows that hold something, with their very values, such as tokens to experts. Rows along the last dim
    that are zero everywhere stay on their rank.

    Their number is known only as the move runs. The price goes by a `share` of all rows, those expected to be sent.
    """

    share: float = 1.0

    name: ClassVar[str] = "filled"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise SbpError(f"filled(share={self.share!r})\n  give it the part of the rows that is expected to be sent")

    def expected(self, src: Layout, dst: Layout) -> Boxing:
        """The boxing of as many bytes as are expected to go; each rank's own sizes are those of the run."""
        *lead, width = src.shape
        shape = (*lead, ceil(width * self.share))
        return between(*(Layout(of.placement, of.state, shape, of.dtype) for of in (src, dst)))

    def check(self, dtype: torch.dtype, of: str) -> NoReturn:
        raise SbpError(
            f"{of} cannot be encoded by {self}: composites say it of what they send\n"
            "  take one that encodes a value, such as flow.encoders.int8()"
        )
