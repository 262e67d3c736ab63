"""Changes that a forward makes to Python's values beside its tensors come at each step, and count at the next one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow

COUNT = 0
SHARED = {"n": 1.0}


class Counting(nn.Module):
    """A layer that counts, notes and keeps, as its function says."""

    def __init__(self, does: Callable[[Any], float]) -> None:
        super().__init__()
        self.does = does
        self.count, self.log, self.kept, self.noted, self.first = 0, list[int](), dict[str, Any](), set[str](), True
        self.gone: int | None = 3

    def forward(self, x: Tensor) -> Tensor:
        return x + self.does(self)

    def held(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name in STATE}


STATE = ("count", "log", "kept", "noted", "first", "gone", "shape")


def counted(s: Any) -> float:
    s.count += 1
    return float(s.count)


def listed(s: Any) -> float:
    s.log.append(len(s.log))
    return float(len(s.log))


def named(s: Any) -> float:
    s.kept["n"] = s.kept.get("n", 0) + 2
    return float(s.kept["n"])


def once(s: Any) -> float:
    if s.first:
        s.first = False
        return 5.0
    return 6.0


def written(s: Any) -> float:
    s.shape = (2, 3)
    s.noted.add("x")
    return 1.0


def removed(s: Any) -> float:
    had = hasattr(s, "gone")
    if had:
        del s.gone
    return float(had)


def of_file(s: Any) -> float:
    global COUNT
    COUNT += 1
    return float(COUNT)


def of_dict(s: Any) -> float:
    SHARED["n"] *= 2.0
    return SHARED["n"]


DEEDS = [counted, listed, named, once, written, removed, of_file, of_dict]


def run(does: Callable[[Any], float], ranks: int | None) -> tuple[list[Tensor], list[dict[str, Any]]]:
    global COUNT
    COUNT, SHARED["n"] = 0, 1.0
    model = nn.Sequential(*(Counting(does) for _ in range(3)))
    step: Any = model if ranks is None else flow.compile(model, placement=flow.placement("cpu", range(ranks)))
    found = [step(torch.zeros(2, 3)) for _ in range(5)]
    whole = [x.full_tensor() if isinstance(x, flow.GlobalTensor) else x for x in found]
    return whole, [layer.held() for layer in model if isinstance(layer, Counting)]


@pytest.mark.filterwarnings("ignore:.*for the 4th time")
@pytest.mark.sampled(8)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("does", DEEDS, ids=lambda does: does.__name__)
def test_what_a_forward_counts_and_keeps_is_as_in_torch(does: Callable[[Any], float], ranks: int) -> None:
    (found, held), (wanted, kept) = run(does, ranks), run(does, None)
    assert all(map(torch.equal, found, wanted))
    assert held == kept


def test_a_plan_alone_does_nothing_to_a_model() -> None:
    model = Counting(counted)
    step = flow.compile(model, placement=flow.placement("cpu", range(2)))
    step.plan_for(torch.zeros(2, 3)).plan_for(torch.zeros(2, 3))
    assert model.count == 0


def test_a_count_that_a_forward_goes_by_is_told_of_as_it_is_captured_each_time() -> None:
    step = flow.compile(Counting(counted), placement=flow.placement("cpu", range(2)))
    with pytest.warns(UserWarning, match=r"for the 4th time.*\n?.*count of the model"):
        [step(torch.zeros(2, 3)) for _ in range(5)]


def test_what_a_forward_writes_and_nobody_reads_is_captured_once() -> None:
    model = Counting(written)
    step = flow.compile(model, placement=flow.placement("cpu", range(2)))
    plans = []
    for _ in range(3):
        vars(model).pop("shape", None)
        step(torch.zeros(2, 3))
        plans.append(step.planned)
    assert model.held()["shape"] == (2, 3)
    assert plans[-1] is plans[-2]
