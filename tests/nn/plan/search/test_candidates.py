"""Candidates: what the planner leaves out is no cheaper than its answer, for the models that it is measured on."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import sbpflow as flow
from sbpflow.nn.graph.passes import Passes
from sbpflow.nn.plan.check import priced_by
from sbpflow.nn.plan.search.candidates import candidates, resting
from sbpflow.nn.plan.search.planner import FoundPlan
from sbpflow.nn.plan.search.trying import Trying

GRID = "grid cuda (data=2, tensor=4)"


def small(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of a family with two layers, and a batch, on meta."""
    llama = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    made = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=256, n_layer=2, n_head=8, vocab_size=1024)
        ),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama, **heads)),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**llama, **heads, num_local_experts=4)
        ),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=256, d_kv=32, d_ff=512, num_layers=2, num_heads=8, vocab_size=1024, decoder_start_token_id=0
            )
        ),
    }
    with torch.device("meta"):
        model: nn.Module = made[name]()
        words = torch.zeros(16, 64, dtype=torch.long)
    return model, {"input_ids": words, "labels": words.clone()}


@cache
def found(name: str) -> FoundPlan:
    model, batch = small(name)
    return flow.find_plan(model, batch, plan=GRID, cluster="h100x8")


TP, SEQUENCE = "tensor parallel by its config", "the same and sequence parallel"
ZEROS = ("ZeRO-1", "ZeRO-2", "ZeRO-3")
HAND = [
    *ZEROS,
    "data parallel",
    "HSDP",
    *(name for of in (TP, SEQUENCE) for name in (of, *(f"{of}, {z}" for z in ZEROS))),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hand", HAND)
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5"])
def test_the_answer_takes_no_longer_than_a_plan_that_people_write(name: str, hand: str) -> None:
    one = next((one for one in found(name).runners_up if one.name == hand), None)
    if one is not None:  # else the config has none
        seconds = one.plan.check(*small(name), cluster="h100x8").seconds
        assert found(name).checked.seconds <= seconds * (1 + 1e-9)


def test_all_candidates_are_captured_once_and_only_those_planned_that_may_be_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured, plain = list[Passes](), Passes.captured

    def counted(self: Passes, *args: Any, **options: Any) -> Any:
        captured.append(self)
        return plain(self, *args, **options)

    monkeypatch.setattr(Passes, "captured", counted)
    others = found.__wrapped__("llama").runners_up
    assert len(captured) == 1
    assert all(one.checked is None and "no less than" in one.why for one in others)
    assert {one.name for one in others} == {*HAND}


def test_what_rests_alone_takes_too_much_is_not_planned() -> None:
    model, batch = small("llama")
    with priced_by("h100x8"):
        plan = flow.Plan.read(GRID)
        trying = Trying(model, batch, None, None, None, 1.0)
        whole = next(one for one in candidates(plan, model) if one.name == "data parallel")
        trained = dict(model.named_parameters())
        least = resting(trying.meaning(whole.plan), model, 2, trained)
        assert least == 4 * sum(value.nbytes for value in model.parameters())
        assert least <= whole.plan.check(model, batch).memory


class Unread(nn.Module):
    """A model that has a large layer which nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.dropped = nn.Linear(64, 64), nn.Linear(64, 8192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dropped(x[:1])
        y: torch.Tensor = self.read(x)
        return y


def test_gradients_and_states_that_there_are_not_rule_out_no_plan() -> None:
    model, x = Unread(), torch.randn(16, 64)
    limit = 2 * sum(value.nbytes for value in model.parameters())
    found = flow.find_plan(model, x, plan="grid (data=2)", memory=limit, loss_fn=lambda m, x: m(x).square().mean())
    assert found.runners_up
    for one in found.runners_up:
        assert "alone take" not in one.why
        assert one.plan.check(model, x, loss_fn=lambda m, x: m(x).square().mean()).memory <= limit
