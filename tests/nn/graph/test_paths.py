"""A step goes one of several paths: straight or in micro-batches, on one stage or two, only forward or in training."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import pytest
import torch

import sbpflow as flow
from sbpflow.placement.errors import SbpError
from tests.ranks import Ranks

from .path_cases import CASES, EARLY
from .paths import PATHS, Case, Path, same_on
from .pipes import close, everywhere, mlp, numbers, square_loss, trains


def goes(name: str, path: Path) -> None:
    case = CASES[name]
    says = case.refusal(path)
    if says is None:
        return same_on(path, case)
    with pytest.raises(SbpError, match=f"(?s){says}"):
        same_on(path, case)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.sampled(len(CASES), sweep=900)
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_as_in_torch_on_every_path_or_says_why_not(name: str, path: Path) -> None:
    goes(name, path)


def refused(case: Case) -> list[Path]:
    return [path for path in PATHS if case.refusal(path) is not None]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if refused(case)])
def test_a_path_that_cannot_be_is_refused(name: str) -> None:
    goes(name, refused(CASES[name])[-1])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "eager_1f1b"])
def test_one_stage_goes_forward_under_any_schedule(schedule: str) -> None:
    torch.manual_seed(3)
    model = mlp().double()
    one = copy.deepcopy(model)
    step = flow.compile(model, lambda model, x: model(x), placement=everywhere(), micro_batches=2, schedule=schedule)
    with torch.no_grad():
        for at in range(2):
            close(step(numbers(at)[0]), one(numbers(at)[0]), 1e-10)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_graph_that_trains_evaluates_on_one_stage(micro_batches: int) -> None:
    torch.manual_seed(3)
    model = mlp().double()
    one = copy.deepcopy(model)
    step = trains(model, one=one, micro_batches=micro_batches, placement=everywhere())
    with torch.no_grad():
        close(step(*numbers(9)), square_loss(one, *numbers(9)), 1e-10)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", EARLY)
def test_a_step_is_as_in_torch_where_stages_step_early(name: str, stages: int) -> None:
    same_on(Path(2, stages, trains=True), EARLY[name])


def test_what_no_optimizer_has_cannot_count_in_a_norm_where_stages_step_early() -> None:
    case = CASES["layers: clipped, of one layer"]
    early = replace(case, options={**case.options, "post_validation": True})
    with pytest.raises(SbpError, match=r"0\.weight has no optimizer and counts in the norm"):
        same_on(Path(2, 2, trains=True), early)


def all_on_ranks(cases: Sequence[tuple[str, Path]]) -> None:
    for name, path in cases:
        try:
            goes(name, path)
        except BaseException as error:
            error.add_note(f"{name}, {path}")
            raise


SOME = ["loss: ignored", "result: rows", "layers: tied", "buffer: argument", "layers: dropout", "result: shares"]


def test_ranks_go_some_paths(ranks4: Ranks) -> None:
    ranks4(all_on_ranks, list(zip(SOME, PATHS[:-7:-1], strict=True)))


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(8))
def test_ranks_go_every_case(at: int, ranks4: Ranks) -> None:
    ranks4(all_on_ranks, [*zip(CASES, cycle(PATHS))][at::8], timeout=300.0)
