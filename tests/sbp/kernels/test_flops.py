"""FLOPs of ops, as torch itself counts them."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sbpflow.sbp.call import Call, tensors_in
from sbpflow.sbp.kernels.flops import flops

aten = torch.ops.aten
X, Y, Z = torch.ones(3, 4, 5), torch.ones(3, 5, 6), torch.ones(6, 7)
IMAGE, KERNEL = torch.ones(2, 4, 8, 8), torch.ones(6, 4, 3, 3)
CALLS: dict[str, tuple[Any, ...]] = {
    "mm": (aten.mm.default, X[0], Y[0]),
    "linear": (aten.linear.default, X, torch.ones(7, 5), torch.ones(7)),
    "bmm": (aten.bmm.default, X, Y),
    "matmul": (aten.matmul.default, X[:, None], Y[:, None]),
    "tensordot": (aten.tensordot.default, X, Y.permute(1, 0, 2), [0, 2], [1, 0]),
    "einsum": (aten.einsum.default, "bij,bjk->bik", [X, Y]),
    "einsum, summed": (aten.einsum.default, "bij,bjk->ik", [X, Y]),
    "einsum, no result named": (aten.einsum.default, "bij, bjk", [X, Y]),
    "einsum of three": (aten.einsum.default, "bij,bjk,kl->bil", [X, Y, Z]),
    "einsum with dots": (aten.einsum.default, "...ij,...jk->...ik", [X, Y]),
    "conv2d": (aten.conv2d.default, IMAGE, KERNEL),
    "conv2d in groups": (aten.conv2d.default, IMAGE, KERNEL[:, :2], None, [1, 1], [0, 0], [1, 1], 2),
    "conv_transpose2d": (aten.conv_transpose2d.input, IMAGE, KERNEL.transpose(0, 1)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_flops_are_those_that_torch_counts(call: tuple[Any, ...]) -> None:
    op, *args = call
    with FlopCounterMode(display=False) as counter:
        out = op(*args)
    assert flops(Call(op, tuple(args), {}, tuple(tensors_in(out)))) == counter.get_total_flops() > 0


def test_flops_of_products_in_groups_of_batches_and_of_bilinear_forms() -> None:
    """Torch counts none of these."""
    rows, experts = torch.ones(12, 5), torch.ones(3, 5, 6)
    assert flops(Call(aten._grouped_mm.default, (rows, experts), {}, (torch.ones(12, 6),))) == 2 * 12 * 5 * 6
    assert flops(Call(aten._grouped_mm.default, (rows.T, torch.ones(12, 6)), {}, (experts,))) == 2 * 12 * 5 * 6
    weight = torch.ones(7, 4, 5)
    form = Call(aten.bilinear.default, (torch.ones(3, 4), torch.ones(3, 5), weight), {}, (torch.ones(3, 7),))
    assert flops(form) == 2 * 3 * 7 * 4 * 5
    added = Call(aten.addbmm.default, (torch.ones(4, 6), X, Y), {}, (torch.ones(4, 6),))
    assert flops(added) == 2 * 3 * 4 * 5 * 6


def test_flops_of_experts_are_those_of_the_tokens_that_chose_them() -> None:
    x, chosen, share = torch.ones(6, 4), torch.zeros(6, 2, dtype=torch.long), torch.ones(6, 2)
    up, down = torch.ones(8, 4, 10), torch.ones(8, 5, 4)
    made = torch.ones(6, 4)
    each = 2 * (4 * 10 + 5 * 4)
    ops = torch.ops.sbpflow
    assert flops(Call(ops.experts.default, (x, chosen, share, up, down, "silu"), {}, (made,))) == 6 * 2 * each
    assert flops(Call(ops.module_experts.default, (x, chosen, share, [up, down], [], "c"), {}, (made,))) == 12 * each
    part: tuple[Any, ...] = x.expand(4, 6, 4), chosen, share, [up, down], [], [0, 8], "c"
    assert flops(Call(ops.experts_part.default, part, {}, (made.expand(4, 6, 4),))) == 12 * each
    rows = torch.ones(8, 3, 4)
    assert flops(Call(ops.stacked_experts.default, (rows, [up, down], [], "c"), {}, (rows,))) == 24 * each


def test_a_sum_of_one_operand_is_no_product() -> None:
    assert flops(Call(aten.einsum.default, ("bij->i", [X]), {}, (torch.ones(4),))) == 0
