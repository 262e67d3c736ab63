"""Checks of a plan: what they find is what a step does, and every `expect` line is held to it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.placement.errors import SbpError, SbpflowError

X = torch.randn(16, 8)


class Blocks(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


TENSOR = "grid (tensor=4)\nlayers.*.0: tensor=S(0)\nlayers.*.1: tensor=S(1)\n"
ZERO = "grid (data=4)\n**: data=S(0)\ninput * <- data=S(0)\nlayers.* <- data=S(0)\nlayers.*.* -> data=S(0)\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TENSOR + "expect 1 all_reduce over tensor a layer forward", "1 all_reduce"),
        (TENSOR + "expect at most 1 all_reduce a layer backward", "all_reduce"),
        (TENSOR + "expect no all_gather and no all_to_all", "0 all_gather and 0 all_to_all"),
        (ZERO + "expect 2 all_gather over data a layer forward", "2 all_gather"),
        (ZERO + "expect gathered at once <= 2 layers", "layers' weights are gathered at once"),
        (ZERO + "expect memory <= 1 MiB", "the fullest rank takes"),
        (ZERO + "expect time <= 1 s", "a step is predicted to take"),
    ],
)
def test_an_expectation_that_holds(text: str, found: str) -> None:
    checked = flow.Plan.read(text).check(Blocks(), X)
    (finding,) = checked.findings
    assert finding.holds
    assert found in finding.found
    assert f"ok   {finding.line}" in str(checked)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("expect 2 all_reduce over tensor a layer forward", r"1 all_reduce in layers\.0"),
        ("expect no all_reduce", r"\d+ all_reduce"),
        ("expect at most 2 all_reduce over tensor forward", "3 all_reduce"),
        ("expect memory <= 1 KiB", r"the fullest rank takes [\d.]+ KiB"),
        ("expect time <= 1e-9 s", "a step is predicted to take .*"),
    ],
)
def test_an_expectation_that_fails(line: str, said: str) -> None:
    with pytest.raises(SbpError, match=rf"line 4: this does not hold: {said}\n  4 . expect"):
        flow.Plan.read(TENSOR + line).check(Blocks(), X)


def test_a_plan_is_held_to_the_time_of_another_file(tmp_path: Path) -> None:
    flow.Plan.read("grid (tensor=4)\n**: tensor=B").save(tmp_path / "other.plan")
    flow.Plan.read(TENSOR + "expect time <= 1e6 of other.plan").save(tmp_path / "this.plan")
    assert flow.Plan.load(tmp_path / "this.plan").check(Blocks(), X).findings[0].holds
    flow.Plan.read(TENSOR + "expect time <= 0.001 of other.plan").save(tmp_path / "this.plan")
    with pytest.raises(SbpError, match="this does not hold"):
        flow.Plan.load(tmp_path / "this.plan").check(Blocks(), X)


def test_what_a_check_finds_is_what_a_step_does() -> None:
    plan = flow.Plan.read("grid (data=4)\nstates **: data=S(0)\ninput * <- data=S(0)\n")
    checked = plan.check(Blocks(), X)
    model = Blocks()
    step = flow.compile(model, lambda m, x: m(x).mean(), torch.optim.AdamW(model.parameters()), plan=plan)
    with flow.record() as moves:
        step(X)
    sent = sum(row.total * row.count for row in checked.report.moves)
    assert sent == sum(move.boxing.total for move in moves)
    assert checked.memory == max(held.total for held in step.planned.held().values())


def test_a_check_needs_no_values_and_no_devices_and_changes_nothing() -> None:
    with torch.device("meta"):
        model, x = Blocks(), torch.empty(64, 8)
    plan = flow.Plan.read("grid cuda (data=*, tensor=2)\nlayers.*.0: tensor=S(0)\nlayers.*.1: tensor=S(1)\n")
    checked = plan.check(model, x, cluster="h100x8*2", ranks=16)
    assert "data=8, tensor=2" in str(checked.report.placements)
    assert not [key for part in model.modules() for key in part.__dict__ if key.startswith("_sbpflow")]
    assert set(checked.dict()) == {"seconds", "memory", "fits", "moves", "changed", "expect", "report"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("**: data=S(0)", "has no grid"),
        ("grid (data=*)\n", "a grid of|grid"),
        ("grid (data=3)\n", "a grid of 3 on 4 ranks"),
        ("grid (a=*, b=*)", "one axis"),
        ("grid (a=3, b=*)", "4 ranks cannot be shared out over axes of 3"),
        ("grid (a=?)", "is left to the planner"),
        ("grid (a=4, b=2 folds c)", "c"),
        ("grid (a=4, b=3 folds a)", "3"),
        ("grid (a=4)\nlayers.*.0: a=S(0), b=S(1)", "the grid has no axis b"),
        ("grid (a=4)\nlayer: a=S(0)", "has nothing called layer"),
        ("grid (a=4)\nlayers.0.0.weight: a=S(2)", r"S\(2\) of layers.0.0.weight"),
        ("grid (a=4)\nlayers.*.tanh -> a=S(0)", "has nothing called"),
        ("grid (a=4)\ntake tp_plan over a", "Blocks"),
        ("grid (a=4, b=4 folds a)\nlayers.0: a=S(0), b=S(1)", "the same ranks"),
        ("grid (a=4)\nplace layers.0 at a=4", "the axis has places 0 to 3"),
        ("grid (a=2, b=2)\npipe layers over a, 4 micro-batches\n**: a=S(0)", "layers are at places of a"),
        ("grid (a=2, b=2)\npipe layers over a, 4 micro-batches\nplace layers.0 at a=0", "among the layers"),
        ("grid (a=4)\npipe layers over a, 4 micro-batches", "3 layers cannot be 4 chunks"),
        ("grid (a=4)\nseek a", "seek leaves degrees to the planner"),
        ("grid (a=4)\ninput y <- a=S(0)", "there is no such argument"),
        ("grid (a=4)\nlimit memory 100 B", "no plan fits"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_and_changes_nothing(text: str, said: str) -> None:
    model = Blocks()
    if text.startswith("grid (data=*)"):
        assert flow.Plan.read(text).check(model, X, ranks=4).memory
    else:
        with pytest.raises(SbpflowError, match=said):
            flow.Plan.read(text).check(model, X, ranks=4)
    assert not [key for part in model.modules() for key in part.__dict__ if key.startswith("_sbpflow")]


class Unread(nn.Module):
    """Of three layers one makes what no loss reads, and one what is read without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.dropped, self.detached = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.read(x)
        self.dropped(x)
        made: Tensor = y + self.detached(y).detach()
        return made


