"""Gradient accumulation by a line of a plan: a batch in parts has the losses and weights of the whole."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.placement.errors import SbpError

INPUTS = "input x <- data=S(0)\ninput y <- data=S(0)"
X, Y = torch.randn(14, 8, dtype=torch.float64), torch.randint(4, (14,))  # parts of four and three samples


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).double()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(plan: str, y: Tensor = Y, **options: Any) -> tuple[list[float], nn.Module, Any]:
    model = net()
    step = flow.compile(model, loss_fn, adamw(model), plan=plan, **options)
    return [step(X, y).item() for _ in range(3)], model, step


def in_torch(y: Tensor = Y) -> tuple[list[float], nn.Module]:
    model = net()
    optimizer, losses = adamw(model), []
    for _ in range(3):
        loss = loss_fn(model, X, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("rest", ["", "states **: data=S(0)", "**: data=S(0)", "recompute *"])
def test_a_batch_in_parts_trains_as_a_whole_one(rest: str) -> None:
    y = torch.where(Y > 2, -100, Y)  # parts have unequally many targets that count
    losses, model, _ = trained(f"grid (data=2)\n{INPUTS}\n4 micro-batches\n{rest}", y)
    wanted, plain = in_torch(y)
    assert losses == pytest.approx(wanted, rel=1e-12)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine, flow.GlobalTensor)
        torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-9, atol=1e-12)


def test_gradients_meet_once_a_step_and_one_part_is_kept() -> None:
    whole, four = (trained(f"grid (data=2)\n{INPUTS}\n{line}")[2] for line in ("", "4 micro-batches"))
    with flow.record() as parts:
        four(X, Y)
    with flow.record() as once:
        whole(X, Y)
    gradients = [sum(move.bytes for move in log if move.bytes > 8) for log in (parts, once)]  # and no loss
    assert gradients[0] == gradients[1] > 0

    big = torch.randn(512, 8, dtype=torch.float64), torch.randint(4, (512,))
    plans = {many: flow.Plan.read(f"grid (data=2)\n{INPUTS}\n{many} micro-batches") for many in (1, 8)}
    peaks = {many: plan.check(net(), big, loss_fn=loss_fn).memory for many, plan in plans.items()}
    assert peaks[8] < peaks[1] / 3


def test_one_micro_batch_is_a_step_that_runs_as_one_function() -> None:
    losses, _, step = trained(f"grid (data=2)\n{INPUTS}\n1 micro-batches")
    assert losses == pytest.approx(in_torch()[0], rel=1e-12)
    assert step.planned.plan.pieces is None


@pytest.mark.parametrize("lines", ["4 micro-batches\nPIPE", "PIPE\n4 micro-batches"], ids=["before", "behind"])
def test_a_pipeline_may_leave_its_number_to_the_line(lines: str) -> None:
    losses, _, step = trained("grid (pipe=2)\n" + lines.replace("PIPE", "pipe * over pipe by 1f1b"))
    assert losses == pytest.approx(in_torch()[0], rel=1e-12)
    assert len(step.planned.plan.pieces.kinds) == 4


@pytest.mark.parametrize("lines", ["4 micro-batches\nPIPE", "PIPE\n4 micro-batches"], ids=["before", "behind"])
def test_two_numbers_are_an_error(lines: str) -> None:
    plan = "grid (pipe=2)\n" + lines.replace("PIPE", "pipe * over pipe by 1f1b, 8 micro-batches")
    with pytest.raises(SbpError, match="how many micro-batches already"):
        flow.compile(net(), loss_fn, plan=plan)
    with pytest.raises(SbpError, match="micro_batches= is given beside a plan that says it too"):
        flow.compile(net(), loss_fn, plan="grid (data=2)\n4 micro-batches", micro_batches=8)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0 micro-batches", "0 is out of range\n  2 | 0 micro-batches\n      ^\n  give 1 or more"),
        ("16", "found the end of the line"),
        ("sixteen micro-batches", "found"),
    ],
)
def test_what_is_no_number_of_parts_is_refused(line: str, said: str) -> None:
    with pytest.raises(SbpError) as caught:
        flow.Plan.read(f"grid (data=2)\n{line}")
    assert said in str(caught.value)


def test_a_batch_that_is_too_small_is_refused() -> None:
    model = net()
    step = flow.compile(model, loss_fn, plan=f"grid (data=2)\n{INPUTS}\n16 micro-batches")
    with pytest.raises(SbpError, match="was given a batch of 14"):
        step(X, Y)


def test_the_answer_of_the_planner_has_the_line() -> None:
    found = flow.find_plan(
        copy.deepcopy(net()), (X, Y), plan=f"grid (data=2)\n{INPUTS}\n4 micro-batches", loss_fn=loss_fn
    )
    assert "4 micro-batches" in str(found).splitlines()


def test_a_step_made_by_hand_is_told_as_the_line() -> None:
    step = flow.compile(net(), loss_fn, placement=flow.placement("cpu", range(2), names=("data",)), micro_batches=4)
    step(X, Y)
    assert "4 micro-batches" in str(step.plan).splitlines()


def dropping() -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.5), net())


def drawn(line: str, **options: Any) -> tuple[float, Any]:
    """The loss of a step whose numbers are seeded, and the step."""
    torch.manual_seed(0)
    model = dropping()
    step = flow.compile(model, loss_fn, plan=f"grid (data=2)\n{INPUTS}\n{line}", **options)
    torch.manual_seed(1)
    return step(X, Y).item(), step


def test_parts_draw_the_numbers_of_the_batch_or_their_own_as_the_plan_says() -> None:
    torch.manual_seed(0)
    model = dropping()
    torch.manual_seed(1)
    whole = loss_fn(model, X, Y).item()
    of_batch, own = drawn("4 micro-batches\ndraw by batch")[0], drawn("4 micro-batches\ndraw by micro-batch")
    assert drawn("4 micro-batches")[0] == of_batch == pytest.approx(whole, rel=1e-12)
    assert own[0] != pytest.approx(whole, rel=1e-6)
    assert own[0] == drawn("4 micro-batches", draws="micro_batch")[0]
    assert "draw by micro-batch" in str(own[1].plan)


def test_whose_numbers_are_drawn_is_said_of_a_batch_in_parts_alone() -> None:
    """The line is shown by a check, too; and micro-batches beside the plan do."""
    lines = f"grid (data=2)\n{INPUTS}\ndraw by micro-batch"
    for tried in (lambda: drawn("draw by micro-batch"), lambda: flow.Plan.read(lines).check(dropping(), (X, Y))):
        with pytest.raises(SbpError, match="draw is said of a step that has none") as caught:
            tried()
        assert str(caught.value).startswith("plan, line 4: ")
        assert "  4 | draw by micro-batch\n              ^\n  say micro_batches=, or `16 micro-b" in str(caught.value)
    drawn("draw by micro-batch", micro_batches=4)
