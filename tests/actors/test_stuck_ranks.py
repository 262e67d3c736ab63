"""A step on several processes in which nothing goes on: every rank tells once who waits, and all name the cause."""

import os
import re
import signal
import time

import pytest

import sbpflow as flow
from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import simulate
from sbpflow.actors.protocol.state import Firing
from sbpflow.actors.runtime import progress
from sbpflow.actors.runtime.bus import bus
from tests.actors.runtime.test_bus import Told, failing, runtime, stuck, survivors
from tests.actors.ticks import Clock
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
