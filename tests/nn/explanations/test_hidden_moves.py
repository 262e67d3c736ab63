"""Hidden moves: by the order of a step, and by no more than that."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.boxing import between
from sbpflow.nn.explanations.hidden_moves import hidden_seconds
from sbpflow.nn.explanations.step_report import explained
from sbpflow.nn.graph.instructions.computing import Forward
from sbpflow.nn.graph.instructions.instruction import Instruction
from sbpflow.nn.graph.instructions.moves import MoveNow, StartMove, WaitForMove
from sbpflow.nn.graph.lower.registers import Transfer
from sbpflow.nn.graph.lower.segments import Segment
from sbpflow.nn.graph.run.program import Program
from sbpflow.placement.hardware import Level
from sbpflow.sbp import B, P, layout
from sbpflow.sbp.joint.op_cost import OpSeconds

WHERE = flow.placement("cpu:[0-3] as (data=4)")
X = torch.ones(64, 32)


@pytest.fixture(autouse=True)
def hosts() -> Iterator[None]:
    """Two hosts of two ranks, whose link is slow beside what they compute."""
    levels = (Level("host", 2, 1e-4, 5e8), Level("network", 2, 3e-4, 1e7))
    with flow.use_cluster(flow.Cluster("two hosts", levels, flow.cluster("cpu").device)):
        yield


def stage_of() -> Segment:
    step = flow.compile(nn.Linear(32, 8), lambda model, x: model(x).sum(), placement=WHERE)
    program = step.step_for(X).program
    assert isinstance(program, Program)
    return next(stage for stage in program.stages if isinstance(stage, Segment))


@pytest.mark.parametrize(
    ("todo", "share"),
    [
        ([MoveNow(0, (), ()), Forward(0, (), ())], 0.0),
        ([StartMove(0, (), ()), WaitForMove(0, (), ()), Forward(0, (), ())], 0.0),
        ([StartMove(0, (), ()), Forward(0, (), ()), WaitForMove(0, (), ())], 0.5),
        ([StartMove(0, (), ()), Forward(0, (), ()), Forward(0, (), ()), WaitForMove(0, (), ())], 1.0),
        ([StartMove(0, (), ()), StartMove(1, (), ()), Forward(0, (), ()), WaitForMove(0, (), ())], 0.5),
        ([StartMove(0, (), ()), Forward(0, (), ()), MoveNow(1, (), ()), WaitForMove(0, (), ())], 0.5),
    ],
    ids=["at once", "waited for", "half", "all", "the link is busy", "one behind the other"],
)
def test_a_move_is_hidden_as_far_as_something_is_computed_before_it_is_waited_for(
    todo: list[Instruction], share: float
) -> None:
    """A segment takes half as long as a move."""
    ends = layout(WHERE, P, (256, 64)), layout(WHERE, B, (256, 64))
    seconds = between(*ends).price.time
    stage = stage_of()
    costs = dict.fromkeys([op.outputs[0].name for op in stage.ops], OpSeconds(0.0, 0.0))
    costs[stage.ops[0].outputs[0].name] = OpSeconds(seconds / 2, seconds)
    found = hidden_seconds(todo, [stage], [Transfer((ends,)), Transfer((ends,))], costs)
    assert found == pytest.approx(share * seconds)


def test_a_step_over_a_slow_link_is_told_with_what_its_order_hides() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    data = "grid (data=4)\n**: data=S(0)\ninput x <- data=S(0)"
    step = flow.compile(model, lambda model, x: model(x).square().mean(), plan=data)
    report = explained(step.step_for(torch.ones(4096, 256)))
    assert report.hidden is not None
    assert 0 <= report.hidden < report.moving
    assert report.predicted == pytest.approx((report.compute or 0) + report.update + report.moving - report.hidden)
