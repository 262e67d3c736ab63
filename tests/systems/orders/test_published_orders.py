"""GPipe, 1F1B, interleaved (PTD-P), breadth-first (BFPP), TeraPipe, Chimera and GEMS: order, time and activations are
those of their papers, and a step computes what one device does."""

import copy

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.actors import Costs, published
from tests.nn.graph.pipes import ALONE2, ALONE4, mlp, staged, trains

SIZES = [(2, 2), (4, 8), (5, 10), (8, 32)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_idles_for_a_filling_and_holds_everything(p: int, m: int) -> None:
    drawn = published("gpipe").show(p, m)
    assert drawn.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert drawn.slots == (m,) * p


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_one_forward_one_backward_begins_with_as_many_forwards_as_stages_are_behind(p: int, m: int) -> None:
    drawn = published("1f1b").show(p, m)
    for s, row in enumerate(drawn.order):
        lead = p - s
        steady = [word for k in range(m - lead) for word in (f"B{k}", f"F{k + lead}")]
        assert row.split() == [*(f"F{k}" for k in range(lead)), *steady, *(f"B{k}" for k in range(m - lead, m))]
    assert drawn.slots == tuple(p - s for s in range(p))
    assert drawn.bubble == published("gpipe").show(p, m).bubble


@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaving_fills_the_line_v_times_sooner(v: int) -> None:
    p, m = 4, 8
    drawn = published("interleaved").show(p, m, v=v)
    assert drawn.bubble == pytest.approx((p - 1) / (v * m + p - 1))
    assert drawn.slots == tuple(2 * (p - s - 1) + (v - 1) * p + 1 for s in range(p))


@pytest.mark.parametrize("v", [2, 4])
def test_breadth_first_ends_with_a_chunk_before_it_begins_the_next(v: int) -> None:
    """So the gradients of a chunk are sent once, under the backward of the next."""
    p, m = 4, 8
    drawn = published("breadth_first").show(p, m, v=v)
    assert drawn.bubble == pytest.approx((p - 1) / (v * m + p - 1))
    for row in drawn.rows:
        chunks = [(cell.op.kind, cell.op.chunk) for cell in row]
        assert list(dict.fromkeys(chunks)) == [*(("F", c) for c in range(v)), *(("B", c) for c in reversed(range(v)))]
        assert chunks == sorted(chunks, key=list(dict.fromkeys(chunks)).index)


def test_terapipe_idles_for_slices_and_goes_back_from_the_last() -> None:
    p, m, n = 4, 4, 2
    drawn = published("terapipe").show(p, m, n=n)
    assert drawn.bubble == pytest.approx((p - 1) / (m * n + p - 1))
    for s, row in enumerate(drawn.order):
        words = row.split()
        assert [word for word in words if word[0] == "F"] == [f"F{k}" for k in range(m * n)]
        assert [word for word in words if word[0] == "B"] == [f"B{q * n + k}" for q in range(m) for k in (1, 0)]
        assert words.index("B1") == p - s - 1 + n


@pytest.mark.parametrize(("p", "end"), [(4, 16), (6, 26), (8, 36)])
def test_chimera_ends_as_published_and_both_routes_hold_less_than_one(p: int, end: int) -> None:
    drawn = published("chimera").show(p, p)
    assert drawn.end == end
    assert max(drawn.slots) <= p
    assert published("chimera").show(p, p, costs=Costs(1, 0.5, 0.5)).bubble == pytest.approx((p - 2) / (2 * p + p - 2))


@pytest.mark.parametrize("p", [2, 4, 8])
def test_gems_has_one_activation_and_takes_its_time(p: int) -> None:
    for m in (2, 4, 8):
        drawn = published("gems").show(p, m)
        assert drawn.end == m / 2 * (4 * p + 2) + p - 1
        assert set(drawn.slots) == {1}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "breadth_first"])
def test_a_step_is_that_of_one_device(schedule: str) -> None:
    trains(staged(mlp().double(), ALONE2, schedule), schedule=schedule, steps=2)


@pytest.mark.parametrize("schedule", ["chimera", "gems"])
def test_a_step_over_two_copies_is_that_of_one_device(schedule: str) -> None:
    trains(staged(mlp().double(), ALONE4, schedule), schedule=schedule, steps=2)


class Reader(nn.Module):
    """Two layers of attention over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            query, key, value = layer(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + seen.transpose(1, 2).flatten(2)
        logits: Tensor = self.head(x).flatten(0, 1)
        return logits


def test_slices_of_a_sequence_learn_as_the_whole() -> None:
    model = Reader()
    alone, text = copy.deepcopy(model), torch.randint(20, (2, 7))
    flow.nn.pipeline(model.layers, ALONE2)

    def loss_fn(model: nn.Module, words: Tensor) -> Tensor:
        labels = nn.functional.pad(words[:, 1:], (0, 1), value=-100)
        return nn.functional.cross_entropy(model(words), labels.flatten())

    step = flow.compile(model, loss_fn, micro_batches=2, slices=(4, 3))
    wanted = loss_fn(alone, text)
    wanted.backward()  # type: ignore[no-untyped-call]
    assert step(text).item() == pytest.approx(wanted.item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]
