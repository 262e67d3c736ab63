"""The peak that is told of each plan of the gallery is within a tenth of what its ranks are seen to take."""

import pytest

from tests.ranks import Ranks

from .peaks import NEAR, PIPED, STRAIGHT, fullest, peak, ranks_of, table


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", STRAIGHT)
def test_the_peak_of_a_plan_is_told(name: str) -> None:
    told, seen = peak(name)
    assert told == pytest.approx(seen, rel=NEAR)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PIPED)
def test_the_peak_of_a_pipeline_is_told(name: str, ranks4: Ranks, ranks8: Ranks) -> None:
    """Of real ranks: every stage has its own."""
    told, seen = fullest((ranks4 if ranks_of(name) == 4 else ranks8)(peak, name, timeout=300.0))
    assert told == pytest.approx(seen, rel=NEAR)


def test_the_page_has_every_plan_within_that() -> None:
    rows = table()
    assert rows.keys() == {*STRAIGHT, *PIPED}
    assert all(told == pytest.approx(seen, rel=NEAR) for told, seen in rows.values())
