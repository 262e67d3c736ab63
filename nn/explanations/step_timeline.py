"""The timeline of a pipelined step: what its last run did, beside a simulation with the times that things took."""

from collections import defaultdict
from dataclasses import replace
from statistics import median

from ...actors.protocol.network import Network
from ...actors.protocol.simulate import Ran, Simulation, simulate
from ...actors.runtime.ranked import is_wire, joined, renamed
from ...actors.timeline.clocks import clock_offsets, collect
from ...actors.timeline.timeline import Timeline
from ...boxing.boxing import between
from ...placement.errors import ScheduleError
from ...placement.world import world
from ..graph.run.network import Lowered
from ..graph.run.pipeline import Pipelined

__all__ = ["timeline"]


def timeline(program: Pipelined, *, beside: bool = True) -> Timeline | None:
    """The timeline of the last step, with a simulation `beside` it; all ranks ask for it, and the first gets it."""
    outcome, proved = program.outcome, program.proved
    if outcome is None:
        raise ScheduleError("a timeline before any step\n  call the graph first")
    proof, lowered, where, sizes = proved.proof, proved.lowered[proved.kinds[0]], proved.places, program.bound.bytes
    here = world().rank
    if here is None:
        homes = {queue: ranks[0] for queue, ranks in where.items()}
        by = {rank: tuple(ran for ran in outcome.firings if homes[ran.queue] == rank) for rank in homes.values()}
        network = _weighed(proof.network, sizes)
        return Timeline(network, by, {}, _simulated(network, outcome.firings) if beside else None)
    ranks = sorted({rank for each in where.values() for rank in each})
    if here not in ranks:
        return None
    offsets = clock_offsets(ranks)
    records = collect(ranks, renamed(outcome.firings, here))
    if here != ranks[0]:
        return None
    whole = joined(proof, where, {name: _pairs(lowered, where, proof, name) for name in _names(proof.network)})
    everything = tuple(ran for each in records.values() for ran in each)
    whole = _weighed(whole, {f"{name}@{here}": size for name, size in sizes.items()})
    return Timeline(whole, records, offsets, _simulated(whole, everything) if beside else None, is_wire)


def _weighed(network: Network, nbytes: dict[str, int]) -> Network:
    registers = tuple(replace(r, bytes=nbytes.get(r.name, r.bytes)) for r in network.registers)
    return Network(network.actors, registers, network.name)


def _names(network: Network) -> list[str]:
    return [register.name for register in network.registers]


def _pairs(
    lowered: Lowered, where: dict[str, tuple[int, ...]], proof: Simulation, register: str
) -> list[tuple[int, int]]:
    """The pairs of ranks between which a register's content goes; of a token every one to every one."""
    bundle = lowered.bundles.get(register)
    if bundle is not None and bundle.hops:
        return sorted({
            (rank, part.peer)
            for hop in bundle.hops
            for rank in hop.pair[0].placement.flat
            for programs in between(*hop.pair).programs(rank)
            for program in programs
            for part in program.sends
        })  # fmt: skip
    network = proof.network
    made = where[network.actor(network.producers[register]).queue] if register in network.producers else ()
    read = [where[a.queue] for a in network.actors if any(take.register == register for take in a.takes)]
    return [(rank, peer) for rank in made for ranks in read for peer in ranks if ranks != made]


def _simulated(network: Network, records: tuple[Ran, ...]) -> Simulation | None:
    """The same network with, for everything, the time that it usually took."""
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    for ran in records:
        took[ran.actor, ran.case].append(ran.end - ran.start)
    usual = {key: median(times) for key, times in took.items()}
    run = simulate(network, time=lambda actor, case, label: 0.0 if is_wire(actor) else usual.get((actor, case), 0.0))
    return run if run.finished else None
