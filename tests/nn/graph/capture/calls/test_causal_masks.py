"""Attention whose mask is causal is told so, whoever makes the mask and how; every other mask stays."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sbpflow.nn.graph.capture.calls import causal_masks
from sbpflow.sbp.logical import LogicalOp
from tests.nn.graph.same import Of, same

SAMPLES, LENGTH = 3, 6


def places(n: int = LENGTH) -> Tensor:
    return torch.arange(n)


def by_library() -> Tensor:
    """As transformers makes it, where it cannot look whether samples are packed."""
    spread = places().unsqueeze(0).expand(SAMPLES, -1)
    packed = (torch.diff(spread, prepend=spread[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    sample = torch.arange(SAMPLES)[:, None, None, None]
    rows, columns = places()[None, None, :, None], places()[None, None, None, :]
    mask = rows.new_ones((), dtype=torch.bool) & (spread[sample, columns] <= spread[sample, rows])
    return mask & (packed[sample, rows] == packed[sample, columns])


CAUSAL: dict[str, Callable[[], Tensor]] = {
    "triangle": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
    "places": lambda: places()[:, None] >= places(),
    "places, for each sample": lambda: (places()[:, None] >= places()).expand(SAMPLES, 1, -1, -1),
    "library": by_library,
    "infinite": lambda: torch.full((LENGTH, LENGTH), float("-inf")).triu(1),
    "torch": lambda: nn.Transformer.generate_square_subsequent_mask(LENGTH),
    "filled": lambda: torch.zeros(LENGTH, LENGTH).masked_fill(places() > places()[:, None], float("-inf")),
    "joined": lambda: torch.cat([torch.zeros(1).long(), places(LENGTH - 1) + 1])[:, None] >= places(),
}
OTHERS: dict[str, Callable[[], Tensor]] = {
    "window": lambda: (places()[:, None] >= places()) & (places()[:, None] - places() < 3),
    "prefix": lambda: (places()[:, None] >= places()) | (places() < 2),
    "one more": lambda: places()[:, None] + 1 >= places(),
    "none hidden": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool),
    "biased": lambda: torch.full((LENGTH, LENGTH), float("-inf")).triu(1) + 0.5,
    "finite": lambda: torch.full((LENGTH, LENGTH), -1e4).triu(1),
    "one sample otherwise": lambda: (places()[:, None] >= places()) | (torch.arange(SAMPLES) == 1)[:, None, None, None],
}


def heads(many: int = 4, width: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SAMPLES, many, LENGTH, width, dtype=dtype)


def told(function: Callable[..., Any], *args: Tensor, atol: float = 1e-6) -> dict[str, Any]:
    """The arguments of the one call of attention in a graph that does what the function does, gradients included."""
    logical = same(Of(lambda self, *given: (function(*given) * self.w[0, 0]).sum()), *args, atol=atol)
    (op,) = (op for op in logical.ops if op.op is torch.ops.aten.scaled_dot_product_attention.default)
    names = [each.name for each in op.op._schema.arguments]
    return {**dict(zip(names, op.args, strict=False)), **op.kwargs, "ops": len(logical.ops)}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_told_and_not_made(name: str) -> None:
    found = told(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=CAUSAL[name]()), *_three())
    assert found["is_causal"]
    assert found.get("attn_mask") is None
    alone = told(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *_three())
    assert found["ops"] == alone["ops"]


@pytest.mark.parametrize("name", OTHERS)
def test_another_mask_stays(name: str) -> None:
    found = told(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=OTHERS[name]()), *_three())
    assert not found.get("is_causal")
    assert found["attn_mask"] is not None


def test_a_mask_is_looked_at_once_and_another_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    look = causal_masks._computed

    def counted(ops: Sequence[LogicalOp]) -> Tensor | None:
        looked.append(len(ops))
        return look(ops)

    monkeypatch.setattr(causal_masks, "_KNOWN", {})
    monkeypatch.setattr(causal_masks, "_computed", counted)
    for name, causal in (("places", True), ("places", True), ("one more", False), ("library", True)):
        mask = (CAUSAL | OTHERS)[name]
        found = told(lambda q, k, v, mask=mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask()), *_three())
        assert bool(found.get("is_causal")) == causal
    assert len(looked) == 3


def _three() -> tuple[Tensor, Tensor, Tensor]:
    return heads(), heads(), heads()


def test_a_mask_of_values_stays() -> None:
    """One that is given, or kept in a buffer, is another in the next step."""
    mask = CAUSAL["triangle"]()
    given = told(lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m), heads(), mask)
    assert given["attn_mask"] is not None
    model = Of(
        lambda self, q: F.scaled_dot_product_attention(q, q * self.w[0, 0], q, attn_mask=self.mask).sum(), mask=mask
    )
    (op,) = (op for op in same(model, heads()).ops if "scaled_dot_product" in str(op.op))
    assert len(op.inputs) == 4


def lower() -> Tensor:
    return torch.ones(LENGTH - 2, LENGTH, dtype=torch.bool).tril(2)


def test_fewer_queries_than_keys_stay() -> None:
    found = told(lambda q, k: F.scaled_dot_product_attention(q[:, :, 2:], k, k, attn_mask=lower()), heads(), heads())
    assert found["attn_mask"] is not None


def attended(q: Tensor, k: Tensor, v: Tensor, repeat: Callable[[Tensor], Tensor]) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat(k), repeat(v), attn_mask=CAUSAL["places"]())


def interleaved(x: Tensor) -> Tensor:
    return x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 2 * x.shape[1], *x.shape[2:])


def test_heads_that_were_repeated_are_shared() -> None:
    given = (heads(many, dtype=torch.bfloat16) for many in (4, 2, 2))
    found = told(lambda q, k, v: attended(q, k, v, interleaved), *given, atol=0.1)
    assert found["enable_gqa"]
    assert found["is_causal"]


@pytest.mark.parametrize(("width", "dtype"), [(4, torch.float32), (264, torch.bfloat16)], ids=["single", "wide"])
def test_heads_without_kernels_that_share_them_stay_repeated(width: int, dtype: torch.dtype) -> None:
    given = (heads(many, width, dtype) for many in (4, 2, 2))
    found = told(lambda q, k, v: attended(q, k, v, interleaved), *given, atol=1.0)
    assert found["is_causal"]
    assert not found.get("enable_gqa")


REPEATS: dict[str, Callable[[Tensor], Tensor]] = {
    "one after the other": lambda x: x[:, None].expand(-1, 2, -1, -1, -1).reshape(x.shape[0], -1, *x.shape[2:]),
    "copies": lambda x: torch.cat([x, x], 1),
    "without gradients": lambda x: _without_gradients(interleaved, x),
}


def _without_gradients(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return function(x)


@pytest.mark.parametrize("name", REPEATS)
def test_heads_that_were_repeated_otherwise_stay(name: str) -> None:
    model = Of(lambda self, q, k: attended(q @ self.w, k @ self.w, k, REPEATS[name]).sum()).bfloat16()
    given = (heads(many, dtype=torch.bfloat16) for many in (4, 2))
    (op,) = (op for op in same(model, *given, atol=1.0).ops if "scaled_dot_product" in str(op.op))
    assert op.kwargs["is_causal"]
    assert not op.kwargs.get("enable_gqa")


def test_a_mask_too_large_to_be_looked_at_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_masks, "LARGEST", LENGTH**2 - 1)
    found = told(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=CAUSAL["places"]()), *_three())
    assert found["attn_mask"] is not None


def test_samples_that_have_one_mask_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_masks, "LARGEST", SAMPLES * LENGTH**2 - 1)
    found = told(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=by_library()), *_three())
    assert found["is_causal"]


def test_a_layer_that_is_told_a_mask_of_torch_learns_as_ever() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    mask = CAUSAL["torch"]()
    same(layer, torch.randn(SAMPLES, LENGTH, 8), mask, is_causal=True)
