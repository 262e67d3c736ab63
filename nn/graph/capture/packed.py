"""Packed sequences in a captured step: samples that end early stay padded, beside how long they are.

A `PackedSequence` holds data of another size for other lengths, and a graph has one size for all. So while a step is
captured `pack_padded_sequence` gives one that holds the padded samples, `Rows`, and their `Lengths`, which recurrent
layers and `pad_packed_sequence` know how to use. Anything else that asks for packed values is refused.

    a recurrent layer    packs where it runs, on each rank the samples that are there
    dropout between two  draws as many numbers as torch does, for the samples as torch sorts them
    what a step is given a packed argument is padded before the step, and packed again inside
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ....boxing.record import user_line
from ....placement.errors import SbpError, ShapeError
from ....placement.structure import leaves, mapped
from ....sbp.recurrent import KINDS
from ...eager.recurrent import stacked

__all__ = ["packing", "padded", "repacked", "unpacked"]


class Padded(NamedTuple):
    """A packed argument as a step takes it: samples first, and how long each is."""

    values: Tensor
    lengths: Tensor


def padded(value: Any) -> Any:
    """Arguments with what is packed in them padded."""
    return mapped(value, PackedSequence, lambda x: Padded(*pad_packed_sequence(x, batch_first=True)))


def repacked(value: Any) -> Any:
    """The same arguments inside of a step."""
    return mapped(value, Padded, lambda x: packed(x.values, x.lengths, True, False))


def unpacked(result: Any) -> Any:
    """The result of a step, in which nothing may be packed."""
    if any(isinstance(x.data, Rows) for x in leaves(result, PackedSequence)):
        _refuse("a result")
    return result


class _StandsFor:
    """Goes where torch's functions take a tensor of a packed sequence; they come back here."""

    device = torch.device("cpu")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        rows, lengths = (*args[:2], None, None)[:2]
        if isinstance(rows, Rows) and isinstance(lengths, Lengths):
            if name in KINDS:
                return _layers(name, rows, lengths, *args[2:])
            if name == "_pad_packed_sequence":
                return _pad(rows, lengths, *args[2:])
        _refuse(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        _refuse(name)


class Rows(_StandsFor):
    """Stands for `PackedSequence.data`: the padded values, time first."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.dtype, self.device = values, values.dtype, values.device

    def dim(self) -> int:
        return 2

    def size(self, dim: int) -> int:
        if dim not in (1, -1):
            _refuse(f"size({dim})")
        return self.values.shape[-1]


class Lengths(_StandsFor):
    """Stands for `PackedSequence.batch_sizes`: the lengths of samples, of which the longest may have `most`."""

    def __init__(self, lengths: Tensor, most: int) -> None:
        self.lengths, self.most = lengths, most

    def __getitem__(self, at: int) -> int:
        if at != 0:
            _refuse(f"batch_sizes[{at}]")
        return self.lengths.shape[0]

    def size(self, dim: int) -> int:
        return _Longest(self.most)


class _Longest(int):
    """The length of the longest sample, if it fills the padded tensor that it was packed from."""


def _refuse(asked: str) -> NoReturn:
    raise SbpError(
        f"capture: {asked} of a packed sequence, at {user_line()}\n"
        "  how much it holds depends on the lengths of samples, and a graph is made once for all of them\n"
        "  give it to nn.LSTM, GRU or RNN, and back to pad_packed_sequence; compute all else on padded tensors"
    )


@contextmanager
def packing() -> Iterator[None]:
    """Until the end `pack_padded_sequence` packs for a graph, under whatever name this thread's program has it."""
    here = get_ident()

    def pack(x: Tensor, lengths: Any, batch_first: bool, enforce_sorted: bool) -> PackedSequence:
        if get_ident() != here:  # such as a loader of data
            return plain(x, lengths, batch_first, enforce_sorted)  # type: ignore[no-any-return]
        return packed(x, lengths, batch_first, enforce_sorted)

    def instead(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
        return _packed_in_graph(input, lengths, batch_first, enforce_sorted)  # type: ignore[name-defined]  # noqa: F821

    code = pack_padded_sequence.__code__
    plain: Any = FunctionType(code, rnn.__dict__)
    rnn.__dict__["_packed_in_graph"] = pack
    pack_padded_sequence.__code__ = instead.__code__
    try:
        yield
    finally:
        pack_padded_sequence.__code__ = code
        del rnn.__dict__["_packed_in_graph"]


def packed(x: Tensor, lengths: Any, batch_first: bool, enforce_sorted: bool) -> PackedSequence:
    """A stand-in for samples of these lengths, packed."""
    first = x.transpose(0, 1) if batch_first else x
    given = lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
    many, most = given.shape[0], first.shape[0]
    if many != first.shape[1]:
        raise ShapeError(
            f"{many} lengths are given for {first.shape[1]} samples, at {user_line()}\n"
            "  pass them as a tensor, an argument of the step, which is cut as the samples are"
        )
    known = _checked(given.to(torch.int64), most, enforce_sorted, False, user_line())
    return PackedSequence(Rows(first), Lengths(known, most))  # type: ignore[arg-type]


def _layers(kind: str, rows: Rows, lengths: Lengths, *rest: Any) -> tuple[Any, ...]:
    out, *ends = stacked(kind, rows.values, lengths.lengths, *rest, drop=partial(_dropped, lengths.lengths))
    return Rows(out), *ends


def _dropped(lengths: Tensor, x: Tensor, p: float) -> Tensor:
    if p == 1:
        return x * 0
    noise: Tensor = torch.ops.sbpflow.packed_noise(lengths, x.shape[0], x.shape[2], p, x.dtype)
    return x * noise


def _pad(rows: Rows, lengths: Lengths, batch_first: bool, value: float, total: int) -> tuple[Tensor, Tensor]:
    x, most = rows.values, lengths.most
    known = _checked(lengths.lengths, most, False, isinstance(total, _Longest), user_line())
    moments = torch.arange(most, device=x.device)
    x = torch.where((moments[:, None] < known.to(x.device))[:, :, None], x, value)
    if total > most:
        x = torch.cat([x, x.new_full((total - most, *x.shape[1:]), value)])
    return x.transpose(0, 1) if batch_first else x, known


def _checked(lengths: Tensor, most: int, in_order: bool, filled: bool, line: str) -> Tensor:
    known: Tensor = torch.ops.sbpflow.lengths(lengths, most, in_order, filled, line)
    return known


@torch.library.custom_op("sbpflow::lengths", mutates_args=())
def _lengths(lengths: Tensor, most: int, in_order: bool, filled: bool, line: str) -> Tensor:
    """The lengths of a batch's samples, looked at."""
    found = lengths.tolist()
    if found and not (min(found) > 0 and max(found) <= most):
        raise SbpError(
            f"samples of {most} moments have lengths from {min(found)} to {max(found)}, at {line}\n"
            f"  give each one from 1 to {most}"
        )
    if in_order and found != sorted(found, reverse=True):
        raise SbpError(
            f"samples to be packed are not sorted by length, the longest first, at {line}\n"
            "  call pack_padded_sequence(..., enforce_sorted=False)"
        )
    if filled and found and max(found) < most:
        raise SbpError(
            f"the longest of samples of {most} moments has {max(found)}, and pad_packed_sequence at {line} would make "
            f"{max(found)} of them\n"
            f"  a graph has one size for all batches: pass total_length={most}, or cut the samples before the step"
        )
    return lengths.clone()


@_lengths.register_fake
def _(lengths: Tensor, *_: Any) -> Tensor:
    return lengths.new_empty(lengths.shape)


@torch.library.custom_op("sbpflow::packed_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _noise(lengths: Tensor, time: int, features: int, p: float, dtype: torch.dtype) -> Tensor:
    """Factors that dropout multiplies packed samples by, padded: the numbers in the order in which torch packs."""
    many = lengths.shape[0]
    place = torch.ones(time, many, 1, dtype=torch.bool, device=lengths.device)
    sizes = pack_padded_sequence(place, lengths.cpu(), enforce_sorted=False)
    drawn = torch.empty(len(sizes.data), features, dtype=dtype, device=lengths.device).bernoulli_(1 - p).div_(1 - p)
    return pad_packed_sequence(sizes._replace(data=drawn), total_length=time)[0]


@_noise.register_fake
def _(lengths: Tensor, time: int, features: int, p: float, dtype: torch.dtype) -> Tensor:
    return lengths.new_empty((time, lengths.shape[0], features), dtype=dtype)
