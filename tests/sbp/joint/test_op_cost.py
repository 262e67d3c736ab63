"""Seconds of ops by what a device reaches."""

from dataclasses import replace

import pytest
import torch

from sbpflow.placement import Calibration, Device, cluster
from sbpflow.sbp.call import Call
from sbpflow.sbp.joint.op_cost import adding_seconds, alone, bytes_of, dtype_of, option_seconds, rate, seconds
from sbpflow.sbp.kernels.fused import FusedOp
from sbpflow.sbp.kernels.kernels import kernels_of

aten = torch.ops.aten
X, Y = torch.ones(3, 4, 5), torch.ones(3, 5, 6)
SHEET = Device("sheet", {"float32": 1e3, "bfloat16": 4e3}, 1e9, 1e2)
CONSTANTS = Calibration(0.5, 0.25, 0.01, "here", 0.0, attention=0.2)
FITTED = replace(SHEET, fitted=CONSTANTS)
PRODUCT = Call(aten.mm.default, (X[0], Y[0]), {}, (torch.ones(4, 6),))


def test_a_product_of_a_fitted_device_computes_reads_and_is_launched() -> None:
    flops, read = 2 * 4 * 5 * 6, 4 * (4 * 5 + 5 * 6 + 4 * 6)
    assert alone(PRODUCT, FITTED) == pytest.approx(flops / 500 + read / 25 + 0.01)
    assert alone(PRODUCT, SHEET) == pytest.approx(max(flops / 1e3, read / 1e2))


def test_both_ways_of_what_ranks_share() -> None:
    """Each has half of the FLOPs, and its bytes; launches are not shared."""
    held = [size / 2 for size in bytes_of(PRODUCT)]
    kernels = kernels_of(PRODUCT, (True, True))
    one = seconds(kernels, bytes_of(PRODUCT), 1, torch.float32, FITTED)
    half = seconds(kernels, held, 2, torch.float32, FITTED)
    assert one.backward == pytest.approx(2 * one.forward)
    assert half.forward == pytest.approx((one.forward - 0.01) / 2 + 0.01)


def test_exponentials_take_longer_than_their_bytes_where_somebody_has_timed_them() -> None:
    call = Call(aten.gelu.default, (X,), {}, (X,))
    moved = 2 * X.nbytes / 25
    assert alone(call, FITTED) == pytest.approx(moved + 0.01)
    slow = replace(FITTED, fitted=replace(CONSTANTS, functions=3.0))
    assert alone(call, slow) == pytest.approx(3 * moved + 0.01)
    assert alone(Call(aten.relu.default, (X,), {}, (X,)), slow) == pytest.approx(moved + 0.01)
    for op in (aten._softmax.default, aten._log_softmax.default):
        assert alone(Call(op, (X, -1, False), {}, (X,)), slow) == pytest.approx(3 * moved + 0.01)
    fused = FusedOp((True,), (True,), 1.0).of(kernels_of(call))
    assert seconds(fused, bytes_of(call), 1, torch.float32, slow).forward == pytest.approx(moved + 0.01)


@pytest.mark.parametrize(("op", "many"), [("gelu", 2), ("silu", 1), ("tanh", 0), ("relu", 0)])
def test_a_backward_takes_its_bytes_and_the_exponentials_that_it_evaluates_anew(op: str, many: int) -> None:
    """It reads the gradient and what was saved, and writes a gradient; tanh's is a product with the result."""
    slow = replace(FITTED, fitted=replace(CONSTANTS, functions=3.0))
    call = Call(getattr(aten, op).default, (X,), {}, (X,))
    tensor, one = X.nbytes / 25, 2 * 2 * X.nbytes / 25  # so long one of each element lengthens a GELU
    took = seconds(kernels_of(call, (True,)), bytes_of(call), 1, torch.float32, slow)
    assert took.backward == pytest.approx(3 * tensor + many * one + 0.01)
    sheet = seconds(kernels_of(call, (True,)), bytes_of(call), 1, torch.float32, SHEET)
    assert sheet.backward == pytest.approx(3 * X.nbytes / 100)
    assert seconds(kernels_of(call, (False,)), bytes_of(call), 1, torch.float32, slow).backward == 0


def test_exponentials_are_of_each_element_that_is_read_where_a_sum_is_given() -> None:
    slow = replace(FITTED, fitted=replace(CONSTANTS, functions=3.0))
    few = X.sum(-1)
    call = Call(aten.logsumexp.default, (X, [-1]), {}, (few,))
    assert alone(call, slow) == pytest.approx((X.nbytes + few.nbytes + 2 * 2 * X.nbytes) / 25 + 0.01)


