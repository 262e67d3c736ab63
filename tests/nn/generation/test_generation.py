"""Generation by compiled steps: unchanged `model.generate`, and the tokens of one device."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.placement.errors import SbpError

from .models import PLANS, generated, model_of, prompts, tokens_of


def generating(model: Any, plan: str = PLANS["tensor"], *, max_length: int | None = 20) -> flow.nn.Generation:
    return flow.nn.generation(flow.compile(model, plan=plan), max_length=max_length)


def listed(found: dict[str, Tensor]) -> dict[str, Any]:
    return {name: x.tolist() for name, x in found.items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", PLANS)
def test_tokens_are_those_of_one_device(plan: str) -> None:
    """Greedy, sampled, by beams and with rows that begin later."""
    model = model_of("llama")
    with generating(model, PLANS[plan]):
        assert listed(generated(model)) == listed(tokens_of("llama"))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma3", "mixtral", "mamba", "qwen3_next", "t5"])
def test_models_with_other_caches_generate_the_same(name: str) -> None:
    model = model_of(name)
    with generating(model, "grid (rank=2)\n"):
        assert listed(generated(model)) == listed(tokens_of(name))


def test_a_token_is_no_new_step() -> None:
    """Two kinds of arguments are two steps, however many tokens; heads stay in pieces from step to step, and weights
    count as they are."""
    model, ids = model_of("llama"), prompts()
    with generating(model) as steps:
        first = model.generate(ids, max_new_tokens=3, do_sample=False)
        ending = model.generate(ids, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
        keys = [layer.keys for layer in ending.cache.layers]
        assert [(tuple(x.shape), str(x.sbp)) for x in keys] == [((4, 2, 20, 8), "(S(1),)")] * 2
        assert torch.equal(first, ending.sequences[:, :8])
        with torch.no_grad():
            model.lm_head.weight.neg_()
        assert not torch.equal(first, model.generate(ids, max_new_tokens=3, do_sample=False))
        assert steps.captures == 2
        with pytest.raises(SbpError, match="generates by a step already"):
            generating(model)
        with pytest.raises(SbpError, match="DynamicCache of 5 tokens"):
            model.generate(ids, max_new_tokens=3, cache_implementation="dynamic")


@pytest.mark.sweep
def test_a_sliding_window_fills_up_within_three_steps() -> None:
    """The prompt, a token where there is room, and one where there is none: a number of tokens is no kind."""
    model = model_of("mistral")
    with generating(model, "grid (rank=1)\n") as steps:
        found = model.generate(prompts(), max_new_tokens=12, do_sample=False)
        assert torch.equal(found, tokens_of("mistral")["greedy"])
        assert steps.captures == 3


MERGED = "grid (context=2)\ninput cache <- context=S(2)\ninside model.layers.*.self_attn use merged over context\n"


def test_a_cache_lies_as_the_plan_says() -> None:
    """Each rank has a part of the tokens that were seen, and only what these say of the next one is sent."""
    model = model_of("llama")
    step = flow.compile(model, plan=MERGED)
    with flow.nn.generation(step, max_length=20):
        found = model.generate(prompts(), max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        assert torch.equal(found.sequences, tokens_of("llama")["greedy"][:, :8])
        assert {str(x.sbp) for layer in found.cache.layers for x in (layer.keys, layer.values)} == {"(S(2),)"}
        sent = {row.route for row in step.explain().moves if row.total}
        assert sent == {"all_reduce_once over context"}


@pytest.mark.sweep
@pytest.mark.parametrize("plan", ["grid (data=2)\ninput * <- data=S(0)\n", MERGED], ids=["rows", "tokens"])
def test_beams_go_on_in_a_cache_in_pieces(plan: str) -> None:
    """Between two steps rows change places; the step has the cache as the plan says all the same."""
    model = model_of("llama")
    with generating(model, plan) as steps:
        found = model.generate(prompts()[:2], max_new_tokens=6, do_sample=False, num_beams=2)
        assert torch.equal(found, tokens_of("llama")["beams"])
        assert steps.captures == 2


def test_a_model_gets_its_forward_back() -> None:
    model = model_of("llama")
    forward, said = model.forward, model.generation_config.to_dict()
    steps = generating(model)
    assert model.forward != forward
    steps.close()
    steps.close()
    assert model.forward == forward
    assert model.generation_config.to_dict() == said


def test_what_generates_by_no_step_is_refused() -> None:
    model = model_of("llama")
    with pytest.raises(SbpError, match="give it a step that is the model's forward"):
        flow.nn.generation(flow.compile(model, lambda model, x: model(x).logits.sum(), plan=PLANS["tensor"]))
    with pytest.raises(SbpError, match="Linear has no generate"):
        flow.nn.generation(flow.compile(nn.Linear(2, 2), placement=flow.placement("cpu", range(2))))
    with pytest.raises(SbpError, match="max_length=0"):
        generating(model, max_length=0)
