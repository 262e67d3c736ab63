"""Adding up addends: numpy's arithmetic, for every dtype that torch can store."""

import itertools
from collections.abc import Callable
from functools import reduce
from math import inf

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from sbpflow.boxing.reductions import check_carried, check_reducible, combine, identity
from sbpflow.placement.errors import DtypeError
from sbpflow.sbp.signature import Reduction

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

INTEGERS = [
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
EIGHTS = [dtype for name, dtype in vars(torch).items() if name.startswith("float8_")]
REDUCTIONS: list[Reduction] = ["sum", "max", "min"]
FOLD: dict[Reduction, Callable[..., npt.NDArray[np.generic]]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
}
COUNTS = pytest.mark.parametrize("count", [1, 2, 3, 5, 8])


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", INTEGERS, ids=name)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@COUNTS
def test_integers_are_numpy_s_and_wrap_as_they_do(dtype: torch.dtype, reduction: Reduction, count: int) -> None:
    kind = np.dtype(name(dtype))
    info = np.iinfo(kind)
    dice = np.random.default_rng(count)
    terms = [dice.integers(info.min, info.max, (4, 25), dtype=kind, endpoint=True) for _ in range(count)]
    terms[0].flat[:4] = [info.min, info.max, 0, 1]
    found = combine([torch.from_numpy(t) for t in terms], reduction)
    assert found.dtype is dtype
    assert np.array_equal(found.numpy(), reduce(FOLD[reduction], terms))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@COUNTS
def test_floats_are_added_in_their_order(dtype: torch.dtype, reduction: Reduction, count: int) -> None:
    terms = [torch.randn(100, dtype=dtype) for _ in range(count)]
    assert np.array_equal(combine(terms, reduction).numpy(), reduce(FOLD[reduction], [t.numpy() for t in terms]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
@COUNTS
def test_halves_are_rounded_once(dtype: torch.dtype, count: int) -> None:
    """However many terms: within half a unit in the last place of the exact sum."""
    terms = [torch.randn(1000).to(dtype) for _ in range(count)]
    exact = sum(t.double() for t in terms)
    assert isinstance(exact, Tensor)
    found = combine(terms, "sum")
    unit = torch.finfo(dtype).eps * (torch.frexp(exact).exponent - 1).double().exp2()
    assert found.dtype is dtype
    assert bool(((found.double() - exact).abs() <= 0.5001 * unit).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_is_not_a_number_stays_so(dtype: torch.dtype, reduction: Reduction) -> None:
    terms = [torch.tensor([torch.nan, 1.0, inf, -inf]).to(dtype), torch.tensor([1.0, torch.nan, 1.0, 1.0]).to(dtype)]
    found = combine(terms, reduction)
    assert found[:2].isnan().all()
    assert found[2:].tolist() == {"sum": [inf, -inf], "max": [inf, 1.0], "min": [1.0, -inf]}[reduction]


@pytest.mark.parametrize("dtype", COMPLEX, ids=name)
@COUNTS
def test_complex_numbers_have_a_sum(dtype: torch.dtype, count: int) -> None:
    wide = [torch.complex(*torch.randint(-9, 10, (2, 50)).double()) for _ in range(count)]
    found = combine([t.to(dtype) for t in wide], "sum")
    assert found.dtype is dtype
    assert torch.equal(found.to(torch.complex128), torch.stack(wide).sum(0))


@COUNTS
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_sum_of_truths_is_whether_any_is_true(reduction: Reduction, count: int) -> None:
    terms = [torch.randint(0, 2, (50,)).bool() for _ in range(count)]
    together = torch.stack(terms)
    assert torch.equal(combine(terms, reduction), together.all(0) if reduction == "min" else together.any(0))


@pytest.mark.parametrize("dtype", EIGHTS, ids=name)
@pytest.mark.parametrize("reduction", ["max", "min"])
@COUNTS
def test_eight_bit_floats_have_an_order(dtype: torch.dtype, reduction: Reduction, count: int) -> None:
    wide = [torch.randint(1, 8, (64,)).float().exp2().to(dtype).float() for _ in range(count)]
    found = combine([t.to(dtype) for t in wide], reduction)
    together = torch.stack(wide)
    assert found.dtype is dtype
    assert torch.equal(found.float(), together.amax(0) if reduction == "max" else together.amin(0))


@pytest.mark.parametrize("dtype", EIGHTS, ids=name)
def test_eight_bit_floats_have_no_sum(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=rf"{dtype} cannot be summed.*\n.*bfloat16"):
        combine([torch.ones(2).to(dtype)] * 2, "sum")


@pytest.mark.parametrize("dtype", COMPLEX, ids=name)
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_complex_numbers_have_no_order(dtype: torch.dtype, reduction: Reduction) -> None:
    with pytest.raises(DtypeError, match=f"{dtype} has no {reduction}imum"):
        check_reducible(dtype, reduction)


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, *FLOATS], ids=name)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_can_be_reduced_is_let_through(dtype: torch.dtype, reduction: Reduction) -> None:
    check_carried(dtype)
    check_reducible(dtype, reduction)


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [
        *itertools.product([torch.bool, *INTEGERS, *FLOATS], REDUCTIONS),
        *itertools.product(COMPLEX, ["sum"]),
        *itertools.product(EIGHTS, ["max", "min"]),
    ],
    ids=str,
)
def test_the_identity_changes_nothing(dtype: torch.dtype, reduction: Reduction) -> None:
    values = torch.tensor([1, 2, 0, 120]) if dtype is not torch.bool else torch.tensor([1, 0, 1, 0])
    some = values.to(torch.float64 if dtype in EIGHTS else dtype).to(dtype)
    none = torch.full_like(some, identity(dtype, reduction))
    for terms in ([some, none], [none, some], [none, some, none]):
        assert torch.equal(combine(terms, reduction).view(torch.uint8), some.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint64, torch.float16, torch.float64], ids=name)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_extremes_survive_beside_the_identity(dtype: torch.dtype, reduction: Reduction) -> None:
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    some = torch.tensor([info.min, info.max], dtype=dtype)
    assert torch.equal(combine([some, torch.full_like(some, identity(dtype, reduction))], reduction), some)


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, *FLOATS, *COMPLEX], ids=name)
@COUNTS
def test_the_result_is_new_and_the_terms_are_as_before(dtype: torch.dtype, count: int) -> None:
    terms = [torch.ones(4, dtype=torch.uint8).to(dtype) for _ in range(count)]
    before = [t.clone() for t in terms]
    found = combine(terms, "sum")
    assert found.data_ptr() not in {t.data_ptr() for t in terms}
    assert all(torch.equal(t.view(torch.uint8), b.view(torch.uint8)) for t, b in zip(terms, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)], ids=str)
def test_shapes_are_kept(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    terms = [torch.ones(shape).to(dtype) for _ in range(3)]
    found = combine(terms, "sum")
    assert (found.shape, found.dtype) == (shape, dtype)
    assert torch.equal(found.double(), torch.full(shape, 3.0, dtype=torch.float64))


def test_terms_need_not_lie_in_one_piece() -> None:
    wide = torch.arange(24, dtype=torch.int64).reshape(4, 6)
    for dtype in (torch.int64, torch.uint64, torch.uint16, torch.bfloat16):
        terms = [wide.to(dtype)[:, ::2], wide.to(dtype).t()[1::2].t(), wide.to(dtype)[:, :3]]
        found = combine(terms, "sum").double()
        assert torch.equal(found, sum(t.double() for t in terms))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype", [torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.bits8, torch.float4_e2m1fn_x2], ids=name
)
def test_what_torch_cannot_cut_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=f"{dtype} cannot be boxed"):
        check_carried(dtype)
