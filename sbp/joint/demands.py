"""Demands on a choice: how sources must lie, how gradients and optimizers' states rest, and what may be done."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import torch

from ...placement import Placement
from ..kernels.update_kernels import ONE_KERNEL, UpdateKernels
from ..layout import Layout
from ..signature import Sbp
from ..state import State
from .pins import Entries

__all__ = [
    "Demands",
    "EncodedGrads",
    "EncodedWay",
    "RestPins",
    "Rounds",
    "Said",
    "SourcePin",
]

SourcePin: TypeAlias = Entries | State
Said: TypeAlias = tuple[tuple[int, Sbp | None], ...]  # entries of some axes, by number; None: to be chosen


class RestPins(NamedTuple):
    """The layouts asked of a parameter's gradient and optimizer states; axes not named follow the parameter.

    None: nothing is said. Such a gradient goes to where the states lie, unless somebody `reads` it whole."""

    grads: Said | None = None
    states: Said | None = None
    reads: bool = False


class EncodedWay(Protocol):
    """The encoding of a parameter's gradient on its way home; equal ones are equal keys."""

    def axes(self, place: Placement) -> tuple[int, ...]:
        """The axes along which it is meant to add up, those of one rank left out."""

    def moves(self, src: Layout, dst: Layout) -> tuple[tuple[Layout, Layout], ...]:
        """The plain moves of which the encoded one is made; none if it goes as it is."""

    def __hash__(self) -> int: ...


class EncodedGrads(NamedTuple):
    """Gradients that go home encoded: by which encoder, and from which dtype. `summed`: only where they are summed, if
    they can be."""

    by: EncodedWay
    dtype: torch.dtype
    summed: bool


class Rounds(NamedTuple):
    """The weight of a micro-batch's work against work done once a step.

    `times` counts the micro-batches and the wait of `stages` for each other; with `gathers`, weights are gathered
    once."""

    times: float = 1.0
    stages: int = 1
    gathers: bool = False


@dataclass(frozen=True)
class Demands:
    """Demands on a choice: pins that it has to respect, and liberties that it may take.

    `states` counts the tensors that an optimizer keeps for each parameter; `sharded` lets them lie in pieces where the
    parameter itself does not, and `rests` say how they are to lie. `together` is how many bytes of gradients go at
    once, by the type of device. `encoders` encode gradients: one says that they are summed, but where the parameter is
    said to be cut; with `real_sums` no gradient that is whole becomes the one addend of a sum over their axes. `rounds`
    are those of a step in micro-batches. `compiled` are the types of devices on which runs of ops are compiled to one
    kernel. In modules that are `held`, by their paths, ops take what follows from pins,
    whatever another way would cost. `update` are the kernels of the optimizer's step.
    """

    pins: Mapping[str, SourcePin] = field(default_factory=dict)  # of sources, by name
    states: int = 0
    sharded: bool = False
    together: Mapping[str, int] = field(default_factory=dict)
    rests: Mapping[str, RestPins] = field(default_factory=dict)  # of parameters, by name
    encoders: Mapping[str, EncodedWay] = field(default_factory=dict)  # of parameters' gradients, by name
    rounds: Rounds | None = None
    real_sums: bool = False
    compiled: frozenset[str] = frozenset()
    held: tuple[str, ...] = ()
    update: UpdateKernels = ONE_KERNEL

    @property
    def optimizer(self) -> tuple[int, bool, UpdateKernels]:
        """The optimizer, as far as the price of a weight goes by it."""
        return self.states, self.sharded, self.update

    def summed_over(self, place: Placement) -> frozenset[int]:
        """The axes along which an encoder is meant to add up."""
        return frozenset(axis for by in self.encoders.values() for axis in by.axes(place))
