"""Switch Transformers of transformers: its experts pick their tokens, and `flow.nn.experts` in their place trains."""

import copy
from typing import Any

import pytest
import torch

import sbpflow as flow

transformers = pytest.importorskip("transformers")
from transformers.models.switch_transformers import modeling_switch_transformers as switch  # noqa: E402

SIZES = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_experts": 4, "expert_capacity": 3}
DEPTH = {"num_layers": 2, "num_sparse_encoder_layers": 1, "num_decoder_layers": 2, "num_sparse_decoder_layers": 1}
STILL = {"dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0}


def loss(model: Any, ids: torch.Tensor) -> Any:
    return model(input_ids=ids, labels=ids).loss


def as_one_op(self: Any, x: Any, selected: Any, share: Any) -> Any:
    """The forward of its experts; who found no room chose none, and has a share of nothing."""
    up, down = (torch.stack([getattr(expert, name).weight.T for expert in self.values()]) for name in ("wi", "wo"))
    chosen = selected.squeeze(1)
    share = share * chosen.sum(-1, keepdim=True)
    return flow.nn.experts(x, chosen.argmax(-1, keepdim=True), share, up, down, act="relu")


def test_experts_that_pick_their_tokens_name_the_op_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = switch.SwitchTransformersForConditionalGeneration(
        switch.SwitchTransformersConfig(**SIZES, **DEPTH, **STILL)
    )
    alone, ids, where = copy.deepcopy(model), torch.randint(0, 64, (4, 6)), flow.placement("cpu", range(2))
    optimizer, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone))
    with pytest.raises(flow.SbpError, match=r"(?s)nonzero.*needs to know.*\.mlp\.experts;.*use dropless over AXIS"):
        flow.compile(model, loss, optimizer, placement=where)(ids)
    wanted = []
    for _ in range(2):
        other.zero_grad()
        wanted.append(loss(alone, ids))
        wanted[-1].backward()
        other.step()
    monkeypatch.setattr(switch.SwitchTransformersExperts, "forward", as_one_op)
    step: Any = flow.compile(model, loss, optimizer, placement=where)
    for want in wanted:
        torch.testing.assert_close(step(ids).full_tensor(), want.detach())
