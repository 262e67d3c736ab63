"""Blocks that run again: which these are in a plan, and that a search has no more of them than it takes."""

from dataclasses import replace
from functools import cache
from itertools import chain

import pytest
from torch import nn

import sbpflow as flow
from sbpflow.nn.model.paths import met
from sbpflow.nn.plan.check import Checked
from sbpflow.nn.plan.language.statements import Offload, Recompute
from sbpflow.nn.plan.search.estimates.blocks_again import ALL, NONE, PARTLY, BlocksAgain
from sbpflow.nn.plan.search.estimates.degrees import Degrees, Pipeline
from sbpflow.nn.plan.search.estimates.estimate import PlanEstimate
from sbpflow.nn.plan.search.estimates.stage_figures import LayerFigures, StageFigures
from tests.nn.plan.search.test_seeking import loss_of, made, searching

LAYERS = 4
GRID = "grid cuda (data=8)\n2 micro-batches"


@pytest.mark.parametrize(
    ("again", "stages", "lines"),
    [
        (NONE, False, []),
        (ALL, True, ["recompute h.*"]),
        (PARTLY, False, ["recompute h.* keep mm, attention"]),
        (BlocksAgain(8, 0, 8), False, ["recompute h.*"]),
        (BlocksAgain(3, 0, 8), False, ["recompute h.[:3]"]),
        (BlocksAgain(3, 5, 8), False, ["recompute h.[:3]", "recompute h.[3:] keep mm, attention"]),
        (BlocksAgain(0, 2, 8), True, ["recompute h.{3,7} keep mm, attention"]),
        (BlocksAgain(1, 0, 8), True, ["recompute h.7"]),
        (BlocksAgain(6, 2, 8), True, ["recompute h.{1,2,3,5,6,7}", "recompute h.{0,4} keep mm, attention"]),
    ],
    ids=str,
)
def test_the_first_blocks_run_again_or_as_many_in_each_stage(
    again: BlocksAgain, stages: bool, lines: list[str]
) -> None:
    assert [*again.lines("h.*", stages=stages)] == lines
    assert [str(flow.Plan.read(line)).strip() for line in lines] == lines


@pytest.mark.parametrize("count", [4, 7, 32])
@pytest.mark.parametrize("stages", [False, True])
def test_every_block_is_named_as_often_as_it_is_said(count: int, stages: bool) -> None:
    model = nn.ModuleDict({"h": nn.ModuleList(nn.Linear(1, 1) for _ in range(count))})
    for n in range(1, count):
        for again in (BlocksAgain(n, 0, count), BlocksAgain(0, n, count), BlocksAgain(n, count - n, count)):
            read = [flow.Plan.read(line).statements[0] for line in again.lines("h.*", stages=stages)]
            paths = [met(line.path, dict(model.named_modules())) for line in read if isinstance(line, Recompute)]
            assert [len(each) for each in paths] == [many for many in (again.whole, again.partly) if many]
            assert len({*chain(*paths)}) == again.whole + again.partly


@cache
def every() -> dict[Degrees, Checked]:
    """All plans of a small space, each planned in full."""
    model, tokens = made(LAYERS, 256)
    some = [like.some(n, LAYERS) for n in range(1, LAYERS) for like in (ALL, PARTLY, BlocksAgain(1, 1))]
    with flow.use_cluster(flow.cluster("h100x8*1")):
        seeking = searching(f"{GRID}\nseek recompute", model, tokens)
        (at,) = seeking.space.every()
        found = {}
        for one in seeking.variants(at):
            for again in (NONE, PARTLY, ALL, *some):
                choice = Degrees(1, 8, 1, 2, again=again, spread=one.spread)
                text = seeking.candidate(choice).plan
                found[choice] = text.check(model, tokens, cluster="h100x8*1", loss_fn=loss_of)
    return found


@pytest.mark.parametrize("share", [0.95, 0.8, 0.65, 0.55])
def test_no_plan_of_a_small_space_is_better_than_the_one_that_is_found(share: float) -> None:
    model, tokens = made(LAYERS, 256)
    limit = share * max(one.memory for at, one in every().items() if not at.again)
    best = min((one.seconds for one in every().values() if one.memory <= limit), default=0.0)
    assert best
    told: list[str] = []
    plan = flow.find_plan(
        model,
        tokens,
        plan=f"{GRID}\nseek recompute, offload",
        cluster="h100x8*1",
        loss_fn=loss_of,
        memory=limit,
        told=told.append,
    )
    assert plan.checked.memory <= limit
    assert plan.checked.seconds <= 1.03 * best
    assert not any(isinstance(line, Offload) for line in plan.statements)
    assert sum(line.startswith("data=") for line in told) <= 4  # plans in full


def test_the_host_is_tried_behind_blocks_that_run_again() -> None:
    model, tokens = made(LAYERS, 256)
    limit = 0.98 * min(one.memory for one in every().values())
    told: list[str] = []
    plan = flow.find_plan(
        model,
        tokens,
        plan=f"{GRID}\nseek recompute, offload",
        cluster="h100x8*1",
        loss_fn=loss_of,
        memory=limit,
        told=told.append,
    )
    assert [line.what for line in plan.statements if isinstance(line, Offload)] == ["states"]
    assert plan.checked.memory <= limit
    first = next(at for at, line in enumerate(told) if "on the host" in line)
    assert any("run again" in line for line in told[:first])
    with pytest.raises(flow.SbpError, match="fits into"):
        flow.find_plan(model, tokens, plan=f"{GRID}\nseek recompute", cluster="h100x8*1", loss_fn=loss_of, memory=limit)


