"""A step for a card that this machine lacks is captured as it would be there."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.boxing.graph.physical import Op, Physical
from sbpflow.placement.device import family

pytestmark = pytest.mark.skipif(family("cuda").here, reason="this machine has such a card")
CARDS = flow.placement("cuda", range(4))
aten = torch.ops.aten


class Step(nn.Module):
    def __init__(self, course: Any, *sizes: int) -> None:
        super().__init__()
        self.course = course
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.course(self, x)
        return made


def planned(course: Any, placement: flow.Placement = CARDS) -> Physical:
    model = Step(course)
    graph = flow.compile(
        model, lambda m, x: m(x).float().mean(), torch.optim.SGD(model.parameters()), placement=placement
    )
    return graph.plan_for(torch.zeros(32, 64)).physical


def types(graph: Physical) -> dict[str, set[torch.dtype]]:
    found: dict[str, set[torch.dtype]] = {}
    for op in (step for step in graph.steps if isinstance(step, Op)):
        found.setdefault(str(op.op), set()).update(y.layout.dtype for y in op.outputs)
    return found


def named(model: Step, x: Tensor) -> Any:
    y = (
        model.first(x.cuda(non_blocking=True))
        + torch.rand(64, device="cuda")
        + torch.ones(64, device=torch.device("cuda", 1))
    )
    bias = torch.tensor(2.0).to("cuda")
    return model.last(y.to(device="cuda:0", dtype=torch.float32)) + bias.cuda(0) + y.new_zeros(8, device="cuda")


def test_a_step_may_name_the_card() -> None:
    assert {"aten.rand.default", "aten.linear.default"} <= types(planned(named)).keys()


def counted(model: Step, x: Tensor) -> Tensor:
    """As experts of transformers count their tokens: cards count whole numbers, and the host floats alone."""
    assert torch.cuda.get_device_capability(x.device) == (9, 0)
    ids = x.argmax(-1)
    held = ids.float() if x.device.type == "cpu" else ids.int()
    counts = torch.histc(held, bins=64, min=0, max=63)
    assert counts.dtype is held.dtype is torch.int32
    found: Tensor = model.last(model.first(x) * (held.histc(64, max=63) + counts))
    return found


def test_whole_numbers_are_counted_on_it() -> None:
    before = torch.cuda.get_device_capability
    assert "aten.histc.default" in types(planned(counted))
    assert torch.cuda.get_device_capability is before


def test_tensors_say_that_they_are_on_it() -> None:
    asked: list[Any] = []

    def course(model: Step, x: Tensor) -> Any:
        asked.extend([x.device, x.is_cuda, x.is_cpu, model.first.weight.device.type])
        with torch.device(x.device):
            more = torch.ones(8)
        return model.last(x) + more + torch.zeros(8, device=x.device)

    planned(course)
    assert asked == [torch.device("cuda", 0), True, False, "cuda"]


@pytest.mark.filterwarnings("error")
def test_autocast_casts_as_on_the_card() -> None:
    def course(model: Step, x: Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            y = model.norm(model.first(x))
            with torch.autocast(x.device.type, enabled=False):
                y = model.first(y)
            return model.last(y).softmax(-1)

    found = types(planned(course))
    assert found["aten.linear.default"] == {torch.bfloat16, torch.float32}
    assert found["aten.layer_norm.default"] == found["aten.softmax.int"] == {torch.float32}


def test_its_own_type_is_what_autocast_takes_there() -> None:
    def course(model: Step, x: Tensor) -> Any:
        with torch.autocast("cuda"):
            return model.last(x)

    assert types(planned(course))["aten.linear.default"] == {torch.float16}


def test_autocast_of_the_host_leaves_it_alone() -> None:
    def course(model: Step, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model.last(x)

    assert types(planned(course))["aten.linear.default"] == {torch.float32}


def test_nothing_of_it_is_left_behind() -> None:
    begin, device = torch.autocast.__init__, torch._subclasses.FakeTensor.device
    planned(named)
    assert (torch.autocast.__init__, torch._subclasses.FakeTensor.device) == (begin, device)
    assert not torch.is_autocast_enabled("cuda")
