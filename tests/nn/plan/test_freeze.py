"""Frozen parameters: a plan's `freeze` is `requires_grad_(False)` by hand, and costs no more than what is left."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sbpflow as flow
from sbpflow.placement.errors import SbpError

X, Y = torch.randn(16, 8, dtype=torch.float64), torch.randint(3, (16,))
FROZEN = "freeze layers.[:2]"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.up(x).relu())
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def by_hand(frozen: int = 2) -> Net:
    model = net()
    model.layers[:frozen].requires_grad_(False)
    return model


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)  # of all parameters, frozen ones too


def plain(model: Net, optimizer: torch.optim.Optimizer) -> float:
    """A step of torch on one device."""
    loss = loss_fn(model, X, Y)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def trains(model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if value.requires_grad}


PLANS = {
    "whole": "grid (data=2)",
    "zero1": "grid (data=2)\nstates **: data=S(0)\ninput * <- data=S(0)",
    "zero3": "grid (data=2)\n**: data=S(0)",
    "stages": "grid (pipe=2)\npipe layers over pipe by 1f1b, 4 micro-batches",
    "recomputed": "grid (data=2)\nrecompute layers.*",
    "cast": "grid (data=2)\ncast ** to fp64\nstates **: data=S(0)",
    "offloaded": "grid (data=2)\nstates **: data=S(0)\noffload states ** to cpu\noffload saved layers.* to cpu",
}


@pytest.mark.parametrize("name", PLANS)
def test_it_trains_as_one_device_that_froze_by_hand(name: str) -> None:
    model, wanted = net(), by_hand()
    mine, theirs = adamw(model), adamw(wanted)
    step = flow.compile(model, loss_fn, mine, plan=f"{PLANS[name]}\n{FROZEN}")
    for _ in range(3):
        assert step(X, Y).item() == pytest.approx(plain(wanted, theirs), rel=1e-12)
    assert trains(model) == trains(wanted)
    assert len(mine.state) == len(theirs.state)
    for (path, value), other in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert isinstance(value, flow.GlobalTensor)
        if other.requires_grad:
            assert torch.allclose(value.full_tensor(), other, rtol=0, atol=1e-9), path
        else:
            assert torch.equal(value.full_tensor(), other), path
            assert value.grad is None


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.update({str(func): 1} if "mm" in str(func) else {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("frozen", [0, 1, 4])
@pytest.mark.parametrize("more", ["", "recompute layers.*\n"], ids=["kept", "recomputed"])
def test_layers_before_which_nothing_trains_run_forward_once(frozen: int, more: str) -> None:
    model = net()
    freeze = f"freeze layers.[:{frozen}]" if frozen else ""
    step = flow.compile(model, loss_fn, adamw(model), plan=f"grid (data=1)\n{more}{freeze}")
    step(X, Y)
    with Products() as counted:
        step(X, Y)
    wanted, optimizer = by_hand(frozen), adamw(by_hand(frozen))
    with Products() as alone:
        plain(wanted, optimizer)
    again = 2 * (4 - frozen) if more else 0  # the products of each block that trains
    assert counted.seen["aten.addmm.default"] == 2 * 4 + 1 + again
    assert counted.seen["aten.mm.default"] == alone.seen["aten.mm.default"]
    assert step.explain().recomputed[1] == (4 - frozen if more else 0)


def test_nothing_is_kept_of_them() -> None:
    many, labels = torch.randn(512, 8, dtype=torch.float64), torch.randint(3, (512,))
    kept = []
    for frozen in range(4):
        model = net()
        freeze = f"freeze layers.[:{frozen}]" if frozen else ""
        step = flow.compile(model, loss_fn, adamw(model), plan=f"grid (data=1)\n{freeze}").plan_for(many, labels)
        memory = step.explain().memory
        assert memory is not None
        kept.append(memory.ranks[0])
    shed = [before.activations - after.activations for before, after in pairwise(kept[1:])]
    assert min(shed) >= many.nbytes  # what comes into a block, at least
    assert kept[2].states < kept[1].states < kept[0].states
    assert kept[2].gradients < kept[1].gradients < kept[0].gradients


def test_a_stage_that_is_frozen_has_no_backward_and_gets_no_gradient() -> None:
    model = net()
    text = "grid (pipe=2)\nplace layers.[:2] at pipe=0\nplace {layers.[2:],head} at pipe=1\n"
    moves = flow.Plan.read(f"{text}{FROZEN}\nexpect no transfer backward").check(model, (X, Y), loss_fn=loss_fn)
    assert moves.findings[0].holds
    with pytest.raises(SbpError, match="does not hold: 1 transfer"):
        flow.Plan.read(f"{text}expect no transfer backward").check(model, (X, Y), loss_fn=loss_fn)


def test_a_gradient_goes_through_what_is_frozen_behind_what_trains() -> None:
    model, wanted = net(), net()
    wanted.layers[1:].requires_grad_(False)
    step = flow.compile(model, loss_fn, adamw(model), plan="grid (data=2)\nfreeze layers.[1:]")
    theirs = adamw(wanted)
    for _ in range(3):
        assert step(X, Y).item() == pytest.approx(plain(wanted, theirs), rel=1e-12)
    assert trains(model) == trains(wanted) != set()


def test_it_is_told() -> None:
    model = net()
    step = flow.compile(model, loss_fn, adamw(model), plan=f"grid (data=2)\n{FROZEN}")
    line = "frozen  8 of 18 parameters, 3.31 KiB: no gradients, no states"
    assert line in str(step.plan_for(X, Y).explain())
    assert line.replace("  ", ": ") in step.explain().full()
    checked = flow.Plan.read(f"grid (data=2)\n{FROZEN}").check(net(), (X, Y), loss_fn=loss_fn)
    assert line.replace("  ", " ") in str(checked)
    assert FROZEN in str(step.plan)
    assert "frozen" not in str(flow.compile(net(), loss_fn, plan="grid (data=2)").plan_for(X, Y).explain())


def test_a_check_and_a_planner_leave_the_model_as_it_is() -> None:
    model = net()
    before = trains(model)
    plan = flow.Plan.read(f"grid (data=2)\n{FROZEN}")
    plan.check(model, (X, Y), loss_fn=loss_fn)
    found = flow.find_plan(model, (X, Y), loss_fn=loss_fn, plan=plan)
    assert FROZEN in str(found)
    assert found.checked.report.frozen.startswith("8 of 18")
    assert trains(model) == before


def test_a_plan_that_fails_freezes_nothing() -> None:
    model = net()
    before = trains(model)
    with pytest.raises(SbpError, match="line 3: offload: weights rest"):
        flow.compile(model, loss_fn, plan=f"grid (data=2)\n{FROZEN}\noffload weights ** to cpu")
    assert trains(model) == before


def test_it_stays_under_another_plan_as_by_hand() -> None:
    model = net()
    flow.compile(model, loss_fn, adamw(model), plan=f"grid (data=2)\n{FROZEN}")(X, Y)
    step = flow.compile(model, loss_fn, adamw(model), plan="grid (data=2)\nstates **: data=S(0)")
    step(X, Y)
    assert trains(model) == trains(by_hand())
    model.requires_grad_(True)
    step(X, Y)
    assert "frozen" not in str(step.explain())


def refused(model: nn.Module, optimizer: torch.optim.Optimizer, line: str) -> list[str]:
    with pytest.raises(SbpError) as caught:
        flow.compile(model, loss_fn, optimizer, plan=f"grid (data=2)\n{line}")
    return str(caught.value).split("\n")


def test_a_path_that_meets_nothing_is_refused() -> None:
    model = net()
    assert refused(model, adamw(model), "freeze layer.*") == [
        "plan, line 2: Net has nothing called layer.*",
        "  2 | freeze layer.*",
        "             ^",
        "  did you mean 'layers.*'?",
    ]
    bare = nn.Sequential(nn.Linear(8, 3), nn.ReLU()).double()
    assert refused(bare, adamw(bare), "freeze 1")[0] == "plan, line 2: 1 has no parameters"


def test_a_parameter_of_which_an_optimizer_has_states_is_refused() -> None:
    model = net()
    optimizer = adamw(model)
    plain(model, optimizer)
    wanted = [
        "plan, line 2: layers.0.up.weight is trained already: AdamW has states of it",
        "  2 | freeze layers.[:2]",
        "             ^",
        "  give the step a new AdamW of the parameters that train on, or leave layers.0.up.weight out of this line",
    ]
    assert refused(model, optimizer, FROZEN) == wanted
    assert trains(model) == trains(net())
    step = flow.compile(model, loss_fn, optimizer, plan="grid (data=2)\nstates **: data=S(0)")
    step(X, Y)  # whose states are of pieces now
    with pytest.raises(SbpError) as caught:
        step.move(f"grid (data=2)\n{FROZEN}")
    assert str(caught.value).split("\n") == wanted
    with pytest.raises(SbpError, match="AdamW has states of it"):
        flow.Plan.read(f"grid (data=2)\n{FROZEN}").check(model, (X, Y), loss_fn=loss_fn, optimizer=optimizer)
    step(X, Y)
    new = torch.optim.AdamW(model.layers[2:].parameters())
    flow.compile(model, loss_fn, new, plan=f"grid (data=2)\n{FROZEN}")(X, Y)
    assert trains(model) == trains(by_hand())


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.SGD, torch.optim.RMSprop])
def test_an_optimizer_that_has_not_stepped_yet_is_none_that_trains(kind: Any) -> None:
    model, more = net(), {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=1e-2, **more)
    flow.compile(model, loss_fn, optimizer, plan="grid (data=2)\nfreeze layers.0\nfreeze layers.1")(X, Y)
    assert "is trained already" in refused(model, optimizer, "freeze head")[0]


def test_a_checkpoint_goes_on(tmp_path: Path) -> None:
    text = f"grid (data=2)\nstates **: data=S(0)\n{FROZEN}"
    model, other = net(), net()
    mine, theirs = adamw(model), adamw(other)
    step = flow.compile(model, loss_fn, mine, plan=text)
    step(X, Y)
    flow.save(tmp_path / "one", model, optimizer=mine, plan=step, step=1)
    wanted = [step(X, Y).item() for _ in range(2)]
    flow.load(tmp_path / "one", other, optimizer=theirs)
    again = flow.compile(other, loss_fn, theirs, plan=text.replace("data=2", "data=4"))
    assert [again(X, Y).item() for _ in range(2)] == pytest.approx(wanted, rel=1e-12)
    assert trains(other) == trains(by_hand())
