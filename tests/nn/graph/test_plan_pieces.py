"""The choice for a step in micro-batches is that of the step: what each of them does, so often, and once what a
step does once."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B
from sbpflow.nn.explanations.step_report import explained
from sbpflow.nn.graph.step import Step
from tests.ranks import Ranks

GRIDS = {"line": "cpu:[0-3]", "square": "cpu:[0-3] as (data=2, tensor=2)"}


class Words(nn.Module):
    """An embedding, two blocks, and a head, which may be tied to it."""

    def __init__(self, width: int, hidden: int, words: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)) for _ in range(2)
        )
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        logits: Tensor = self.head(h)
        return logits


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def planned(model: nn.Module, samples: int, m: int, where: str, **options: Any) -> Step:
    # fused: its update is as short beside the sums of gradients as was priced here; a loop takes three times as long
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = flow.compile(model, loss_fn, optimizer, placement=flow.placement(where), micro_batches=m, **options)
    return step.step_for(torch.zeros(samples, 16, dtype=torch.long, device="meta"))


def lies(step: Step) -> dict[str, tuple[object, ...]]:
    """How the matrices of blocks and the head lie."""
    sources = [s.value for s in step.graph.sources if s.kind == "parameter" and len(s.value.layout.shape) > 1]
    return {value.name: value.layout.sbp for value in sources if "embed" not in value.name}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("m", "options"), [(1, {"schedule": "1f1b"}), (3, {}), (8, {}), (4, {"schedule": "gpipe"})])
@pytest.mark.parametrize("tied", [False, True], ids=["two", "tied"])
@pytest.mark.parametrize("cluster", ["cpu", "h100x8"])
@pytest.mark.sampled(4)
def test_what_is_said_of_the_choice_is_said_of_the_step(
    grid: str, m: int, options: dict[str, Any], tied: bool, cluster: str
) -> None:
    with torch.device("meta"):
        model = Words(64, 256, 400, tied=tied)
    with flow.use_cluster(cluster):
        where = GRIDS[grid].replace("cpu", cluster if cluster == "cpu" else "cuda")
        report = explained(planned(model, 12 * m, m, where, **options))
    assert report.solution is not None
    assert report.solution.bound is not None
    assert report.predicted == pytest.approx(report.solution.optimum, rel=1e-9)
    assert report.solution.optimum >= report.solution.bound * (1 - 1e-9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("m", [2, 8])
@pytest.mark.parametrize(("samples", "width", "words"), [(4096, 64, 64), (16, 512, 64), (2048, 128, 4000)])
def test_samples_are_shared_out_alike_as_one_and_as_many_micro_batches(
    samples: int, width: int, words: int, m: int
) -> None:
    with torch.device("meta"):
        model = Words(width, 4 * width, words)
    one, many = (planned(model, samples, n, GRIDS["line"]) for n in (1, m))
    assert lies(many) == lies(one)


def accumulated() -> tuple[int, list[object]]:
    """Bytes to a rank in a step that adds up eight micro-batches, and how the weights lie; it is the step of torch."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(1024, 64)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = flow.compile(model, square, optimizer, placement=flow.placement("cpu", range(4)), micro_batches=8)
    with flow.record() as moves:
        step(x)
    grads = torch.autograd.grad(square(alone, x), [*alone.parameters()])
    held: list[Any] = [*model.parameters()]
    for mine, other, grad in zip(held, alone.parameters(), grads, strict=True):
        torch.testing.assert_close(mine.full_tensor().detach(), (other - 0.1 * grad).detach())
    return moves.bytes, [p.sbp[0] for p in held]


def square(model: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(model(x).square().mean())


def test_ranks_that_accumulate_bring_gradients_together_once_a_step(ranks4: Ranks) -> None:
    """As DDP does. Each micro-batch moved activations, for sums that were priced as if each of them made them."""
    weights = 4 * (2 * 64 * 256 + 256 + 64)
    for received, lies in ranks4(accumulated):
        assert lies == [B] * 4
        assert received == pytest.approx(weights * 2 * 3 / 4, rel=0.01)  # and each micro-batch's loss, a number


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) + time[:, None])


class Lit(nn.Module):
    """Two values made beside the first block scale and shift the result of the last, on one line."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.light = nn.Linear(8, 8), nn.Linear(8, 16)
        self.blocks, self.head = nn.ModuleList(Timed() for _ in range(2)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        time = self.time(x.mean(1))
        for block in self.blocks:
            x = block(x, time)
        scale, shift = self.light(time.tanh()).chunk(2, -1)
        lit: Tensor = self.head(x * (1 + scale)[:, None] + shift[:, None])
        return lit


def test_ops_of_one_line_on_two_stages_stay_there_in_smaller_micro_batches() -> None:
    """As in AuraFlow: where they were nobody knew, and two samples ran in other chunks than three."""
    model = Lit().double()
    one, x = copy.deepcopy(model), torch.randn(5, 16, 8, dtype=torch.float64)
    flow.nn.pipeline(model.blocks, [flow.placement("cpu", [0]), flow.placement("cpu", [1])])
    step = flow.compile(model, lambda m, x: m(x).square().mean(), micro_batches=2)
    torch.testing.assert_close(step(x).full_tensor(), one(x).square().mean())
