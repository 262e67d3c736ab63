"""Calls of eager parts in a captured step: each becomes one op, of its arguments and of what its modules hold."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ....placement.errors import SbpError
from ....placement.structure import leaves, replaced
from ...eager.capture import autocast_state
from ...eager_parts.held import HeldTensors
from ...eager_parts.marks import EagerMark
from ...eager_parts.part import EagerPart, Made, PartCall, PartTensor, of_all
from ...model.recompute.recomputation import regions_by
from ...tensors.tensor import GlobalTensor
from .eager_trial import Learnt, PartTrial
from .interceptor import Interceptor
from .module_state import HeldTensor
from .repeats.layer_reuse import like
from .tape import Tape
from .training_calls import Questions

__all__ = ["EagerCalls"]


class EagerCalls:
    """Makes the calls of eager parts. `inputs` are those of the step by path, each with its fake first, and `slots`
    what modules hold."""

    def __init__(
        self,
        tape: Tape,
        watch: Interceptor,
        inputs: Mapping[str, tuple[Tensor, Tensor, int]],
        slots: Iterable[HeldTensor],
        asked: Questions,
    ) -> None:
        self.tape, self.watch, self.asked = tape, watch, asked
        self.reals = {id(fake): real for fake, real, _ in inputs.values()}
        self.reals.update((id(slot.fake), slot.real) for slot in slots)

    def __call__(self, mark: EagerMark, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a call: fakes for its tensors, all else as it is."""
        tape, watch = self.tape, self.watch
        # What it saved is kept: a part is not run again, because it need not do the same twice.
        tape.origin = replace(watch.here(), recompute="")
        place = " ".join(filter(None, (tape.origin.module and f"{tape.origin.module},", tape.origin.line)))
        fakes: list[Tensor] = []
        given = self._numbered((args, dict(kwargs)), fakes)
        held = HeldTensors(_modules(mark, (args, kwargs)))
        self._check(mark, held, place)
        values = [self._value(x) for x in (*fakes, *held.tensors)]
        stands = [*fakes, *held.tensors]
        if watch.used is not None:  # parameters that rest in another type
            (cast,), _ = watch.used(torch.ops.aten.alias.default, (stands,), {})
            values = [real if x is y else None for real, x, y in zip(values, stands, cast, strict=True)]
            stands = cast
        learnt = PartTrial(mark, given, stands, values, held, place, self._stood_aside, watch.looked_at).learnt()
        return self._put(mark, given, stands, held, learnt, place)

    def _numbered(self, value: Any, fakes: list[Tensor]) -> Any:
        """The arguments with `PartTensor`s in the place of tensors, whose fakes are collected."""
        known: dict[int, PartTensor] = {}

        def number(path: str, x: Tensor) -> PartTensor:
            fake = self.watch.fake(x)
            if id(fake) not in known:
                known[id(fake)] = PartTensor(len(fakes))
                fakes.append(fake)
            return known[id(fake)]

        return replaced(value, number, objects=True)

    def _check(self, mark: EagerMark, held: HeldTensors, place: str) -> None:
        eights = next((module for module in held.modules if id(module) in self.watch.eights), None)
        if eights is not None:
            raise SbpError(
                f"capture: the eager part {mark.name}, called at {place}, has a {type(eights).__name__} that is to "
                "compute in 8 bits\n  eager code does not: name other modules in flow.nn.cast"
            )

    def _value(self, fake: Tensor) -> Tensor | None:
        """The tensor for which a fake stands, where every process has it, with values."""
        real = self.reals.get(id(fake))
        if isinstance(real, GlobalTensor):  # a buffer, say, from the first run on
            lies = real._layout.state
            whole = not lies.split and not lies.partial and of_all(real.placement)
            real = real._shards[0] if whole else None
        if real is None or real.is_meta:
            return None
        return real if self.tape.number(fake) == self.tape.view(fake).memory.born else None  # else it was written to

    @contextmanager
    def _stood_aside(self) -> Iterator[None]:
        with self.watch.paused(), self.asked.stand_aside(), regions_by(None):
            yield

    def _put(
        self, mark: EagerMark, given: Any, stands: list[Tensor], held: HeldTensors, learnt: Learnt, place: str
    ) -> Any:
        tape, grad = self.tape, torch.is_grad_enabled()
        made: list[Made] = []
        outputs: list[Tensor] = []

        def fresh(path: str, y: Tensor) -> Tensor:
            made.append(Made(tuple(y.shape), y.dtype))
            one = torch.empty(tuple(y.shape), dtype=y.dtype, device=stands[0].device if stands else "cpu")
            outputs.append(like(one.requires_grad_()) if y.requires_grad and grad else one)
            return outputs[-1]

        with self.watch.paused():
            result = replaced(learnt.result, fresh, objects=True)
            buffers = [torch.empty_like(held.tensors[at]) for at in learnt.written]
        numbers = {id(y): PartTensor(n) for n, y in enumerate(outputs)}
        named = replaced(result, lambda _, y: numbers[id(y)], objects=True)
        many = len(stands) - len(held.tensors)
        call = PartCall(
            mark, given, many, held, named, tuple(made), learnt.written, grad, learnt.draws, autocast_state(), place
        )
        op: Any = EagerPart(call)
        tape.record(op, tuple(stands), {}, [*outputs, *buffers])
        for at, now in zip(learnt.written, buffers, strict=True):
            tape.write(tape.view(held.tensors[at]), tape.number(now))
        return result


def _modules(mark: EagerMark, given: Any) -> list[nn.Module]:
    """The modules whose tensors a part may use: the one that is marked, or those among a function's arguments, and the
    one of which it is a method."""
    found = [] if mark.module is None else [mark.module]
    if isinstance(mark.inner, MethodType) and isinstance(mark.inner.__self__, nn.Module):
        found.append(mark.inner.__self__)
    return [*found, *leaves(given, nn.Module)]
