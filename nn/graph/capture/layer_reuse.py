"""Repeated layers: one is traced, and its ops stand again for every other that is like it.

A call is taken over only where that is exact: the ops read nothing but the call's arguments and the module's own
tensors, nothing outside was written to, and all that Python could have gone by is the same. A whole number that the
trace did not read, such as that of a layer, may be another.
"""

import operator
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as calls
from torch.nn.modules.module import _has_any_global_hook

from ....boxing.record import following
from ....placement.structure import replaced
from ....sbp.logical import LogicalOp, Origin
from ...eager.capture import autocast_state
from ...model.flows import flow_of
from .declared import Declared
from .interceptor import Interceptor
from .likeness import ALL, Number, Unlike, attributes_noted, blocks_of, of_module, of_value, read_name
from .module_state import ModuleState
from .tape import Tape, View

__all__ = ["Repeats", "like"]

Run = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class _LayerCall:
    """A call about to be made: all it could go by, and the tensors it may use."""

    key: Any
    settings: list[Number]
    own: list[Tensor]
    constants: list[Tensor]
    given: list[Tensor]
    numbers: tuple[int, ...]  # of own and given

    def same(self, other: "_LayerCall") -> bool:
        """Whether another call of one module has all the same that it could go by."""
        return self.key == other.key and [each.value for each in self.settings] == [n.value for n in other.settings]


@dataclass(frozen=True, eq=False)
class _Traced:
    """The ops and results of a call."""

    key: Any
    read: Mapping[int, int]  # the settings that are numbers and were read, by place, with their values
    path: str
    module: nn.Module
    region: str  # that it was in
    ops: tuple[LogicalOp, ...]
    first: int  # of the numbers of its values
    fakes: tuple[Tensor, ...]
    place: Mapping[int, int]  # the places of numbers from outside, among those of own and given
    constants: Mapping[int, int]
    result: Any
    given: Mapping[int, int]  # the result's tensors that are arguments, by identity, and their places among those
    made: Mapping[int, int]  # its other tensors, and their numbers
    writes: Mapping[int, int]  # own tensors by place, and their new numbers

    def stands_for(self, call: _LayerCall) -> bool:
        return self.key == call.key and all(call.settings[at].value == value for at, value in self.read.items())


