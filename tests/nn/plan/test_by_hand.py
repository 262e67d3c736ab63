"""No plan that people write is better than what is chosen, in micro-batches and pipelines too: drawn cases."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.nn.plan.check import Checked

TENSOR = "layers.*.up.*: {0}=S(0)\nlayers.*.down.*: {0}=S(1)"
WORDS = "embed.*: {0}=S(0)\nhead.*: {0}=S(0)"
BETWEEN = "layers.*.norm -> {0}=S(1)"
ZEROS = ["", "states **: data=S(0)", "{grads,states} **: data=S(0)", "**: data=S(0)"]
SLOWEST = 1.1  # times: in pipelines the least sum of all stages is looked for, and the slowest makes the step


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


class Net(nn.Module):
    def __init__(self, layers: int, width: int, hidden: int, words: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for layer in self.layers:
            y = layer(y)
        logits: Tensor = self.head(y)
        return logits


class Case(NamedTuple):
    """A model, the samples and tokens of a batch, a pipeline, a grid, and a cluster."""

    model: Net
    batch: tuple[int, int]
    head: str
    tensor: int
    stages: int
    cluster: str

    @classmethod
    def drawn(cls, seed: int) -> "Case":
        draw = random.Random(seed)
        width, m, stages = draw.choice([64, 256, 1024]), draw.choice([1, 2, 4, 8]), draw.choice([1, 1, 2])
        data, tensor = draw.choice([(4, 1), (2, 2), (2, 4), (4, 2), (8, 1)])
        cluster = draw.choice(["h100x8", "h100x8*4", "a100x8*4", "cpu"])
        with torch.device("meta"):
            model = Net(draw.choice([2, 4]), width, width * draw.choice([1, 4]), draw.choice([256, 4096, 16384]))
        axes = f"(pipe={stages}, data={data}, tensor={tensor})"
        head = f"grid {'cpu' if cluster == 'cpu' else 'cuda'} {axes}\n"
        head += f"pipe layers over pipe by {draw.choice(['1f1b', 'gpipe', 'zb_h1'])}, {m} micro-batches\n"
        return cls(model, (8 * m * draw.choice([1, 4, 16]), draw.choice([16, 128])), head, tensor, stages, cluster)

    def checked(self, lines: str) -> Checked:
        x = torch.zeros(self.batch, dtype=torch.long, device="meta")
        return flow.Plan.read(self.head + lines).check(self.model, (x, x), cluster=self.cluster, loss_fn=loss_fn)

    def by_hand(self) -> Iterator[str]:
        """The lines of plans that people write: data parallel, the three stages of ZeRO, and these with tensor parallel
        blocks, words and tokens."""
        split = "input 0 <- data=S(0)\ninput 1 <- data=S(0)\n"
        inner = "tensor" if self.tensor > 1 else "data"
        ways = ["", *("\n".join(each).format(inner) for each in ([TENSOR], [TENSOR, WORDS], [TENSOR, BETWEEN]))]
        if inner == "data":
            return iter([*(f"{split}{zero}" for zero in ZEROS), *ways[1:]])
        return (f"{split}{zero}\n{way}" for zero in ZEROS for way in ways)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@pytest.mark.sampled(1, sweep=15)
@pytest.mark.parametrize("seed", range(60))
def test_no_plan_by_hand_is_better_than_the_chosen_one(seed: int) -> None:
    case = Case.drawn(seed)
    found = case.checked("{weights,grads,states} **: data=?, tensor=?")
    assert found.report.solution is not None
    for lines in case.by_hand():
        hand = case.checked(lines)
        assert hand.report.solution is not None
        least = found.report.solution.optimum if found.report.solution.proved else found.report.solution.bound or 0.0
        assert least <= hand.report.solution.optimum * (1 + 1e-9), lines
        assert found.seconds <= hand.seconds * (SLOWEST if case.stages > 1 else 1 + 1e-9), lines
