"""Two `pipe` lines in a plan: the towers of a model share the chunks of one schedule, and train as on one device."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.placement.errors import SbpError, SbpflowError
from tests.nn.graph.pipes import close, same_weights, sgd
from tests.nn.graph.towers import LENGTH, WIDTH, Translator, Twins, pairs, translated, twin_loss
from tests.ranks import Ranks

BOTH = ("pipe", "pipe")
APART = ("pipe[:2]", "pipe[2:]")
PLANS = {  # the schedule of both lines, over which places each, and how many there are
    "1f1b": ("1f1b", BOTH, 2),
    "gpipe": ("gpipe", BOTH, 2),
    "zb_h1": ("zb_h1", BOTH, 2),
    "interleaved": ("interleaved", BOTH, 2),
    "breadth_first": ("breadth_first", BOTH, 2),
    "zb_v": ("zb_v", BOTH, 2),
    "v_half": ("v_half", BOTH, 2),
    "dualpipe_v": ("dualpipe_v", BOTH, 2),
    "apart": ("1f1b", APART, 4),
    "apart both ways": ("chimera", APART, 4),
    "overlapping": ("1f1b", ("pipe[:1]", "pipe"), 2),
    "more of the second": ("1f1b", ("pipe[:1]", "pipe[1:]"), 4),
    "deep": ("interleaved", ("pipe", "pipe by interleaved v=2"), 2),
}


def plan(name: str, more: str = "") -> str:
    schedule, over, places = PLANS[name]
    first, second = (each if " by " in each else f"{each} by {schedule}" for each in over)
    axes = f"(pipe={places}{', data=2' if more else ''})"
    return f"grid {axes}\npipe encoder over {first}, 4 micro-batches\npipe decoder over {second}\n{more}"


def learn(name: str, more: str = "", steps: int = 2) -> Any:
    """Train a translator by a plan, and another one on one device."""
    model, one = Translator().double(), Translator().double()
    mine, ones = sgd(model), sgd(one)
    step = flow.compile(model, translated, mine, plan=plan(name, more))
    for at in range(steps):
        batch = pairs(at)
        wanted = translated(one, *batch)
        wanted.backward()  # type: ignore[no-untyped-call]
        ones.step()
        ones.zero_grad()
        close(step(*batch), wanted, 1e-12)
    same_weights(model, one, 1e-12)
    return step


@pytest.mark.sampled(3)
@pytest.mark.parametrize("more", ["", "**: data=S(0)", "words.weight: data=S(1)"])
@pytest.mark.parametrize("name", PLANS)
def test_towers_learn_as_on_one_device(name: str, more: str) -> None:
    learn(name, more)


def learn_here(name: str, more: str) -> None:
    learn(name, more)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["1f1b", "zb_v", "apart", "overlapping"])
def test_ranks_learn_as_one_device(ranks4: Ranks, name: str) -> None:
    ranks4(learn_here, name, "" if name == "apart" else "**: data=S(0)")


def test_what_the_encoder_made_is_sent_once_to_each_stage_and_its_gradient_comes_home_once() -> None:
    model = Translator(2, 3).double()
    lines = "grid (pipe=4)\npipe encoder over pipe[:2] by 1f1b, 4 micro-batches\npipe decoder over pipe[2:] by 1f1b"
    step: Any = flow.compile(model, translated, sgd(model), plan=lines)
    step(*pairs(0))
    with flow.record() as moves:
        step(*pairs(1))
    sent = Counter(
        (move.boxing.src.placement, move.boxing.dst.placement, move.bytes) for move in moves if move.op == "hop"
    )
    where = [flow.placement("cpu", [at]) for at in range(4)]
    samples, bias = 2 * LENGTH * WIDTH * 8, LENGTH * LENGTH * 8  # of a micro-batch
    hops = {(0, 1, samples): 1, (1, 2, samples): 1, (2, 3, samples): 2, (2, 3, bias): 1}  # the memory and the words
    ways = {(a, b, n): many for (a, b, n), many in hops.items()} | {(b, a, n): many for (a, b, n), many in hops.items()}
    assert sent == {(where[a], where[b], n): 4 * many for (a, b, n), many in ways.items()}


@pytest.mark.parametrize("over", [BOTH, APART])
def test_towers_side_by_side_meet_behind(over: tuple[str, str]) -> None:
    model, one = Twins().double(), Twins().double()
    lines = f"pipe left over {over[0]} by 1f1b, 4 micro-batches\npipe right over {over[1]} by 1f1b"
    optimizer = sgd(model)
    step = flow.compile(model, twin_loss, optimizer, plan=f"grid (pipe={2 if over == BOTH else 4})\n{lines}")
    wanted = twin_loss(one, *pairs(0))
    wanted.backward()  # type: ignore[no-untyped-call]
    sgd(one).step()
    close(step(*pairs(0)), wanted, 1e-12)
    same_weights(model, one, 1e-12)


def test_towers_are_cut_by_one_course_and_told_so() -> None:
    step: Any = flow.compile(Translator(2, 4).double(), translated, plan=plan("1f1b"))
    assert "1 | 1 layers and 2 | 2 layers by" in str(step.plan_for(*pairs(0)).explain())
    heavy = nn.Sequential(nn.Linear(WIDTH, 4096), nn.Tanh(), nn.Linear(4096, WIDTH))
    model = Twins(2, 6)
    model.left[1] = heavy
    step = flow.compile(
        model.double(), twin_loss, plan=plan("1f1b").replace("encoder", "left").replace("decoder", "right")
    )
    step(*pairs(0))
    weights: list[Any] = [model.get_parameter(f"right.{at}.0.weight") for at in range(6)]
    cut = [str(weight.placement) for weight in weights]
    assert cut == ["cpu:[0]"] * 5 + ["cpu:[1]"]  # the heavy layer of the other tower is on the second stage


class Rows(nn.Module):
    """Many weights of which little is read, so that a cut by weights is a bad guess."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8192, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[0]


