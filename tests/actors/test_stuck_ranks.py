"""A step on several processes in which nothing goes on: every rank tells once who waits, and all name the cause."""

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch

import sbpflow as flow
from sbpflow import B, S
from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import simulate
from sbpflow.actors.protocol.state import Firing
from sbpflow.actors.runtime import progress
from sbpflow.actors.runtime.bus import bus
from sbpflow.boxing.exchange import watch
from sbpflow.placement.world import store
from tests.actors.runtime.test_bus import Told, failing, runtime, stuck, survivors
from tests.actors.ticks import LIMIT, Clock
from tests.ranks import Fresh


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "as_it_comes"])
def test_a_step_without_progress_tells_who_waits_on_every_rank(fresh: Fresh, ordered: bool) -> None:
    ended = fresh(4, failing, "hangs", 3, ordered)
    for rank, told in survivors(ended).items():
        assert told.text.startswith("" if rank == 3 else "rank 3 gave up"), told  # not a rank that only waits
        assert "made no progress for 1 s; at work: device 3 at " in told.text, told
        assert ended[rank].stderr.count("who waits for whom") == 1
        assert f"rank {rank}, " in ended[rank].stderr
    assert "a3 (fired 2) is at work" in ended[3].stderr
    assert not any(re.search(r"^  to .* is at work", end.stderr, re.MULTILINE) for end in ended)
    if ordered:
        assert re.search(r"a0 \(fired \d\) waits for x1: 0 of 1 free, by to 1: x1", ended[0].stderr)
        assert re.search(r"to 1: x1 \(fired \d\) waits for rank 1 to take it", ended[0].stderr)


def bereaved() -> Told:
    """Rank 2 dies, for whom nobody waits; rank 1 hangs, for whom rank 0 waits."""
    flow.init(timeout=60)
    rank, line, clock = flow.init().rank, bus(range(3)), Clock(0.1)
    setattr(progress, "monotonic", clock)  # noqa: B010

    def work(firing: Firing) -> list[None]:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            while line.dead() is None:
                time.sleep(0.01)
            stuck(clock)
        return [None] if rank == 0 else []

    actors = (
        Actor("a0", "device 0", (), (Give("x"),), 9),
        Actor("a1", "device 1", (Take("x"),)),
        Actor("a2", "device 2", firings=1),
    )
    network = Network(actors, (Register("x"),), "two that talk and one that does not")
    where: dict[str, int | tuple[int, ...]] = {f"device {d}": d for d in range(3)}
    running = runtime(simulate(network), where, lambda part: {f"a{rank}": work}, timeout=1.0)
    try:
        running.run()
    except Exception as error:
        return Told(type(error).__name__, str(error))
    return Told("", "")


def test_a_dead_rank_for_whom_nobody_waits_is_named(fresh: Fresh) -> None:
    for told in survivors(fresh(3, bereaved), lost=2).values():
        assert told.text.startswith("rank 2 died\n")


def outlasted(native: bool | None) -> Told:
    """Rank 1 gets stuck late: both clocks of rank 0, which waits for it in a move, run out before that of rank 1."""
    rank, line, clock = flow.init(timeout=60).rank, bus(range(2)), Clock(0.25)
    setattr(progress, "monotonic", clock)  # noqa: B010
    watch.LATE = LIMIT, LIMIT  # a busy machine makes rank 1's word late
    ask = watch.Watch._told_late

    def out_of_time(of: watch.Watch) -> int | None:
        """The move has waited for its limit; now the watch over the step looks until its own has run out too."""
        clock.goes = True
        end = time.monotonic() + LIMIT
        while line.broken is None and clock.now < 2.0 and time.monotonic() < end:
            time.sleep(0.01)
        clock.goes = False
        store().set("out of time", "")
        return ask(of)

    setattr(watch.Watch, "_told_late", out_of_time if rank == 0 else ask)  # noqa: B010
    p = flow.placement("cpu", range(2))
    src, dst = flow.layout(p, S(0), (2,)), flow.layout(p, B, (2,))

    def work(firing: Firing) -> None:
        if rank == 1:
            store().wait(["out of time"], timedelta(seconds=LIMIT))
            stuck(clock)
        flow.box([torch.ones(1)], src, dst)

    run = simulate(Network((Actor("a", "stage", firings=1),), (), "one stage"))
    running = runtime(run, {"stage": (0, 1)}, lambda part: {"a": work}, timeout=1.0)
    flow.init(timeout=1.0, native=native)
    try:
        running.run()
    except Exception as error:
        return Told(type(error).__name__, str(error))
    return Told("", "")


def own_host(rank: int) -> dict[str, str]:
    return {"SBPFLOW_HOST": f"host {rank}"}


@pytest.mark.parametrize(
    ("native", "hosts"),
    [(None, 1), (False, 1), (True, 1), (False, 2)],
    ids=["shared", "messages", "collectives", "hosts"],
)
def test_who_waits_in_a_move_hears_who_is_stuck_though_its_clocks_run_out_first(
    fresh: Fresh, native: bool | None, hosts: int
) -> None:
    """It left the wait to look for the cause, and was then taken for the stuck one itself."""
    where = own_host if hosts > 1 else lambda rank: {}
    waiting, itself = survivors(fresh(2, outlasted, native, timeout=2 * LIMIT, environment=where)).values()
    said = "one stage on rank 1 made no progress for 1 s; at work: stage at "
    assert waiting.text.startswith(f"rank 1 gave up: TransportError: {said}"), waiting
    assert itself.text.startswith(said), itself


@pytest.mark.parametrize(("limit", "more"), [(0.1, 1.0), (12.0, 3.0), (300.0, 10.0)])
def test_who_only_waits_bears_a_part_of_its_limit_more(limit: float, more: float) -> None:
    assert watch.grace(limit) == more
