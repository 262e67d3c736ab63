"""Adapters of PEFT in graphs and plans: values, weights, bytes and files are those of PEFT on one device."""

import importlib
import math
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from tests.libraries import library

if find_spec("peft") is None:
    pytest.skip("peft is not installed, whose adapters this is about", allow_module_level=True)

IDS = torch.randint(32, (4, 5), generator=torch.Generator().manual_seed(3))
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "use_cache": False}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CLOSE = 1e-7  # in float64, in which the norms of Llama compute in float32
Q_AND_V: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", Q_AND_V),
    "DoRA": ("LoraConfig", {**Q_AND_V, "use_dora": True}),
    "rsLoRA": ("LoraConfig", {**Q_AND_V, "use_rslora": True, "bias": "lora_only"}),
    "saved modules": ("LoraConfig", {**Q_AND_V, "modules_to_save": ["lm_head"]}),
    "QLoRA": ("LoraConfig", Q_AND_V),
    "LoHa": ("LoHaConfig", Q_AND_V),
    "LoKr": ("LoKrConfig", {**Q_AND_V, "rank_dropout": 0.0}),
    "IA3": ("IA3Config", {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "experts": (
        "LoraConfig",
        {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
}
PLANS = {
    "ZeRO-3": "grid cpu (data=4)\n**: data=S(0)\n",
    "tensor parallel": "grid cpu (tensor=2)\ntake tp_plan over tensor\n",
    "stages": "grid cpu (pipe=2)\npipe {layers} over pipe by 1f1b, 2 micro-batches\n",
    "ZeRO-3 in parts": "grid cpu (data=2)\n**: data=S(0)\n2 micro-batches\n",
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class FourBits(nn.Linear):
    """A linear layer whose weight rests as packed codes of four bits and a scale a row."""

    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        scale = layer.weight.abs().amax(1, keepdim=True).detach() / 7
        codes = (layer.weight / scale).round().to(torch.int64) + 8
        self.weight = nn.Parameter((codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.stack([self.weight >> 4, self.weight & 15], -1).flatten(1)
        return nn.functional.linear(x, (codes.to(x.dtype) - 8) * self.scale)


def adapted(kind: str, *, layers: int = 2, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """A model of PEFT with adapters that are not at their start, where most of them do nothing."""
    hub, peft = library("transformers"), importlib.import_module("peft")
    torch.manual_seed(0)
    sizes = {**SIZES, **HEADS, "num_hidden_layers": layers}
    if kind == "experts":
        how = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
        base = hub.MixtralForCausalLM(hub.MixtralConfig(**sizes, **how))
    else:
        base = hub.LlamaForCausalLM(hub.LlamaConfig(**sizes))
    if kind == "QLoRA":
        for layer in base.model.layers:
            layer.self_attn.q_proj = FourBits(layer.self_attn.q_proj)
            layer.mlp.up_proj = FourBits(layer.mlp.up_proj)
    name, said = KINDS[kind]
    model = peft.get_peft_model(base, getattr(peft, name)(task_type="CAUSAL_LM", **said, **more)).to(dtype)
    spread(model)
    return model


def spread(model: nn.Module) -> None:
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in trained(model):
            x.add_(torch.randn(x.shape, generator=numbers, dtype=torch.float64).to(x.dtype) * 0.05)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [x for x in model.parameters() if x.requires_grad]


def loss_fn(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, -ids.shape[1] :]  # the model's own loss is computed in float32
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def compiled(model: Any, plan: str, **how: Any) -> Any:
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    return flow.compile(model, loss_fn, optimizer, plan=plan, **how)


def with_adapters_whole(plan: str, model: nn.Module) -> str:
    names = [name for name, x in model.named_parameters() if x.requires_grad]
    return plan + "".join(f"{name}: data=B\n" for name in names) if "data=" in plan else plan


def plain_steps(model: Any, count: int, optimizer: Any = None, ids: Tensor = IDS) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(trained(model), lr=1e-2)
    losses = []
    for _ in range(count):
        loss = loss_fn(model, ids)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(x: Tensor) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, flow.GlobalTensor) else x.detach()


def assert_same(mine: nn.Module, plain: nn.Module, tolerance: float = CLOSE) -> None:
    for (name, x), y in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(whole(x).double(), y.detach().double(), rtol=0, atol=tolerance), name


@pytest.mark.sampled(2, sweep=22)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_as_on_one_device(kind: str, plan: str) -> None:
    mine, plain = adapted(kind), adapted(kind)
    layers = next(name for name, x in mine.named_modules() if isinstance(x, nn.ModuleList) and name.endswith("layers"))
    step = compiled(mine, with_adapters_whole(PLANS[plan].format(layers=layers), mine))
    assert [step(IDS).item() for _ in range(3)] == pytest.approx(plain_steps(plain, 3), abs=CLOSE)
    assert_same(mine, plain)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["LoHa", "LoKr", "experts"])
def test_adapters_that_branch_on_a_draw_or_parametrize_in_their_forward_are_captured(kind: str) -> None:
    mine, plain = adapted(kind, layers=1), adapted(kind, layers=1)
    step = compiled(mine, with_adapters_whole("grid cpu (data=2)\n**: data=S(0)\n", mine), backend="code")
    assert [step(IDS).item() for _ in range(2)] == pytest.approx(plain_steps(plain, 2), abs=CLOSE)
    assert_same(mine, plain)
    assert step.explain().frozen


def test_what_adapters_cost_is_as_counted() -> None:
    """Of four ranks each has a quarter of the base and all of its adapters; what is sent is what was predicted."""
    mine = adapted("LoRA", layers=1)
    step = compiled(mine, with_adapters_whole(PLANS["ZeRO-3"], mine), backend="code")
    step(IDS)
    with flow.record() as moves:
        step(IDS)
    assert sum(move.boxing.total for move in moves) == sum(row.total * row.count for row in step.explain().moves)
    mine_bytes = sum(x.numel() * 8 for x in trained(mine))
    on_all = mine_bytes + sum(x.nbytes for x in mine.buffers())
    base = [x for x in mine.parameters() if not x.requires_grad]
    for rank, held in enumerate(step.memory_at_rest().values()):
        pieces = sum(x.numel() // x.shape[0] * (x.shape[0] // 4 + (rank < x.shape[0] % 4)) * 8 for x in base)
        assert (held.parameters, held.states) == (pieces + on_all, 2 * mine_bytes)


def test_adapters_are_saved_loaded_and_merged_from_a_compiled_model(tmp_path: Path) -> None:
    peft = importlib.import_module("peft")
    mine, plain = adapted("LoRA", layers=1), adapted("LoRA", layers=1)
    step = compiled(mine, PLANS["ZeRO-3"], backend="code")  # adapters in pieces too
    step(IDS), plain_steps(plain, 1)
    state, theirs = peft.get_peft_model_state_dict(mine), peft.get_peft_model_state_dict(plain)
    assert {name: tuple(x.shape) for name, x in state.items()} == {name: tuple(x.shape) for name, x in theirs.items()}
    mine.save_pretrained(str(tmp_path))
    again = peft.PeftModel.from_pretrained(adapted("LoRA", layers=1).unload(), str(tmp_path), is_trainable=True)
    assert_same(again, plain)
    mine.merge_adapter(), plain.merge_adapter()
    assert_same(mine, plain)
    with torch.no_grad():
        assert step(IDS).item() == pytest.approx(loss_fn(plain, IDS).item(), abs=CLOSE)
    mine.unmerge_adapter(), plain.unmerge_adapter()
    with torch.no_grad():
        for x in trained(mine):
            x.zero_()
    peft.set_peft_model_state_dict(mine, theirs)  # from another run, into the compiled one
    assert_same(mine, plain)
    assert step(IDS).item() == pytest.approx(loss_fn(plain, IDS).item(), abs=CLOSE)


@pytest.mark.sweep
def test_adapters_are_switched_after_the_first_step() -> None:
    mine, plain = adapted("LoRA", layers=1), adapted("LoRA", layers=1)
    for model in (mine, plain):
        torch.manual_seed(4)
        model.add_adapter("other", model.peft_config["default"])
        model.to(torch.float64)
    both = [[x for name, x in model.named_parameters() if "lora_" in name] for model in (mine, plain)]
    optimizers = [torch.optim.AdamW(x, lr=1e-2) for x in both]
    step = flow.compile(mine, loss_fn, optimizers[0], plan="grid cpu (data=2)\n**: data=S(0)\n", backend="code")
    for name in ("default", "other", "default"):
        for model in (mine, plain):
            model.set_adapter(name)
        assert step(IDS).item() == pytest.approx(plain_steps(plain, 1, optimizers[1])[0], abs=CLOSE), name
    with torch.no_grad(), mine.disable_adapter(), plain.disable_adapter():
        assert step(IDS).item() == pytest.approx(loss_fn(plain, IDS).item(), abs=CLOSE)
    assert_same(mine, plain)


def test_a_base_of_bf16_is_that_of_one_device_to_the_bit_where_its_mask_is_the_same() -> None:
    """Without a mask transformers asks for `is_causal=True` eagerly, and makes a mask in every graph, because a graph
    may be given packed sequences: another kernel of torch, whose backward adds up in another order."""
    mine, plain = (adapted("LoRA", layers=1, dtype=torch.bfloat16) for _ in range(2))

    def masked(model: Any, ids: Tensor) -> Tensor:
        mask = torch.ones(5, 5, dtype=torch.bool, device=ids.device).tril().expand(len(ids), 1, 5, 5)
        loss: Tensor = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        return loss

    optimizer = torch.optim.AdamW(trained(plain), lr=1e-2)
    how: dict[str, Any] = {"placement": flow.placement("cpu", range(1)), "backend": "code"}
    step = flow.compile(mine, masked, torch.optim.AdamW(trained(mine), lr=1e-2), **how)
    for _ in range(3):
        loss = masked(plain, IDS)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        assert step(IDS).item() == loss.item()
    assert_same(mine, plain, 0.0)


def test_an_adapter_that_drops_whole_modules_is_refused_with_its_line() -> None:
    with pytest.raises(flow.SbpError, match=r"loha.layer\.py(.|\n)*inside base_model.*q_proj run eager"):
        compiled(adapted("LoHa", layers=1, module_dropout=0.5), PLANS["ZeRO-3"])(IDS)


@pytest.mark.sweep
def test_an_adapter_that_drops_whole_modules_runs_eager_between_captured_parts() -> None:
    plan = "grid cpu (data=2)\ninside **.self_attn.* run eager\n"
    step = compiled(adapted("LoHa", layers=1, module_dropout=0.5), plan, backend="code")
    assert math.isfinite(step(IDS).item())
