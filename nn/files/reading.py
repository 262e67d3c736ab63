"""Reading: shards from values in files, each process its own; an error of one rank is one of all.

A shard is read run by run of its spans, so that no element is read that the process does not keep. A file is mapped
into memory, and the system brings whole pages of it: of a split along the last dim, with rows shorter than a page, each
process has the disk read all rows.

Pieces of a checkpoint have checksums, which are compared when all has been read.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, product
from math import prod
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ...boxing import box
from ...boxing.exchange.execute import token
from ...placement import Placement
from ...placement.errors import DtypeError, FileError
from ...placement.world import device, owned
from ...sbp import Layout
from ...sbp.state import Spans, State
from ..tensors.agreement import told
from ..tensors.tensor import GlobalTensor, wrap
from .headers import DTYPES, opened
from .held import written_here
from .pieces import boxes, intersection, sizes_of
from .raw import RawFile
from .served import ServedFile, opened_piece
from .sums import PieceSums
from .values import FileTensor, FileValue, Pieced, Region, converted, whole

__all__ = ["Reading", "check_dtype"]

BLOCK = 16 << 20  # bytes that are read at once, and added up while they are still in a cache


def check_dtype(full: str, values: Sequence[FileValue], dtype: torch.dtype) -> None:
    """Refuse numbers of another kind: floats are converted to floats, and others not at all."""
    for tensor in (tensor for value in values for tensor in value.tensors()):
        if tensor.dtype is not dtype and not (tensor.dtype.is_floating_point and dtype.is_floating_point):
            raise DtypeError(
                f"flow.load: {full} is {dtype}, and {tensor.name} in {tensor.file} is {tensor.dtype}\n"
                "  floats of one kind are converted to those of another, and nothing else is\n"
                f"  make the model as the file is, or save {tensor.name} as {dtype}"
            )


class Reading:
    """Files that are open for a while, and what went wrong on the way. `everybody` are the ranks that read together."""

    def __init__(self, everybody: Placement | None) -> None:
        self.everybody = everybody
        self.stack = ExitStack()
        self.handles: dict[str, Any] = {}
        self.raw: dict[str, RawFile | ServedFile] = {}
        self.sums = PieceSums()
        self.error: Exception | None = None

    def __enter__(self) -> "Reading":
        if torch.get_default_device().type != "cpu":  # memory of files is there
            self.stack.enter_context(torch.device("cpu"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stack.close()
        for file in self.raw.values():
            file.close()
        if error is None:
            self.error = self.error or self.sums.wrong_here()
            self.agree()
            self.sums.compare(self.everybody)

    def agree(self) -> None:
        """Raise what went wrong here, or on another rank."""
        row = [0 if self.error is None else 1]
        rows = (told(row, self.everybody, "flow.load") if self.everybody is not None else None) or [row]
        if self.error is not None:
            raise self.error
        if any(number for (number,) in rows):
            assert self.everybody is not None
            failed = [rank for rank, (number,) in zip(self.everybody.flat, rows, strict=True) if number]
            raise FileError(
                f"flow.load: rank {failed[0]} could not read its part of the weights\n"
                f"  its own error tells why; of {len(rows)} ranks {len(failed)} failed\n  every rank needs the files"
            )

    def read(self, of: FileTensor, region: Region) -> Tensor:
        """The elements of a region, in the file's own memory."""
        handle = self.handles.get(of.file)
        if handle is None:
            handle = self.handles[of.file] = self.stack.enter_context(opened(of.file))
        changed = f"flow.load: {of.file} was changed since: "
        try:
            part = handle.get_slice(of.name)
        except Exception as error:  # safetensors' own
            raise FileError(f"{changed}it has no {of.name}\n  load it again") from error
        now = tuple(part.get_shape()), DTYPES.get(part.get_dtype())
        if now != (of.shape, of.dtype):
            was = f"{of.dtype} {of.shape}"
            raise FileError(f"{changed}{of.name} is {now[1]} {now[0]}, and was {was}\n  load it again")
        found: Tensor = part[tuple(slice(lo, hi) for lo, hi in region)] if region else part[...]
        return found

    def fill_pieces(self, of: Pieced, out: Tensor, region: Region) -> None:
        """The elements of a region, block by block from the pieces that have them."""
        for number, piece in enumerate(of.pieces):
            inside = intersection(region, piece.region)
            for block in _blocks(inside, of.dtype.itemsize) if inside is not None else ():
                there = out[_within(block, region)]
                direct = out.dtype is of.dtype and there.device.type == "cpu" and there.is_contiguous()
                read = there if direct else torch.empty(sizes_of(block), dtype=of.dtype, device="cpu")
                if piece.file not in self.raw:
                    self.raw[piece.file] = opened_piece(piece.file)
                slices = _within(block, piece.region)
                own = tuple((each.start, each.stop) for each in slices)
                self.raw[piece.file].box(piece.at, sizes_of(piece.region), own, read)
                self.sums.note(of, number, read, block)
                if not direct:
                    converted(there, read, of.name, piece.file)

    def fill(self, full: str, values: Sequence[FileValue], spans: Sequence[Spans], out: Tensor) -> None:
        """Read some index ranges of each dim of a value; of several, which are tied, all must have the same numbers."""
        if self.error is not None:
            return
        try:
            first, *others = values
            self.fill_runs(first, spans, out)
            for other in others:
                again = torch.empty_like(out)
                self.fill_runs(other, spans, again)
                if not _same(out, again):
                    raise _differ(full, first, other)
        except Exception as error:  # others wait to hear of it; `agree` raises it
            self.error = error

    def fill_runs(self, value: FileValue, spans: Sequence[Spans], out: Tensor) -> None:
        starts = [list(accumulate((hi - lo for lo, hi in dim), initial=0)) for dim in spans]
        for runs in product(*(range(len(dim)) for dim in spans)):
            part, region = out, tuple(spans[d][run] for d, run in enumerate(runs))
            for d, run in enumerate(runs):
                part = part.narrow(d, starts[d][run], region[d][1] - region[d][0])
            value.fill(part, region, self)

    def fill_whole(self, full: str, values: Sequence[FileValue], out: Tensor) -> None:
        self.sums.counting = [whole(tuple(out.shape))]
        self._expect(values, alone=True)
        self.fill(full, values, [(dim,) for dim in whole(tuple(out.shape))], out)

    def _expect(self, values: Sequence[FileValue], *, alone: bool) -> None:
        for value in values:
            if isinstance(value, Pieced):
                self.sums.expect(value, alone=alone)

    def shards(
        self, full: str, values: Sequence[FileValue], of: Layout, into: GlobalTensor | None = None
    ) -> GlobalTensor:
        """A value as it is to lie; `into` is one that lies so, whose memory is filled if it can be. What several ranks
        of this process hold alike is read once."""
        bare = Layout(of.placement, State(of.state.dims), of.shape, of.dtype)
        alike: dict[object, Tensor] = {}
        self._expect(values, alone=False)
        mine = _counting(bare) if any(isinstance(value, Pieced) for value in values) else {}
        pieces, held = [], _memory(into, of)
        for at, rank in enumerate(owned(of.placement)):
            spans, on = bare.spans(rank), device(of.placement, rank)
            known = alike.get((spans, on))
            if known is None:
                known = held[at] if held else torch.empty(bare.local_shape(rank), dtype=of.dtype, device=on)
                alike[spans, on] = known
                self.sums.counting = mine.pop(spans, ())
                self.fill(full, values, spans, known)
                pieces.append(known)
            else:
                pieces.append(held[at].copy_(known) if held else known.clone())
        if into is not None and held:
            torch.autograd.graph.increment_version(held)  # it was not torch that wrote
            into._moved = None
            return into
        there = Layout(of.placement, of.state, of.shape, of.dtype, (), of.sbp)
        made = tuple(pieces) or (token(bare),)
        return wrap(box(made, bare, there, op="load") if of.state.partial else made, there)


