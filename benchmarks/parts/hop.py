"""The cost of a hop between two stages, against a plain isend and irecv of the same bytes.

    torchrun --nproc-per-node 2 benchmarks/parts/hop.py [seconds]

A message goes from rank 0 to rank 1 and back, again and again: once by hand, once through a network of three actors
(F on rank 0 fills x, G on rank 1 takes x and fills y, B on rank 0 takes y). The ways alternate; shown is what a fifth
of the rounds stay below, since whatever else a machine does only adds. `ordered` goes by the simulated order.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import sbpflow as flow
from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import simulate
from sbpflow.actors.runtime.bus import bus
from sbpflow.actors.runtime.channel import TensorLink
from sbpflow.actors.runtime.partition import cut
from sbpflow.actors.runtime.runtime import Runtime, order_of

TRIPS = 100
SIZES = (16, 1 << 16, 1 << 18, 1 << 20, 1 << 22)  # bytes


def network() -> Network:
    """One trip at a time: `one` has a single slot, which B frees."""
    actors = (
        Actor("F", "device 0", (), (Give("x"), Give("one")), firings=TRIPS),
        Actor("B", "device 0", (Take("y"), Take("one"))),
        Actor("G", "device 1", (Take("x"),), (Give("y"),)),
    )
    return Network(actors, (Register("x"), Register("y"), Register("one")), "a hop")


def runtime(size: int, ordered: bool) -> Runtime:
    line = bus((0, 1))
    rank, data = line.rank, torch.zeros(size // 4)
    proof = simulate(network())
    part = cut(proof, {"device 0": 0, "device 1": 1}, rank)
    links = {
        edge.actor: TensorLink(
            line.line,
            edge.number,
            sends=tuple((peer, lambda value: value) for peer in edge.peers if edge.sends),
            receives=tuple((peer, lambda: torch.empty(size // 4)) for peer in edge.peers if not edge.sends),
        )
        for edge in part.edges
    }
    work = {"F": lambda f: (data, None), "G": lambda f: (f.held[0][0].value,), "B": lambda f: ()}
    order = order_of(proof) if ordered else None
    return Runtime(part.network, work | part.work(links), order=order, guard=line)


def by_hand(size: int) -> Callable[[], None]:
    data, rank = torch.zeros(size // 4), dist.get_rank()

    def send(label: int) -> None:
        posted = dist.isend(data, 1 - rank, tag=label)
        assert posted is not None
        posted.wait()

    def receive(label: int) -> None:
        posted = dist.irecv(torch.empty(size // 4), 1 - rank, tag=label)
        assert posted is not None
        posted.wait()

    def trips() -> None:
        for label in range(TRIPS):
            first, then = (send, receive) if rank == 0 else (receive, send)
            first(label)
            then(label)

    return trips


def timed(step: Callable[[], object]) -> float:
    """Microseconds a hop."""
    dist.barrier()
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) / TRIPS / 2 * 1e6


def main(seconds: float) -> None:
    torch.set_num_threads(1)
    flow.init(timeout=60)
    if bus((0, 1)).rank == 0:
        print("microseconds a hop\nbytes      by hand   ordered         as it comes")
    for size in SIZES:
        ordered, free = runtime(size, True), runtime(size, False)
        ways: list[Callable[[], object]] = [by_hand(size), ordered.run, free.run]
        for way in ways:
            way()
        rounds: list[list[float]] = []
        end = time.monotonic() + seconds
        go_on = torch.ones(1)
        while go_on.item():
            rounds.append([timed(way) for way in ways])
            go_on.fill_(time.monotonic() < end or len(rounds) < 5)
            dist.broadcast(go_on, 0)
        ordered.close()
        free.close()
        hand, *times = (statistics.quantiles(column, n=5)[0] for column in zip(*rounds, strict=True))
        if bus((0, 1)).rank == 0:
            print(
                f"{size:<10} {hand:7.1f}" + "".join(f"   {each:7.1f} {each / hand:5.2f}" for each in times), flush=True
            )
    flow.boxing.close()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 3.0)