SHEET = "H200: datasheet, not calibrated"


@pytest.mark.parametrize("line", ["", "states **: data=S(0)\n", "**: data=S(0)\n"], ids=["", "ZeRO-1", "ZeRO-3"])
def test_parameters_that_no_loss_reaches_have_no_states_and_are_not_moved(line: str) -> None:
    model = Unread()
    plan, adam = "grid cpu (data=2)\n" + line, torch.optim.Adam(model.parameters())
    step = flow.compile(model, lambda m, x: m(x).square().mean(), adam, plan=plan)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step(X)
    with flow.record() as moves:
        step(X)
    report = step.explain()
    assert report.memory is not None
    for rank, held in step.memory_at_rest().items():
        assert (held.parameters, held.states) == (
            report.memory.ranks[rank].parameters,
            report.memory.ranks[rank].states,
        )
    sent = sum(move.boxing.total for move in moves if move.op != "same values")
    assert sent == sum(row.total * row.count for row in report.moves)
    after = {name: value.full_tensor() for name, value in model.state_dict().items()}
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {"read.weight", "read.bias"}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("pipe", ["", "pipe layers over pipe by 1f1b, 2 micro-batches"], ids=["straight", "pipe"])
def test_a_cluster_prices_all_of_a_plan_whatever_is_in_use_when_it_is_looked_at(kind: str, pipe: str) -> None:
    """Moves were those of this machine's processes, beside ops of a card."""
    grid = f"grid {kind} ({'pipe=2, ' if pipe else ''}data=4)\n{pipe}\n**: data=S(0)"
    made = flow.Plan.read(grid).check(Blocks(4), X, cluster="h100x8")
    with flow.use_cluster("h100x8"):
        priced = [(row.name, row.seconds) for row in flow.Plan.read(grid).check(Blocks(4), X).report.moves]
    assert [(row.name, row.seconds) for row in made.report.moves] == priced
    assert max(seconds for _, seconds in priced) < 60e-6  # what a message takes to start on a CPU
    assert " 60 us" not in made.report.full()


@pytest.mark.parametrize(
    ("name", "said"),
    [("h100x8", "H100: fitted, on published steps of transformers on H100, median error 5.1 %"), ("h200x8", SHEET)],
)
def test_answers_say_how_well_the_seconds_of_a_device_are_known(name: str, said: str) -> None:
    made = flow.Plan.read("grid cuda (data=4)").check(Blocks(1), X, cluster=name)
    assert f"\n  priced by {said}\n" in str(made)
    assert f"\n  devices {said}\n" in str(made.report)
    assert f"\n  devices {said}\n" in made.report.full()
    assert said in made.report.html()
    assert made.dict()["report"]["devices"] == said


def test_op_by_op_a_step_of_a_card_is_priced_with_all_its_launches() -> None:
    """Compiled, norms and pointwise ops between two products are one kernel."""
    plan = flow.Plan.read("grid cuda (data=1)")
    eager = plan.check(Blocks(2), X, cluster="h100x8", backend="code")
    compiled = plan.check(Blocks(2), X, cluster="h100x8")
    assert compiled.report.compute < eager.report.compute  # type: ignore[operator]
    assert compiled.seconds == plan.check(Blocks(2), X, cluster="h100x8", backend="inductor").seconds
    with pytest.raises(SbpError, match="backend='fast'\n  there are 'auto'"):
        plan.check(Blocks(2), X, backend="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(("states", "lasting"), [("", 0), ("states **: data=S(0)\n", 2 * 2 * 8 * 16 * 4 // 2)])
def test_sums_of_gradients_that_come_home_in_pieces_leave_no_gaps(states: str, lasting: int) -> None:
    """From the first micro-batch on they are there whole, of the two layers of a stage, beside the piece at home."""
    text = f"grid cuda (pipe=2, data=2)\ninput 0 <- data=S(0)\n{states}pipe layers over pipe by 1f1b, 8 micro-batches"
    checked = flow.Plan.read(text).check(
        Blocks(4), torch.randn(2**12, 8), loss_fn=lambda model, x: model(x).square().mean(), cluster="a100x8"
    )
    assert checked.report.memory is not None
    held = checked.report.memory.ranks
    assert {one.lasting for one in held.values()} == {lasting}
    for one in held.values():
        assert one.passing == one.total - one.parameters - one.gradients - one.states - lasting
    assert checked.taken(0.5) == max(one.total + 0.5 * one.passing for one in held.values())
