"""The gallery of plans: each trains as one device does, rests as its formula says, and expects what comes out."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from tests.ranks import Ranks

GALLERY = Path(__file__).resolve().parents[3] / "examples/plans"
NAMES = sorted(path.stem for path in GALLERY.glob("*.plan"))
LEFT = {"replica": 2, "tensor": 2, "context": 2, "x": 2, "rows": 2}  # beside these axes `*` is two ranks, else four
WORDS = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(0))
STEPS = 5
EXPECTING = sorted(path.stem for path in GALLERY.glob("*.plan") if "\nexpect " in path.read_text())
ON_PROCESSES = ["context", "decomposition", "fsdp", "mesh_tensorflow", "megatron_sequence", "slapo", "zero2", "zero3"]
ROUNDED = {"fsdp", "mixed_precision", "megatron_3d", "mt_nlg", "offload"}  # of weights in half precision


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(8, 2 * width, width) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(x, self.up).relu(), self.down)


class Mlp(nn.Module):
    """Every sample has room for all its tokens at each expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 8), Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        chosen = nn.functional.one_hot(share.argmax(-1), 8).to(x.dtype)
        place = (chosen.cumsum(1) * chosen).sum(-1).long() - 1
        sent = chosen.unsqueeze(-1) * nn.functional.one_hot(place, x.shape[1]).to(x.dtype).unsqueeze(2)
        inside = torch.einsum("btec,btd->ebcd", sent, x)
        made = self.experts(inside.flatten(1, 2)).unflatten(1, inside.shape[1:3])
        return x + torch.einsum("btec,ebcd->btd", sent * share.unsqueeze(-1), made)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.mlp(x)
        return made


class Sparse(nn.Module):
    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(64, width)
        self.model = nn.ModuleDict({"layers": nn.ModuleList(Layer(width) for _ in range(layers))})

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.words(input_ids)
        for name, _ in self.model["layers"].named_children():
            x = self.model["layers"].get_submodule(name)(x)
        return x


class Pictures(nn.Module):
    def __init__(self, words: int = 12, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.classifier = nn.Sequential(nn.Linear(32 * words, width), nn.ReLU(), nn.Linear(width, 8))

    def forward(self, input_ids: Tensor) -> Tensor:
        points = input_ids.to(next(self.parameters()).dtype)[:, None, :, None].expand(-1, -1, -1, 8) / 64
        x: Tensor = self.classifier(self.features(points))
        return x


def model_for(name: str, layers: int) -> nn.Module:
    torch.manual_seed(0)
    if name == "gshard":
        return Sparse().double()
    if name == "one_weird_trick":
        return Pictures().double()
    if name == "slapo":
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        gpt: nn.Module = GPT2LMHeadModel(config)
        return gpt.double()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    llama: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=64))
    return llama.double()


def loss_fn(model: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    if isinstance(model, Sparse | Pictures):
        made: Tensor = model(input_ids).square().mean()
        return made
    logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def text_of(name: str) -> str:
    """The plan on four to eight ranks; its expectations are of large models."""
    text = (GALLERY / f"{name}.plan").read_text()
    grid = next(line for line in text.splitlines() if line.startswith("grid"))
    left = 2 if any(re.search(rf"\b{axis}=", grid) for axis in LEFT) else 4
    return re.sub(r"^expect.*$", "", text.replace("=*", f"={left}"), flags=re.MULTILINE)


def alone(name: str, layers: int) -> tuple[list[float], nn.Module]:
    model = model_for(name, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = loss_fn(model, WORDS, WORDS)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_the_gallery_trains_as_one_device_does(name: str) -> None:
    trains(name, 8 if name == "interleaved" else 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ON_PROCESSES)
def test_a_plan_of_the_gallery_trains_on_processes(name: str, ranks4: Ranks) -> None:
    ranks4(trains, name, 2)


def trains(name: str, layers: int) -> None:
    model = model_for(name, layers)
    step = flow.compile(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-3), plan=text_of(name))
    losses, wanted = alone(name, layers)
    near = 3e-3 if name in ROUNDED else 1e-7
    assert [step(WORDS, WORDS).item() for _ in losses] == pytest.approx(losses, rel=near)
    for mine, other in zip(model.parameters(), wanted.parameters(), strict=True):
        assert isinstance(mine, flow.GlobalTensor)
        far = (mine.full_tensor().double() - other).abs().max().item()
        # Adam divides by gradients, and those that are next to nothing turn by their rounding.
        assert far <= (1e-2 if name in ROUNDED else 2e-5)


FORMULAS = {  # bytes of a number: weights, gradients, states; each over four ranks or not
    "ddp": (8, 8, 16),
    "zero1": (8, 8 / 4, 16 / 4),
    "zero2": (8, 8 / 4, 16 / 4),
    "zero3": (8 / 4, 8 / 4, 16 / 4),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_bytes_at_rest_are_those_of_the_formula(name: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 8)).double()
    adamw = torch.optim.AdamW(model.parameters())
    step = flow.compile(model, lambda m, x: m(x).square().mean(), adamw, plan=text_of(name))
    step(torch.randn(8, 16, dtype=torch.float64))
    weights, grads, states = (n * sum(value.numel() for value in model.parameters()) for n in FORMULAS[name])
    assert {(held.parameters, held.states) for held in step.memory_at_rest().values()} == {(weights, states)}
    assert {held.gradients for held in step.planned.held().values()} == {grads}  # they are gone after the step


MASTERS = "cast ** to bf16\ncast states ** to fp32\n"  # 2 bytes of weights, 12 of a master and two moments
MIXED = {  # bytes of a number, as above; gradients are of two bytes, or cast to fp32 too
    "ddp": (2, 1, 12),
    "zero1": (2, 1 / 4, 12 / 4),
    "zero2": (2, 1 / 4, 12 / 4),
    "zero3": (2 / 4, 1 / 4, 12 / 4),
}


@pytest.mark.parametrize("wide", [2, 4], ids=["bf16 gradients", "fp32 gradients"])
@pytest.mark.parametrize("name", MIXED)
def test_bytes_at_rest_of_mixed_precision_are_those_of_the_formula(name: str, wide: int) -> None:
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 8))
    text = text_of(name) + MASTERS + ("cast grads ** to fp32\n" if wide == 4 else "")
    adamw = torch.optim.AdamW(model.parameters())
    step = flow.compile(model, lambda m, x: m(x).float().square().mean(), adamw, plan=text)
    step(torch.randn(8, 16).bfloat16())
    count = sum(value.numel() for value in model.parameters())
    weights, share, states = (n * count for n in MIXED[name])
    assert {(held.parameters, held.states) for held in step.memory_at_rest().values()} == {(weights, states)}
    told = {(held.parameters, held.gradients, held.states) for held in step.planned.held().values()}
    assert told == {(weights, wide * share, states)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EXPECTING)
def test_what_a_plan_expects_holds_of_a_large_model(name: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, vocab_size=32000))
        samples = 4 if "sequence" in name else 16  # few tokens go over an axis, beside many the weights do
        words = torch.empty(samples, 2048, dtype=torch.long)
    plan = flow.Plan.load(GALLERY / f"{name}.plan")
    checked = plan.check(model, {"input_ids": words, "labels": words}, cluster="h100x8", ranks=4)
    assert checked.findings
    assert all(one.holds for one in checked.findings)


def test_experts_are_reached_by_two_all_to_alls_a_layer() -> None:
    text = text_of("gshard") + "input * <- data=S(0)\nexpect 2 all_to_all over expert a layer forward\n"
    found = flow.Plan.read(text).check(Sparse(), WORDS).findings
    assert found[0].holds
