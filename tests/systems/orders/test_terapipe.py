"""TeraPipe: lengths of slices by a dynamic program, in which later slices take longer as they look back at more."""

import copy
import random
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow.actors import network_of, published, simulate, slice_lengths, sliced_seconds
from tests.nn.graph.pipes import ALONE2

from .test_published_orders import Reader

Seconds = Callable[[int, int], float]


def attention(length: int, context: int) -> float:
    """A launch, what each token takes, and what it looks back at; short slices leave a device half empty."""
    return 2 + max(length, 3) + length * (context + (length + 1) / 2) / 4


def noise(seed: int) -> Seconds:
    drawn = random.Random(seed)
    table = {pair: drawn.choice((0, 1, 1, 2, 3, 5, 8, 13)) for pair in product(range(1, 13), range(12))}
    return lambda length, context: float(table[length, context])


def compositions(tokens: int, multiple: int) -> Iterator[tuple[int, ...]]:
    if tokens <= multiple:
        yield (tokens,)
        return
    yield (tokens,)
    for first in range(multiple, tokens, multiple):
        for rest in compositions(tokens - first, multiple):
            yield (first, *rest)


@pytest.mark.parametrize("seconds", [attention, *map(noise, range(6))], ids=["attention", *map(str, range(6))])
@pytest.mark.parametrize("tokens", [1, 2, 7, 10])
def test_no_other_lengths_take_less(tokens: int, seconds: Seconds) -> None:
    for p, m, multiple in product((1, 2, 4, 9), (1, 3), (1, 2, 3)):
        found = slice_lengths(tokens, seconds, p=p, micro_batches=m, multiple=multiple)
        assert sum(found) == tokens
        assert all(x % multiple == 0 for x in found[:-1])
        every = [sliced_seconds(x, seconds, p=p, micro_batches=m) for x in compositions(tokens, multiple)]
        assert sliced_seconds(found, seconds, p=p, micro_batches=m) == min(every)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_the_time_is_that_of_the_order_that_runs(p: int) -> None:
    """Backward takes twice as long as forward, so that together they are three times forward."""
    lengths = slice_lengths(12, attention, p=p)
    contexts = [sum(lengths[:at]) for at in range(len(lengths))]
    times = [attention(*pair) for pair in zip(lengths, contexts, strict=True)]
    schedule = published("terapipe")
    network = network_of(schedule, schedule.shape(p, 1, n=len(lengths)))
    run = simulate(network, time=lambda actor, case, label: times[label] * (1 if actor.startswith("F") else 2))
    assert run.end == pytest.approx(3 * sliced_seconds(lengths, attention, p=p))


def test_later_slices_are_shorter_and_more_stages_have_more_of_them() -> None:
    chosen = [slice_lengths(48, attention, p=p) for p in (1, 4, 16)]
    assert [len(x) for x in chosen] == sorted({len(x) for x in chosen})
    assert list(chosen[1]) == sorted(chosen[1], reverse=True)
    assert len(set(chosen[1])) > 1
    assert chosen[0] == (48,)
    even = (12,) * 4
    assert sliced_seconds(chosen[1], attention, p=4) < sliced_seconds(even, attention, p=4)


def test_a_step_in_such_slices_has_the_logits_of_the_whole() -> None:
    lengths = slice_lengths(11, attention, p=2, micro_batches=2)
    assert len(set(lengths)) > 1
    torch.manual_seed(0)
    model = Reader().double()
    alone, text = copy.deepcopy(model), torch.randint(20, (2, 11))
    flow.nn.pipeline(model.layers, ALONE2)

    def loss_fn(model: torch.nn.Module, words: Tensor) -> tuple[Tensor, Tensor]:
        labels = torch.nn.functional.pad(words[:, 1:], (0, 1), value=-100)
        logits = model(words)
        return torch.nn.functional.cross_entropy(logits, labels.flatten()), logits

    step = flow.compile(model, loss_fn, micro_batches=2, slices=lengths)
    _, logits = step(text)
    wanted, expected = loss_fn(alone, text)
    torch.testing.assert_close(logits.full_tensor(), expected, rtol=0, atol=1e-12)  # type: ignore[attr-defined]
    wanted.backward()  # type: ignore[no-untyped-call]
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-12)  # type: ignore[union-attr]


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"p": 0}, {"micro_batches": True}, {"multiple": -1}], ids=str)
def test_what_is_no_number_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(flow.SbpflowError, match="give a whole number, 1 or more"):
        slice_lengths(**{"tokens": 4, "seconds": attention, "p": 2, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -1.0])
def test_times_without_an_end_are_refused(time: float) -> None:
    with pytest.raises(flow.SbpflowError, match="a slice of 1 tokens behind 0 takes"):
        slice_lengths(4, lambda length, context: time, p=2)
    with pytest.raises(flow.SbpflowError, match="the shortest slice or multiple is 0"):
        sliced_seconds((4, 0), attention, p=2)
    with pytest.raises(flow.SbpflowError, match="tokens is 0"):
        sliced_seconds((), attention, p=2)
