"""Every dtype of torch goes through every move: exactly, or it is refused before anything is sent."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sbpflow.boxing import between, box, gather, scatter
from sbpflow.boxing.exchange.execute import transport
from sbpflow.placement import placement
from sbpflow.placement.errors import DtypeError, SbpflowError
from sbpflow.sbp import B, Layout, P, S, Sbp, layout
from tests.boxing.oracle import cut, grid

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

EVERY = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
EIGHTS = [dtype for dtype in EVERY if str(dtype).startswith("torch.float8_")]
PLAIN = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, *EIGHTS,
]  # fmt: skip
OTHERS = [dtype for dtype in EVERY if dtype not in PLAIN]
SPLITS_AND_B: list[Sbp] = [S(0), S(1), B]
PAIRS = list(itertools.product([*SPLITS_AND_B, P], repeat=2))
LINE = placement("cpu:[0-3]")

IN_ALL_DTYPES = pytest.mark.parametrize("dtype", PLAIN, ids=str)
BETWEEN_ALL = pytest.mark.parametrize(("sbp", "target"), PAIRS, ids=lambda sbp: str(sbp))


def wide(dtype: torch.dtype) -> torch.dtype:
    """A dtype that torch computes with and that holds all of the small numbers used here."""
    return torch.complex128 if dtype.is_complex else torch.float64


def numbers(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers that are exact in this dtype, and sums of four of them too; powers of two, the only ones some have."""
    dice = torch.Generator().manual_seed(seed)
    some = torch.randint(0, 4, shape, generator=dice).double().exp2().to(wide(dtype))
    if dtype.is_complex:
        return some - 1j * torch.randint(0, 5, shape, generator=dice)
    return some % 2 if dtype is torch.bool else some


