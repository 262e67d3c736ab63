"""LSTM, GRU and RNN of global tensors compute what torch computes: values, gradients, and what dropout draws."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.nn.eager import capture, prepare
from sbpflow.nn.tensors.meeting import name_of
from tests.ranks import Ranks

GRID = flow.placement("cpu", [[0, 1], [2, 3]])
LINE = flow.placement("cpu", range(4))
LIES: list[Any] = [(B, B), (S(0), S(1)), (S(1), B), (S(0), S(0)), (P, S(2)), (S(2), P), (P, P)]
KINDS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(3, 4, batch_first=True),
    "lstm, three layers both ways": lambda: nn.LSTM(3, 4, 3, dropout=0.3, bidirectional=True, batch_first=True),
    "lstm, projected": lambda: nn.LSTM(3, 4, 2, proj_size=2, dropout=0.5),
    "gru": lambda: nn.GRU(3, 4, 2, dropout=0.4, bias=False),
    "rnn": lambda: nn.RNN(3, 4, 2, dropout=0.4, nonlinearity="relu", bidirectional=True),
}


def made(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]().to(dtype)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    """Of all that comes out, every number with a weight of its own."""
    out, ends = model(x)
    total = (out * out).sum()
    for end in ends if isinstance(ends, tuple) else (ends,):
        total = total + (end * torch.arange(end.shape[-1])).sum()
    assert isinstance(total, Tensor)
    return total


def learnt(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss, the gradients, and one number more that is drawn behind."""
    torch.manual_seed(7)
    value = loss(model, x)
    value.backward()  # type: ignore[no-untyped-call]
    found = [value, *(p.grad for p in model.parameters()), torch.rand(1)]
    return [t.full_tensor() if isinstance(t, flow.GlobalTensor) else t for t in found]  # type: ignore[misc]


def check(kind: str, lies: Any, weights: Any = B) -> None:
    x = torch.linspace(-1, 1, 90, dtype=torch.float64).reshape(6, 5, 3)
    model = made(kind)
    plain = learnt(copy.deepcopy(model), x)
    flow.nn.to_global(model, GRID, {"*weight*": weights})
    mine = learnt(model, flow.tensor(x, placement=GRID, sbp=B).to_global(sbp=lies))
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("lies", LIES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_recurrent_layers_is_torchs(kind: str, lies: Any) -> None:
    check(kind, lies)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("weights", [*product([B, S(0), S(1)], [B, S(0), P])], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_recurrent_layers_may_lie_in_pieces(kind: str, weights: Any) -> None:
    check(kind, (S(0), S(1)), weights)


def test_samples_split_over_ranks_move_nothing_but_gradients() -> None:
    model = made("lstm")
    flow.nn.to_global(model, LINE, B)
    x = flow.randn(8, 5, 3, placement=LINE, sbp=S(0), dtype=torch.float64)
    with flow.explicit():
        out, (h, c) = model(x)
    assert (out.sbp, h.sbp, c.sbp) == ((S(0),), (S(1),), (S(1),))


@pytest.mark.parametrize("samples", [0, 1, 3])
def test_fewer_samples_than_ranks(samples: int) -> None:
    for kind in ("lstm", "lstm, three layers both ways"):
        model = made(kind)
        x = torch.randn(samples, 5, 3, dtype=torch.float64)
        plain = learnt(copy.deepcopy(model), x)
        flow.nn.to_global(model, LINE, B)
        for one, other in zip(learnt(model, flow.tensor(x, placement=LINE, sbp=S(0))), plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_autocast_of_recurrent_layers(kind: str) -> None:
    model, x = made(kind, torch.float32), torch.randn(6, 5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(3)
        try:
            wanted, _ = model(x)
        except RuntimeError as error:
            if "primitive" not in str(error):  # which oneDNN lacks in bfloat16 on some processors
                raise
            pytest.skip(f"torch's own {kind} does not run here: {str(error)[:60]}")
        flow.nn.to_global(model, LINE, B)
        torch.manual_seed(3)
        found, _ = model(flow.tensor(x, placement=LINE, sbp=S(0) if kind == "lstm" else S(1)))
    assert found.dtype is wanted.dtype
    torch.testing.assert_close(found.full_tensor(), wanted, rtol=0, atol=0.02)


def packs(model: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    held = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, _ = pad_packed_sequence(model(held)[0], batch_first=True)
    assert isinstance(out, Tensor)
    return out


def test_packed_sequences() -> None:
    model = made("lstm, three layers both ways")
    x, lengths = torch.randn(4, 6, 3, dtype=torch.float64), torch.tensor([6, 2, 5, 1])
    torch.manual_seed(3)
    wanted = packs(model, x, lengths)
    flow.nn.to_global(model, LINE, B)
    torch.manual_seed(3)
    found = packs(model, flow.tensor(x, placement=LINE, sbp=S(0)), lengths)
    assert isinstance(found, flow.GlobalTensor)
    torch.testing.assert_close(found.full_tensor(), wanted)


def learns_on_ranks() -> None:
    for kind in ("lstm, three layers both ways", "gru"):
        check(kind, (S(0), S(1)), (S(0), B))


def test_real_ranks_run_recurrent_layers(ranks4: Ranks) -> None:
    ranks4(learns_on_ranks)


def test_a_new_length_costs_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's formula of a sequence has as many calls as it has moments, on fakes too."""
    model = made("gru")
    flow.nn.to_global(model, LINE, B)
    seen: list[str] = []
    real = capture.capture

    def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(name_of(function))
        return real(function, *args, **kwargs)

    monkeypatch.setattr(prepare, "capture", counted)
    for length in (31, 32):
        model(flow.randn(length, 4, 3, placement=LINE, sbp=S(1), dtype=torch.float64))
    assert seen
    assert not {"gru", "lstm"} & set(seen)


def test_a_recurrent_layer_is_explained() -> None:
    model = made("lstm")
    flow.nn.to_global(model, LINE, B)
    told = str(flow.explain(model, flow.randn(8, 5, 3, placement=LINE, sbp=S(0), dtype=torch.float64)))
    assert "sbpflow::recurrent of (5, 8, 3) S(1)" in told