def test_a_tower_that_a_step_does_not_run_stays_as_it_was_cut() -> None:
    left, right = (nn.Sequential(Rows(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))) for _ in range(2))
    model, stages = nn.ModuleDict({"left": left, "right": right}), [flow.placement("cpu", [at]) for at in range(2)]
    for tower in (left, right):
        flow.nn.pipeline(tower, stages, worth=1.0)
    step = flow.compile(model, lambda model, x: model["left"](x).square().mean(), micro_batches=4)
    step(torch.ones(4096, WIDTH))
    weights: list[list[Any]] = [[layer.weight for layer in tower] for tower in (left, right)]
    cuts = [[str(weight.placement) for weight in of] for of in weights]
    assert cuts[0] != cuts[1] == ["cpu:[0]", "cpu:[1]", "cpu:[1]", "cpu:[1]"]


def test_a_plan_that_ran_has_both_lines() -> None:
    step: Any = flow.compile(Translator().double(), translated, plan=plan("apart"))
    lines = str(step.plan_for(*pairs(0)).plan).splitlines()
    assert "pipe encoder over pipe[:2] by 1f1b, 4 micro-batches" in lines
    assert "pipe decoder over pipe[2:] by 1f1b" in lines


ENCODER = "pipe encoder over pipe by 1f1b, 4 micro-batches"


@pytest.mark.parametrize(
    ("places", "lines", "said"),
    [
        ("pipe=2", f"{ENCODER}\npipe decoder over pipe by gpipe", "one schedule is for both: write 1f1b"),
        (
            "pipe=2, other=2",
            f"{ENCODER}\npipe decoder over other",
            "each place of pipe has ranks of each place of other",
        ),
        ("pipe=2", f"{ENCODER}\npipe decoder over pipe, 2 micro-batches", "another line says how many micro-batches"),
        ("pipe=2", f"{ENCODER}\npipe encoder.0 over pipe", "encoder.0 is among the layers of both"),
        ("pipe=4", "pipe encoder over pipe[:1]\npipe decoder over pipe[1:3]", "no layers are at pipe=3"),
        ("pipe=4", "pipe encoder over pipe[:1]\npipe decoder over pipe[1:5]", "pipe has places 0 to 3"),
        ("pipe=4", "pipe encoder over pipe[:1]\npipe decoder over pipe[4:]", "pipe has places 0 to 3"),
        ("pipe=3", f"{ENCODER}\npipe decoder over pipe", "2 layers cannot be 3 chunks of 1f1b"),
        ("pipe=2", "pipe encoder over pipe by zb_v v=2\npipe decoder over pipe by zb_v", "cannot be 4 chunks of zb_v"),
        ("pipe=2", "pipe decoder over pipe by zb_v\npipe encoder over pipe by zb_v", "schedule zb_v wants 4 chunks"),
        ("pipe=2", "pipe encoder over pipe by chimera\npipe decoder over pipe by chimera", "chimera wants 2 chunks"),
        ("pipe=2", f"{ENCODER}\npipe decoder over pipe\n2 micro-batches", "the pipeline says how many micro-batches"),
    ],
)
def test_two_lines_that_cannot_both_be_are_shown(places: str, lines: str, said: str) -> None:
    many = lines if "micro-batches" in lines else lines.replace("\n", ", 4 micro-batches\n", 1)
    with pytest.raises(SbpflowError, match=re.escape(said)):
        flow.compile(Translator().double(), translated, plan=f"grid ({places})\n{many}")(*pairs(0))


def test_layers_behind_others_that_are_placed_nowhere_are_refused() -> None:
    model, stages = Translator(), [flow.placement("cpu", [at]) for at in range(2)]
    with pytest.raises(SbpflowError, match="layer 0 of the 2 that these come behind is in no chunk"):
        flow.nn.pipeline(model.decoder, stages, behind=model.encoder)
    flow.nn.pipeline(model.encoder, stages[:1], "zb_v", chunks=1)
    with pytest.raises(SbpflowError, match="zb_v goes down all stages and up again"):
        flow.nn.pipeline(model.decoder, stages, "zb_v", chunks=1, behind=model.encoder)


@pytest.mark.filterwarnings("ignore:an output with one or more elements")
def test_a_loss_over_all_pairs_needs_the_whole_batch() -> None:
    def contrasted(model: nn.Module, text: Tensor, said: Tensor) -> Tensor:
        x, y = model(text, said)
        return F.cross_entropy(x @ y.T, torch.arange(len(x)))

    lines = "grid (pipe=2)\npipe left over pipe\npipe right over pipe\n"
    with pytest.raises(SbpError, match=r"matmul at .*needs more than one micro-batch"):
        flow.compile(Twins().double(), contrasted, plan=f"{lines}4 micro-batches")(*pairs(0))
    loss = flow.compile(Twins().double(), contrasted, plan=f"{lines}1 micro-batches")(*pairs(0))
    close(loss, contrasted(Twins().double(), *pairs(0)), 1e-12)
