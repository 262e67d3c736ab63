"""How many firings a second the simulator does, and how long the proof of a schedule takes.

    python benchmarks/simulate.py [--quick]

One process and no wire, in time on the core. A proof is one simulated run with its records; a refusal searches for the
mark that makes a schedule run, and so takes several.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator
from time import thread_time

from benchmarks.parts.alone import aligned
from sbpflow.actors.protocol.feasibility import proved
from sbpflow.actors.protocol.network import Network
from sbpflow.actors.protocol.simulate import simulate
from sbpflow.actors.schedules.pipeline import Costs, network_of
from sbpflow.actors.schedules.published import published
from sbpflow.actors.schedules.schedule import Schedule
from sbpflow.placement.errors import ScheduleError

LONG = (("1f1b", 8), ("zb_h1", 8), ("interleaved", 8), ("1f1b", 64), ("zb_h2", 64))
PROVED = (("1f1b", 8, 64), ("zb_h2", 16, 128), ("interleaved", 16, 128), ("1f1b", 64, 512))
TIGHT = Schedule("too_low", act="p-s", low_b="p-s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short runs of each: whether all runs")
    options = parser.parse_args()
    gc.collect()
    gc.freeze()
    print("\n".join([*runs(20_000 if options.quick else 1_000_000), "", *proofs(1 if options.quick else 5)]))


def network(name: str, p: int, m: int) -> Network:
    schedule = published(name)
    return network_of(schedule, schedule.shape(p, m), Costs(1.0, 1.1, 0.9, hop=0.05))


def runs(firings: int) -> Iterator[str]:
    """Runs without records, of about so many firings."""
    rows = [("schedule", "devices", "firings", "seconds", "firings a second", "us a firing")]
    for name, p in LONG:
        each = sum(state.fired for state in simulate(network(name, p, p), record=False).desk.states) / p
        made = network(name, p, max(p, int(firings / each) // p * p))
        start = thread_time()
        run = simulate(made, record=False)
        took = thread_time() - start
        done = sum(state.fired for state in run.desk.states)
        rows.append((name, str(p), f"{done:,}", f"{took:.2f}", f"{done / took:,.0f}", f"{took / done * 1e6:.1f}"))
    yield "**Simulator.** Runs of many micro-batches."
    yield ""
    yield from aligned(rows)


def proofs(rounds: int) -> Iterator[str]:
    rows = [("schedule", "devices", "micro-batches", "firings", "median, ms")]
    for name, p, m in PROVED:
        made = network(name, p, m)
        count = len(proved(made).firings)
        rows.append((name, str(p), str(m), f"{count:,}", f"{_median(lambda n=made: proved(n), rounds):.1f}"))  # type: ignore[misc]
    for p, m in ((4, 8), (16, 128)):
        refused = network_of(TIGHT, TIGHT.shape(p, m))
        stopped = len(simulate(refused).firings)
        took = _median(lambda n=refused: _refused(n), rounds)  # type: ignore[misc]
        rows.append(("1f1b with low_b=p-s: refused", str(p), str(m), f"{stopped:,}", f"{took:.1f}"))
    yield "**Proof** that a schedule ends, before anything runs; and the search for the marks of one that does not."
    yield ""
    yield from aligned(rows)


def _refused(network: Network) -> None:
    try:
        proved(network)
    except ScheduleError:
        return
    raise AssertionError(f"{network.name} was to be refused")


def _median(call: Callable[[], object], rounds: int) -> float:
    took = []
    for _ in range(rounds):
        start = thread_time()
        call()
        took.append((thread_time() - start) * 1e3)
    return statistics.median(took)


if __name__ == "__main__":
    main()
