"""Phases: encoders that begin some steps later, and one that encodes momentum instead of gradients (1-bit Adam)."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from ...placement.errors import SbpError
from ..kept import KeptTensors
from .bits import SignEncoder
from .course import EncoderCourse, PieceCuts, Summed, SummedPieces, TensorEncoder
from .encoder import Encoder

__all__ = ["LaterEncoder", "MomentumEncoder"]


def _count(kept: KeptTensors) -> int:
    return int(kept["steps"]) if "steps" in kept else 0


def _steps(count: int) -> Tensor:
    return torch.tensor(count, device="cpu")


@dataclass(frozen=True)
class LaterEncoder(Encoder):
    """Another encoder from some step on; before that, sums are sent as they are. `twice` and `feedback=False` are the
    other's too."""

    steps: int = 1
    of: Encoder = field(default_factory=SignEncoder)

    name: ClassVar[str] = "later"

    def __post_init__(self) -> None:
        _check_steps("later", self.steps)
        _hand_on(self)

    def course(self, value: Tensor, kept: KeptTensors, ranks: int) -> EncoderCourse:
        return (yield from self._phase(kept, Summed(value), lambda inner: self.of.course(value, inner, ranks)))

    def course_in_pieces(self, value: Tensor, kept: KeptTensors, cuts: PieceCuts) -> EncoderCourse:
        plain = SummedPieces(cuts.of(value))
        return (yield from self._phase(kept, plain, lambda inner: self.of.course_in_pieces(value, inner, cuts)))

    def _phase(
        self, kept: KeptTensors, plain: Summed | SummedPieces, then: Callable[[KeptTensors], EncoderCourse]
    ) -> EncoderCourse:
        count = _count(kept)
        if count < self.steps:
            return (yield plain), {"steps": _steps(count + 1)}
        total, found = yield from then({name: x for name, x in kept.items() if name != "steps"})
        return total, {**found, "steps": _steps(count)}

    @property
    def cuts(self) -> bool:
        return self.of.cuts

    @property
    def steady(self) -> TensorEncoder:
        return self.of.steady


@dataclass(frozen=True)
class MomentumEncoder(Encoder):
    """The mean of gradients over steps in the gradient's place. All ranks have it, each adds its own gradient, and the
    sum of that is encoded. For some steps before, it is kept of plain sums, which are what comes out.

    So the optimizer gets gradients while it warms up, and then the momentum: it must have none of its own then. `twice`
    and `feedback=False` are of the encoder that encodes that sum too.
    """

    beta: float = 0.9
    steps: int = 1
    of: Encoder = field(default_factory=SignEncoder)

    name: ClassVar[str] = "momentum"

    def __post_init__(self) -> None:
        _check_steps("momentum", self.steps)
        if not 0 <= self.beta < 1:
            raise SbpError(f"momentum(beta={self.beta!r})\n  it is the share of the last momentum that stays, below 1")
        _hand_on(self)

    def course(self, value: Tensor, kept: KeptTensors, ranks: int) -> EncoderCourse:
        count, held = _count(kept), kept.get("momentum")
        before = torch.zeros_like(value) if held is None else held
        if count < self.steps:
            total: Tensor = yield Summed(value)
            return total, {"momentum": self.beta * before + (1 - self.beta) * total, "steps": _steps(count + 1)}
        mine = self.beta / ranks * before + (1 - self.beta) * value
        inner = {name: x for name, x in kept.items() if name not in ("momentum", "steps")}
        whole, found = yield from self.of.course(mine, inner, ranks)
        # A copy, because the momentum is handed out, and may be changed in place, such as by clipping.
        return whole, {**found, "momentum": whole.clone(), "steps": _steps(count)}

    @property
    def steady(self) -> TensorEncoder:
        return self.of.steady


def _hand_on(phase: "LaterEncoder | MomentumEncoder") -> None:
    """Have the encoder of a phase, which is the one that encodes, do as was said of the phase."""
    of, twice, feedback = phase.of, phase.twice or phase.of.twice, phase.feedback and phase.of.feedback
    if (twice, feedback) == (of.twice, of.feedback):
        return
    try:
        object.__setattr__(phase, "of", replace(of, twice=twice, feedback=feedback))
    except TypeError:  # an __init__ of its own takes other arguments
        said = f"twice={twice}, feedback={feedback}"
        raise SbpError(
            f"{phase.name}({said}) cannot tell its {type(of).__name__}, whose __init__ does not take both\n"
            f"  make that one with them, or give it a field for each option and no __init__"
        ) from None


def _check_steps(name: str, steps: object) -> None:
    if type(steps) is not int or steps < 0:
        raise SbpError(f"{name}(steps={steps!r})\n  give it how many steps go before it, as in {name}(steps=100)")
