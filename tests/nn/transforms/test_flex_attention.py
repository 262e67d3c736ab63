"""flex_attention of global tensors and in captured steps: torch's own result, and gradients of the formula."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention, noop_mask

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.placement.errors import SbpError
from sbpflow.sbp import SbpLike
from tests.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")

LINE = flow.placement("cpu", range(2))
SAME = torch.Generator().manual_seed(0)  # on every rank
Q, K, V = (torch.randn(3, heads, 6, 4, dtype=torch.float64, generator=SAME) for heads in (4, 2, 2))
SLOPES, DOCUMENTS = torch.rand(4, dtype=torch.float64, generator=SAME), torch.tensor([0, 0, 1, 1, 2, 2])
flex: Any = flex_attention


class Attention(nn.Module):
    documents: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(SLOPES.clone())
        self.register_buffer("documents", DOCUMENTS.clone())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        documents, slopes = self.documents, self.slopes

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (documents[i] == documents[j]) & (i != 4)  # one row attends to nothing

        def nearer(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + slopes[h] * (i - j)

        mask: Any = create_block_mask(seen, None, None, 6, 6, device="cpu")
        return flex(q, k, v, score_mod=nearer, block_mask=mask, enable_gqa=True)


def formula(slopes: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(6)[:, None], torch.arange(6)
    seen = (i >= j) & (DOCUMENTS[:, None] == DOCUMENTS) & (i != 4)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = q @ k.transpose(-2, -1) / 2 + slopes[:, None, None] * (i - j)
    return scores.masked_fill(~seen, -1e30).softmax(-1).masked_fill(~seen, 0.0) @ v


@pytest.mark.parametrize("sbp", [S(0), S(1), S(2), S(3), B, P], ids=str)
def test_values_and_gradients_in_eager_code(sbp: SbpLike) -> None:
    spread: list[Any] = [
        flow.tensor(x, placement=LINE, sbp=B).to_global(sbp=sbp).detach().requires_grad_() for x in (Q, K, V)
    ]
    model = flow.nn.to_global(Attention(), placement=LINE)
    found = model(*spread)
    with torch.no_grad():
        torch.testing.assert_close(found.full_tensor(), Attention()(Q, K, V))
    plain = [x.clone().requires_grad_() for x in (SLOPES, Q, K, V)]
    formula(*plain).sin().sum().backward()  # type: ignore[no-untyped-call]
    found.sin().sum().backward()
    for a, b in zip((model.slopes, *spread), plain, strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


def trained() -> list[Tensor]:
    model = Attention()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = {str(at): S(0) for at in range(3)}
    step = flow.compile(model, lambda model, *x: model(*x).sin().sum(), sgd, placement=LINE, inputs=rows)
    made: Any = [step(Q, K, V).full_tensor() for _ in range(3)]
    slopes: Any = model.slopes
    return [*made, slopes.full_tensor().detach()]


def test_a_step_trains_as_the_formula() -> None:
    slopes, wanted = SLOPES.clone().requires_grad_(), []
    sgd = torch.optim.SGD([slopes], lr=0.1)
    for _ in range(3):
        loss = formula(slopes, Q, K, V).sin().sum()
        sgd.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        wanted.append(loss.detach())
    for a, b in zip(trained(), [*wanted, slopes.detach()], strict=True):
        torch.testing.assert_close(a, b)


def test_sums_of_scores() -> None:
    out, beside = flex(Q, K, V, enable_gqa=True, return_aux=AuxRequest(lse=True))
    spread: list[Any] = [flow.tensor(x, placement=LINE, sbp=S(0)) for x in (Q, K, V)]
    found, other = flex(*spread, enable_gqa=True, return_aux=AuxRequest(lse=True))
    for a, b in ((found, out), (other.lse, beside.lse)):
        assert a.sbp == (S(0),)
        torch.testing.assert_close(a.full_tensor(), b)


def test_a_mask_of_a_global_tensor() -> None:
    documents = flow.tensor(DOCUMENTS, placement=LINE, sbp=B)
    mask = create_block_mask(lambda b, h, i, j: documents[i] == documents[j], None, None, 6, 6, device="cpu")
    same = create_block_mask(lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j], None, None, 6, 6, device="cpu")
    spread: list[Any] = [flow.tensor(x, placement=LINE, sbp=S(0)) for x in (Q, K, V)]
    found: Any = flex(*spread, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(found.full_tensor(), flex(Q, K, V, block_mask=same, enable_gqa=True))


def test_plain_tensors_go_to_torch_as_ever() -> None:
    with pytest.raises(NotImplementedError, match="backward"):
        flex(Q.clone().requires_grad_(), K, V, enable_gqa=True)


def test_blocks_without_a_mask_function_are_refused() -> None:
    ones = torch.ones(1, 1, 1, dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(ones, ones[..., None] * 0, BLOCK_SIZE=128, mask_mod=noop_mask, seq_lengths=(6, 6))
    spread: list[Any] = [flow.tensor(x, placement=LINE, sbp=S(0)) for x in (Q, K, V)]
    with pytest.raises(SbpError, match=r"(?s)test_flex_attention\.py.*mask_mod"):
        flex(*spread, block_mask=blocks, enable_gqa=True)


def on_ranks() -> Tensor:
    where = flow.placement("cpu", range(4))
    spread: list[Any] = [flow.tensor(x, placement=where, sbp=S(0)) for x in (Q, K, V)]
    return flow.nn.to_global(Attention(), placement=where)(*spread).full_tensor()  # type: ignore[no-any-return]


def test_real_ranks_of_which_one_has_no_sample(ranks4: Ranks) -> None:
    for found in ranks4(on_ranks):
        torch.testing.assert_close(found, formula(SLOPES, Q, K, V))
