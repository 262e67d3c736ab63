"""Kernels of ops: FLOPs, traffic and launches of forward and backward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sbpflow.nn.graph.capture.trace import trace
from sbpflow.sbp.call import Call, tensors_in
from sbpflow.sbp.kernels.kernels import PAIR_PASSES, Kernels, OpPass, is_view, kernels_of

aten = torch.ops.aten
X, W, BIAS = torch.ones(12, 5), torch.ones(7, 5), torch.ones(7)
ROWS = torch.ones(2, 3, 8, 4)
WIDE, TALL = torch.ones(3, 4, 5), torch.ones(3, 5, 6)


def kernels(op: Any, *args: Any, wants: tuple[bool, ...] = (), **kwargs: Any) -> Kernels:
    return kernels_of(Call(op, args, kwargs, tuple(tensors_in(op(*args, **kwargs)))), wants)


@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mm.default, (X, W.T)),
        (aten.linear.default, (X, W)),
        (aten.bmm.default, (ROWS[0], ROWS[0].mT)),
        (aten.einsum.default, ("ij,kj->ik", [X, W])),
        (aten.conv2d.default, (torch.ones(2, 4, 8, 8), torch.ones(6, 4, 3, 3))),
    ],
    ids=["mm", "linear", "bmm", "einsum", "conv2d"],
)
def test_the_backward_of_a_product_has_one_for_each_factor_that_wants_a_gradient(
    op: Any, args: tuple[Any, ...], wants: tuple[bool, bool]
) -> None:
    factors = tensors_in(args)
    leaves = [x.clone().requires_grad_(want) for x, want in zip(factors, wants, strict=True)]
    made = op(args[0], leaves) if isinstance(args[1], list) else op(*leaves)
    with FlopCounterMode(display=False) as counter:
        if any(wants):
            made.sum().backward()
    backward = kernels(op, *args, wants=wants).backward
    assert backward.flops == counter.get_total_flops()
    assert backward.launches == sum(wants)
    assert backward.traffic == (sum(wants),) * 3


def test_a_bias_is_a_sum_of_rows() -> None:
    found = kernels(aten.linear.default, X, W, BIAS, wants=(False, False, True))
    assert found.backward == OpPass(0.0, (0.0, 0.0, 1.0, 1.0), 1.0)
    assert found.forward.traffic == (1.0,) * 4


def test_attention_is_half_where_it_is_causal_and_goes_back_at_two_and_a_half() -> None:
    whole = kernels(aten.scaled_dot_product_attention.default, ROWS, ROWS, ROWS, wants=(True,) * 3)
    half = kernels(aten.scaled_dot_product_attention.default, ROWS, ROWS, ROWS, None, 0.0, True)
    assert whole.attention
    assert whole.forward.flops == 2 * half.forward.flops == 2 * 2 * 2 * 3 * 8 * 8 * 4
    assert whole.backward.flops == 2.5 * whole.forward.flops
    assert half.backward.flops == half.backward.launches == 0


def traffic(op: Any, *args: Any, wants: tuple[bool, ...]) -> float:
    return sum(kernels(op, *args, wants=wants).backward.traffic)


def test_the_backward_of_a_pointwise_op_reads_the_gradient_and_what_it_saved() -> None:
    y = torch.ones(12, 5)
    assert traffic(aten.gelu.default, X, wants=(True,)) == 3  # gradient and input in, gradient out
    assert traffic(aten.neg.default, X, wants=(True,)) == 2
    assert traffic(aten.mul.Tensor, X, y, wants=(True, True)) == 5
    assert traffic(aten.mul.Tensor, X, y, wants=(True, False)) == 3  # the gradient, the other one, and a gradient out
    assert traffic(aten.add.Tensor, X, y, wants=(True, True)) == 3
    assert traffic(aten.mul.Tensor, X, y, wants=(False, False)) == 0


def test_a_norm_reads_twice_where_its_weights_are_trained() -> None:
    size = torch.ones(5)
    found = kernels(aten.layer_norm.default, X, [5], size, size, wants=(True, True, True))
    assert found.backward == OpPass(0.0, (3.0, 1.0, 1.0, 2.0), 2.0)
    frozen = kernels(aten.layer_norm.default, X, [5], size, size, wants=(True, False, False))
    assert frozen.backward == OpPass(0.0, (2.0, 0.0, 0.0, 1.0), 1.0)


def test_rows_of_a_table_are_read_and_not_the_table() -> None:
    at = torch.zeros(3, dtype=torch.long)
    found = kernels(aten.embedding.default, W, at, wants=(True, False))
    assert found.forward.traffic == (0.0, 1.0, 2.0)
    assert found.backward.traffic == (1.0, 1.0, 3.0)


def test_a_layer_of_moments_is_launched_at_each() -> None:
    def launches(time: int, both: bool = False, kind: str = "lstm") -> float:
        x = torch.ones(time, 2, 4)
        states = [torch.ones(1 + both, 2, 3)] * 2
        weights = [torch.ones(12, 4), torch.ones(12, 3)] * (1 + both)
        op = torch.ops.sbpflow.recurrent.default
        call = Call(op, (x, None, states, weights, kind, False, both, None), {}, (torch.ones(time, 2, 3),))
        return kernels_of(call).forward.launches

    assert launches(20) - launches(10) == launches(10) - 1
    assert launches(10, both=True) == launches(20)
    assert launches(10, kind="gru") > 5 * launches(10)  # no kernel has all of a moment


def test_experts_are_computed_once_more_in_the_backward_and_read_tokens_as_often_as_they_are_taken() -> None:
    chosen, share = torch.zeros(6, 2, dtype=torch.long), torch.ones(6, 2)
    weights, op = [torch.ones(8, 4, 10), torch.ones(8, 5, 4)], torch.ops.sbpflow.experts_part.default
    made = torch.ones(2, 6, 4)
    found = kernels_of(Call(op, (made, chosen, share, weights, [], [0, 8], "c"), {}, (made,)), (True,) * 5)
    assert found.backward.flops == 3 * found.forward.flops > 0
    assert found.forward.traffic == (1.0,) * 5 + (1.0 + PAIR_PASSES * 12 / 12,)


def test_eight_bits_are_scaled_before_they_are_multiplied() -> None:
    call = Call(torch.ops.sbpflow.product_of_8_bits.default, (X, W, False), {}, (torch.ones(12, 7),))
    found = kernels_of(call, (True, True))
    assert found.forward.traffic[:2] == (3.0, 3.0)
    assert found.backward.launches == 2 * found.forward.launches


def test_a_tensor_of_its_own_is_written_once() -> None:
    made: Tensor = F.relu(X)
    assert kernels_of(Call(aten.zeros_like.default, (X,), {}, (made,))).forward.launches == 1


def test_a_view_is_one_by_its_schema_and_its_memory() -> None:
    """Layers that are alike share fakes, so that the sum at the end of one is the fake that went into it."""
    assert is_view(Call(aten.view.default, (WIDE, [12, 5]), {}, (WIDE.view(12, 5),)))
    assert not is_view(Call(aten.reshape.default, (WIDE.mT, [60]), {}, (WIDE.mT.reshape(60),)))
    # The parts of an op that was taken apart, and the ops of a micro-batch, have fakes of their own.
    assert is_view(Call(aten.reshape.default, (WIDE, [60]), {}, (torch.empty(60),)))
    assert not is_view(Call(aten.reshape.default, (WIDE.mT, [60]), {}, (torch.empty(60),)))
    meta = torch.empty(3, device="meta")
    assert not is_view(Call(aten.to.device, (meta, torch.device("cpu"), torch.bool), {}, (meta.bool(),)))
    assert is_view(Call(aten.to.device, (meta, torch.device("cpu"), torch.float32), {}, (meta.clone(),)))
    assert not is_view(Call(aten.add.Tensor, (WIDE, TALL.mT[..., :5]), {}, (WIDE,)))


def test_sums_at_the_end_of_alike_layers_are_computed_in_each() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.inner(x)
            return y

    model = nn.Sequential(*(Layer() for _ in range(5)))
    logical, _ = trace(model, (torch.ones(3, 4),), {}, {"": model})
    assert [is_view(logical.call(op)) for op in logical.ops] == [False] * 10
