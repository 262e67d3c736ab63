"""What people do wrong at first: each is an error that says what was found and what to write instead."""

import io
import logging
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.placement.errors import PlacementError, SbpError, ShapeError
from tests.ranks import Fresh, Ranks

LINE = flow.placement("cpu", range(4))
ROWS = S(0)


def ones(*shape: int, sbp: flow.sbp.SbpLike = ROWS) -> flow.GlobalTensor:
    return flow.ones(*shape, placement=LINE, sbp=sbp)


def said(*mistakes: Callable[[], object]) -> list[str]:
    """The errors, as text."""
    texts = []
    for mistake in mistakes:
        with pytest.raises(flow.SbpflowError) as caught:
            mistake()
        texts.append(str(caught.value))
    return texts


def test_a_plain_parameter_among_global_ones() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    flow.nn.to_global(model[0], LINE)
    with pytest.raises(SbpError, match=r"(?s)^layer_norm .*\(4,\)  float32  a plain nn.Parameter.*to_global\(model"):
        model(ones(2, 4))


def test_a_pattern_that_fits_nothing() -> None:
    with pytest.raises(SbpError, match=r"(?s)'wieght'.*did you mean 'weight'\?"):
        flow.nn.to_global(nn.Linear(4, 4), LINE, {"wieght": S(0)})
    with pytest.raises(SbpError, match=r"'data', nor an axis of placement\("):
        flow.nn.to_global(nn.Linear(4, 4), LINE, {"data": S(0)})


def test_a_signature_that_some_parameter_cannot_have() -> None:
    with pytest.raises(ShapeError, match=r'(?s)^to_global of 0.bias \(4,\): S\(1\) .*\{"0.bias": flow.B'):
        flow.nn.to_global(nn.Sequential(nn.Linear(4, 4)), LINE, S(1))


def test_an_optimizer_made_before_the_model_was_global() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    flow.nn.to_global(model, LINE)
    model(ones(2, 4)).sum().backward()
    with pytest.raises(SbpError, match=r"(?s)before to_global, and holds the weight.*make the optimizer after"):
        optimizer.step()


def test_plain_weights_that_were_kept_may_be_trained_on() -> None:
    model = nn.Linear(4, 4)
    kept = model.weight
    flow.nn.to_global(model, LINE)
    kept.grad = torch.full((4, 4), 2.0)
    before = kept.detach().clone()
    torch.optim.SGD([kept], lr=1.0).step()
    assert torch.equal(kept, before - 2)


def test_wrong_shapes_are_told_with_the_tensors_and_without_a_crash_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="4x3 and 5x2") as caught:
        ones(4, 3) @ ones(5, 2, sbp=B)
    (note,) = caught.value.__notes__
    assert note.startswith("in matmul of global tensors\n  (4, 3)  float32  (S(0),) on cpu:[0-3]   made at ")
    assert not caplog.records


def test_devices_without_placements() -> None:
    with pytest.raises(PlacementError, match=r"(?s)cannot go to 'meta'.*named weight\n.*full_tensor"):
        flow.nn.to_global(nn.Linear(4, 4), LINE).to("meta")


def own_weights() -> list[str]:
    """Ranks that did not seed alike, and those that did."""
    torch.manual_seed(flow.boxing.owned(LINE)[0])
    models = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)), nn.LayerNorm(3)
    texts = said(lambda: flow.nn.to_global(models[0], LINE, S(0)))
    flow.nn.to_global(models[1], LINE)
    return texts


def test_weights_that_differ_between_ranks(ranks4: Ranks) -> None:
    for texts in ranks4(own_weights):
        assert texts[0].startswith("to_global: ranks 0 and 1 have different values in 1.weight")
        assert "torch.manual_seed(0)" in texts[0]


def sent_by_torch() -> list[str]:
    x, model = ones(4, sbp=P), flow.nn.to_global(nn.LayerNorm(4), LINE)
    pieces = [torch.zeros(4) for _ in range(4)]
    texts = said(
        lambda: dist.all_reduce(x),
        lambda: dist.all_gather(pieces, x),
        lambda: dist.send(x, (flow.boxing.owned(LINE)[0] + 1) % 4),
        lambda: nn.parallel.DistributedDataParallel(model),
    )
    assert torch.equal(x.full_tensor(), torch.ones(4))
    return texts


def test_collectives_of_torch_do_not_see_the_shell(ranks4: Ranks) -> None:
    for texts in ranks4(sent_by_torch):
        assert all("not for global tensors" in text for text in texts)


def asked_on_one_rank() -> str:
    x = ones(8, 3)
    try:
        total = x.sum()
        if 0 in flow.boxing.owned(LINE):
            total.item()
        x.sum(0).tolist()
    except flow.SbpflowError as error:
        return str(error)
    return ""


def test_a_value_asked_for_on_one_rank_is_an_error_soon(fresh: Fresh) -> None:
    texts: Sequence[str] = [ended.answer.value for ended in fresh(4, asked_on_one_rank) if ended.answer]
    assert "take value = x.item() on all of them, then print it on one" in texts[0]
    for text in texts[1:]:
        assert "rank 0: in float32 () as (P,)" in text, texts


def saved_on(rank: int) -> bytes | None:
    file = io.BytesIO()
    torch.save(ones(6), file)
    return file.getvalue() if rank in flow.boxing.owned(LINE) else None


