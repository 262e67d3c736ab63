"""GSPMD, Mesh-TensorFlow and one weird trick: a few words about weights, and everything else follows."""

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S

from ..small import gpt, same_as_one_device

GRID = flow.placement("cpu", [[0, 1], [2, 3]], names=("x", "y"))
FEW = """
grid (x=2, y=2)
input words <- x=S(0)
input labels <- x=S(0)
layers.*.{q,k,v,up}: y=S(0)
layers.*.{out,down}.weight: y=S(1)
"""


def test_gspmd_finds_the_signatures_that_one_would_write_by_hand() -> None:
    """Of an MLP and of attention: only weights are said."""
    step = same_as_one_device(gpt(), plan=FEW)
    graph = step.physical
    found = {name: graph.layout(f"layers.0.{name}").sbp for name in ("q.linear", "up.linear", "gelu")}
    assert found == {"q.linear": (S(0), S(2)), "up.linear": (S(0), S(2)), "gelu": (S(0), S(2))}
    assert graph.layout("layers.0.scaled_dot_product_attention").sbp == (S(0), S(1))  # heads
    assert graph.layout("layers.0.down.linear").sbp == (S(0), P)


def test_mesh_tensorflow_sums_exactly_what_is_contracted_over_a_split_dimension() -> None:
    """einsum "bh,hd->bd": a sum over the axis of h if it is split, and of no other."""
    x, w = torch.randn(4, 6), torch.randn(6, 8)
    for name, sbp_x, sbp_w, summed in (
        ("batch", (S(0), B), (B, B), False),
        ("hidden", (B, S(1)), (B, S(0)), True),
        ("batch and hidden", (S(0), S(1)), (B, S(0)), True),
        ("batch and out", (S(0), B), (B, S(1)), False),
    ):
        left, right = flow.tensor(x, placement=GRID, sbp=sbp_x), flow.tensor(w, placement=GRID, sbp=sbp_w)
        with flow.record() as moves:
            y = torch.einsum("bh,hd->bd", left, right)
        assert not moves.bytes, name
        assert (y.sbp[1] == P) is summed, name  # type: ignore[attr-defined]
        torch.testing.assert_close(y.full_tensor(), x @ w)  # type: ignore[attr-defined]


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        )
        self.classifier = nn.Sequential(nn.Linear(8 * 36, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.classifier(self.features(x).flatten(1))
        return made


def test_one_weird_trick_sends_at_the_border_and_the_gradients_of_convolutions() -> None:
    plan = """
    grid (ranks=4)
    features.**: ranks=B
    classifier.0: ranks=S(0)
    classifier.2.weight: ranks=S(1)
    input x <- ranks=S(0)
    features -> ranks=S(0)
    classifier <- ranks=B
    """
    torch.manual_seed(0)
    model = Pictures().double()
    given = [(torch.randn(8, 1, 6, 6, dtype=torch.float64), torch.randint(8, (8,))) for _ in range(2)]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    step = same_as_one_device(model, loss=loss, given=given, plan=plan)
    with flow.record() as moves:
        step(*given[0])
    sent = {move.op.split(".")[0].removeprefix("d ") for move in moves if move.boxing.total}
    assert sent <= {"flatten", "flatten@1", "classifier", "bucket", "features", "div"}
    assert "bucket" in sent
    assert "flatten" in sent
