"""Tracing: a step of an unmodified model, run once on tensors without values, as a logical graph.

    sources    inputs by their path in the arguments, parameters and buffers by their name, constants
    ops        every ATen call as the program made it, before decomposition; none writes in place
    losses     what `backward()` was called on; the backward itself is not captured

Nothing is computed, no random number drawn, and the modules are afterwards what they were.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.amp import GradScaler

from ....boxing.record import user_line
from ....placement import Placement
from ....placement.device import family
from ....placement.errors import SbpError
from ....placement.structure import replaced
from ....sbp.call import Ref, map_tensors
from ....sbp.logical import Logical, Loss, Source
from ...eager.capture import quiet
from ...eager_parts.marks import parts_by
from ...model.fp8 import eights_of
from ...model.recompute.recomputation import regions_by
from .arguments import WrittenArguments
from .caches import ResultWithCaches
from .calls.causal_masks import without_causal_masks
from .calls.derivatives import gradients
from .calls.described_card import DescribedCard
from .calls.gradient_hooks import hooked
from .calls.strides import part_of_memory, started
from .declared import Declared
from .eager_calls import EagerCalls
from .interceptor import Interceptor
from .kept_tensors import tell_kept
from .module_state import Constant, ModuleState, fake_like
from .own_backward import called
from .precision import Precision
from .repeats.layer_reuse import Repeats, like
from .repeats.object_calls import OtherAnswer, objects_in
from .results import CapturedResult
from .surroundings.clocks import Clocks
from .surroundings.draws import Draws, warn_of_draws
from .surroundings.settings import Settings
from .tape import Tape
from .training_calls import Questions, around

__all__ = ["SCALER", "Constants", "trace"]

aten = torch.ops.aten
Constants = dict[str, Callable[[], Tensor]]  # how the value of a constant is read, at each step anew


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: Mapping[str, nn.Module],
    *,
    device: str = "cpu",
    placement: Placement | None = None,
    reuse: bool = True,
    samples_apart: bool = False,
    scale: Callable[[], Tensor] | None = None,
    clocks: bool = False,
    lacked: Set[tuple[int, str]] = frozenset(),
) -> tuple[Logical, Constants]:
    """The logical graph of `function(*args, **kwargs)` with the tensors of `modules`, which are named after their keys.

    Tensors may be plain, global or on meta; they are taken for such of `device`. Gradients flow where they are on now,
    too. Without `reuse` every layer is traced. `placement` is where what nobody placed lives. With `samples_apart`
    functions that could be done for some samples alone are captured so that it shows. `scale` reads the factor that
    losses are multiplied by, at each step anew. With `clocks` it is told of clocks that the program asks. In `lacked`
    come meanwhile, by identity and name, attributes of modules that it asks for while there is no tensor.
    """

    def tracing(*, reuse: bool = reuse) -> _Tracing:
        made = _Tracing(function, modules, device, placement, scale, reuse=reuse, samples_apart=samples_apart)
        made.clocks, made.lacked = Clocks() if clocks else None, lacked
        return made

    def again() -> None:
        other = tracing()
        other.run(args, kwargs)
        other.held.around.undo()

    one, made = tracing(), None
    with suppress(OtherAnswer):
        made = one.run(args, kwargs)
    # Layers that were not run would draw and count, too.
    counted = any(number is not None for number in one.held.around.before.values())
    if made is None or (one.repeats.taken and (one.draws.some() or counted)):
        one.held.around.undo()
        one = tracing(reuse=False)
        made = one.run(args, kwargs)
    if one.clocks is not None:
        one.clocks.warn()
    if one.draws.some():
        warn_of_draws(one.draws, again)
    return made


class _Tracing:
    def __init__(
        self,
        function: Callable[..., Any],
        modules: Mapping[str, nn.Module],
        device: str,
        placement: Placement | None,
        scale: Callable[[], Tensor] | None,
        *,
        reuse: bool,
        samples_apart: bool,
    ) -> None:
        self.function = function
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.card = None if family(device).here else DescribedCard(family(device))
        self.device = device if self.card is None else "cpu"
        self.held = ModuleState(modules, self.device, self.fakes, function)
        self.tape = Tape()
        self.watch = Interceptor(self.tape, self.known, self.literal, real=self.card is None, card=self.card)
        self.declared = Declared(self.tape, self.watch, self.device, placement)
        self.repeats = Repeats(self.tape, self.watch, self.held, self.declared, reuse=reuse)
        self.watch.eights = eights_of(modules)
        self.precision = Precision(modules, self.held, self.tape, self.watch, self.repeats.call)
        hear = partial(hooked, self.tape)
        self.asked = Questions(partial(started, self.tape), self.tape.leaf, hear, samples_apart=samples_apart)
        self.sources: dict[int, Source] = {}  # by number
        self.inputs: dict[str, tuple[Tensor, Tensor, int]] = {}  # by path: fake, real one, number at the start
        self.names: set[str] = set()
        self.literals: dict[str, int] = {}
        self.scale = scale
        self.factors: dict[str, Tensor] = {}  # factors of losses: fakes by name
        self.scalers: dict[int, str] = {}  # these names of the scales of GradScalers, by identity
        self.losses: list[Loss] = self.repeats.losses
        self.constants: Constants = {}
        self.met: dict[int, tuple[Constant, Tensor]] = {}  # constants that were used, by the identity of the real one
        self.found: dict[int, Constant] | None = None
        self.clocks: Clocks | None = None
        self.lacked: Set[tuple[int, str]] = frozenset()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Logical, Constants]:
        self.draws = Draws()
        with ExitStack() as stack:
            stack.callback(Settings().restore)
            stack.enter_context(self.fakes)
            self.repeats.outside = objects_in((args, kwargs))
            given = [replaced(value, self._input, str(at)) for at, value in enumerate(args)]
            named = {name: replaced(value, self._input, name) for name, value in kwargs.items()}
            slots = {}
            for slot in self.held.slots:
                fixed = _FIXED.format(name=slot.name, line="{line}") if slot.kind == "parameter" else ""
                slots[slot.name] = number = self._source(
                    slot.name, slot.kind, slot.fake, slot.real.requires_grad, fixed, part_of_memory(slot.real)
                )
                if slot.types is not None and slot.kind == "parameter":
                    source, types = self.sources[number], slot.types
                    self.sources[number] = replace(source, grads=types.grads, states=types.states)
            stack.enter_context(self.held)
            self.draws.follow(self.held.around.streams)
            stack.enter_context(quiet())
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled functions run as they are written
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            stack.enter_context(enable_python_dispatcher())
            regions, call = self.watch.recomputed, self.repeats.call
            if self.precision.needed:
                self.watch.used, call = self.precision.used, self.precision.call
            grad, scaled = partial(gradients, self.tape, like, self.watch.paused), self._scaled_by
            stack.enter_context(around(self.asked, self._lost, call, self._own, regions, scaled, grad))
            stack.enter_context(self.declared.heard())
            stack.enter_context(regions_by(self.watch.run_again))
            stack.enter_context(parts_by(EagerCalls(self.tape, self.watch, self.inputs, self.held.slots, self.asked)))
            stack.callback(torch.clear_autocast_cache)
            stack.enter_context(self.watch)
            stack.enter_context(self.asked)
            stack.enter_context(nullcontext() if self.card is None else self.card.heard(self.fakes))
            stack.enter_context(nullcontext() if self.clocks is None else self.clocks.watched())
            try:
                result = self.function(*given, **named)
            except Exception as error:
                error.captured = tuple(self.tape.ops)  # type: ignore[attr-defined]  # for who looks for the cause
                raise
            self.draws.end()
            self.repeats.warn()
            with self.watch.paused():
                writes = self._writes(slots)
                result, rebuild, held = self._result(result)
                self._counted()
                written = {path: Ref(self.tape.number(fake)) for path, fake in self._written(held).items()}
                if written:
                    result, rebuild = (result, written), WrittenArguments(rebuild, tuple(written))
        made = self._made(result, rebuild, writes)
        beside = self.held.around
        return replace(made, deeds=tuple(beside.deeds), before=beside.before), self.constants

    # Sources

    def _source(
        self,
        name: str,
        kind: Literal["input", "parameter", "buffer", "constant"],
        fake: Tensor,
        grad: bool,
        fixed: str = "",
        part: str = "",
    ) -> int:
        if name in self.names:
            raise SbpError(
                f"capture: an argument and something in the model are both called {name}\n"
                "  rename the argument, or pass it by position"
            )
        self.names.add(name)
        number = self.tape.read(self.tape.source(fake, fixed=fixed, part=part))
        self.sources[number] = Source(name, kind, fake, grad)
        return number

    def _input(self, path: str, real: Tensor) -> Tensor:
        fake = fake_like(self.fakes, real, self.device)
        part = part_of_memory(real)
        self.inputs[path] = fake, real, self._source(path, "input", fake, real.requires_grad, part=part)
        return fake

    def known(self, real: Tensor) -> Tensor | None:
        """The fake of a parameter, buffer or attribute of a module that code got hold of by itself."""
        if isinstance(real, FakeTensor):
            return real
        slot = self.held.by_real.get(id(real))
        if slot is not None:
            return slot.fake
        if id(real) not in self.met:
            if self.found is None:
                self.found = self.held.constants()
            constant = self.found.get(id(real)) or self.held.cached(real)
            if constant is None:
                return None
            fake = fake_like(self.fakes, real.detach(), self.device)
            fixed = _FROZEN.format(name=constant.name, kind=constant.kind, line="{line}")
            self._source(constant.name, "constant", fake, False, fixed, part_of_memory(real))
            self.constants[constant.name] = constant.read
            self.met[id(real)] = constant, fake
        return self.met[id(real)][1]

    def literal(self, real: Tensor, fake: Tensor) -> None:
        """A tensor that is written down in the program: an op that makes it, or a constant if it has several values."""
        with unset_fake_temporarily():
            first = real.flatten()[:1].tolist()
            one, copy = bool(first) and bool((real == first[0]).all()), real.clone()
        kept = {"dtype": real.dtype, "device": torch.device(self.device)}
        if one:
            self.tape.record(aten.full.default, ([*real.shape], first[0]), kept, fake)
        elif not first:
            self.tape.record(aten.empty.memory_format, ([*real.shape],), kept, fake)
        else:
            with unset_fake_temporarily():
                written = repr((real.dtype, real.shape, real.tolist()))
            if written in self.literals:  # the same, written elsewhere or made by the same line again
                self.tape.stand_for(fake, self.literals[written])
                return
            name = f"literal{len(self.literals)}"
            self.literals[written] = number = self._source(name, "constant", fake, False)
            self.repeats.literals.add(number)
            self.constants[name] = lambda: copy

    def _own(self, apply: Callable[..., Any], cls: Any, args: tuple[Any, ...]) -> Any:
        self.tape.origin = self.watch.here()
        return called(apply, cls, args, self.tape, self.watch)

    def _lost(self, loss: Tensor, gradient: Tensor | None) -> None:
        self.tape.origin = replace(self.tape.origin, line=user_line())
        given = None if gradient is None else self.tape.number(gradient)
        number = self.tape.number(loss)
        self.losses.append(Loss(number if self.scale is None else self._scaled(loss, number), given))

    def _scaled_by(self, scaler: GradScaler, outputs: Any) -> Any:
        """The outputs times the scale of a GradScaler, as it is at each step."""
        if not scaler.is_enabled():
            return outputs
        name = self.scalers.setdefault(id(scaler), f"{SCALER} {len(self.scalers) + 1}")
        factor = self._factor(name, lambda: plain_scale(scaler, torch.ones((), device="cpu")))
        return map_tensors(outputs, lambda x: x * factor.to(x.device))

    def _scaled(self, loss: Tensor, number: int) -> int:
        """The loss times the factor, in the range of fp32."""
        assert self.scale is not None
        factor = self.tape.number(self._factor(LOSS_SCALE, self.scale))
        if loss.dtype.itemsize < 4:
            number = self.tape.make(aten.to.dtype, Ref(number), torch.float32, grad=True)
        return self.tape.make(aten.mul.Tensor, Ref(number), Ref(factor), grad=True)

    def _factor(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """The fake of a number that is read at each step anew."""
        if name not in self.factors:
            with self.watch.paused():
                self.factors[name] = torch.empty((), dtype=torch.float32, device=self.device)
            self._source(name, "constant", self.factors[name], False)
            self.constants[name] = read
        return self.factors[name]

    # The end

    def _writes(self, slots: Mapping[str, int]) -> dict[str, int]:
        """The final values of buffers that were written to or assigned."""
        writes = {}
        for slot in self.held.slots:
            if slot.kind == "buffer" and self.tape.number(slot.fake) != slots[slot.name]:
                writes[slot.name] = self.tape.number(slot.fake)
        for name, now in self.held.assigned():
            writes[name] = self.tape.number(now)
        for constant, _ in self.met.values():
            if constant.read() is not constant.real:
                raise SbpError(
                    f"capture: {constant.name} is a plain attribute that the step reads and then replaces\n"
                    "  it would stay what it was\n"
                    f"  make it a buffer: register_buffer({constant.name.rpartition('.')[2]!r}, ...)"
                )
        tell_kept(self.held, self.tape, self.lacked, self.sources.keys() - self.repeats.literals)
        return writes

    def _counted(self) -> None:
        """Note of inputs whether the program counts from where they start in memory."""
        for fake, _, number in self.inputs.values():
            if self.tape.view(fake).memory.counted:
                self.sources[number] = replace(self.sources[number], starts=True)

    def _result(self, result: Any) -> tuple[Any, Callable[[Any], Any], Set[int]]:
        """The values that are returned, how they are put together, and the fakes that caches held, by identity."""
        results = CapturedResult(self.tape, self.known)
        if not isinstance(result, ResultWithCaches):
            return *results.of(result), frozenset()
        given = {id(fake): (real, number) for fake, real, number in self.inputs.values()}
        held = {id(x) for each in result.caches for x in each.argument.values()}
        return *results.with_caches(result.result, result.caches, given), held

    def _written(self, held: Set[int]) -> dict[str, Tensor]:
        """The arguments that were written to, by path, with the fakes that say what they hold then; but for those that
        caches held."""
        found = {}
        for path, (fake, real, number) in self.inputs.items():
            now = self.tape.number(fake)
            if id(fake) in held or self.tape.leaves.get(now, now) == number:
                continue
            if real.requires_grad or fake.shape != real.shape:
                what = "requires grad" if real.requires_grad else "gets another shape by it"
                raise SbpError(
                    f"capture: the argument {path} is written to in the step, and {what}\n"
                    "  the tensor that was passed could not become what it is then in torch\n"
                    "  write to a copy, as in x = x.clone(), and return what is to be kept"
                )
            found[path] = fake
        return found

    def _made(self, result: Any, rebuild: Callable[[Any], Any], writes: dict[str, int]) -> Logical:
        """The graph: ops that nothing uses are left out, and values numbered anew, sources first."""
        ops = without_causal_masks(self.tape.ops, self.tape.fakes)
        whole = Logical((), ops, result, tuple(self.losses), writes, rebuild)
        whole = whole.needed(dict(enumerate(self.tape.fakes)))
        used = whole.ends.union(*(op.inputs for op in whole.ops))
        sources = {n: s for n, s in self.sources.items() if s.kind != "constant" or n in used}
        order = {n: at for at, n in enumerate(sorted(sources, key=lambda n: _ORDER[sources[n].kind]))}
        for op in whole.ops:
            for n in op.numbers:
                order[n] = len(order)
        listed = tuple(sources[n] for n in order if n in sources)
        self.constants = {s.name: self.constants[s.name] for s in listed if s.kind == "constant"}
        return replace(whole.map(order), sources=listed)


LOSS_SCALE, SCALER = "loss scale", "scale of GradScaler"  # which no path in a model is called
plain_scale: Any = GradScaler.scale  # which a capture replaces meanwhile
_ORDER = {"input": 0, "parameter": 1, "buffer": 1, "constant": 2}
_FIXED = (
    "capture: the parameter {name} is written to, at {line}\n"
    "  a step changes parameters by its optimizer alone\n"
    "  compute a new tensor, make it a buffer, or write to it outside of the graph"
)
_FROZEN = (
    "capture: {name} is {kind} and is written to, at {line}\n"
    "  the values written would be lost\n"
    "  make it a buffer: register_buffer"
)
