"""The seconds that `explain` tells are those that the choice was made by."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from sbpflow.boxing.graph.report.report import Report
from sbpflow.placement import Placement

LINE = flow.placement("cpu", range(4))
CARDS = flow.placement("cuda", range(4))


def explained(hints: dict[str, object], place: Placement = LINE) -> Report:
    """Of a step that was planned and never ran."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)), nn.Linear(512, 512))
        x = torch.zeros(16384, 512)
    flow.nn.shard(model, hints)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x)

    with flow.use_cluster("h100x8"):
        step = flow.compile(model, loss_fn, optimizer, placement=place)
        step.plan_for(x)
        report: Report = step.explain()
        assert report.moves  # priced as long as the cluster is this one
        return report


@pytest.mark.parametrize("place", [LINE, CARDS], ids=["cpu", "cuda"])
@pytest.mark.parametrize("hints", [{}, {"*": B}, {"*": S(0)}], ids=["chosen", "copies", "pieces"])
def test_the_time_told_is_what_was_chosen_by(hints: dict[str, object], place: Placement) -> None:
    report = explained(hints, place)
    assert report.solution is not None
    assert report.compute is not None
    assert report.exposed is not None
    assert report.hidden is not None
    assert report.predicted == pytest.approx(report.solution.optimum, rel=1e-9)
    assert report.predicted == pytest.approx(report.compute + report.update + report.exposed)
    assert report.moving == pytest.approx(report.hidden + report.exposed)
    assert report.update > 0


@pytest.mark.parametrize("hints", [{"*": B}, {"*": S(0)}], ids=["copies", "pieces"])
def test_no_pinned_plan_is_told_to_be_quicker_than_the_best(hints: dict[str, object]) -> None:
    best, pinned = explained({}), explained(hints)
    assert best.predicted is not None
    assert pinned.predicted is not None
    assert best.predicted <= pinned.predicted * (1 + 1e-9)


def test_moves_are_hidden_where_somebody_else_carries_them_and_only_there() -> None:
    assert explained({"*": S(0)}).hidden == 0
    report = explained({"*": S(0)}, CARDS)
    assert report.hidden is not None
    assert report.exposed is not None
    assert report.hidden > 0


@pytest.mark.parametrize("hints", [{}, {"*": B}, {"*": S(0)}], ids=["chosen", "copies", "pieces"])
def test_on_one_axis_moves_cost_what_their_routes_do(hints: dict[str, object]) -> None:
    report = explained(hints)
    assert sum(total.seconds for total in report.totals) == pytest.approx(
        report.moving, rel=0.3
    )  # of buckets a share is counted


def test_a_step_takes_its_products_twice_or_thrice_and_its_optimizer_its_passes_at_known_prices() -> None:
    """At one FLOP and one byte a second; the same arithmetic is held to clocks by benchmarks/predicted.py."""
    rows, width = 128, 64
    with torch.device("meta"), flow.use_cluster("flat"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
        adam = torch.optim.AdamW(model.parameters())
        step = flow.compile(model, lambda m, x: m(x).sum(), adam, placement=flow.placement("cpu", range(1)))
        report: Report = step.plan_for(torch.zeros(rows, width)).explain()
    seconds = {cost.of: cost.seconds for cost in report.costs}
    product = 2 * rows * width * width
    assert seconds["0.linear"] == 2 * product  # forward, and the gradient of the weight: nobody asks for that of x
    assert seconds["1.linear"] == 3 * product  # and that of what came from the first
    assert seconds["sum"] == 2 * 4 * (rows * width + 1)  # reads all and writes one, and the other way round
    assert report.update == 2 * 20 * 4 * width * width  # eight kernels; one that is fused would read and write seven
