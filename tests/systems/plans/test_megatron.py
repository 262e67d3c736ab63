"""Megatron-LM: columns then rows, two sums a layer either way; and sequence parallelism, that halves each of them."""

from functools import cache

import torch

import sbpflow as flow
from sbpflow.boxing.graph.move_table import moves_of

from ..small import GPT, gpt, loss_fn, same_as_one_device

TENSOR = """
grid (tensor=4)
layers.*.{q,k,v,up}: tensor=S(0)
layers.*.{out,down}.weight: tensor=S(1)
"""
FLOWS = "layers.*.{norm1,norm2,out,down} -> tensor=B\n"  # the chooser would take sequence parallelism
SEQUENCE = TENSOR + "layers.*.{norm1,norm2,out,down} -> tensor=S(1)\n"
T, TOKENS, LARGE = 4, 256, 2048  # ranks, tokens, width


@cache
def bytes_a_layer(plan: str, tokens: int = TOKENS) -> int:
    """The bytes that all ranks send for one layer more, where it weighs more than the tokens that go through it."""

    def sent(layers: int) -> int:
        with torch.device("meta"):
            model = GPT(layers, LARGE)
            words = torch.zeros(2, tokens // 2, dtype=torch.long)
        step = flow.compile(model, loss_fn, plan=plan).plan_for(words, words)
        return sum(row.total * row.count for row in moves_of(step.physical))

    return sent(3) - sent(2)


def test_a_layer_has_two_sums_forward_and_two_backward() -> None:
    plan = (
        TENSOR
        + FLOWS
        + "expect 2 all_reduce over tensor a layer forward\nexpect 2 all_reduce over tensor a layer backward\n"
    )
    same_as_one_device(gpt(), plan=plan)


def test_four_sums_send_what_the_paper_says() -> None:
    """2 (t - 1) / t b s h numbers of four bytes from each of t ranks, in one piece or as a scatter and a gather; and
    the gradients of what all ranks have of their own tokens: norms and biases behind sums."""
    small = 2 * (T - 1) * 6 * LARGE * 4
    assert 0 <= bytes_a_layer(TENSOR) - 4 * (2 * (T - 1) * TOKENS * LARGE) * 4 <= small


def test_sequence_parallelism_has_two_gathers_and_two_scatters_in_their_place() -> None:
    plan = SEQUENCE + "expect 2 all_gather and 2 reduce_scatter over tensor a layer forward\n"
    same_as_one_device(gpt(), plan=plan + "recompute layers.* only attention\n")


def test_sequence_parallelism_sends_no_more() -> None:
    assert bytes_a_layer(SEQUENCE) == bytes_a_layer(TENSOR)
