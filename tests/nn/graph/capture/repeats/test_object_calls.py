"""Layers that are handed a cache are traced once where that is exact: each has the cache's own answer to its number."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from sbpflow.nn.graph.capture.repeats.layer_reuse import Repeats
from tests.nn.graph.capture.repeats.test_layer_reuse import Block, Stack, text
from tests.nn.graph.same import same, traced

X = torch.randn(4, 4)


class Kept:
    """A cache of one entry a layer."""

    def __init__(self) -> None:
        self.entries: dict[int, Tensor] = {}
        self.calls = 0

    def update(self, x: Tensor, place: int, *, times: int = 1) -> Tensor:
        self.calls += 1
        self.entries[place] = x * times
        return torch.cat([self.entries[place], x])

    def total(self) -> Tensor:
        return torch.stack([x * place for place, x in self.entries.items()]).sum()

    def numbered(self, x: Tensor, place: int) -> Tensor:
        """Another answer for another layer."""
        return x * place if place < 2 else torch.cat([x, x])[:4] * place

    def longer(self, x: Tensor, place: int) -> tuple[Tensor, int]:
        return x, place

    def inplace(self, x: Tensor, place: int) -> Tensor:
        return x.mul_(2)


def cached(blocks: Any, x: Tensor) -> Any:
    kept = Kept()
    for block in blocks:
        x = block(x, kept=kept)
    return x.sum() + kept.total() * kept.calls if kept.entries else x.sum()


def updates(s: Any, x: Tensor, kept: Kept) -> Any:
    return s.inner(kept.update(s.inner(x), s.place)[4:]).relu()


def by_name(s: Any, x: Tensor, kept: Kept) -> Any:
    return s.inner(kept.update(times=s.heads, x=x.t().contiguous(), place=s.place)[:4])


def views(s: Any, x: Tensor, kept: Kept) -> Any:
    k, v = s.inner(x).chunk(2, dim=1)
    return s.inner(kept.update(torch.cat([v, k], 1).t(), s.place)[2:6] + kept.update(x, s.place)[:4])


@pytest.mark.parametrize("function", [updates, by_name, views])
def test_a_layer_with_a_cache_stands_for_all(taken: list[Repeats], function: Callable[..., Any]) -> None:
    model = Stack([Block(function, place=k, heads=2) for k in range(5)], cached)
    quick = same(model, X)
    assert taken[-1].taken == 3  # the first one's input needs no gradient
    assert text(quick) == text(traced(model, X, reuse=False)[0])


def scaled(s: Any, x: Tensor, kept: Kept) -> Any:
    return s.inner(kept.update(x, s.place)[4:]) * (1 + s.place)


def held_back(s: Any, x: Tensor, kept: Kept) -> Any:
    place = s.place
    return s.inner(kept.update(x, place)[4:])


def looks(s: Any, x: Tensor, kept: Kept) -> Any:
    return s.inner(kept.update(x, s.place)[4:]) * len(kept.entries)


def sets(s: Any, x: Tensor, kept: Kept) -> Any:
    kept.calls = kept.calls + s.heads
    return s.inner(kept.update(x, s.place)[4:])


def computes(s: Any, x: Tensor, kept: Kept) -> Any:
    return s.inner(kept.update(x, s.place + 1)[4:])


def chooses(s: Any, x: Tensor, kept: Kept) -> Any:
    return s.inner(kept.update(x, s.place if s.heads else 0)[4:])


def writes(s: Any, x: Tensor, kept: Kept) -> Any:
    return kept.inplace(s.inner(x), s.place)


def gives(s: Any, x: Tensor, kept: Kept) -> Any:
    y = s.inner(x)
    kept.update(y, s.place)
    return y


def without(s: Any, x: Tensor, kept: Kept) -> Any:
    with torch.no_grad():
        y = kept.update(x, s.place)
    return s.inner(x) + y[:4]


@pytest.mark.parametrize(
    "function", [scaled, held_back, looks, sets, computes, chooses, writes, gives, without], ids=lambda f: f.__name__
)
def test_layers_that_do_more_with_a_cache_or_their_number_are_traced_each(
    taken: list[Repeats], function: Callable[..., Any]
) -> None:
    model = Stack([Block(function, place=k, heads=2) for k in range(4)], cached)
    quick = same(model, X)
    assert taken[-1].taken == 0
    assert text(quick) == text(traced(model, X, reuse=False)[0])


def answered(s: Any, x: Tensor, kept: Kept) -> Any:
    y, place = kept.longer(s.inner(x), s.place)
    return y * place


def test_a_cache_that_answers_a_layer_otherwise_has_all_traced(taken: list[Repeats]) -> None:
    model = Stack([Block(answered, place=k) for k in range(4)], cached)
    quick = same(model, X)
    assert [one.taken for one in taken[:2]] == [1, 0]  # the second trace takes none over
    assert text(quick) == text(traced(model, X, reuse=False)[0])
    numbered = Stack([Block(lambda s, x, kept: kept.numbered(s.inner(x), s.place), place=k) for k in range(4)], cached)
    assert text(same(numbered, X)) == text(traced(numbered, X, reuse=False)[0])


def test_a_cache_among_the_arguments_of_the_step_keeps_layers_apart(taken: list[Repeats]) -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(answered, place=k) for k in range(3)])

        def forward(self, x: Tensor, kept: Kept) -> Tensor:
            for block in self.blocks:
                x = block(x, kept=kept)
            return x.sum()

    traced(Given(), X, Kept())
    assert taken[-1].taken == 0


def llama(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def test_a_model_of_transformers_that_keeps_a_cache_is_traced_in_calls_of_a_layer(taken: list[Repeats]) -> None:
    ids = torch.randint(32, (2, 8))
    model = llama(5)
    quick, _ = traced(model, ids, labels=ids, use_cache=True)
    assert taken[-1].taken == 4
    assert text(quick) == text(traced(model, ids, labels=ids, use_cache=True, reuse=False)[0])
