"""MAST: each job of a trace at the site that ends it first, beside all ways to place them."""

import re
import runpy
from math import inf, isfinite
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[3] / "examples" / "clusters" / "sites.py"
SECONDS = {  # of a step, in the place of plans
    "small": {("east",): 4e-4, ("west",): 2e-4, ("north",): 3e-4, ("east", "north"): 9e-4},
    "wide": {("east",): inf, ("west",): inf, ("north",): 5e-2, ("east", "north"): 7e-2},
    "deep": {("east",): 8e-2, ("west",): 2e-2, ("north",): 4e-2, ("east", "north"): 3e-2},
}


@pytest.fixture(scope="module")
def sites() -> dict[str, Any]:
    return runpy.run_path(str(FILE))


def given(sites: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sites["runs_of"].__globals__, "seconds_of_step", lambda at, model: SECONDS[model][at])


@pytest.mark.parametrize("seed", range(4))
def test_no_site_ends_a_job_earlier_and_sites_run_one_at_a_time(
    sites: dict[str, Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    given(sites, monkeypatch)
    free = dict.fromkeys(sites["SITES"], 0.0)
    for run in sites["placed"](sites["trace"](12, seed)):
        assert isfinite(run.ends)
        assert run.begins >= max(run.job.came, *(free[site] for site in run.at))
        assert all(run.ends <= other.ends for other in sites["runs_of"](run.job, free))
        free |= dict.fromkeys(run.at, run.ends)


@pytest.mark.parametrize("seed", range(4))
def test_jobs_wait_little_longer_than_in_the_best_of_all_ways(
    sites: dict[str, Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    given(sites, monkeypatch)
    jobs = sites["trace"](5, seed)
    best = sites["least"](jobs)
    assert best * (1 - 1e-9) <= sites["mean_wait"](sites["placed"](jobs)) <= 1.2 * best


def test_data_that_lie_elsewhere_come_over_the_thin_link_first(
    sites: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(sites, monkeypatch)
    job = sites["Job"](0, 10.0, "small", 1, "east", 1.25e12)
    begins = {run.at: run.begins for run in sites["runs_of"](job, dict.fromkeys(sites["SITES"], 0.0))}
    assert begins == {("east",): 10.0, ("west",): 1010.0, ("north",): 1010.0, ("east", "north"): 510.0}


@pytest.mark.sweep
def test_a_plan_of_each_job_fits_the_cards_of_its_site(sites: dict[str, Any]) -> None:
    found = {at: [sites["seconds_of_step"](at, model) for model in sites["MODELS"]] for at in sites["places"]()}
    assert all(isfinite(seconds) for seconds in found[("north",)])
    assert found[("east",)][1] > 2 * found[("north",)][1]  # half of the cards: states go to the host
    assert found[("west",)][2] < found[("east",)][2]


@pytest.mark.sweep
def test_the_command_says_where_each_job_runs(sites: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    sites["main"]()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 13
    assert re.match(r"job  1 wide  of west   at north ", said[1])
    assert re.match(r"\d+ of 12 where their data are; a job is done \d", said[-1])