def test_rates_are_by_dtype_and_attention_has_its_own() -> None:
    assert rate(SHEET, torch.bfloat16) == 4e3
    assert rate(SHEET, torch.float16) == 1e3  # unknown ones are as float32
    assert rate(FITTED, torch.bfloat16, attention=True) == pytest.approx(0.2 * 4e3)
    plain = replace(FITTED, fitted=replace(CONSTANTS, attention=None))
    assert rate(plain, torch.bfloat16, attention=True) == rate(plain, torch.bfloat16) == 2e3


def test_a_small_product_reaches_less_of_a_card_than_a_large_one() -> None:
    card = cluster("a100x8").device

    def share(n: int) -> float:
        x = torch.empty(n, n, dtype=torch.bfloat16, device="meta")
        return 2 * n**3 / alone(Call(aten.mm.default, (x, x), {}, (x,)), card) / card.flops["bfloat16"]

    shares = [share(2**k) for k in range(7, 15)]
    assert shares == sorted(shares)
    assert shares[0] < 0.01
    assert 0.75 < shares[-1] < 0.782


def test_products_of_a_ring_are_computed_in_the_dtype_of_queries_and_see_half_where_they_are_causal() -> None:
    """Its sums are kept in single precision, at whose rate the products are not computed."""
    import sbpflow.nn.composites.ring_attention as _  # noqa: F401  # the op is known behind that

    def ring(causal: bool) -> Call:
        half = torch.ones(1, 2, 8, 4, dtype=torch.bfloat16)
        one, top = torch.ones(1, 2, 8, 4), torch.ones(1, 2, 8)
        given = (half, half, half, None, None, None, None, [0, 8], [0, 8], 1, causal, 1.0, False)
        return Call(torch.ops.sbpflow.ring_part.default, given, {}, (one, top, top))

    assert dtype_of(ring(True)) is torch.bfloat16
    whole, seen = (kernels_of(ring(causal), (True, True, True)).forward.flops for causal in (False, True))
    assert whole == 2 * seen == 2 * 2 * 8 * 8 * (4 + 4)


def test_a_norm_and_a_gelu_by_tanh_compute_for_as_long_as_they_do_on_a_cpu() -> None:
    """In times of what a function of each element takes; where nobody timed functions, they take their bytes."""
    slow = replace(FITTED, fitted=replace(CONSTANTS, functions=3.0))
    w = torch.ones(5)
    norm = Call(aten.layer_norm.default, (X, [5], w, w), {}, (X,))
    rms = Call(aten.rms_norm.default, (X, [5], w), {}, (X,))
    gelu = Call(aten.gelu.default, (X,), {"approximate": "tanh"}, (X,))
    one = 2 * 2 * X.nbytes / 25
    for call, many in ((norm, (1, 0)), (rms, (3, 15)), (gelu, (6, 6))):
        kernels = kernels_of(call, (True,) * len(call.inputs))
        plain, took = (seconds(kernels, bytes_of(call), 1, torch.float32, of) for of in (FITTED, slow))
        more = [after - before for before, after in zip(plain, took, strict=True)]
        assert more == pytest.approx([n * one for n in many])


def test_a_sum_in_place_is_priced_where_an_update_was_timed() -> None:
    assert adding_seconds(100, FITTED) == adding_seconds(100, SHEET) == 0
    timed = replace(FITTED, fitted=replace(CONSTANTS, update=0.5))
    assert adding_seconds(100, timed) == pytest.approx(0.5 * 300 / 25 + 0.01)


def test_the_host_launches_each_kernel_of_either_way_and_once_more_those_that_run_again() -> None:
    slow = replace(FITTED, fitted=replace(CONSTANTS, host=0.1))
    for again, backward in ((False, 0.2), (True, 0.3)):
        spent = option_seconds(PRODUCT, [], (True, True), slow, fused=None, again=again)
        assert spent.host == pytest.approx((0.1, backward))
    inside = FusedOp((True,), (True,), 0.0)
    call = Call(aten.gelu.default, (X,), {}, (X,))
    assert option_seconds(call, [], (True,), slow, fused=inside, again=False).host == (0, 0)
    assert option_seconds(PRODUCT, [], (True, True), FITTED, fused=None, again=False).host == (0, 0)
