"""Ways to train data parallel over a slow link: each a function that makes a `Way`. Add yours below.

The model is that of examples/train.py, small, and on bytes: what it learns is the text of this repository. Four ranks
see other samples at each step; every way sees the same.
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, S

__all__ = [
    "ALONE",
    "BANDWIDTH",
    "LAST",
    "LATENCY",
    "METHODS",
    "Method",
    "RANKS",
    "ROWS",
    "Way",
    "adam",
    "batch",
    "loss_fn",
    "model",
]

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "examples"))
from training.gpt import GPT  # noqa: E402

RANKS = 4
LATENCY, BANDWIDTH = 1e-3, 1.25e7  # seconds; 100 Mbit/s
LAST = 20  # steps whose mean is a loss
DATA = flow.placement("cpu", range(RANKS), names=("data",))
ALONE = [flow.placement("cpu", [at]) for at in range(RANKS)]
WIDTH, LAYERS, LENGTH, ROWS, RATE, TOGETHER, WARM = 64, 2, 32, 16, 2e-3, 8, 20

Step: TypeAlias = Callable[[int], float]


class Way(NamedTuple):
    """A way to train, ready to: `steps(at)` does the step of that number, or some from it on, and has a loss for each.

    `busiest` is the share of the counted bytes that goes by the busiest link. Where computing and the link go on beside
    each other, `ends(compute, bytes)` says when the steps of a call have ended, of what a rank computes in one and what
    is counted in one; without it a step takes the sum.
    """

    steps: Callable[[int], Sequence[float]]
    busiest: float = 1.0
    ends: Callable[[float, float], Sequence[float]] | None = None


class Method(NamedTuple):
    """A way to train, by name, and how it is made."""

    name: str
    make: Callable[[], Way]


def summing(step: Step) -> Way:
    return Way(lambda at: [step(at)])


@cache
def text() -> Tensor:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()


def batch(at: int) -> tuple[Tensor, Tensor]:
    """The samples of a step, those of the first rank first."""
    begins = torch.randint(len(text()) - LENGTH - 1, (ROWS,), generator=torch.Generator().manual_seed(at))
    rows = torch.stack([text()[begin : begin + LENGTH + 1] for begin in begins.tolist()])
    return rows[:, :-1], rows[:, 1:]


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(256, WIDTH, LAYERS, LENGTH)


def loss_fn(model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
    loss: Tensor = model(text, following)
    return loss


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))


def summed(
    encoders: Mapping[str, Any] | None, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam
) -> Callable[[], Way]:
    """Data parallelism whose gradients are encoded, or are not."""

    def make() -> Way:
        trained = model()
        options: Any = {"inputs": {"text": {"data": S(0)}, "following": {"data": S(0)}}, "compress": encoders}
        flow.nn.shard(trained, {"*": B})
        step = flow.compile(trained, loss_fn, optimizer(trained), placement=DATA, **options)
        return summing(lambda at: float(step(*batch(at)).item()))

    return make


class FrozenAdam(torch.optim.Optimizer):
    """Adam while it warms up; then momentum comes in the place of gradients, and the variance stays (1-bit Adam)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for x in (x for group in self.param_groups for x in group["params"] if x.grad is not None):
            state = self.state[x]
            if not state:
                state.update(step=0, mean=torch.zeros_like(x), square=torch.zeros_like(x))
            state["step"] += 1
            if state["step"] <= WARM:
                state["mean"].lerp_(x.grad, 0.1)
                state["square"].mul_(0.95).addcmul_(x.grad, x.grad, value=0.05)
            else:
                state["mean"].copy_(x.grad)
            root = (state["square"] / (1 - 0.95 ** min(state["step"], WARM))).sqrt()
            x.addcdiv_(state["mean"] / (1 - 0.9 ** state["step"]), root + 1e-8, value=-RATE)


def met(outer: Mapping[str, Any], encoder: flow.encoders.Encoder | None = None) -> Callable[[], Way]:
    """Ranks that train apart, and meet after some steps: an outer optimizer steps by how far they came on average."""

    def make() -> Way:
        whole = model()
        models = [flow.nn.to_global(copy.deepcopy(whole), place) for place in ALONE]
        shared = flow.nn.to_global(whole, DATA, lambda name, x: S(0) if x.ndim else B)
        steps = [
            flow.compile(one, loss_fn, adam(one), placement=place) for one, place in zip(models, ALONE, strict=True)
        ]
        optimizer = torch.optim.SGD(shared.parameters(), **outer)
        errors = flow.encoders.KeptErrors()

        def apart(at: int) -> float:
            parts = zip(*(x.chunk(RANKS) for x in batch(at)), strict=True)
            losses = [step(*part).full_tensor().item() for step, part in zip(steps, parts, strict=True)]
            if at % TOGETHER == TOGETHER - 1:
                meet()
            return sum(losses) / RANKS

        def meet() -> None:
            for number, (name, x) in enumerate(shared.named_parameters()):
                now = [[*one.parameters()][number].detach() for one in models]
                pairs = zip((old[number] for old in begun), now, strict=True)
                far = flow.addends([(before - after) / RANKS for before, after in pairs], DATA, "data")
                how: Any = {} if encoder is None else {"encoder": encoder, "kept": errors[name]}
                x.grad = far.to_global(sbp=x.sbp, **how)
            optimizer.step()
            optimizer.zero_grad()
            for one in models:
                flow.refit(shared, one)
            begun[:] = copies()

        def copies() -> list[list[Tensor]]:
            return [[x.detach().clone() for x in one.parameters()] for one in models]

        begun = copies()
        return summing(apart)

    return make


DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
SIGN = flow.encoders.sign(rows=True, twice=True)
MOMENTUM = flow.encoders.momentum(steps=WARM, of=flow.encoders.sign(twice=True))

METHODS = [
    Method("data parallel", summed(None)),
    Method("8 bits", summed({"*": flow.encoders.int8(twice=True)})),
    Method("4 bits", summed({"*": flow.encoders.int4(twice=True)})),
    Method("1-bit SGD's signs", summed({"*": SIGN})),
    Method(
        "1-bit Adam", summed({"*": flow.encoders.momentum(steps=WARM, of=flow.encoders.sign(twice=True))}, FrozenAdam)
    ),
    Method("largest 1 %", summed({"*": flow.encoders.topk(fraction=0.01)})),
    Method("largest 10 %", summed({"*": flow.encoders.topk(fraction=0.1)})),
    Method("PowerSGD, rank 4", summed({"*": flow.encoders.low_rank(rank=4)})),
    Method(f"local SGD, {TOGETHER} steps", met({"lr": 1.0})),
    Method(f"DiLoCo, {TOGETHER} steps", met(DILOCO)),
    Method(f"DiLoCo, {TOGETHER} steps, 4 bits", met(DILOCO, flow.encoders.int4(twice=True))),
]
