"""From a model and a description of the cluster alone, the choice finds the parallel schemes that people invented."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from sbpflow.boxing.graph.buckets import bucketed
from sbpflow.boxing.graph.physical import Op, Physical
from sbpflow.boxing.routes.moves import LOCAL
from sbpflow.nn.graph.capture.trace import trace
from sbpflow.nn.graph.choose.choose import Choosing, Decided, decide, taken_apart
from sbpflow.nn.graph.memory.account import account
from sbpflow.sbp.joint.demands import Demands, SourcePin

FOUR = flow.placement("cuda", range(4))
APART = flow.placement("cuda", [0, 8, 16, 24])  # each in a node of its own
ALONE = flow.placement("cpu", range(4))  # of one host: nothing moves beside what is computed
MIB = 2**20


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ln2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.ln1(x)).split(x.shape[-1], -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.words(text) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), following.flatten())


class Grouped(nn.Module):
    """Attention in which 32 query heads share one of two of the keys'."""

    def __init__(self) -> None:
        super().__init__()
        wide, narrow = 4096, 128
        self.q, self.k = nn.Linear(wide, wide), nn.Linear(wide, narrow)
        self.v, self.o = nn.Linear(wide, narrow), nn.Linear(wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 64)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2)).pow(2).mean()  # type: ignore[no-any-return]


class AlexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pool = nn.MaxPool2d(3, 2)
        self.conv = nn.Sequential(
            *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), pool, nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), pool),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(), pool),
        )
        self.fc = nn.Sequential(nn.Linear(256 * 36, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU())
        self.head = nn.Linear(4096, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.fc(self.conv(images).flatten(1))), labels)


def decided(
    model: nn.Module,
    batch: list[Tensor],
    cluster: str = "h100x8",
    place: flow.Placement = FOUR,
    limit: float | None = None,
    pins: Mapping[str, SourcePin] = {},
) -> Decided:
    def build(*batch: Tensor) -> Tensor:
        loss: Tensor = model(*batch)
        torch.autograd.backward(loss)
        return loss

    logical, _ = trace(build, batch, {}, {"": model})
    with flow.use_cluster(cluster):
        found = decide(Choosing(*taken_apart(logical, place), Demands(pins, states=2), limit))
    assert found.solution.cost <= found.solution.greedy
    return found


def gpt(layers: int, width: int, heads: int, words: int, length: int, rows: int, **more: Any) -> Decided:
    with torch.device("meta"):
        model = GPT(layers, width, heads, words, length)
        text = torch.zeros(rows, length, dtype=torch.long)
    return decided(model, [text, text], **more)


def forward(graph: Physical, inside: str = "") -> Counter[str]:
    """Kinds of what is sent forward, of values whose names begin so; a reduce_scatter and an all_gather are a sum."""
    return Counter(_kind(graph.boxing(box)) for box in graph.boxes if box.source.startswith(inside)) - Counter(
        {"": 999}
    )


def backward(graph: Physical, inside: str = "", parameters: bool = True) -> Counter[str]:
    """The same of gradients."""
    names = {s.value.name for s in graph.sources}
    backs = (b for b in graph.backs if b.into.startswith(inside) and (b.into in names) is parameters)
    return Counter(_kind(back.boxing) for back in backs) - Counter({"": 999})


def _kind(plan: flow.boxing.Boxing) -> str:
    kinds = [move.kind.removesuffix("_once") for move in plan.moves if move.kind not in LOCAL]
    return "all_reduce" if kinds == ["reduce_scatter", "all_gather"] else "+".join(kinds)


def lies(graph: Physical, *names: str) -> list[Any]:
    return [graph.layout(name).sbp[0] for name in names]


def test_data_parallelism_for_a_small_model_and_a_large_batch() -> None:
    graph = gpt(3, 256, 8, 512, 128, rows=256).graph
    sources = [s.value for s in graph.sources]
    assert {value.layout.sbp for value in sources} == {(B,)}
    assert forward(graph) == {"all_reduce": 1}  # of the loss
    assert backward(graph) == {"all_reduce": len(sources) - 2}
    assert not backward(graph, parameters=False)


def test_columns_and_rows_as_in_megatron_where_weights_dominate() -> None:
    """Two sums forward and two backward in each layer, and of weights nothing moves."""
    graph = gpt(4, 4096, 32, 50304, 16, rows=1).graph
    for k in range(1, 3):
        block = f"blocks.{k}"
        weights = [f"{block}.{name}.weight" for name in ("qkv", "out", "up", "down")]
        assert lies(graph, *weights) == [S(0), S(1), S(0), S(1)]
        assert forward(graph, block) == {"all_reduce": 2}
        assert backward(graph, block, parameters=False) == {"all_reduce": 2}
        assert not backward(graph, block)


def test_grouped_heads_are_not_gathered_under_data_and_tensor_parallel() -> None:
    columns, rows = (B, S(0)), (B, S(1))
    pins: dict[str, SourcePin] = {
        **{f"{n}.weight": columns for n in "qkv"},
        **{f"{n}.bias": columns for n in "qkv"},
        "o.weight": rows,
        "x": (S(0), B),
    }
    grid = flow.placement("cuda", [[0, 1], [2, 3]])
    with torch.device("meta"):
        graph = decided(Grouped(), [torch.zeros(4, 64, 4096)], place=grid, pins=pins).graph
    (attention,) = (step for step in graph.steps if isinstance(step, Op) and "attention" in str(step.op))
    assert {graph.layout(name).sbp for name in attention.inputs} == {(S(0), S(1))}
    assert not set(attention.inputs) & {box.output.name for box in graph.boxes}


