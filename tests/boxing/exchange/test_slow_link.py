"""Emulated links: seconds are counted from bytes, and waits are asked for in their place."""

from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow import B, S
from sbpflow.boxing.exchange.slow_link import SlowLink
from tests.ranks import Ranks

P4 = flow.placement("cpu", range(4))


def gathered() -> tuple[float, int, int]:
    x = flow.zeros(8, 4, placement=P4, sbp=S(0))
    with flow.boxing.slow_link(latency=0.5, bandwidth=1000.0, wait=False) as link:
        x.to_global(sbp=B)
        x.to_global(sbp=S(1))
    return link.seconds, link.bytes, link.exchanges


def test_an_exchange_takes_the_latency_and_the_bytes_of_its_busiest_rank() -> None:
    """Of 128 bytes each rank gets three quarters; of what it has it sends three quarters on, in an exchange to S(1)."""
    seconds, nbytes, exchanges = gathered()
    assert (nbytes, exchanges) == (96 + 24, 2)
    assert seconds == pytest.approx(2 * 0.5 + (96 + 24) / 1000)


def test_processes_count_as_one_that_plays_all_ranks_does(ranks4: Ranks) -> None:
    assert ranks4(gathered) == [gathered()] * 4


def test_what_is_local_takes_no_time() -> None:
    with flow.boxing.slow_link(latency=9.0) as link:
        flow.ones(8, placement=P4, sbp=B).to_global(sbp=S(0))
    assert (link.exchanges, link.seconds) == (0, 0.0)


def test_an_exchange_is_over_when_the_line_has_brought_it_and_work_beside_it_costs_nothing() -> None:
    clock, pauses = [100.0], list[float]()
    link = SlowLink(0.25, 100.0, now=lambda: clock[0], pause=pauses.append)
    first, second = link.takes(50), link.takes(100)  # the second comes behind the first
    assert (first, second) == (100.75, 101.75)
    link.until(first)
    clock[0] = 101.0  # work meanwhile
    link.until(second)
    clock[0] = 102.0
    link.until(second)
    assert pauses == [0.75, 0.75]
    assert link.seconds == pytest.approx(2 * 0.25 + 1.5)


def test_a_link_that_waits_lets_values_be_what_they_are() -> None:
    x = flow.tensor(torch.arange(8.0), placement=P4, sbp=S(0))
    with flow.boxing.slow_link(latency=1e-4, bandwidth=1e6) as link:
        assert x.to_global(sbp=B).to_local()[3].tolist() == list(range(8))
    assert link.exchanges == 1


@pytest.mark.parametrize("how", [{"latency": -1.0}, {"bandwidth": 0.0}, {"bandwidth": float("nan")}], ids=str)
def test_a_link_that_cannot_be_is_refused(how: Any) -> None:
    with pytest.raises(flow.SbpError, match="seconds from 0"), flow.boxing.slow_link(**how):
        pass
