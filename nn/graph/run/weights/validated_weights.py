"""Weights that optimizers step chunk by chunk before the gradients of all are known: chunks tell each other of theirs,
and a step that should not have been is taken back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .....actors.protocol.network import Network
from .....actors.protocol.state import Firing
from .....boxing.exchange.transport import lane
from .....placement import Placement
from .....sbp import Layout, State
from ...compiler.generated_calls import Shards
from ...lower.registers import LocalRegister
from ...memory.resident import Resident
from ...tasks.task import Hop, Name
from ..network import Bundle
from .chunk_weights import ChunkWeights
from .step_state import Validation
from .weights import MeanDtype

__all__ = ["ValidatedWeights"]


class ValidatedWeights(ChunkWeights):
    """How a schedule with a flush keeps weights where steps of chunks' optimizers are made good in the end."""

    @property
    def validates(self) -> Sequence[str]:
        return tuple(self.home.tasks.grads)

    def resident(self, slots: Mapping[str, int], states: int, mean: MeanDtype) -> Iterator[Resident]:
        """With copies to which a step is taken back."""
        yield from super().resident(slots, states, mean)
        names, group = self.home.tasks.grads, self.home.where.group
        copies = [s.master for s in self.home.graph.sources if s.value.name in names] * (1 + states)
        if len(set(group)) < len(group):
            yield Resident.of("activations", copies)
        else:  # a stage of one chunk has let its activations go by then
            yield Resident.of("update", [*copies, *self.home.sums])

    def told(self, register: str, network: Network, places: Mapping[str, Sequence[int]]) -> Bundle | None:
        made = network.actor(network.producers[register])
        if made.name[0] not in "NV":
            return None
        (reader,) = (a for a in network.actors if any(take.register == register for take in a.takes))
        ends = Name("B", 0), Name("B", 0)
        what = LocalRegister("sent", register), LocalRegister("come", register)
        pair = self.told_as(places[made.queue]), self.told_as(places[reader.queue])
        return Bundle(what[:1], what[1:], (Hop(*ends, *what, pair),))

    def told_as(self, ranks: Sequence[int]) -> Layout:
        """How what is told of gradients lies on the ranks of a chunk: a number for each, and two for all."""
        device = self.home.where.placements[0][0].type
        line = Placement(device, tuple(ranks), (len(ranks),), None)
        return Layout(line, State(((),)), (len(self.home.tasks.grads) + 2,), torch.float64)

    def undo(self) -> Sequence[int]:
        return sorted(self.validating.undo())

    @property
    def validating(self) -> Validation:
        """The validation of the step under way."""
        assert self.step.validation is not None
        return self.step.validation

    @property
    def once_a_step(self) -> dict[str, Callable[[int, int, Firing], Sequence[Any]]]:
        return {**super().once_a_step, "N": self.known, "V": self.validate}

    def update(self, number: int, width: int, firing: Firing) -> Sequence[Any]:
        (known,) = firing.held[1][0].value
        with torch.no_grad():
            self.validating.step(number, known)
        return (None,) * width

    def known(self, number: int, width: int, firing: Firing) -> Sequence[Any]:
        """All that is known of gradients, with those of one chunk more."""
        with torch.no_grad(), lane(self.lane):
            known = self.validating.known(number, firing.held[0][0].value, self.losses(number))
            for slots in firing.held[1:]:
                (before,) = slots[0].value
                known = known + before.to(known.device)
        return ((known,),) * width

    def validate(self, number: int, width: int, firing: Firing) -> Sequence[Any]:
        """A chunk, now that all is known."""
        (known,) = firing.held[1][0].value
        with torch.no_grad():
            self.validating.validate(number, known)
        return ((known,),) * width

    def losses(self, chunk: int) -> list[tuple[Placement, Shards]]:
        """The losses that a chunk made of all micro-batches."""
        found = []
        for key, values in zip(self.micro_batches, self.step.values, strict=True):
            graph, where = self.variants[key].graph, self.variants[key].where
            mine = [name for name, _ in graph.losses if where.home[name] == chunk and name in values]
            found += [(graph.layout(name).placement, values[name]) for name in mine]
        return found