def test_a_file_of_one_rank_read_where_others_are(ranks4: Ranks) -> None:
    files = [next(file for file in ranks4(saved_on, rank) if file) for rank in (0, 3)]
    for file in files:
        with pytest.raises(Exception, match=r"(?s)ranks \[0, 1, 2, 3\] are here.*so does x.full_tensor\(\)"):
            torch.load(io.BytesIO(file))


def shown() -> list[str]:
    return [str(ones(4, sbp=sbp)) for sbp in (P, S(0), B)]


def test_a_printed_shard_says_what_it_is_of(ranks4: Ranks) -> None:
    partial, split, whole = ranks4(shown)[1]
    assert "only rank 1's addend (sum), shape=(4,)" in partial
    assert "only the piece of rank 1, shape=(4,)" in split
    assert "only" not in whole


class Holder(nn.Module):
    """A module with a tensor of whatever kind."""

    def __init__(self, held: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("held", held)


@pytest.mark.filterwarnings("ignore:.*(beta|prototype)")
def test_tensors_that_are_sparse_nested_or_on_meta() -> None:
    x = ones(4, 3)
    sparse, rows = torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    meta = torch.empty(4, 3, device="meta")

    class Twice(flow.nn.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    for odd, fix in (
        (sparse, "x.to_dense()"),
        (rows, "x.to_dense()"),
        (nested, "to_padded_tensor"),
        (meta, "materialise"),
    ):
        mistakes: list[Callable[[], object]] = [
            lambda odd=odd: flow.tensor(odd, placement=LINE, sbp=S(0)),  # type: ignore[misc]
            lambda odd=odd: flow.nn.to_global(Holder(odd), LINE),  # type: ignore[misc]
            lambda odd=odd: odd * x if odd is nested else odd.mT @ x if odd is meta else odd @ x,  # type: ignore[misc]
        ]
        if odd is not meta:
            mistakes += [
                lambda odd=odd: flow.from_local([odd] * 4, placement=LINE, sbp=S(0)),  # type: ignore[misc]
                lambda odd=odd: Twice(placement=LINE)(odd),  # type: ignore[misc]
            ]
        for text in said(*mistakes):
            assert fix in text, text


def test_a_gradient_that_torch_keeps_as_no_more_than_zero() -> None:
    line = flow.placement("cpu", range(3))
    for sbp in (B, S(0), P):
        y = flow.tensor(torch.arange(15.0).reshape(5, 3) - 2, placement=line, sbp=sbp, requires_grad=True)
        w = flow.ones(3, 3, placement=line, sbp=B, requires_grad=True)
        z = flow.ones(5, 3, placement=line, sbp=S(0))
        grads = torch.autograd.grad((y.sgn() + z @ w.sgn()).sum(), (y, w))
        assert not any(g.full_tensor().any() for g in grads)  # type: ignore[attr-defined]


def test_a_global_gradient_of_a_plain_tensor_is_refused_by_name() -> None:
    x, g = torch.ones(4, 2, requires_grad=True), ones(4, 2)
    texts = said(lambda: torch.autograd.backward(x * 1, g), lambda: torch.autograd.grad(x * 1, x, g))
    assert all("full_tensor()" in text and "flow.tensor" in text for text in texts)
    with pytest.raises(RuntimeError, match="assign a gradient of size"):  # torch's own, in docs/concepts.md
        x.grad = g
    torch.autograd.backward(x * 2, g.full_tensor())
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4, 2), 2.0))


def test_a_global_tensor_is_not_made_by_its_class() -> None:
    makes: list[Callable[[], object]] = [
        lambda: flow.GlobalTensor(torch.ones(2)),
        lambda: torch.ones(2).as_subclass(flow.GlobalTensor),
    ]
    for make in makes:
        with pytest.raises(TypeError, match="made by flow"):
            repr(make())
    assert not hasattr(ones(4), "no_such_name")


def test_memory_that_is_not_shared_is_not_said_to_be() -> None:
    (text,) = said(lambda: ones(4).share_memory_())  # type: ignore[no-untyped-call]
    assert "to_local()" in text


WRITTEN: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "copy": lambda x, g: x.copy_(g),
    "all elements": lambda x, g: x.__setitem__(..., g),
    "a sum": lambda x, g: x.zero_().add_(g),
    "out": lambda x, g: torch.mul(g, 1, out=x),
    "masked": lambda x, g: x.masked_scatter_(torch.ones(4, 2, dtype=torch.bool), g),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_a_global_value_written_to_a_plain_tensor_arrives_or_is_refused(how: str) -> None:
    whole = torch.arange(8.0).reshape(4, 2)
    g = flow.tensor(whole, placement=LINE, sbp=S(0))
    x = torch.zeros(4, 2)
    WRITTEN[how](x, g)
    assert torch.equal(x.full_tensor() if isinstance(x, flow.GlobalTensor) else x, whole)
    if how != "out":
        base = torch.zeros(2, 4, 2)
        (text,) = said(lambda: WRITTEN[how](base[0], g))  # the base would not see it
        assert "plain" in text
    held = nn.Parameter(torch.zeros(4, 2))
    with torch.no_grad():
        (text,) = said(lambda: held.copy_(g))
    assert "flow.tensor" in text
