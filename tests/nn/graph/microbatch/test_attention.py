"""Sequences in slices: attention looks back to earlier ones, gradients come back from later ones, all else is apart."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.nn.graph.microbatch import attention
from sbpflow.nn.graph.microbatch.batch import Batch
from sbpflow.nn.graph.run.footprint import left
from sbpflow.placement.errors import SbpError
from tests.ranks import Ranks

from ..pipes import ALONE2, ALONE4, F32, F64, LENGTH, PAIRS, WORDS, Gpt, close, hinted, of, often, staged, trains, whole

MASK = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def words(at: int, rows: int = 8, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Text, and what follows each word; what follows the last of a row nobody knows."""
    text = torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(at))
    return text, F.pad(text[:, 1:], (0, 1), value=-100)


def told(model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


def llama_told(model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
    """Which shifts its labels itself, and makes a mask of places."""
    loss: Tensor = model(input_ids=text, labels=text).loss
    return loss


learns = partial(trains, schedule="terapipe")


@pytest.mark.parametrize(
    ("width", "heads", "lengths", "dtype", "mask"),
    [
        (8, 4, (4, 4, 4), F64, False),
        (8, 2, (5, 1, 6), F64, False),
        (16, 2, (5, 1, 6), F64, False),
        (8, 4, (3, 9), F32, False),
        (16, 4, (6, 6), torch.bfloat16, False),
        (8, 4, (4, 4, 4), F64, True),
        (16, 1, (1,) * 12, F64, True),
    ],
)
def test_attention_in_slices_is_attention(
    width: int, heads: int, lengths: tuple[int, ...], dtype: torch.dtype, mask: bool
) -> None:
    shapes = [(2, 4, 12, 8), (2, heads, 12, 8), (2, heads, 12, width)]
    leaves = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    above = torch.randn(2, 4, 12, width, dtype=dtype)
    hides = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril() if mask else None
    if hides is not None:
        hides[1, :, 5:, 2] = False
    query, key, value = leaves
    one = F.scaled_dot_product_attention(query, key, value, hides, 0.0, hides is None, scale=0.3, enable_gqa=True)
    wanted = torch.autograd.grad(one, leaves, above)
    number, ends = attention.reserved(), [sum(lengths[:at]) for at in range(len(lengths) + 1)]
    inputs, outs = [], []
    for a, b in pairwise(ends):
        inputs.append([x[..., a:b, :].detach().requires_grad_() for x in leaves])
        rows = None if hides is None else hides[..., a:b, :]
        outs.append(attention.attend(*inputs[-1], torch.tensor([number, a]), rows, 12, 0.3, True)[0])
    grads = [
        torch.autograd.grad(out, mine, above[..., a:b, :])
        for out, mine, (a, b) in reversed(list(zip(outs, inputs, pairwise(ends), strict=True)))
    ]
    tolerance = {F64: 1e-12, F32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    close(torch.cat(outs, -2), one, tolerance)
    close([torch.cat(each[::-1], -2) for each in zip(*grads, strict=True)], wanted, tolerance)
    assert number not in attention._pasts


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "two stages": (ALONE2, {"slices": 3}),
    "four stages": (ALONE4, {"slices": 3}),
    "lengths": (ALONE2, {"slices": (3, 2, 1)}),
    "early ones longer": (ALONE2, {"slices": 4}),
    "a batch that does not divide": (ALONE2, {"slices": 2, "micro_batches": 3}),
    "one micro-batch": (ALONE2, {"slices": 3, "micro_batches": 1}),
    "one slice": (ALONE2, {"slices": 1}),
    "a token each": (ALONE2, {"slices": LENGTH, "micro_batches": 2}),
    "as many samples as tokens": (ALONE2, {"slices": 3, "micro_batches": 3, "batches": partial(words, rows=LENGTH)}),
    "autograd": (ALONE2, {"slices": 3, "backend": "autograd"}),
    "no optimizer": (ALONE2, {"slices": 3, "make": None, "steps": 1}),
    "clipped": (ALONE2, {"slices": 3, "clip_grad_norm": 0.1}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("run", RUNS)
def test_a_gpt_learns_as_on_one_device(run: str) -> None:
    stages, options = RUNS[run]
    learns(staged(of("gpt"), stages), told, **{"batches": words, **options})
    assert not attention._pasts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["tensor", "data", "zero"])
def test_signatures_inside_of_stages(way: str) -> None:
    learns(hinted(staged(of("gpt"), PAIRS), way), told, words, slices=3)


@pytest.mark.sweep
def test_inductor_compiles_slices() -> None:
    from torch._inductor import config

    with config.patch(compile_threads=1):  # else it leaves threads running
        learns(staged(of("gpt"), ALONE2), told, words, slices=3, steps=1, backend="inductor")


@pytest.mark.parametrize("stages", often(["2"], ["4"]))
def test_llama_learns_as_on_one_device(stages: str) -> None:
    learns(staged(of("llama"), {"2": ALONE2, "4": ALONE4}[stages]), llama_told, words, slices=3, tolerance=1e-5)


def read(model: nn.Module, text: Tensor, mask: Tensor | None = None) -> Tensor:
    """The logits of a GPT whose mask is said."""
    assert isinstance(model, Gpt)
    x = model.words(text) + model.places(torch.arange(text.shape[1]))
    for block in model.blocks:
        heads = block.qkv(block.norm(x)).unflatten(-1, (3, 2, -1))  # type: ignore[operator]
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, mask)
        x = x + block.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[operator]
    logits: Tensor = model.head(model.norm(x))
    return logits


def masked(model: nn.Module, text: Tensor, following: Tensor, mask: Tensor | None) -> Tensor:
    return F.cross_entropy(read(model, text, mask).flatten(0, 1), following.flatten())


def padded() -> Tensor:
    """For each row of a batch its own; the first words of some are not there."""
    mask = MASK.expand(8, 1, LENGTH, LENGTH).clone()
    mask[1, :, 2:, :2] = False
    return mask


def sloped() -> Tensor:
    """More of what is near; each head in its own way."""
    places = torch.arange(LENGTH)
    far = (places[:, None] - places)[None] * torch.tensor([0.1, 0.3], dtype=F64)[:, None, None]
    return (-far).masked_fill(~MASK, -torch.inf)


MASKS: dict[str, Callable[[], Tensor]] = {
    "of all": lambda: MASK,
    "of each": padded,
    "of each head": sloped,
    "added": lambda: torch.zeros(8, 1, LENGTH, LENGTH, dtype=F64).masked_fill(~padded(), -torch.inf),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_hides_what_it_hides(name: str) -> None:
    learns(staged(of("gpt"), ALONE2), masked, lambda at: (*words(at), MASKS[name]()), slices=3, steps=2)


def test_a_mask_that_shows_later_words_is_refused() -> None:
    step = flow.compile(staged(of("gpt"), ALONE2), masked, micro_batches=2, slices=3)
    step(*words(0), padded())
    with pytest.raises(SbpError, match="lets tokens see later ones"):
        step(*words(0), torch.ones_like(padded()))
    assert not attention._pasts


def results(model: nn.Module, text: Tensor, following: Tensor) -> list[Tensor]:
    logits = model(text)
    each = F.cross_entropy(logits.transpose(1, 2), following.clamp(min=0), reduction="none")
    rows = logits.transpose(0, 1).flatten(0, 1)
    return [each.mean(1).sum() * 0.3, logits, logits.flatten(0, 1), rows, logits.mean(), logits.amax((0, 1)),
            logits.mean(1), logits.sum(0), following, each, each.mean()]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rows", "micro_batches", "slices"), [(8, 4, 3), (7, 3, 4), (4, 1, 2)])
def test_results_are_those_of_the_batch(rows: int, micro_batches: int, slices: int) -> None:
    batches = partial(words, rows=rows)
    learns(staged(of("gpt"), ALONE2), results, batches, micro_batches=micro_batches, slices=slices, steps=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("slices", [2, (4, 1, 1)])
def test_an_inference_goes_through_the_stages(slices: Any) -> None:
    model = of("gpt")
    wanted = model(words(0)[0])
    with torch.no_grad():
        got = flow.compile(staged(model, ALONE2), micro_batches=2, slices=slices)(words(0)[0])
    close(got, wanted, 1e-12)
    assert not attention._pasts


def skipping(model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
    """What the first stage makes is used on every later one."""
    assert isinstance(model, Gpt)
    x = first = model.words(text)
    for block in model.blocks:
        x = block(x) * first
    return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), following.flatten())


def test_far_stages_use_what_earlier_ones_made() -> None:
    learns(staged(of("gpt"), ALONE4), skipping, words, slices=3)


def table(model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
    """Places are rows of a weight, as many as there are tokens; a column of it is for sequences of one length."""
    assert isinstance(model, Gpt)
    x = model.words(text) + model.places.weight[: text.shape[1]] + model.places.weight[:, :1]
    for block in model.blocks:
        x = block(x)
    return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), following.flatten())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [8, LENGTH])
def test_rows_of_a_weight_are_those_of_a_slice(rows: int) -> None:
    learns(staged(of("gpt"), ALONE2), table, partial(words, rows=rows), slices=3, micro_batches=2)


def sized(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten()) + 0.1 * logits.logsumexp(-1).square().mean()


def by_sequence(logits: Tensor, following: Tensor) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), following, reduction="none")
    return (each.sum(1) / (following >= 0).sum(1)).mean()


