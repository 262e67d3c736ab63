"""BPipe: the stages of a pipeline that keep much have others keep some of it, so that all keep alike.

Under 1F1B the first stage has as many micro-batches under way as there are stages, and the last has one. What stage s
has too many of goes to stage p-1-s and back: `evict` takes an activation out of the stage's register and puts it in
one of the partner, `load` brings it back in time for the backward. How far the forward may be ahead stays as it was,
and so does the order of a stage.
"""

from collections.abc import Sequence
from typing import Any

from ...placement.errors import ScheduleError
from ..protocol.network import Actor, Network
from ..protocol.state import Firing
from .addition import Added

__all__ = ["bpipe", "handed_on"]


def handed_on(firing: Firing) -> Sequence[Any]:
    """The work of an actor that puts what it takes into the register that it fills."""
    return [firing.held[0][0].value]


def bpipe(network: Network, time: float = 0.0) -> Added:
    """The network with actors that level what its stages keep; evicting and loading takes so long each.

    A pair of stages that keeps `a` and `b` has the room of ceil((a + b + 1) / 2) on each: one slot is for what is under
    way between the two. Of its own room a stage has one slot for what was loaded less two, and two for what F makes.
    """
    kept = _kept(network)
    stages, ranks = list(kept), dict[str, str]()
    for number, stage in enumerate(stages):
        partner = stages[-1 - number]
        (name, mine), (_, theirs) = kept[stage], kept[partner]
        room = (mine + theirs + 2) // 2
        if mine <= room:
            continue
        slots = 2, room - theirs, room - 2
        if min(slots) < 1:
            what = f"{stage} keeps {mine} micro-batches and {partner} {theirs}, and {room} leave none under way"
            raise ScheduleError(f"{network.name}: {what}\n  BPipe levels 1F1B on four stages or more")
        chunk = name.partition(".")[2]
        out, back = f"evict {chunk}", f"load {chunk}"
        network = network.through(name, Actor(out, out, time=time), Actor(back, back, time=time), slots=slots)
        ranks |= {out: stage, back: partner}
    return Added(network, dict.fromkeys(ranks, handed_on), ranks)


def _kept(network: Network) -> dict[str, tuple[str, int]]:
    """By queue the register between its forward and its backward, and its slots."""
    found: dict[str, tuple[str, int]] = {}
    for register in network.registers:
        maker = network.producers.get(register.name)
        readers = [a for a in network.actors if any(take.register == register.name for take in a.takes)]
        if maker is None or not register.name.startswith("act.") or len(readers) != 1:
            continue
        queue = readers[0].queue
        if queue in found or readers[0].sequence or register.name.count(".") > 1:
            what = f"{queue} keeps activations in {register.name} as well as in {found.get(queue, ('cases',))[0]}"
            raise ScheduleError(f"{network.name}: {what}\n  BPipe levels stages of one chunk, as those of '1f1b'")
        found[queue] = register.name, register.high
    if len(found) < 2:
        raise ScheduleError(f"{network.name}: {len(found)} stages keep activations\n  BPipe levels those of a pipeline")
    return found
