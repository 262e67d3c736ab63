"""Generated functions under torch's profiler: a trace names modules and moves, and without one there are no spans."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import sbpflow as flow

PLAN = "grid (data=2, tensor=2)\nup.weight: tensor=S(0)\ndown.weight: tensor=S(1)\ninput x <- data=S(0)\nhold **"
PIPE = "grid (pipe=2, data=2)\npipe layers over pipe by {}, 4 micro-batches"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.up(x).relu())
        return made


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def step_of(net: nn.Module, plan: str) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return flow.compile(net, lambda net, x: torch.as_tensor(net(x).square().mean()), optimizer, plan=plan)


def spans(run: Callable[[], Any]) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    found = sorted(seen.events(), key=lambda event: event.time_range.start)
    return [event.name for event in found if event.name.split(" ")[0] in ("forward", "backward", "move")]


def test_a_trace_names_modules_and_moves_in_their_order() -> None:
    step, x = step_of(Net(), PLAN), torch.ones(4, 4)
    step(x)
    found = spans(lambda: step(x))
    assert found[0] == "forward up, down"
    assert found[1] == "move down.linear: (S(0), P) -> (S(0), S(0)) by reduce_scatter"
    assert any(name.startswith("backward ") for name in found)
    assert [name for name in found if "gradient of up.weight" in name]


def test_no_span_is_entered_while_no_profiler_records(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    def enter(span: record_function) -> record_function:
        entered.append(span.name)
        return span

    monkeypatch.setattr(record_function, "__enter__", enter)
    monkeypatch.setattr(record_function, "__exit__", lambda *of: None)
    step, x = step_of(Net(), PLAN), torch.ones(4, 4)
    for _ in range(3):
        step(x)
    assert not [name for name in entered if not name.startswith("Optimizer")]  # torch's own have theirs at all times
    with profile(activities=[ProfilerActivity.CPU]):
        step(x)
    assert [name for name in entered if name.startswith("forward")]


def test_a_step_computes_the_same_under_a_profiler() -> None:
    x = torch.ones(4, 4)
    one, other = step_of(Net(), PLAN), step_of(Net(), PLAN)
    alone = [one(x).item() for _ in range(3)]
    with profile(activities=[ProfilerActivity.CPU]):
        watched = [other(x).item() for _ in range(3)]
    assert watched == alone


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_threads_of_a_pipeline_are_in_a_trace_of_all_threads(schedule: str) -> None:
    step, x = step_of(Layers(), PIPE.format(schedule)), torch.ones(8, 4)
    step(x)
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as seen:
        step(x)
    names = [event.name for event in seen.events()]
    assert {*names} >= {f"forward layers.{at}" for at in range(4)}
    assert [name for name in names if name.startswith("backward")]
