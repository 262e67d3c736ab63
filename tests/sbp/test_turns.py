"""Turns of a value around an axis: where it is after each move, and at the end."""

import pytest

from sbpflow import placement
from sbpflow.placement import Placement
from sbpflow.sbp.logical import AxisSwap, AxisTurn


@pytest.mark.parametrize("turn", [AxisTurn(1, 3), AxisTurn(0, 1), AxisSwap(1, 2)], ids=str)
def test_a_path_leads_to_its_end(turn: AxisTurn | AxisSwap) -> None:
    where = placement("cpu:[0-7] as (2, 4)")
    assert turn.path(where)[-1] is turn.end(where)


def test_a_grid_is_turned_once_however_many_rounds_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    where = placement("cpu:[0-11] as (3, 4)")
    first = AxisTurn(1, 3).path(where)
    monkeypatch.setattr(Placement, "_pick", None)  # cannot be asked again
    assert [AxisTurn(1, 3).path(where) for _ in range(4)] == [first] * 4
    assert AxisTurn(1, 2).end(where) is first[1]