def _memory(into: GlobalTensor | None, of: Layout) -> tuple[Tensor, ...]:
    """The shards of a tensor that lies so, if they can be read into as they are."""
    if into is None or (into._layout.state, into._layout.dtype) != (of.state, of.dtype) or of.state.partial:
        return ()
    shards = tuple(shard.detach() for shard in into._shards)
    own = len({shard.data_ptr() for shard in shards if shard.numel()}) == sum(shard.numel() > 0 for shard in shards)
    fits = into.placement == of.placement and own and all(x.is_contiguous() and x.dtype is of.dtype for x in shards)
    return shards if fits and owned(of.placement) else ()


def _counting(of: Layout) -> dict[tuple[Spans, ...], list[Region]]:
    """The boxes that this process adds up, by the spans of which they are part."""
    mine = written_here(of)
    found: dict[tuple[Spans, ...], list[Region]] = {}
    for rank in owned(of.placement):
        spans = of.spans(rank)
        if spans not in found:
            parts = [intersection(share, box) for share in mine for box in boxes(spans)]
            found[spans] = [part for part in parts if part is not None]
    return found


def _blocks(region: Region, width: int) -> Iterator[Region]:
    """A region in parts of not too many bytes."""
    row = prod(sizes_of(region)[1:]) * width
    many = max(1, BLOCK // max(row, 1))
    if not region or region[0][1] - region[0][0] <= many:
        yield region
        return
    for lo in range(region[0][0], region[0][1], many):
        yield ((lo, min(lo + many, region[0][1])), *region[1:])


def _within(region: Region, outer: Region) -> tuple[slice, ...]:
    return tuple(slice(lo - at, hi - at) for (lo, hi), (at, _) in zip(region, outer, strict=True))


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit, so that NaN is NaN."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _differ(full: str, one: FileValue, other: FileValue) -> FileError:
    names = [next(each.tensors()).name for each in (one, other)]
    return FileError(
        f"flow.load: {names[0]} and {names[1]} are tied in the model, and the files have different values of them\n"
        f"  the model has one tensor for both, {full}\n"
        "  make the model without tying, as by tie_word_embeddings=False in its config, or leave one out of the files"
    )
