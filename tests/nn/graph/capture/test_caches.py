"""Caches of transformers as arguments of a step: state that it returns, in one size, or a refusal."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement.errors import SbpError
from tests.nn.generation.models import model_of, prompts

P2 = flow.placement("cpu", range(2))


def stepped(forward: Any, cache: Any, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """The last logits of each of these calls of a forward, which go on in one cache."""
    found, at = [], 0
    with torch.no_grad():
        for ids in tokens:
            places = torch.arange(at, at + ids.shape[1])[None]
            result = forward(input_ids=ids, position_ids=places, cache=cache, use_cache=True)
            assert result.cache is cache
            found.append(result.logits[:, -1])
            at += ids.shape[1]
    return found


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, flow.GlobalTensor) else x


def test_a_static_cache_is_state_that_a_step_returns() -> None:
    """The loop that a user writes: one step for the prompt, one for a token; a reset cache begins anew."""
    one, model, ids = model_of("llama"), model_of("llama"), prompts(2, 8)
    tokens = [ids[:, :5], ids[:, 5:6], ids[:, 6:7], ids[:, 7:]]
    caches = [StaticCache(config=one.config, max_cache_len=12) for _ in range(2)]
    wanted = stepped(one, caches[0], tokens)
    step = flow.compile(model, placement=P2)
    for turn in range(2):
        found = stepped(step, caches[1], tokens)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(whole(mine), theirs)
        for mine, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
            torch.testing.assert_close(whole(mine.keys), theirs.keys)
            torch.testing.assert_close(whole(mine.values), theirs.values)
            assert type(mine.cumulative_length) is torch.Tensor
            assert mine.get_seq_length() == 8
        assert (
            sum(map(len, step._steps.values())) == 2 + turn
        )  # a cache without shapes is one kind, a reset one another
        caches[1].reset()


def test_a_first_step_fills_a_dynamic_cache_and_the_next_is_refused() -> None:
    model, cache, ids = model_of("llama"), DynamicCache(), prompts(2, 5)
    step = flow.compile(model, placement=P2)
    one = DynamicCache()
    (wanted,) = stepped(model_of("llama"), one, [ids])
    (found,) = stepped(step, cache, [ids])
    torch.testing.assert_close(whole(found), wanted)
    torch.testing.assert_close(whole(cache.layers[1].keys), one.layers[1].keys)
    with pytest.raises(SbpError, match=r"DynamicCache of 5 tokens, which grows.*\n.*StaticCache"):
        stepped(step, cache, [ids[:, :1]])
    assert cache.get_seq_length() == 5


@pytest.mark.sweep
def test_a_cache_that_lies_otherwise_is_brought_back() -> None:
    """Whatever code between steps makes of its tensors, the same step runs, and returns them as it had them."""
    model, ids = model_of("llama"), prompts(2, 7)
    cache, other = (StaticCache(config=model.config, max_cache_len=12) for _ in range(2))
    wanted = stepped(model_of("llama"), other, [ids[:, :5], ids[:, 5:6], ids[:, 6:]])
    step = flow.compile(model, placement=P2)
    stepped(step, cache, [ids[:, :5], ids[:, 5:6]])
    many, lies = sum(map(len, step._steps.values())), [(x.keys.sbp, x.values.sbp) for x in cache.layers]
    cache.layers[0].keys = cache.layers[0].keys.to_global(sbp=B)
    cache.layers[1].values = cache.layers[1].values.full_tensor()
    cache.layers[1].keys = cache.layers[1].keys.to_global(sbp=S(2))
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reorder_cache(torch.tensor([1, 0]))
    with torch.no_grad():
        result = step(input_ids=ids[:, 6:], position_ids=torch.tensor([[6]]), cache=cache, use_cache=True)
    torch.testing.assert_close(whole(result.logits[:, -1]), wanted[-1])
    assert sum(map(len, step._steps.values())) == many
    assert [(x.keys.sbp, x.values.sbp) for x in cache.layers] == lies


def test_a_sliding_layer_without_a_mask_is_refused_once_it_counts() -> None:
    cache = StaticCache(config=model_of("mistral").config, max_cache_len=12)
    cache.layers[0].cumulative_length_int = 3
    with (
        pytest.raises(SbpError, match=r"sliding layer of 3 tokens(.|\n)*prepare_inputs_for_generation"),
        torch.no_grad(),
    ):
        flow.compile(model_of("mistral"), placement=P2)(input_ids=prompts(), cache=cache)


def test_an_offloaded_cache_is_refused() -> None:
    cache = StaticCache(config=model_of("llama").config, max_cache_len=12)
    cache.offloading = True
    with pytest.raises(SbpError, match="offloaded layer by layer"), torch.no_grad():
        flow.compile(model_of("llama"), placement=P2)(input_ids=prompts(), cache=cache)


def test_planning_leaves_a_cache_as_it_is() -> None:
    model = model_of("llama")
    cache = StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad():
        step = flow.compile(model, placement=P2).plan_for(input_ids=prompts(), cache=cache)
    assert "index_copy" in step.text()
    assert [layer.keys for layer in cache.layers] == [None, None]
    assert not any(layer.is_initialized for layer in cache.layers)
