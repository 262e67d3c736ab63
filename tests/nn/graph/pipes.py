"""Models cut into stages, their data, and steps of them in a pipeline beside the same steps on one device."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from sbpflow.actors.protocol.network import Actor
from sbpflow.actors.schedules.published import PUBLISHED
from sbpflow.actors.schedules.schedule import Schedule
from sbpflow.nn.graph.run.pipeline import Pipelined
from sbpflow.placement import Placement
from sbpflow.sbp.trial import one_thread

from .zoo import hub

F32, F64 = torch.float32, torch.float64
WIDTH, HEADS, LENGTH, WORDS = 16, 2, 6, 32

# All micro-batches of a step see the same weights, and each goes through all stages, from the first to the last.
SYNCHRONOUS = [s.name for s in PUBLISHED.values() if s.synchronous and s.way != "routes" and not s.slices]

Loss = Callable[..., Any]


def see_bundles(monkeypatch: pytest.MonkeyPatch, see: Callable[[str, Any], None]) -> None:
    """Have `see` called with each bundle that an actor of a pipeline gives, and its register."""
    work = Pipelined.work

    def seen(self: Pipelined, actor: Actor) -> Any:
        run, names = work(self, actor), [give.register for give in actor.gives]

        def fire(firing: Any) -> Any:
            out = run(firing)
            for name, bundle in zip(names, out, strict=True):
                if bundle is not None:
                    see(name, bundle)
            return out

        return fire

    monkeypatch.setattr(Pipelined, "work", seen)


Optimize = Callable[[nn.Module], torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.wide(x))))
        return y


class Gpt(nn.Module):
    """Four blocks; with `tied`, the words at its begin and end are one weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.order: Tensor
        self.register_buffer("order", torch.arange(LENGTH))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places(self.order[: text.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def llama(**more: Any) -> nn.Module:
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    made: nn.Module = hub("LlamaForCausalLM")(hub("LlamaConfig")(**sizes, **heads, **more))
    return made


def mlp(layers: int = 4, width: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def of(kind: str, dtype: torch.dtype = F64) -> nn.Module:
    torch.manual_seed(1)
    return (Gpt() if kind == "gpt" else llama()).to(dtype)


def words_loss(model: nn.Module, text: Tensor) -> Tensor:
    """How well each next word is told; Llama does it itself."""
    if not isinstance(model, Gpt):
        loss: Tensor = model(input_ids=text, labels=text).loss
        return loss
    return F.cross_entropy(model(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten())


def text(at: int, rows: int = 8) -> tuple[Tensor]:
    return (torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(at)),)


def square_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def numbers(at: int, rows: int = 8, width: int = 6, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(at)
    x, y = (torch.randn(rows, width, dtype=F64, generator=draw).to(dtype) for _ in range(2))
    return x, y


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


# Where stages lie.


def line(*groups: Sequence[int] | int) -> list[Placement]:
    """A placement for each stage; a number is one rank."""
    return [flow.placement("cpu", [group] if isinstance(group, int) else list(group)) for group in groups]


ALONE2, ALONE4 = line(0, 1), line(0, 1, 2, 3)
PAIRS = line((0, 1), (2, 3))


def staged(model: nn.Module, stages: Sequence[Placement], schedule: str | Schedule = "1f1b") -> nn.Module:
    """A GPT, Llama or Sequential with its layers as the chunks of a schedule; its ends are on the first and last."""
    if isinstance(model, nn.Sequential):
        flow.nn.pipeline(list(model), stages, schedule)
        return model
    inner: Any = model if isinstance(model, Gpt) else model.model
    layers: Any = model.blocks if isinstance(model, Gpt) else inner.layers
    flow.nn.pipeline(layers, stages, schedule)
    last = layers[-1].__dict__  # what `pipeline` said of it
    begin: Any = [inner.words, inner.places] if isinstance(model, Gpt) else [inner.embed_tokens, inner.rotary_emb]
    end: Any = [inner.norm, model.head] if isinstance(model, Gpt) else [inner.norm, model.lm_head]
    for module in begin:
        flow.nn.place(module, stages[0], chunk=0)
    for module in end:
        flow.nn.place(module, last["_sbpflow_place"], chunk=last["_sbpflow_chunk"])
    return model


COLUMNS = ("*.qkv", "*.up", "*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight", "*.gate_proj.weight",
           "*.up_proj.weight")  # fmt: skip
ROWS = ("*.out.weight", "*.down.weight", "*.o_proj.weight", "*.down_proj.weight")


def hinted(model: nn.Module, way: str) -> nn.Module:
    """Signatures inside of stages."""
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]

    def there(patterns: Sequence[str]) -> list[str]:
        ends = [pattern.removeprefix("*") for pattern in patterns]
        return [f"*{end}" for end in ends if any(name.endswith(end) for name in names)]

    if way == "tensor":
        flow.nn.shard(model, dict.fromkeys(there(COLUMNS), S(0)) | dict.fromkeys(there(ROWS), S(1)))
    elif way in ("data", "zero"):
        flow.nn.shard(model, {"*": B if way == "data" else S(0)})
    return model


# Running.


def often(first: list[Any], more: list[Any]) -> list[Any]:
    """The first run always, the rest with the sweep."""
    return [
        *first,
        *(pytest.param(*(one if isinstance(one, tuple) else [one]), marks=pytest.mark.sweep) for one in more),
    ]


def everywhere() -> Placement:
    return flow.placement("cpu", range(4))


def whole(value: Any) -> Any:
    """A value as one tensor, also on ranks that have nothing of it."""
    if isinstance(value, flow.GlobalTensor):
        value = value.detach()
        if flow.boxing.owned(everywhere()) != tuple(range(4)):
            return value.to_global(placement=everywhere(), sbp=B).to_local()
        return value.full_tensor()
    if isinstance(value, dict):
        return {name: whole(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [whole(part) for part in value]
    return value.detach() if isinstance(value, Tensor) else value


def close(mine: Any, one: Any, tolerance: float) -> None:
    """Sums are made in another order."""
    torch.testing.assert_close(whole(mine), whole(one), rtol=tolerance, atol=tolerance)


def same_weights(model: nn.Module, one: nn.Module, tolerance: float) -> None:
    for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q.detach(), rtol=tolerance, atol=tolerance, msg=f"the weights {name}")
    for (name, x), y in zip(model.named_buffers(), one.buffers(), strict=True):
        assert torch.equal(whole(x), y), name


def first(result: Any) -> Tensor:
    while not isinstance(result, Tensor):
        result = next(iter(result.values() if isinstance(result, dict) else result))
    return result


@one_thread()
def trains(
    model: nn.Module,
    loss: Loss = square_loss,
    batches: Callable[[int], tuple[Any, ...]] = numbers,
    *,
    make: Optimize | None = adamw,
    one: nn.Module | None = None,
    steps: int = 3,
    micro_batches: int = 4,
    schedule: str | Schedule | None = "1f1b",
    tolerance: float = 1e-10,
    **options: Any,
) -> flow.nn.Graph:
    """Train a model in a pipeline and its copy on one device: all results and all weights are the same."""
    one = one or copy.deepcopy(model)
    mine, ones = (make(model), make(one)) if make else (None, None)
    step = flow.compile(model, loss, mine, micro_batches=micro_batches, schedule=schedule, **options)
    for at in range(steps):
        batch = batches(at)
        wanted = loss(one, *batch)
        first(wanted).backward()  # type: ignore[no-untyped-call]
        if ones is not None:
            if options.get("clip_grad_norm"):
                nn.utils.clip_grad_norm_(one.parameters(), options["clip_grad_norm"])
            ones.step()
            ones.zero_grad()
        close(step(*batch), wanted, tolerance)
    if make is None:
        for (name, p), q in zip(model.named_parameters(), one.named_parameters(), strict=True):
            assert (p.grad is None) == (q[1].grad is None), name
            close(p.grad, q[1].grad, tolerance)
    same_weights(model, one, tolerance)
    return step
