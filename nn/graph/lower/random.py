"""Random numbers of whole tensors, of which every rank keeps its part; the numbers are those of one device."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ....boxing.graph.physical import Physical
from ....placement.device import family
from ....placement.errors import SbpError
from ....placement.world import device, owned
from ....sbp.call import fill, tensors_in
from ...tensors import seeds
from .localise import part, placed, renamed
from .segments import Draw

__all__ = ["Drawer", "Numbered"]

_drawing = Lock()  # torch's generator is one for all threads


class Drawer:
    """Runs one op that draws, once a process, with torch's own generator; also where this process keeps no part,
    so that every process's generator goes the same way."""

    def __init__(self, graph: Physical, draw: Draw) -> None:
        op = draw.op
        self.op, self.outputs = op.op, [y.layout for y in op.outputs]
        self.where = self.outputs[0].placement
        here = owned(self.where)
        self.device = device(self.where, here[0]) if here else torch.device(self.where.type)
        number = {name: i for i, name in enumerate(op.inputs)}
        self.args, kwargs = renamed((op.args, op.kwargs), number)
        self.kwargs = kwargs if op.inputs else placed(op.op, kwargs, self.device)
        self.reads = bool(draw.inputs)
        self.layouts = [graph.layout(name) for name in op.inputs]
        for of in self.layouts if self.reads else ():
            if of.state.split or of.state.partial:
                raise SbpError(
                    f"{op.op} draws by the values of a tensor that lies as {of.lie}, at {op.origin.line or 'no line'}\n"
                    "  random numbers are drawn for the whole tensor; it has to be B there"
                )

    def __call__(self, *inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The owned parts of each output; `inputs` are the owned shards of each input, where values matter."""
        seeds.agree(self.where)
        return self.drawn(*inputs)

    def noted(self, *inputs: Sequence[Tensor]) -> list[Any]:
        """The same, and from where on the generator drew."""
        chance = self.generator.get_state()
        return [*self(*inputs), chance]

    def again(self, *given: Any) -> list[tuple[Tensor, ...]]:
        """Numbers as they were drawn from there on."""
        *inputs, chance = given
        with _drawing:
            before = self.generator.get_state()
            try:
                self.generator.set_state(chance)
                return self.drawn(*inputs)
            finally:
                self.generator.set_state(before)

    @property
    def generator(self) -> torch.Generator:
        """Torch's own generator on the device that draws."""
        return family(self.device.type).generator(self.device)

    def drawn(self, *inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The same where ranks are known to have one seed."""
        if inputs and inputs[0]:
            given = [held[0] for held in inputs]
        elif self.reads:  # the values are elsewhere; as many numbers are drawn for any others
            given = [torch.full(of.shape, 0.5, device=self.device).to(of.dtype) for of in self.layouts]
        else:
            given = [torch.empty(of.shape, dtype=of.dtype, device=self.device) for of in self.layouts]
        wholes = tensors_in(self.op(*fill(self.args, given), **fill(self.kwargs, given)))
        here = owned(self.where)
        if len(here) == 1 and not any(of.state.split or of.state.partial for of in self.outputs):
            return [(whole,) for whole in wholes]
        # A view of the whole would keep all of it alive.
        return [
            tuple(part(whole, of, rank).to(device(self.where, rank), copy=True) for rank in here)
            for whole, of in zip(wholes, self.outputs, strict=True)
        ]


class Numbered:
    """A draw of a pipeline, whose numbers depend on the step, the op, and the micro-batch.

    They do not depend on what ran before, so they are the same under every schedule and on every placement. Those drawn
    by values, which are of weights, are the same for every micro-batch."""

    def __init__(self, drawer: Drawer, number: int) -> None:
        self.drawer, self.number = drawer, number

    def __call__(self, shards: Mapping[str, tuple[int, ...]], *inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        step, k = shards["numbers"]
        k = 0 if self.drawer.reads else k
        generator = self.drawer.generator
        seed = (step + 0x9E3779B97F4A7C15 * (self.number + 1) + 0xBF58476D1CE4E5B9 * k) % (1 << 63)
        with _drawing:
            before = generator.get_state()
            try:
                generator.manual_seed(seed)
                return self.drawer.drawn(*inputs)
            finally:
                generator.set_state(before)
