"""Values made of arguments, buffers and constants alone are made where they are used, and do not travel."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.boxing.graph.physical import Box
from tests.nn.graph.alike import F64, batch, same, same_model, sgd
from tests.nn.graph.pipes import LENGTH, WORDS, llama, often
from tests.nn.graph.zoo import build
from tests.ranks import Ranks


class Angles(nn.Module):
    """Rotary angles of a buffer, and a causal mask of nothing, both made once at the front."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.register_buffer("speed", torch.tensor([1.0, 0.5], dtype=F64))
        self.speed: Tensor
        self.layers = nn.ModuleList(nn.Linear(4, 4).to(F64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(4)[:, None] * self.speed
        turned = torch.cat([angle.cos(), angle.sin()], 1)
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        for layer in self.layers:
            weights = layer(x)[:, :, None] * turned
            x = x + (weights.softmax(-1) * mask).sum(-1)
        return x


def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def test_angles_and_masks_are_made_on_each_stage() -> None:
    model = Angles()
    one, stages = copy.deepcopy(model), [flow.placement("cpu", [rank]) for rank in range(4)]
    for layer, where in zip(model.layers, stages, strict=True):
        flow.nn.place(layer, where)
    ones, step = sgd(one), flow.compile(model, loss_fn, sgd(model), micro_batches=2)
    for at in range(2):
        wanted = loss_fn(one, *batch(at=at))
        same(step(*batch(at=at)), wanted)
        wanted.backward()  # type: ignore[no-untyped-call]
        ones.step()
        ones.zero_grad()
    same_model(model, one)
    crossing = [
        box.source.partition("@")[0]
        for box in step.physical.steps
        if isinstance(box, Box) and step.physical.layout(box.source).placement is not box.output.layout.placement
    ]
    # The buffer goes to three, x from each to the next; targets are taken from the caller.
    assert sorted(crossing.count(name) for name in dict.fromkeys(crossing)) == [1, 1, 1, 3]
    assert crossing.count("speed") == 3


class Biased(nn.Module):
    """Attention biased by how far apart words are that are no padding, by positions made of the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]))
        self.slopes: Tensor

    def forward(self, text: Tensor, mask: Tensor) -> Tensor:
        places = mask.cumsum(1)
        bias = -(places[:, :, None] - places[:, None]).abs()[:, None] * self.slopes[:, None, None]
        bias = bias.masked_fill(~mask.bool()[:, None, None], -1e9)
        x = self.words(text)
        for layer in self.layers:
            heads = layer(x).unflatten(-1, (2, 8)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(heads, heads, heads, bias).transpose(1, 2).flatten(2)
        y: Tensor = self.head(x)
        return y


def masked(kind: str) -> tuple[Any, Any]:
    """A model that takes a mask, and its layers."""
    torch.manual_seed(0)
    if kind == "llama":
        model: Any = llama()
        return model, model.model.layers
    if kind == "biased":
        model = Biased()
        return model, model.layers
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = build("BertForMaskedLM", "BertConfig", **sizes, **drops, intermediate_size=32)
    return model, model.bert.encoder.layer


def masked_loss(model: Any, text: Tensor, mask: Tensor) -> Tensor:
    if isinstance(model, Biased):
        return F.cross_entropy(model(text, mask).flatten(0, 1), text.flatten())
    loss: Tensor = model(input_ids=text, attention_mask=mask, labels=text).loss
    return loss


def padded_text(at: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(1, WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(at))
    return text, (torch.arange(LENGTH) < LENGTH - torch.arange(8)[:, None] % 3).long()


def learn(kind: str, stages: Sequence[Sequence[int]], schedule: str) -> None:
    """Hops from stage to stage have what layers make, and nothing else; values are those of one device."""
    model, layers = masked(kind)
    one = copy.deepcopy(model)
    flow.nn.pipeline(layers, [flow.placement("cpu", list(ranks)) for ranks in stages], schedule)
    ones, step = sgd(one), flow.compile(model, masked_loss, sgd(model), micro_batches=4, schedule=schedule)
    for at in range(2):
        wanted = masked_loss(one, *padded_text(at))
        assert step(*padded_text(at)).item() == pytest.approx(wanted.item(), rel=1e-5)
        torch.autograd.backward(wanted)
        ones.step()
        ones.zero_grad()
    graph: Any = step.planned
    for variant in graph.program.proved.variants.values():
        sent = [variant.stages[at].output for at in variant.where.hops]
        assert sent
        assert all(value.grad for value in sent)  # a mask has none


KINDS = ["llama", "bert", "biased"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_made_of_arguments_do_not_travel_between_stages(kind: str, schedule: str) -> None:
    learn(kind, [[0], [1], [2], [3]], schedule)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["interleaved", "zb_v"])
def test_nor_do_they_where_a_stage_has_several_chunks_or_several_ranks(schedule: str) -> None:
    learn("llama", [[0], [1]], schedule)
    learn("biased", [[0, 1], [2, 3]], schedule)


@pytest.mark.parametrize("kind", often(["biased"], ["llama", "bert"]))
def test_nor_do_they_between_ranks(ranks4: Ranks, kind: str) -> None:
    ranks4(learn, kind, [[0], [1], [2], [3]], "1f1b")


@pytest.mark.parametrize("wide", [False, True])
def test_without_micro_batches_what_is_cheaper_to_send_is_sent(wide: bool) -> None:
    """A step of one piece has to send arguments, too: then the smaller of argument and result goes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            large = mask[:, None].expand(-1, 64).contiguous() if wide else mask.sum(-1, keepdim=True)
            for layer in self.layers:
                x = layer(x) * large
            return x

    model = Net()
    mask = torch.ones(4096) if wide else torch.ones(4096, 64)
    one = copy.deepcopy(model)
    for layer, rank in zip(model.layers, range(2), strict=True):
        flow.nn.place(layer, flow.placement("cpu", [rank]))
    step, x = flow.compile(model), torch.randn(4096, 64)
    same(step(x, mask), one(x, mask))
    boxes = [step.physical.layout(box.source).shape for box in step.physical.boxes if step.physical.boxing(box).total]
    assert sorted(boxes) == sorted([(4096, 64), (4096,) if wide else (4096, 1)])