@pytest.mark.parametrize(("width", "length"), [(1024, 512), (2048, 1024), (4096, 1024)])
def test_weights_move_beside_the_computing_where_experts_would_take_zero(width: int, length: int) -> None:
    """In one node of eight cards: no product is split, activations stay where they are, and nothing is waited for."""
    found = gpt(4, width, width // 128, 2048, length, rows=8, place=flow.placement("cuda", range(8)))
    graph, problem, choice = found.graph, found.formulated.problem, found.solution.choice
    products = [step for step in graph.steps if isinstance(step, Op) and "linear" in str(step.op)]
    assert {step.outputs[0].layout.sbp for step in products if "blocks" in step.outputs[0].name} == {(S(0),)}
    assert not backward(graph, "blocks.1", parameters=False)
    assert problem.hides(choice) > 0 > problem.beside(choice)


def test_ranks_that_carry_their_moves_themselves_hide_nothing() -> None:
    found = gpt(4, 1024, 8, 2048, 512, rows=8, place=ALONE)
    assert found.formulated.problem.hides(found.solution.choice) == 0


def test_classes_are_split_in_the_loss_and_logits_never_gathered() -> None:
    graph = gpt(2, 4096, 32, 50304, 128, rows=4, place=APART).graph
    assert lies(graph, "head.weight") == [S(0)]
    after = [box for box in graph.boxes if graph.layout(box.source).shape[:1] in ((512,), ())]
    assert after
    assert max(graph.boxing(box).bytes for box in after) <= 2 * 512 * 4  # two numbers a row, of 50304


def test_the_sequence_is_split_between_the_products_where_it_is_long() -> None:
    """What Megatron calls sequence parallelism: sums leave pieces of the sequence, which are gathered for products."""
    graph = gpt(4, 1024, 16, 2048, 1024, rows=1, limit=400 * MIB, place=ALONE).graph
    norms = [step for step in graph.steps if step.outputs[0].name.startswith("blocks.1.ln")]
    assert [step.outputs[0].layout.sbp for step in norms if step.outputs[0].name.endswith("layer_norm")] == [
        (S(1),)
    ] * 2
    assert forward(graph, "blocks.1") == {"all_gather": 2, "reduce_scatter": 2}
    assert backward(graph, "blocks.1", parameters=False) == {"all_gather": 2, "reduce_scatter": 2}


@pytest.mark.parametrize(("limit", "stored"), [(2900, B), (2200, S)], ids=["ZeRO-2", "ZeRO-3"])
def test_states_then_parameters_are_cut_where_memory_is_short(limit: int, stored: Any) -> None:
    found = gpt(12, 1024, 16, 2048, 256, rows=32, limit=limit * MIB, place=ALONE)
    graph, weights = found.graph, [f"blocks.1.{name}.weight" for name in ("up", "down")]
    assert max(held.total for held in account(bucketed(graph), 2).values()) <= limit * MIB
    sources = {s.value.name: s for s in graph.sources}
    assert all(sources[name].home.state.split for name in weights)  # gradients and Adam's two lie in pieces
    if stored is B:
        assert lies(graph, *weights) == [B] * 2
        assert backward(graph, "blocks.1.up.weight") == {"reduce_scatter": 1}
    else:
        assert B not in lies(graph, *weights)
        assert forward(graph, "blocks.1")["all_gather"] >= 2
        assert backward(graph, "blocks.1")["reduce_scatter"] >= 2


def test_one_weird_trick() -> None:
    """Convolutions in parallel over the batch, the classifier in parallel over its weights, and an exchange between."""
    with torch.device("meta"):
        model = AlexNet()
        batch = [torch.zeros(256, 3, 224, 224), torch.zeros(256, dtype=torch.long)]
    graph = decided(model, batch, "a100x8", ALONE).graph
    convs = [s.value.name for s in graph.sources if s.value.name.startswith("conv")]
    assert lies(graph, *convs) == [B] * len(convs)
    assert backward(graph, "conv") == {"all_reduce": len(convs)}
    assert all(lie != B for lie in lies(graph, "fc.0.weight", "fc.2.weight", "head.weight"))
    assert not backward(graph, "fc.0.weight") + backward(graph, "fc.2.weight")
    assert forward(graph, "flatten") == {"all_to_all": 1}


@pytest.mark.sweep
def test_plans_for_many_ranks_are_the_best() -> None:
    """96 layers on 64 and on 4096 ranks; how long that takes is in benchmarks/parts/graph_planning.py."""
    with torch.device("meta"):
        model = GPT(96, 1024, 64, 50304, 1024)
        text = torch.zeros(4096, 1024, dtype=torch.long)

    def build(*batch: Tensor) -> Tensor:
        loss: Tensor = model(*batch)
        torch.autograd.backward(loss)
        return loss

    logical, _ = trace(build, [text, text], {}, {"": model})
    for shape in ((8, 8), (16, 16, 16)):
        place = flow.placement("cuda", torch.arange(torch.Size(shape).numel()).reshape(shape).tolist())
        with flow.use_cluster("h100x8"):
            found = decide(Choosing(*taken_apart(logical, place), Demands()))
        assert found.solution.gap < 1e-3
