"""Pathways: several programs on shared ranks, in the order in which they are launched, ahead of what they compute."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import sbpflow as flow
from sbpflow.nn.graph.launches import Launch
from sbpflow.placement.errors import SbpError
from tests.ranks import Ranks

LIMIT = 20.0  # seconds that a gate waits at most


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


class Program:
    """A model on some ranks, its optimizer with a schedule of rates, and its step."""

    def __init__(self, ranks: list[int], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(8, 8)
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        where = flow.placement("cpu", ranks)
        self.step = flow.compile(self.model, loss_fn, self.optimizer, placement=where, name=f"on {ranks}")


class Gate:
    """A program that holds those behind it until it is opened, and changes nothing."""

    launch_name = "gate"

    def __init__(self) -> None:
        self.event = threading.Event()

    def watched(self) -> tuple[()]:
        return ()

    def __call__(self) -> None:
        self.event.wait(LIMIT)


def batch(at: int) -> Tensor:
    return torch.full((4, 8), at / 3 + 1)


def names(launch: Launch, what: str) -> list[str]:
    return [event.name for event in launch.events if event.what == what]


def test_steps_are_launched_before_those_before_them_end() -> None:
    gate, one = Gate(), Program([0, 1])
    with flow.ahead() as launch:
        launch(one.step, batch(0))
        launch(gate)
        losses = [launch(one.step, batch(at)) for at in range(1, 4)]
        assert len(names(launch, "launched")) == 5
        assert not any(loss.done for loss in losses)
        assert names(launch, "ended") == ["on [0, 1]"]
        assert "under way" in repr(losses[0])
        gate.event.set()
        losses[2].value()
        assert all(loss.done for loss in losses)
    assert names(launch, "began") == names(launch, "ended") == names(launch, "launched")


def test_two_programs_on_shared_ranks_compute_what_they_do_alone() -> None:
    def losses(ahead: bool) -> list[float]:
        first, second = Program([0, 1], 0), Program([1, 2], 1)
        found: list[Any] = []
        if not ahead:
            for at in range(3):
                found += [first.step(batch(at)), second.step(batch(at))]
                first.scheduler.step()
            return [float(loss) for loss in found]
        x = torch.empty(4, 8)
        with flow.ahead(most=100) as launch:
            for at in range(3):
                x.copy_(batch(at))  # arguments are as they are at the launch
                found += [launch(first.step, x), launch(second.step, x)]
                launch(first.scheduler.step)
        assert names(launch, "ended") == ["on [0, 1]", "on [1, 2]", "step"] * 3
        return [float(loss) for loss in found]

    assert losses(ahead=True) == losses(ahead=False)


def test_a_result_is_an_argument_of_the_next_program() -> None:
    program = Program([0, 1])
    step = flow.compile(copy.deepcopy(program.model), placement=flow.placement("cpu", [1, 2]))
    with flow.ahead() as launch, torch.no_grad():
        first = launch(step, batch(0))
        second = launch(step, first)
    wanted = program.model(program.model(batch(0)))
    assert torch.allclose(second.value().full_tensor(), wanted, atol=1e-6)


def test_who_reads_or_writes_weights_waits() -> None:
    gate, one, alone = Gate(), Program([0, 1]), Program([0, 1])
    for program in (one, alone):
        program.step(batch(0))
    with flow.ahead() as launch:
        launch(gate)
        later = [launch(one.step, batch(at)) for at in range(1, 3)]
        threading.Timer(0.05, gate.event.set).start()
        weight = one.model.weight.detach().full_tensor()  # type: ignore[attr-defined]
        assert all(each.done for each in later)
    for at in range(1, 3):
        alone.step(batch(at))
    assert torch.equal(weight, alone.model.weight.detach().full_tensor())  # type: ignore[attr-defined]


def test_a_step_that_is_called_waits_for_those_that_are_launched() -> None:
    one, alone = Program([0, 1]), Program([0, 1])
    with flow.ahead() as launch:
        found: list[Any] = [launch(one.step, batch(0)), launch(one.step, batch(1))]
        found.append(one.step(batch(2)))
    assert [float(x) for x in found] == [float(alone.step(batch(at))) for at in range(3)]


def test_no_more_than_so_many_are_under_way() -> None:
    one = Program([0, 1])
    with flow.ahead(most=2) as launch:
        for at in range(6):
            launch(one.step, batch(at))
    under_way = most = 0
    for event in launch.events:
        under_way += {"launched": 1, "ended": -1}.get(event.what, 0)
        most = max(most, under_way)
    assert most <= 2 + 1  # one may have ended, and be counted a moment later


def test_an_error_comes_where_its_result_is_asked_for_and_nothing_runs_behind_it() -> None:
    gate, one = Gate(), Program([0, 1])
    one.step(batch(0))
    with flow.ahead() as launch:
        launch(gate)
        good = launch(one.step, batch(1))
        bad = launch(one.step, torch.ones(4, 7))
        behind = launch(one.step, batch(2))
        gate.event.set()
        good.value()
        with pytest.raises(Exception, match="7") as caught:
            bad.value()
        assert any("on [0, 1], launched as 2 at" in note for note in caught.value.__notes__)
        with pytest.raises(SbpError, match=r"launched as 3 at (.|\n)*was not run(.|\n)*launched as 2"):
            behind.value()
        with pytest.raises(SbpError, match="nothing is launched behind it"):
            launch(one.step, batch(3))


def test_an_error_of_which_nobody_heard_is_raised_at_the_end() -> None:
    one = Program([0, 1])
    with pytest.raises(Exception, match="7"), flow.ahead() as launch:
        launch(one.step, torch.ones(4, 7))


def test_what_has_not_begun_is_left_out_when_the_block_fails() -> None:
    gate, one, later = Gate(), Program([0, 1]), list[Any]()
    one.step(batch(0))

    def block() -> None:
        with flow.ahead() as launch:
            launch(gate)
            later.append(launch(one.step, batch(1)))
            threading.Timer(0.05, gate.event.set).start()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        block()
    with pytest.raises(SbpError, match="ended by an error"):
        later[0].value()


CHANGED = {
    "a rate": "launch\\(scheduler.step\\)",
    "a mode": "launch\\(scheduler.step\\)",
    "an argument": "was written to",
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_is_changed_behind_the_back_of_a_launch_is_an_error(what: str) -> None:
    gate, one = Gate(), Program([0, 1])
    x = flow.tensor(batch(0), placement=flow.placement("cpu", [0, 1]), sbp=flow.B)
    one.step(x)
    shard = x.to_local()[0]

    def block() -> None:
        with flow.ahead() as launch:
            launch(gate)
            launch(one.step, x)
            if what == "a rate":
                one.scheduler.step()
            elif what == "a mode":
                one.model.eval()
            else:
                shard.zero_()
            gate.event.set()

    with pytest.raises(SbpError, match=CHANGED[what]):
        block()


def test_bad_calls_are_refused() -> None:
    one = Program([0, 1])
    with pytest.raises(SbpError, match="most=0"):
        flow.ahead(most=0)
    with flow.ahead() as launch:
        with pytest.raises(SbpError, match="another is open"), flow.ahead():
            pass
        with pytest.raises(SbpError, match="that is no program"):
            launch(batch(0))  # type: ignore[arg-type]
        inner = launch(lambda: launch(one.step, batch(0)))
        with pytest.raises(SbpError, match="a launched program launches"):
            inner.value()
    with pytest.raises(SbpError, match="has ended"):
        launch(one.step, batch(0))
    one.step(batch(0))


def test_a_move_waits_for_what_is_launched() -> None:
    one, alone = Program([0, 1]), Program([0, 1])
    with flow.ahead() as launch:
        found = [launch(one.step, batch(at)) for at in range(2)]
        one.step.move(placement=flow.placement("cpu", [2, 3]))
        found += [launch(one.step, batch(at)) for at in range(2, 4)]
    assert [float(x) for x in found] == [float(alone.step(batch(at))) for at in range(4)]
    assert one.model.weight.placement.flat == (2, 3)  # type: ignore[attr-defined]


def on_ranks() -> tuple[list[float], list[str]]:
    first, second, third = Program([0, 1], 0), Program([1, 2], 1), Program([3], 2)
    stages = [flow.placement("cpu", [2]), flow.placement("cpu", [3])]
    piped = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    flow.nn.pipeline(piped, stages)
    fourth = flow.compile(piped, loss_fn, optim.SGD(piped.parameters(), lr=0.1), micro_batches=2, name="stages")
    found = []
    with flow.ahead(most=100) as launch:
        for at in range(4):
            found += [launch(each, batch(at)) for each in (third.step, second.step, fourth, first.step)]
    return [float(loss) for loss in found], names(launch, "ended")


def test_real_ranks_run_programs_in_one_order(ranks4: Ranks) -> None:
    found = ranks4(on_ranks)
    assert all(each == found[0] for each in found)
    assert found[0][0] == pytest.approx(on_ranks()[0], abs=1e-6)