def weighed(logits: Tensor, following: Tensor) -> Tensor:
    weights = torch.linspace(0, 1, following.shape[1], dtype=F64)
    return (F.cross_entropy(logits.transpose(1, 2), following, reduction="none") * weights).sum() / weights.sum()


def shifted(logits: Tensor, following: Tensor) -> Tensor:
    """Addends of each slice, of which the loss is made linearly."""
    return logits[:, :-1].mean() - 0.5 * logits[:, -1].sum()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", [sized, by_sequence, weighed, shifted])
def test_a_loss_is_that_of_whole_sequences(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    learns(staged(of("gpt"), ALONE2), lambda model, text, following: loss(model(text), following), words, slices=3)


def by_hand(model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
    x = model.words(text)  # type: ignore[operator]
    hides = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool)
    weights = (x @ x.transpose(-2, -1)).masked_fill(~hides.tril(), -torch.inf).softmax(-1)
    return F.cross_entropy(model.head(weights @ x).flatten(0, 1), following.flatten())  # type: ignore[operator]


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "both ways": (lambda m, x, y: masked(m, x, y, None), "scaled_dot_product_attention at .*more than one slice"),
    "by hand": (by_hand, "matmul at .*more than one slice"),
    "the last alone": (
        lambda m, x, y: F.cross_entropy(m(x)[:, -1], x[:, -1]),
        "(?s)more than one slice.*  select.int at ",
    ),
    "shifted": (
        lambda m, x, y: F.cross_entropy(m(x)[:, :-1].mT, x[:, 1:]),
        "(?s)more than one slice.*  slice.Tensor at ",
    ),
    "squares of means": (lambda m, x, y: m(x).mean(1).square().mean(), "square at .*more than one slice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_slices_is_refused(name: str) -> None:
    loss, message = REFUSED[name]
    step = flow.compile(staged(of("gpt"), ALONE2), loss, micro_batches=2, slices=3)
    with pytest.raises(SbpError, match=message):
        step(*words(0))


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"slices": 0}, "slices=0"),
    "no number": ({"slices": "3"}, "slices='3'"),
    "an empty one": ({"slices": (3, 0, 3)}, r"slices=\(3, 0, 3\)"),
    "not said": ({"schedule": "terapipe"}, "say how many by slices="),
    "another schedule": ({"schedule": "1f1b", "slices": 2}, "take 'terapipe'"),
    "too many": ({"slices": 9}, "9 slices, and was given sequences of 6"),
    "of another length": ({"slices": (4, 4)}, "slices of 4, 4 tokens, and was given 6"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_slices_that_cannot_be(name: str) -> None:
    options, message = OPTIONS[name]
    with pytest.raises(SbpError, match=message):
        flow.compile(staged(of("gpt"), ALONE2), told, micro_batches=2, **options)(*words(0))


def test_arguments_without_tokens_are_refused() -> None:
    with pytest.raises(SbpError, match="2 slices, and was given sequences of 0"):
        flow.compile(nn.Linear(2, 2), micro_batches=2, slices=2)(torch.ones(4))


@pytest.mark.parametrize(
    ("shape", "dtype", "dims"),
    [
        ((8, 6), F32, ((0,), (1,))),
        ((8, 6, 6), F32, ((0,), (1,), ())),
        ((8, 6, 6), torch.bool, ((0,), (), ())),
        ((2, 6, 6), F32, ((), (), ())),
        ((1, 6), F32, ((), (1,))),
        ((6,), F32, ((1,),)),
        ((6, 6), F32, ((), ())),
        ((8, 1, 6, 6), F32, ((0,), (), (), ())),
        ((3, 5), F32, ((), ())),
    ],
)
def test_how_arguments_are_cut(shape: Sequence[int], dtype: torch.dtype, dims: tuple[tuple[int, ...], ...]) -> None:
    batch = Batch.of([torch.ones(8, 6), torch.ones(*shape).to(dtype)], {}, 4, "step", 3)
    assert batch.inputs["1"] == dims
    assert [piece.starts for piece in batch.pieces[:4]] == [(0, 0), (0, 2), (0, 4), (2, 0)]


@pytest.mark.parametrize("dims", [((0, 1),), ((1, 0),), ((-8, 1),), ((0,),)])
def test_pieces_of_a_dim_that_has_samples_and_tokens(dims: Any) -> None:
    batch = Batch.of([torch.ones(8, 6)], {}, 1 if dims == ((-8, 1),) else 4, "step", 3)
    x = torch.arange(48)
    found = torch.cat([batch.piece(x, dims, piece) for piece in batch.pieces])
    assert set(found.tolist()) == set(range(48))
    rows = x.view(6, 8).t() if dims == ((1, 0),) else x.view(8, 6)
    (_, start), (samples, many) = batch.pieces[1]
    wanted = rows[:samples] if dims == ((0,),) else rows[:samples, start : start + many]
    got = batch.piece(x, dims, batch.pieces[1])
    assert torch.equal(got, (wanted.t() if dims == ((1, 0),) else wanted).flatten())


def test_a_dropped_step_leaves_nothing() -> None:
    """Also one that fails in the middle of a sequence."""
    model = staged(of("gpt"), ALONE2)
    step = flow.compile(model, told, micro_batches=2, slices=3)
    step(*words(0))
    text, following = words(0)
    text[-1, -1] = WORDS + 5  # of the last slice of the last sequence
    with pytest.raises(IndexError):
        step(text, following)
    assert not attention._pasts
    assert torch.isfinite(whole(step(*words(1))))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_memory_counts_keys_and_values_of_whole_sequences(micro_batches: int) -> None:
    step = flow.compile(staged(of("gpt"), ALONE2), told, micro_batches=micro_batches, slices=LENGTH)
    step(*words(0))
    rows, blocks, width = 8 // micro_batches, 2, 16
    held = 2 * 2 * rows * LENGTH * width * 8 * blocks  # keys and values, and gradients of both
    program: Any = step.planned.program
    assert [left(program.proved.firsts[0], rank) for rank in (0, 1)] == [held, held]
    assert step.planned.memory()[1].activations > held
    assert "6 slices" in str(program.proved.network)


def on_ranks(stages: str, way: str, kind: str) -> None:
    model = hinted(staged(of(kind), {"4": ALONE4, "pairs": PAIRS}[stages]), way)
    tolerance = 1e-10 if kind == "gpt" else 1e-5
    learns(model, told if kind == "gpt" else llama_told, words, tolerance=tolerance, slices=3)
    assert not attention._pasts


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("stages", "way", "kind"), [("4", "alone", "gpt"), ("pairs", "tensor", "gpt"), ("pairs", "zero", "llama")]
)
def test_ranks_learn_in_slices(ranks4: Ranks, stages: str, way: str, kind: str) -> None:
    ranks4(on_ranks, stages, way, kind, timeout=120.0)
