"""Steps by a plan: they train as one device does, rest as the plan says, and tell the plan that runs."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.boxing.graph.physical import Op
from sbpflow.nn.plan.grids import grids_of
from sbpflow.nn.plan.language.plan_text import PlanText
from sbpflow.placement.errors import SbpError, SbpflowError
from sbpflow.sbp.logical import SavedOffload
from tests.ranks import Ranks

X, Y = torch.randn(16, 8, dtype=torch.float64), torch.randint(3, (16,))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 3)).double()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def alone(steps: int = 5) -> tuple[list[float], nn.Module]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = loss_fn(model, X, Y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses, model


PLANS = {
    "ddp": "grid (data=4)\ninput * <- data=S(0)\nexpect no all_gather",
    "zero1": "grid (data=4)\nstates **: data=S(0)\ninput * <- data=S(0)\nexpect 3 all_gather over data update",
    "zero2": "grid (data=4)\n{grads,states} **: data=S(0)\nexpect 3 all_gather update",
    "zero3": "grid (data=4)\n**: data=S(0)",
    "hsdp": "grid (replica=2, data=2)\n**: data=S(0)\ninput * <- replica=S(0), data=S(0)",
    "uneven": "grid (data=3)\n**: data=S(0)",
    "tensor": "grid (data=2, tensor=2)\n0: tensor=S(0)\n2.weight: tensor=S(1)\nstates **: data=S(0)",
    "sequence": "grid (tensor=2)\n0: tensor=S(0)\n1 -> tensor=S(1)\n2.weight: tensor=S(1)\n2 -> tensor=S(0)",
    "stages": "grid (pipe=2, data=2)\npipe {0,1,2} over pipe by 1f1b, 4 micro-batches\nstates **: data=S(0)",
    "placed": "grid (pipe=2)\nplace {0,1} at pipe=0\nplace 2 at pipe=1",
    "chosen": "grid (data=2, tensor=2)\n**: ?",
    "a part chosen": "grid (data=2, tensor=2)\n**: data=S(0), tensor=?",
    "within a limit": "grid (data=4)\nlimit memory 100 KiB",
    "recomputed": "grid (data=2)\nrecompute **\n**: data=S(0)",
    "wide": "grid (data=2)\ncast ** to fp64\nstates **: data=S(0)",
    "offloaded": "grid (data=4)\nstates **: data=S(0)\noffload states ** to cpu\noffload saved ** to cpu ahead 2",
    "on disk": "grid (data=2)\noffload states 0 to disk\noffload states 2.bias to disk\noffload saved {0,1} to disk",
    "folded": "grid (data=4, other=2 folds data)\n0: other=S(0)\n2: data=S(0)",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_as_one_device_does(name: str) -> None:
    model = net()
    step = flow.compile(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=PLANS[name])
    losses, wanted = alone()
    assert [step(X, Y).item() for _ in losses] == pytest.approx(losses, rel=1e-12)
    for mine, other in zip(model.parameters(), wanted.parameters(), strict=True):
        assert isinstance(mine, flow.GlobalTensor)
        assert torch.allclose(mine.full_tensor(), other, rtol=0, atol=1e-6 if "S" in str(mine.sbp) else 1e-9)


def test_what_a_plan_offloads_lies_there() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = "grid (data=2)\noffload states 0 to cpu\noffload states 2.bias to disk\noffload saved {0,1} to disk ahead 2"
    step = flow.compile(model, loss_fn, optimizer, plan=text).plan_for(X, Y)
    places = {s.value.name: s.offload for s in step.physical.sources if s.kind == "parameter"}
    assert places == {"0.weight": "cpu", "0.bias": "cpu", "2.weight": None, "2.bias": "disk"}
    saved = {op.origin.module: op.origin.offload for op in step.physical.steps if isinstance(op, Op)}
    assert saved["0"] == saved["1"] == SavedOffload("disk", 2)
    assert saved["2"] is None
    memory = step.explain().memory
    assert memory is not None
    assert memory.ranks[0].host > 0
    with pytest.raises(
        SbpError, match=r"line 2: offload: .*'0.weight'\n(?s:.*)0.weight is a parameter: name the module"
    ):
        flow.compile(net(), loss_fn, plan="grid (data=2)\noffload saved 0.weight to cpu")
    taken = flow.compile(net(), loss_fn, plan=text.replace("saved {0,1} to disk ahead 2", "saved 1 to cpu"))
    assert taken(X, Y).item() == pytest.approx(alone(1)[0][0], rel=1e-12)


@pytest.mark.parametrize("name", ["zero1", "tensor", "chosen", "a part chosen", "stages", "folded"])
def test_the_plan_of_a_step_says_all_that_was_left_open_and_gives_the_same_step(name: str) -> None:
    model, again = net(), net()
    step = flow.compile(model, loss_fn, torch.optim.AdamW(model.parameters()), plan=PLANS[name])
    assert str(step.plan) == PLANS[name]  # before anything is known
    found = step.plan_for(X, Y).plan
    assert "?" not in str(found.without_comments())
    other = flow.compile(again, loss_fn, torch.optim.AdamW(again.parameters()), plan=str(found)).plan_for(X, Y)
    laid = [[(s.value.layout, s.home, s.master) for s in one.physical.sources] for one in (step, other)]
    assert laid[0] == laid[1]


def test_axes_of_a_line_are_merged_and_the_last_counts() -> None:
    text = "grid (data=2, tensor=2)\n**: data=S(0)\n0.weight: tensor=S(1)\n0: data=B\nstates 0: data=S(0)"
    step = flow.compile(net(), loss_fn, plan=text).plan_for(X, Y)
    laid = {s.value.name: s.value.layout.sbp for s in step.physical.sources if s.kind == "parameter"}
    assert laid["0.weight"] == (flow.B, flow.S(1))
    assert laid["2.weight"] == (flow.S(0), flow.B)


def test_flows_are_of_the_modules_that_are_called() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(net())

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    flow.compile(Listed().double(), loss_fn, plan="grid (data=2)\nlayers.** -> data=S(0)").plan_for(X, Y)
    with pytest.raises(SbpError, match=r"(?s)line 2.*ModuleList is never called"):
        flow.compile(Listed().double(), loss_fn, plan="grid (data=2)\nlayers -> data=S(0)")


def test_notes_of_a_plan_are_all_there_or_none_and_the_next_plan_takes_them_back() -> None:
    model = net()

    def notes() -> Iterator[str]:
        return itertools.chain.from_iterable(
            [key for key in part.__dict__ if key.startswith("_sbpflow")] for part in model.modules()
        )

    with pytest.raises(SbpError, match="line 3"):
        flow.compile(model, loss_fn, plan="grid (data=2)\n0: data=S(0)\n1 -> data=P")
    assert not list(notes())
    flow.compile(model, loss_fn, plan="grid (data=2)\n0: data=S(0)\n1 -> data=S(0)\nrecompute 0\ncast 2 to bf16")
    assert "forward" in vars(model[0])
    step = flow.compile(model, loss_fn, plan="grid (data=2)").plan_for(X, Y)
    assert "forward" not in vars(model[0])
    assert all(s.value.layout.sbp == (flow.B,) for s in step.physical.sources if s.kind == "parameter")


def test_copies_of_a_planned_model_keep_the_plan_apart() -> None:
    model = net()
    flow.compile(model, loss_fn, plan="grid (data=2)\n**: data=S(0)")
    other = copy.deepcopy(model)
    flow.compile(other, loss_fn, plan="grid (data=2)")
    for one, wanted in ((model, (flow.S(0),)), (other, (flow.B,))):
        sources = flow.compile(one, loss_fn, placement=flow.placement("cpu", 2)).plan_for(X, Y).physical.sources
        assert {s.value.layout.sbp for s in sources if s.kind == "parameter"} == {wanted}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"placement": flow.placement("cpu", [0])}, "placement= is given beside a plan"),
        ({"plan": 3}, "give it a flow.Plan, a text"),
        ({"plan": "nowhere.plan"}, "nowhere.plan: No such file"),
    ],
)
def test_options_that_a_plan_cannot_be_with(options: dict[str, object], said: str) -> None:
    with pytest.raises(SbpError, match=said):
        flow.compile(net(), loss_fn, **{"plan": "grid (data=2)", **options})  # type: ignore[call-overload]


def test_an_expectation_that_fails_is_an_error_of_the_first_step() -> None:
    model = net()
    text = "grid (data=4)\nstates **: data=S(0)\nexpect no all_gather"
    step = flow.compile(model, loss_fn, torch.optim.AdamW(model.parameters()), plan=text)
    with pytest.raises(SbpError, match=r"line 3: this does not hold: 3 all_gather\n  3 . expect no all_gather"):
        step(X, Y)
    assert not any(isinstance(value, flow.GlobalTensor) for value in model.parameters())


@pytest.mark.parametrize(
    ("line", "at", "said"),
    [
        ("0 -> data=S(5)", 5, "the result of 0 is to flow as {data: S(5)}, and no tensor in it has these dims"),
        ("2 <- data=S(-3)  # far", 5, "the input of 2 is to flow"),
        ("input x <- data=S(2)", 11, "says that x lies as {data: S(2)}"),
        ("input z <- data=S(0)", 11, "and there is no such argument"),
    ],
)
def test_a_flow_that_a_tensor_has_no_dims_for_is_shown_at_its_line(line: str, at: int, said: str) -> None:
    text = f"grid (data=2)\n1 -> data=S(0)\n{line}"
    for go in (
        lambda: flow.compile(net(), loss_fn, plan=text)(X, Y),
        lambda: flow.Plan.read(text).check(net(), (X, Y), loss_fn=loss_fn),
    ):
        with pytest.raises(SbpError) as told:
            go()
        first, shown, caret, *_ = str(told.value).split("\n")
        assert first.startswith("plan, line 3: ")
        assert said in first
        assert shown == f"  3 | {line}"
        assert caret.index("^") == 6 + at


def test_a_flow_that_was_noted_by_hand_is_told_as_before() -> None:
    model = net()
    flow.nn.flow(model[0], result={"data": flow.S(5)})
    with pytest.raises(SbpError, match=r"^the result of 0 is to flow as \{data: S\(5\)\}"):
        flow.compile(model, loss_fn, plan="grid (data=2)")(X, Y)


def some_ranks(text: str) -> str:
    try:
        return str(grids_of(PlanText.read(text)).whole)
    except SbpflowError as error:
        return str(error)


def test_a_grid_that_is_a_placement_may_leave_out_ranks_but_not_name_others(ranks4: Ranks) -> None:
    assert ranks4(some_ranks, "grid cpu:[1-2] as (data=2)") == ["cpu:[1-2] as (data=2)"] * 4
    assert "there is no rank 5: 4 were started, 0 to 3" in ranks4(some_ranks, "grid cpu:[2-5] as (data=4)")[0]
    assert "a grid of 2 on 4 ranks" in ranks4(some_ranks, "grid (data=2)")[0]


def test_options_that_are_none_leave_the_plan_what_it_says() -> None:
    """Whoever hands options on gives None for what nobody has said."""
    said = "grid (pipe=2)\npipe {0,2} over pipe by gpipe, 2 micro-batches\nlimit memory 1 MiB"
    none: Any = {"placement": None, "schedule": None, "memory": None, "inputs": None, "name": None, "slices": None}
    found = flow.compile(net(), loss_fn, plan=said, **none)._options
    assert found == flow.compile(net(), loss_fn, plan=said)._options
    assert found.memory == 2**20
    with pytest.raises(SbpError, match="memory= is given beside a plan that says it too"):
        flow.compile(net(), loss_fn, plan=said, **{**none, "memory": 1e9})