def test_a_stage_of_which_some_blocks_run_again_lies_between_those_of_which_none_and_all_do() -> None:
    """Also where the first layer keeps less than those behind it do, as a dense one before mixtures."""

    def layer(kept: int, seconds: float) -> LayerFigures:
        return LayerFigures(seconds, seconds, seconds, 0.0, 0.0, 0.0, 5, 5, 10, 0, kept, 0, 0, 1)

    whole = StageFigures(layer(100, 1.0), layer(900, 1.0), layer(900, 1.0))
    again = StageFigures(layer(10, 2.0), layer(10, 2.0), layer(10, 2.0))
    for layers, share in ((1, 0.5), (2, 0.75), (4, 0.5), (4, 0.0), (4, 1.0)):
        for first, last in ((True, False), (False, False), (False, True)):
            none, some, every = (
                of.stage(layers, first=first, last=last) for of in (whole, whole.mixed(again, share), again)
            )
            assert every.kept <= some.kept <= none.kept
            assert none.forward <= some.forward <= every.forward
    mixed = whole.mixed(again, 0.75)
    stages = [mixed.stage(2, first=not before, last=False, before=before) for before in (0, 2)]
    assert [stage.kept for stage in stages] == [510, 20]  # three of four layers: one of the first two, and both others
    assert [stage.forward for stage in stages] == [3.0, 4.0]


def test_where_a_mixed_plan_takes_too_much_one_of_all_blocks_alike_is_next() -> None:
    model, tokens = made()
    base = Degrees(2, 4, 1, 4)
    mixed, slow, quick, large = (
        replace(base, again=again, by=Pipeline(by))
        for again, by in ((BlocksAgain(3, 0, 6), "1f1b"), (ALL, "1f1b"), (ALL, "zb_h1"), (PARTLY, "zb_h1"))
    )
    with flow.use_cluster(flow.cluster("h100x8*1")):
        seeking = searching("seek pipe, data, micro-batches, schedule, recompute", model, tokens)
        takes = ((base, 1.0, 1), (mixed, 1.5, 1), (slow, 3.0, 4), (quick, 2.0, 8), (large, 1.0, 99))
        seeking.limit, seeking.found = 10, {at: PlanEstimate(seconds, memory) for at, seconds, memory in takes}
        assert seeking.all_alike(seeking.found) == quick
        assert seeking.all_alike([base, mixed, large]) is None


def test_blocks_that_run_again_under_another_schedule_are_held_against_none_that_do() -> None:
    model, tokens = made()
    at = Degrees(2, 4, 1, 4, Pipeline("zb_h1"), again=ALL)
    with flow.use_cluster(flow.cluster("h100x8*1")):
        seeking = searching("seek pipe, data, micro-batches, schedule, recompute", model, tokens)
        seeking.add([at])
        seeking.add_partly()
    assert {replace(at, again=NONE), replace(at, again=PARTLY)} <= seeking.found.keys()


def test_a_schedule_that_holds_more_has_as_many_more_blocks_that_run_again_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the quicker schedule is not looked at: it does not fit with the few that are enough for another."""
    model, tokens = made(8)
    few = Degrees(2, 4, 1, 4, again=ALL.some(3, 8))

    def takes(at: Degrees) -> PlanEstimate:
        holds = {"1f1b": 10, "zb_h1": 14}[at.by.schedule]
        return PlanEstimate(2.0 if at.by.schedule == "1f1b" else 1.0 + 0.01 * at.again.whole, holds - at.again.whole)

    with flow.use_cluster(flow.cluster("h100x8*1")):
        seeking = searching("seek pipe, data, micro-batches, schedule, recompute", model, tokens)
        monkeypatch.setattr(seeking.estimates, "of", takes)
        monkeypatch.setattr(seeking.estimates, "memory", lambda at: takes(at).memory)
        seeking.limit = 7
        seeking.add([few])
        seeking.add_scheduled(replace(few, by=Pipeline("zb_h1")))
        assert seeking.ranked()[0] == replace(few, by=Pipeline("zb_h1"), again=ALL.some(7, 8))


def test_where_all_blocks_partly_again_take_too_much_as_many_as_that_takes_run_again_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokens = made(8)
    partly = Degrees(2, 4, 1, 4, again=PARTLY)

    def takes(at: Degrees) -> PlanEstimate:
        return PlanEstimate(1.0 + 0.1 * at.again.whole, 102.0 - 2 * at.again.whole * (at.again != PARTLY))

    with flow.use_cluster(flow.cluster("h100x8*1")):
        seeking = searching("seek pipe, data, micro-batches, schedule, recompute", model, tokens)
        monkeypatch.setattr(seeking.estimates, "of", takes)
        monkeypatch.setattr(seeking.estimates, "memory", lambda at: takes(at).memory)
        seeking.limit = 100
        seeking.add([partly])
        seeking.add_nearer(partly, 1.0, 102.0)
        (nearer,) = seeking.found.keys() - {partly}
    assert nearer.again == BlocksAgain(2, 6, 8)  # one would do, but for what a stage with fewer of them takes more
