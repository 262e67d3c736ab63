"""Gradients move back through the boxes that they reach, and no others."""

import torch

from sbpflow.boxing.graph.physical import Physical
from sbpflow.boxing.graph.text.parse import from_text
from sbpflow.boxing.graph.text.text import to_text
from sbpflow.boxing.graph.transpose import with_backs

# As of a batch norm: of a moved copy only what no gradient comes back from is computed.
STATISTICS = """\
graph step
p0 = cpu:[0-3]

input     %x: float32[8, 64] (S(0))
parameter %w: float32[64] (B/P) grad, grads (B), states (B)
parameter %u: float32[64] (B/P) grad, grads (B), states (B)

forward
  %h: float32[8, 64] (S(0)) grad = mul.Tensor(%x, %w)
  %h.1: float32[8, 64] (S(1)) grad = box(%h)
  %var: float32[64] (S(0)) = var.dim(%h.1, [0]) no_grad
  %old: float32[64] (B) = mul.Tensor(%u, %u) no_grad
  %h.2: float32[8, 64] (S(1)) grad = box(%h)
  %loss: float32[] (P) grad = sum(%h.2)
  %loss.1: float32[] (B) grad = box(%loss)

return %loss.1
loss %loss.1
"""


def moved(graph: Physical) -> list[tuple[str, str]]:
    return [(back.of, back.into) for back in with_backs(graph).backs]


def test_where_no_gradient_comes_back_none_is_moved() -> None:
    assert moved(from_text(STATISTICS)) == [("loss.1", "loss"), ("h.2", "h"), ("w", "w")]


def test_what_is_no_loss_moves_no_gradient() -> None:
    text = STATISTICS.replace("loss %loss.1", "loss %h.1")
    assert moved(from_text(text)) == [("h.1", "h"), ("w", "w")]
    assert moved(from_text(STATISTICS.replace("loss %loss.1\n", ""))) == []


CAST = """\
graph step
p0 = cpu:[0-3]

input     %x: bfloat16[8, 64] (S(0))
parameter %w: bfloat16[64] (S(0)) grad, grads float32[64] (S(0))
parameter %u: float32[64] (S(0)) grad, grads (S(0))
parameter %v: float32[64] (S(0)) grad

forward
  %w.1: bfloat16[64] (B/P) grad = box(%w)
  %low: bfloat16[64] (S(0)) grad = to.dtype(%u, dtype=bfloat16)
  %low.1: bfloat16[64] (B/P) grad = box(%low)
  %under: bfloat16[64] (S(0)) grad = to.dtype(%v, dtype=bfloat16)
  %under.1: bfloat16[64] (B/P) grad = box(%under)
  %h: bfloat16[8, 64] (S(0)) grad = mul.Tensor(%x, %w.1)
  %h.2: bfloat16[8, 64] (S(0)) grad = mul.Tensor(%h, %low.1)
  %h.3: bfloat16[8, 64] (S(0)) grad = mul.Tensor(%h.2, %under.1)
  %loss: bfloat16[] (P) grad = sum(%h.3)
  %loss.1: bfloat16[] (B) grad = box(%loss)

return %loss.1
loss %loss.1
"""


def test_gradients_are_added_up_in_the_type_that_is_said_of_their_parameter() -> None:
    """Also those of what is cast of one before it is gathered; of others, as of autocast, in their own."""
    graph = with_backs(from_text(CAST))
    types = {back.of: (back.src.dtype, back.dst.dtype) for back in graph.backs}
    wide, low = (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)
    assert types == {"loss.1": low, "w.1": wide, "low.1": wide, "under.1": low}
    assert with_backs(from_text(to_text(graph))).backs == graph.backs
