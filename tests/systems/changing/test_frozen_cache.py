"""AutoCache of PipeTransformer: what frozen layers make of a sample is computed once, and kept over epochs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from tests.ranks import Ranks

ALL = flow.placement("cpu", [0, 1])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(8, 4)
        self.double()

    def rest(self, x: Tensor, frozen: int) -> Tensor:
        made: Tensor = self.head(self.layers[frozen:](x))
        return made


DATA = torch.randn(24, 8, generator=torch.Generator().manual_seed(1)).double()
LABELS = torch.randint(4, (24,), generator=torch.Generator().manual_seed(2))


def batches(epoch: int) -> list[Tensor]:
    return list(torch.randperm(24, generator=torch.Generator().manual_seed(epoch)).chunk(3))


class Pair:
    """A model of which layers freeze, with a cache in front of it, and the same on one device without."""

    def __init__(self) -> None:
        self.model, self.alone = Net(), Net()
        self.frozen = 0
        self.adams = [torch.optim.AdamW(each.parameters(), lr=0.02) for each in (self.model, self.alone)]

        def loss_fn(model: Net, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model.rest(x, self.frozen), y)

        self.loss_fn: Callable[[Net, Tensor, Tensor], Tensor] = loss_fn
        self.step = flow.compile(self.model, loss_fn, self.adams[0], plan="grid cpu:[0-1] as (data=2)")
        self.cache: Any = None

    def freeze(self, layers: int) -> None:
        more = self.model.layers[self.frozen : layers]
        for model in (self.model, self.alone):
            model.layers[:layers].requires_grad_(False)
        if self.cache is None:
            self.cache = flow.nn.FrozenCache(more, placement=ALL)
        else:
            self.cache.extend(more)
        self.frozen = layers

    def epoch(self, number: int) -> None:
        for at in batches(number):
            x, y = DATA[at], LABELS[at]
            wanted = nn.functional.cross_entropy(self.alone.rest(x, 0), y)
            wanted.backward()  # type: ignore[no-untyped-call]
            self.adams[1].step()
            self.adams[1].zero_grad()
            found = self.step(self.cache(at, x) if self.cache else x, y)
            assert found.item() == pytest.approx(wanted.item(), abs=1e-12)


def run() -> tuple[list[int], int, list[Tensor]]:
    pair = Pair()
    pair.epoch(0)
    pair.freeze(2)
    for epoch in (1, 2, 3):
        pair.epoch(epoch)
    assert pair.cache.forwards == [3]
    pair.freeze(3)
    for epoch in (4, 5):
        pair.epoch(epoch)
    return pair.cache.forwards, pair.cache.nbytes, [x.full_tensor() for x in pair.model.parameters()]  # type: ignore[attr-defined]


def test_frozen_layers_run_once_a_sample_and_losses_are_those_without() -> None:
    forwards, size, _ = run()
    assert forwards == [3, 3]  # of 5 epochs of 3 batches, and of 2
    assert size == 24 * 8 * 8


@pytest.mark.sweep
def test_two_processes_as_one(ranks4: Ranks) -> None:
    expected = run()
    for forwards, size, weights in ranks4(run):
        assert (forwards, size) == expected[:2]
        assert all(map(torch.equal, weights, expected[2]))


def frozen(layers: nn.Module, limit: int | None = None) -> flow.nn.FrozenCache:
    return flow.nn.FrozenCache(layers.double().requires_grad_(False), limit=limit, placement=ALL)


def test_changed_weights_are_seen() -> None:
    layers = nn.Linear(8, 8)
    cache = frozen(layers)
    before = cache(range(4), DATA[:4])
    assert torch.equal(cache(range(4), DATA[:4]), before)
    assert cache.forwards == [1]
    layers.load_state_dict({name: x * 2 for name, x in layers.state_dict().items()})
    torch.testing.assert_close(cache(range(4), DATA[:4]), before * 2, rtol=0, atol=1e-12)
    assert cache.forwards == [2]


def test_other_weights_are_seen_though_they_lie_where_the_last_did() -> None:
    layers = nn.Linear(8, 8)
    cache = frozen(layers)
    before, bias = cache(range(4), DATA[:4]), layers.bias.full_tensor()  # type: ignore[attr-defined]
    memory = layers.weight.full_tensor().clone()  # type: ignore[attr-defined]
    for times in (1, 2):
        memory.mul_(times)
        there = torch.frombuffer(memory.numpy(), dtype=torch.float64).reshape(8, 8)  # as if it had just been made there
        layers.weight = nn.Parameter(there, requires_grad=False)
        torch.testing.assert_close(cache(range(4), DATA[:4]), (before - bias) * times + bias, rtol=0, atol=1e-12)
        assert cache.forwards == [times]


def test_batches_that_are_partly_kept() -> None:
    layers = nn.Linear(8, 8)
    cache, alone = frozen(layers), copy.deepcopy(layers)
    for at in ([0, 1, 2], [2, 3], [3, 2, 2, 0], [1]):
        torch.testing.assert_close(cache(torch.tensor(at), DATA[at]), alone(DATA[at]), rtol=0, atol=1e-12)
    assert cache.forwards == [2]


ROW = 8 * 8  # bytes of a sample


@pytest.mark.parametrize("rows", [0, 3, 9])
def test_no_more_is_kept_than_a_limit_and_the_first_go_first(rows: int) -> None:
    layers = nn.Linear(8, 8)
    cache, alone = frozen(layers, rows * ROW + ROW // 2), copy.deepcopy(layers)
    kept, gone, runs = list[int](), 0, 0
    for at in ([0, 1], [2, 3], [0, 1], [3], [2, 2, 4], [5, 6, 7], [7], [0, 1, 2, 3], [8, 8]):
        if not set(at) <= set(kept):
            runs += 1
            kept = [each for each in kept if each not in at]
            for number in at:
                kept = [*(each for each in kept if each != number), number]
                gone += len(kept) > rows
                kept = kept[-rows:] if rows else []
        torch.testing.assert_close(cache(at, DATA[at]), alone(DATA[at]), rtol=0, atol=1e-12)
        assert (cache.forwards, cache.nbytes, cache.dropped) == ([runs], len(kept) * ROW, gone)


def test_a_limit_holds_for_layers_that_freeze_later_and_changed_weights() -> None:
    first, then = nn.Linear(8, 4), nn.Linear(4, 8)
    cache = frozen(first, 2 * ROW)
    cache(range(4), DATA[:4])
    assert (cache.nbytes, cache.dropped) == (2 * ROW, 0)
    cache.extend(then.double().requires_grad_(False))
    found = cache(range(4), DATA[:4])
    torch.testing.assert_close(found, then(first(DATA[:4])), rtol=0, atol=1e-12)
    assert (cache.forwards, cache.nbytes, cache.dropped) == ([1, 1], 2 * ROW, 2)
    first.load_state_dict({name: x * 2 for name, x in first.state_dict().items()})
    cache([5], DATA[5:6])
    assert cache.nbytes == ROW


class Mixed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), "draws random numbers"),
        (lambda: nn.BatchNorm1d(8), "running_mean is changed by each run"),
        (lambda: Mixed(8, 8), "makes something of a whole batch"),
        (lambda: nn.Sequential(nn.Linear(8, 8), Mixed(8, 8)), "samples"),
        (lambda: nn.Flatten(0), "a row for each sample"),
    ],
    ids=["dropout", "batch_norm", "mixed", "mixed_later", "rows"],
)
def test_what_is_not_the_same_each_time_is_refused(layers: Callable[[], nn.Module], match: str) -> None:
    made = layers()
    cache = frozen(made)
    with pytest.raises(flow.SbpflowError, match=match):
        cache(range(4), DATA[:4])
    if isinstance(made, nn.BatchNorm1d) or match.startswith("draws"):
        made.eval()  # the fix that the error names
        assert cache(range(4), DATA[:4]).shape == (4, 8)


def test_other_refusals() -> None:
    for limit in (-1, 2.5, True):
        with pytest.raises(flow.SbpflowError, match=f"limit={limit}"):
            frozen(nn.Linear(8, 8), limit)  # type: ignore[arg-type]
    with pytest.raises(flow.SbpflowError, match="weight of Linear is not frozen"):
        flow.nn.FrozenCache(nn.Linear(8, 8), placement=ALL)
    cache = frozen(nn.Linear(8, 8))
    with pytest.raises(flow.SbpflowError, match="3 numbers of samples for a batch"):
        cache(range(3), DATA[:4])
    cache(range(4), DATA[:4])
    with pytest.raises(flow.SbpflowError, match="sample 2 came with other values"):
        cache([2], DATA[:1])