def together(terms: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    whole = torch.stack([t.to(wide(dtype)) for t in terms]).sum(0)
    return (whole != 0).to(wide(dtype)) if dtype is torch.bool else whole


def made(lies: Layout) -> tuple[list[Tensor], Tensor]:
    """The shards, and the value that they mean."""
    terms = [numbers(lies.dtype, lies.shape, seed) for seed in range(4 if lies.sbp[0] is P else 1)]
    shards = [cut(terms[rank % len(terms)], lies, rank).to(lies.dtype) for rank in LINE.flat]
    return shards, together(terms, lies.dtype)


@IN_ALL_DTYPES
@pytest.mark.parametrize("shape", [(8, 4), (5, 3)], ids=str)
def test_a_move_is_exact_or_refused(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for sbp, target in PAIRS:
        assert_exact_or_refused(layout(LINE, sbp, shape, dtype), layout(LINE, target, shape, dtype))


def assert_exact_or_refused(src: Layout, dst: Layout) -> None:
    (sbp,), (target,), dtype = src.sbp, dst.sbp, src.dtype
    shards, whole = made(src)
    if dtype in EIGHTS and sbp is P and target is not P:
        return assert_refused(shards, src, dst)
    out = box(shards, src, dst)
    assert all(t.dtype is dtype for t in out)
    if target is P and dtype in EIGHTS:
        return assert_one_holds_all(out, src, whole)
    if target is P:
        assert torch.equal(together(out, dtype), whole)
    else:
        assert all(torch.equal(t.to(whole.dtype), cut(whole, dst, r)) for t, r in zip(out, LINE.flat, strict=True))
    return None


def assert_refused(shards: Sequence[Tensor], src: Layout, dst: Layout) -> None:
    before = transport().sent.calls.total()
    with pytest.raises(DtypeError, match=f"{src.dtype} cannot be summed"):
        box(shards, src, dst)
    assert transport().sent.calls.total() == before


def assert_one_holds_all(out: Sequence[Tensor], src: Layout, whole: Tensor) -> None:
    """Where torch has no sum, it is enough that all others hold zero where one holds the value."""
    if src.sbp[0] is not P:
        assert torch.equal(torch.stack([t.double() for t in out]).sum(0), whole)


@pytest.mark.parametrize("kind", [P("max"), P("min")], ids=str)
@pytest.mark.parametrize("target", [S(0), S(1), B], ids=str)
@pytest.mark.parametrize("dtype", [d for d in PLAIN if not d.is_complex], ids=str)
def test_what_has_an_order_has_a_maximum(dtype: torch.dtype, kind: Sbp, target: Sbp) -> None:
    src, dst = layout(LINE, kind, (5, 3), dtype), layout(LINE, target, (5, 3), dtype)
    terms = [numbers(dtype, (5, 3), seed) for seed in range(4)]
    best = torch.stack(terms).amax(0) if kind is P("max") else torch.stack(terms).amin(0)
    out = box([t.to(dtype) for t in terms], src, dst)
    assert all(torch.equal(t.double(), cut(best, dst, r)) for t, r in zip(out, LINE.flat, strict=True))


@pytest.mark.parametrize("kind", [P("max"), P("min")], ids=str)
@pytest.mark.parametrize("source", [S(0), B], ids=str)
@pytest.mark.parametrize("dtype", [d for d in PLAIN if not d.is_complex], ids=str)
def test_a_value_made_a_maximum_comes_back(dtype: torch.dtype, kind: Sbp, source: Sbp) -> None:
    src, mid, dst = (layout(LINE, sbp, (5, 3), dtype) for sbp in (source, kind, B))
    shards, whole = made(src)
    assert all(torch.equal(t.double(), whole) for t in box(box(shards, src, mid), mid, dst))


@pytest.mark.parametrize("dtype", [d for d in PLAIN if d.is_complex], ids=str)
def test_what_has_no_order_has_no_maximum(dtype: torch.dtype) -> None:
    with pytest.raises(SbpflowError, match="no order"):
        layout(LINE, P("max"), (4,), dtype)


@pytest.mark.sampled(48)
@IN_ALL_DTYPES
@pytest.mark.parametrize(("sbp", "target"), list(itertools.product(SPLITS_AND_B, repeat=2)), ids=str)
def test_moving_changes_no_bit(dtype: torch.dtype, sbp: Sbp, target: Sbp) -> None:
    """Also not of NaNs with payload, negative zeros, and what is too large for other dtypes."""
    src, dst = layout(LINE, sbp, (5, 6), dtype), layout(LINE, target, (5, 6), dtype)
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (5, 6, dtype.itemsize), dtype=torch.uint8)
    out = box([in_bits(cut(bits, bytewise(src), r), dtype) for r in LINE.flat], src, dst)
    for rank, shard in zip(LINE.flat, out, strict=True):
        want = in_bits(cut(bits, bytewise(dst), rank), dtype)
        assert torch.equal(shard.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def bytewise(lies: Layout) -> Layout:
    return layout(LINE, lies.sbp, (*lies.shape, lies.dtype.itemsize), torch.uint8)


def in_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.contiguous().view(dtype).squeeze(-1) if bits.numel() else torch.empty(bits.shape[:-1], dtype=dtype)


@IN_ALL_DTYPES
@pytest.mark.parametrize("sbp", [S(0), S(1), B], ids=str)
def test_scatter_and_gather_are_inverse(dtype: torch.dtype, sbp: Sbp) -> None:
    lies = layout(LINE, sbp, (5, 3), dtype)
    whole = numbers(dtype, (5, 3), 0).to(dtype)
    assert torch.equal(gather(scatter(whole, lies), lies).to(wide(dtype)), whole.to(wide(dtype)))


@IN_ALL_DTYPES
def test_nothing_is_sent_of_an_empty_tensor(dtype: torch.dtype) -> None:
    for sbp, target in itertools.product(SPLITS_AND_B, repeat=2):
        src, dst = layout(LINE, sbp, (0, 3), dtype), layout(LINE, target, (0, 3), dtype)
        out = box([torch.empty(src.local_shape(r), dtype=dtype) for r in LINE.flat], src, dst)
        assert [(tuple(t.shape), t.dtype) for t in out] == [(dst.local_shape(r), dtype) for r in LINE.flat]
        assert between(src, dst).total == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", [(B, B), (S(0), S(1)), (B, S(0)), (P, S(1))], ids=str)
def test_sums_over_two_axes_are_exact_too(dtype: torch.dtype, target: tuple[Sbp, Sbp]) -> None:
    p = grid(2, 2)
    src, dst = layout(p, (P, P), (5, 3), dtype), layout(p, target, (5, 3), dtype)
    terms = [numbers(dtype, (5, 3), seed) for seed in range(4)]
    out = box([t.to(dtype) for t in terms], src, dst)
    whole = layout(p, B, (5, 3), dtype)
    assert all(torch.equal(t.double(), together(terms, dtype)) for t in box(out, dst, whole))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64], ids=str)
@BETWEEN_ALL
def test_gradients_have_the_dtype_of_the_tensor(dtype: torch.dtype, sbp: Sbp, target: Sbp) -> None:
    src, dst = layout(LINE, sbp, (5, 3), dtype), layout(LINE, target, (5, 3), dtype)
    leaves = [shard.requires_grad_() for shard in made(src)[0]]
    cotangents, whole = made(dst.dual)
    grads = torch.autograd.grad(box(leaves, src, dst), leaves, cotangents)
    assert all(g.dtype is dtype for g in grads)
    if src.dual.sbp[0] is P:
        assert torch.equal(together(grads, dtype), whole)
    else:
        assert all(torch.equal(g.to(whole.dtype), cut(whole, src, r)) for g, r in zip(grads, LINE.flat, strict=True))


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_what_is_no_plain_number_is_refused(dtype: torch.dtype) -> None:
    for sbp, target in PAIRS:
        with pytest.raises(DtypeError, match=f"{dtype} cannot be boxed"):
            between(layout(LINE, sbp, (4, 4), dtype), layout(LINE, target, (4, 4), dtype))


def test_shards_of_another_dtype_are_refused_before_anything_is_sent() -> None:
    src, dst = layout(LINE, S(0), (4, 4)), layout(LINE, B, (4, 4))
    shards = [torch.zeros(1, 4) for _ in range(3)] + [torch.zeros(1, 4, dtype=torch.float64)]
    before = transport().sent.calls.total()
    with pytest.raises(DtypeError, match=r"rank 3 has torch.float64 .*\n.*float32.*\n.*x.to\(torch.float32\)"):
        box(shards, src, dst)
    assert transport().sent.calls.total() == before