class Repeats:
    """Calls modules, and knows where in the model the capture is."""

    def __init__(
        self, tape: Tape, watch: Interceptor, held: ModuleState, declared: Declared, *, reuse: bool = True
    ) -> None:
        self.tape, self.watch, self.held, self.reuse = tape, watch, held, reuse
        self.declared = declared
        self.flowing = {id(module): module for module in held.modules if flow_of(module)}
        self.met: set[int] = set()  # modules of which a flow is said, and that were called
        self.blocks = blocks_of(held.paths, held.modules)
        self.traced: list[_Traced] = []
        self.taken = 0  # calls that were not traced
        self.busy: set[int] = set()
        self.literals: set[int] = set()  # numbers of constants that are the same everywhere
        self.losses: list[Any] = []
        self.read: set[tuple[int, str]] = set()  # names that were read of modules, while one was traced to be reused

    def call(self, run: Run, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the module; stands in for `nn.Module.__call__`."""
        watch = self.watch
        before = watch.module, watch.block, watch.inner
        path = self.held.paths.get(id(module))
        watch.module, watch.inner = watch.module if path is None else path, module
        if not watch.block:
            watch.block = self.blocks.get(id(module), "")
        try:
            if id(module) in self.flowing:
                self.met.add(id(module))
                args, kwargs = self.declared.flowing(module, "input", (args, kwargs))
            if self.reuse and watch.policy is None and id(module) in self.blocks and id(module) not in self.busy:
                result = self._call(run, module, args, kwargs)
            else:
                result = run(module, *args, **kwargs)
            return self.declared.flowing(module, "result", result) if id(module) in self.flowing else result
        finally:
            watch.module, watch.block, watch.inner = before

    def warn(self) -> None:
        """Tell of modules of which a flow is said, and that the step does not call."""
        missed = [self.held.paths[key] for key in self.flowing if key not in self.met]
        if missed:
            more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
            warnings.warn(
                f"flow: the step does not call {', '.join(missed[:3])}{more}, so that nothing flows there as was said; "
                "take it back by flow.nn.flow(module, result=None, input=None)",
                stacklevel=2,
            )

    def _call(self, run: Run, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.watch.paused():
            call = self._look(module, args, kwargs)
        if call is None:
            return run(module, *args, **kwargs)
        for known in self.traced:
            if known.stands_for(call):
                self.taken += 1
                self.read.update((id(call.settings[at].module), call.settings[at].name) for at in known.read)
                if self.flowing:
                    pairs = zip(known.module.modules(), module.modules(), strict=True)
                    self.met.update(id(mine) for theirs, mine in pairs if id(theirs) in self.met)
                with self.watch.paused():
                    return self._again(known, call)
        tape = self.tape
        start, first, writes, losses = len(tape.ops), len(tape.fakes), len(tape.written), len(self.losses)
        chance = random.getstate()
        self.busy.add(id(module))
        classes = dict.fromkeys(type(each.module) for each in call.settings)
        try:
            with attributes_noted(classes, self._noted):
                result = run(module, *args, **kwargs)
        finally:
            self.busy.discard(id(module))
        if len(self.losses) == losses and random.getstate() == chance:
            with self.watch.paused():
                after = self._look(module, args, kwargs, call.numbers)
                if after is not None and after.same(call) and all(map(operator.is_, after.own, call.own)):
                    made = self._traced(module, call, result, start, first, writes)
                    self.traced += [made] if made is not None else []
        return result

    def _noted(self, module: Any, name: str) -> None:
        named = read_name(name)
        if named is not None:
            self.read.add((id(module), named))

    def _look(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: tuple[int, ...] | None = None
    ) -> _LayerCall | None:
        if _hooked():
            return None
        constants: list[Tensor] = []
        settings: list[Number] = []
        given: list[Tensor] = []
        try:
            taken = of_value((args, kwargs), given)
            like = of_module(module, constants, settings)
        except (Unlike, RecursionError):
            return None
        own = [x for part in module.modules() for kept in (part._parameters, part._buffers) for x in kept.values()]
        held = [x for x in own if x is not None]
        if numbers is None:
            numbers = tuple(self.tape.number(x) for x in (*held, *given))
        seen: dict[int, int] = {}
        pattern = tuple([seen.setdefault(n, len(seen)) for n in numbers])
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), autocast_state()
        return _LayerCall((like, taken, pattern, modes), settings, held, constants, given, numbers)

    def _traced(
        self, module: nn.Module, call: _LayerCall, result: Any, start: int, first: int, writes: int
    ) -> _Traced | None:
        tape = self.tape
        ops = tuple(tape.ops[start:])
        made = {n for op in ops for n in op.numbers}
        place = {n: at for at, n in reversed(list(enumerate(call.numbers)))}
        known = [(at, self.watch.known(x)) for at, x in enumerate(call.constants)]
        constants = {tape.number(fake): at for at, fake in known if fake is not None}
        read = {n for op in ops for n in op.inputs} - made
        if not all(n in place or n in constants or n in self.literals for n in read):
            return None
        roots = {id(tape.view(x).memory): at for at, x in enumerate(call.own)}
        changed: dict[int, int] = {}
        for memory in tape.written[writes:]:
            if memory.born < first:
                if id(memory) not in roots:
                    return None
                at = roots[id(memory)]
                changed[at] = tape.read(tape.view(call.own[at]))
        returned: list[Tensor] = []
        try:
            of_value(result, returned)
        except Unlike:
            return None
        given = {id(x) for x in call.given}
        fresh = {id(x): tape.view(x) for x in returned if id(x) not in given}
        if not all(map(_stands_alone, fresh.values())) or len({id(v.memory) for v in fresh.values()}) < len(fresh):
            return None
        if any(v.memory.born < first or tape.read(v) not in made for v in fresh.values()):
            return None
        settings = enumerate(call.settings)
        return _Traced(
            call.key,
            {
                at: n.value
                for at, n in settings
                if not self.read.isdisjoint({(id(n.module), n.name), (id(n.module), ALL)})
            },
            self.watch.module,
            module,
            self.watch.region,
            ops,
            first,
            tuple(tape.fakes[first:]),
            place,
            constants,
            replaced(result, lambda path, x: x),
            {id(x): at for at, x in enumerate(call.given)},
            {n: tape.read(view) for n, view in fresh.items()},
            changed,
        )

    def _again(self, known: _Traced, call: _LayerCall) -> Any:
        tape, watch = self.tape, self.watch
        first = known.first
        move = {n: call.numbers[at] for n, at in known.place.items()}
        used = {n for op in known.ops for n in op.inputs}
        for n, at in known.constants.items():
            fake = watch.known(call.constants[at]) if n in used else None
            if fake is not None:
                move[n] = tape.number(fake)
        move.update((n, n) for n in self.literals)
        shift = len(tape.fakes) - first
        tape.fakes.extend(known.fakes)

        used.difference_update(move)
        move.update({n: n + shift for n in used})
        lines: dict[Origin, Origin] = {}
        regions = {known.region: watch.region}
        for op in known.ops:
            origin = lines.get(op.origin)
            if origin is None:
                module = watch.module + op.origin.module.removeprefix(known.path)
                inner = op.origin.recompute
                if inner not in regions:
                    regions[inner] = watch.region or watch.new_region()
                origin = lines[op.origin] = Origin(module, op.origin.line, watch.block, regions[inner])
            numbers = tuple([n + shift for n in op.numbers])
            tape.ops.append(op.of(move, numbers=numbers, origin=origin))
        for at, number in known.writes.items():
            tape.write(tape.view(call.own[at]), move.get(number, number + shift))
        results: dict[int, Tensor] = {}

        def stand(path: str, x: Tensor) -> Tensor:
            if id(x) in known.given:
                return call.given[known.given[id(x)]]
            if id(x) not in results:
                results[id(x)] = y = like(x)
                tape.stand_for(y, known.made[id(x)] + shift)
            return results[id(x)]

        return replaced(known.result, stand)


def like(fake: Tensor) -> Tensor:
    """Another fake that lies the same and, if that one did, needs a gradient without being a leaf."""
    made = torch.empty_strided(tuple(fake.shape), fake.stride(), dtype=fake.dtype, device=fake.device)
    if fake.requires_grad:
        made.add_(torch.empty((), dtype=fake.dtype, device=fake.device, requires_grad=True))
    return made


def _stands_alone(view: View) -> bool:
    """Whether a tensor can be made anew: nothing is known of it but shape and strides."""
    where = view.where
    overlaps = any(s == 0 and n > 1 for s, n in zip(where.stride, where.shape, strict=True))
    return not overlaps and not any(where.bits[1:])


def _hooked() -> bool:
    """Whether modules have global hooks besides those by which a record knows where it is."""
    if not following():
        return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]
    forward = max(len(calls._global_forward_pre_hooks), len(calls._global_forward_hooks))
    return forward > 1 or bool(calls._global_backward_pre_hooks or calls._global_backward_hooks)
