"""Steps that are planned for cards which are not here: their memory is that of the cards' kernels."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.boxing.graph.measures import Held
from sbpflow.nn.graph.lower.card_kernels import as_on_card
from sbpflow.placement.device import family

aten = torch.ops.aten
HEADS, WORDS, SAMPLES = 4, 256, 2
pytestmark = pytest.mark.skipif(family("cuda").here, reason="with a card its own kernels are asked")


class Attention(nn.Module):
    def __init__(self, values: int, mask: Tensor | None) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, HEADS * n) for n in (24, 24, values))
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (of(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for of in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.mask is None)


def held(model: nn.Module, x: Tensor, kind: str) -> Held:
    plan = flow.Plan.read(f"grid {kind} (data=2)\ninput 0 <- data=S(0)")
    report = plan.check(model, x, loss_fn=lambda m, x: m(x).square().mean()).report
    assert report.memory is not None
    assert not report.memory.estimates
    return report.memory.ranks[0]


@pytest.mark.parametrize(
    "mask", [None, torch.rand(WORDS, WORDS) > 0.5, torch.rand(WORDS, WORDS)], ids=["causal", "bool", "float"]
)
@pytest.mark.parametrize("values", [16, 24])
def test_attention_on_a_card_holds_no_scores(values: int, mask: Tensor | None) -> None:
    scores = HEADS * WORDS * WORDS * 4  # of the sample of a rank
    model, x = Attention(values, mask), torch.randn(SAMPLES, WORDS, 64)
    on_card, on_cpu = held(model, x, "cuda").activations, held(model, x, "cpu").activations
    assert on_card < 1.5 * scores
    assert (on_cpu > 2 * scores) == (values != 24)


def test_a_norm_on_a_card_keeps_what_it_is_of() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.RMSNorm(256), nn.Linear(256, 256)) for _ in range(8))).bfloat16()
    x = torch.randn(1024, 256, dtype=torch.bfloat16)
    on_card, on_cpu = (held(model, x, kind).activations for kind in ("cuda", "cpu"))
    row = 512 * 256 * 2  # bytes of a value on a rank
    assert on_card < 3 * 8 * row  # two of each layer are kept
    assert on_cpu > 5 * 8 * row  # and two of float32


def test_what_stands_for_a_norm_gives_its_values() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    norm = as_on_card(aten.rms_norm.default)
    torch.testing.assert_close(norm(x, [8], weight, 1e-5), aten.rms_norm.default(x, [8], weight, 1e-5))
    assert as_on_card(aten.linear.default) is aten.linear.default
