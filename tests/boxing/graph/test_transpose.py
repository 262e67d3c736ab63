"""Gradients move back through the boxes that they reach, and no others."""

from sbpflow.boxing.graph.physical import Physical
from sbpflow.boxing.graph.text.text import from_text
from sbpflow.boxing.graph.transpose import with_backs

# As of a batch norm: of a moved copy only what no gradient comes back from is computed.
STATISTICS = """\
graph step
p0 = cpu:[0-3]

input     %x: float32[8, 64] (S(0))
parameter %w: float32[64] (B/P) grad, update (B)
parameter %u: float32[64] (B/P) grad, update (B)

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
