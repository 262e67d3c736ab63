"""An axis over which nothing is split is told, with what the batch split over it would take."""

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B
from sbpflow.boxing.figures import duration
from sbpflow.nn.plan.check import Checked

GRID = "grid (data=2, tensor=2)\n"
TENSOR = "0.*: tensor=S(0)\n2.*: tensor=S(1)\n"
IDLE = "nothing is split over data: its 2 ranks do the same; the batch split over it, a step would take "


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(model(x).square().mean())


def checked(text: str, rows: int = 4) -> Checked:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return flow.Plan.read(text).check(model, torch.zeros(rows, 64, device="meta"), loss_fn=loss_fn)


def test_an_axis_over_which_nothing_is_split_is_told_with_its_price() -> None:
    idle, split = checked(GRID + TENSOR), checked(f"{GRID}{TENSOR}input 0 <- data=S(0)")
    (line,) = idle.report.idle
    assert line.startswith(f"{IDLE}{duration(split.seconds)}, ")
    assert line.endswith(" more")
    assert all(line in str(shown) for shown in (idle, idle.report))
    assert line in idle.report.full()
    assert idle.dict()["report"]["idle"] == [line]
    assert not split.report.idle


@pytest.mark.parametrize("text", ["**: data=S(0)", "states **: data=S(0)", "input 0 <- data=S(0)"])
def test_an_axis_over_which_anything_lies_in_pieces_is_not(text: str) -> None:
    assert not [line for line in checked(f"{GRID}{TENSOR}{text}").report.idle if "over data" in line]


PIPE = "grid (pipe=2, data=2, tensor=2)\npipe * over pipe by 1f1b, 2 micro-batches\n"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (TENSOR, "over data: "),
        (f"{TENSOR}0.*: data=S(0)", "over data on stage 2 of 2: "),
        (f"{TENSOR}input 0 <- data=S(0)", "over data on stage 2 of 2: "),
    ],
)
def test_in_a_pipeline_it_is_told_on_which_stage(text: str, where: str) -> None:
    (line,) = checked(PIPE + text, rows=2).report.idle
    assert line == f"nothing is split {where}its 2 ranks do the same"


def test_the_axis_of_the_stages_is_not_idle_where_a_buffer_that_nothing_uses_lies_on_all() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model.register_buffer("unused", torch.ones(3))
    text = "grid (pipe=2, data=2)\npipe * over pipe by 1f1b, 2 micro-batches\ninput 0 <- data=S(0)"
    found = flow.Plan.read(text).check(model, torch.zeros(4, 64, device="meta"), loss_fn=loss_fn)
    assert not [line for line in found.report.idle if "pipe" in line]


def test_arguments_that_lie_already_have_no_price() -> None:
    place = flow.placement("cpu", range(2))
    x = flow.tensor(torch.zeros(4, 4), placement=place, sbp=B)
    model = flow.nn.shard(nn.Linear(4, 4), {"*": B})
    with torch.no_grad():
        step = flow.compile(model, lambda model, x: model(x).sum(), placement=place).plan_for(x)
    assert step.explain().idle == ("nothing is split over axis 0: its 2 ranks do the same",)
