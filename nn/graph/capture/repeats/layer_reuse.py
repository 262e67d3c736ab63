"""Repeated layers: one is traced, and its ops stand again for every other that is like it.

A call is taken over only where that is exact: the ops read nothing but the call's arguments and the module's own
tensors, nothing outside was written to, and all that Python could have gone by is the same. A whole number that the
trace did not read, such as that of a layer, may be another. Methods of objects that a layer is handed, such as a cache,
are called for each layer (object_calls).
"""

import operator
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as calls
from torch.nn.modules.module import _has_any_global_hook

from .....boxing.record import following
from .....placement.structure import replaced
from .....sbp.logical import LogicalOp, Origin
from ....eager.capture import new_fake
from ....eager_parts.part import EagerPart
from ....model.flows import flow_of
from ..calls.transforms import transformed
from ..declared import Declared
from ..interceptor import Interceptor
from ..module_state import ModuleState
from ..tape import Tape, View
from .expert_calls import ExpertCalls
from .likeness import ALL, Number, Unlike, attributes_noted, blocks_of, of_module, of_value, read_name, reader
from .object_calls import MethodCall, MethodCalls, modes

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
    objects: list[Any]
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
    tensors: tuple[Tensor, ...]  # that the call had: own and given
    methods: tuple[MethodCall, ...]  # that were called in between, counted from the first op

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
        self.experts = ExpertCalls({held.paths[id(module)]: module for module in held.modules}, watch)
        self.traced: list[_Traced] = []
        self.taken = 0  # calls that were not traced
        self.busy: set[int] = set()
        self.literals: set[int] = set()  # numbers of constants that are the same everywhere
        self.losses: list[Any] = []
        self.methods = MethodCalls(tape, watch)
        self.outside: set[int] = set()  # objects among the arguments of the step, which no failed capture puts back
        self.read: set[tuple[int, str]] = set()  # names that were read of modules, while one was traced to be reused

    def call(self, run: Run, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the module; stands in for `nn.Module.__call__`."""
        watch, run = self.watch, self.experts.around(run)
        before = watch.module, watch.block, watch.inner
        path = self.held.paths.get(id(module))
        watch.module, watch.inner = watch.module if path is None else path, module
        if not watch.block:
            watch.block = self.blocks.get(id(module), "")
        try:
            if id(module) in self.flowing:
                self.met.add(id(module))
                args, kwargs = self.declared.flowing(module, "input", (args, kwargs))
            reusable = self.reuse and watch.policy is None and not transformed()
            if reusable and id(module) in self.blocks and id(module) not in self.busy:
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
        calls = self.methods.noted(call.objects, call.settings) if call.objects else nullcontext()
        try:
            with attributes_noted(classes, self._noted), calls:
                result = run(module, *args, **kwargs)
        finally:
            self.busy.discard(id(module))
            if call.objects:
                self.read.update(self.methods.unmatched())
        if call.objects and not (self.methods.exact and len(tape.written) == writes):
            return result
        if len(self.losses) == losses and random.getstate() == chance:
            with self.watch.paused():
                after = self._look(module, args, kwargs, call.numbers)
                methods = tuple(self.methods.made) if call.objects else ()
                if after is not None and after.same(call) and all(map(operator.is_, after.own, call.own)):
                    made = self._traced(module, call, result, start, first, writes, methods)
                    self.traced += [made] if made is not None else []
        return result

    def _noted(self, module: Any, name: str) -> None:
        named = read_name(name)
        if named is not None and not self.methods.read(module, named, reader(sys._getframe(1))):
            self.read.add((id(module), named))

    def _look(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: tuple[int, ...] | None = None
    ) -> _LayerCall | None:
        if _hooked():
            return None
        constants: list[Tensor] = []
        settings: list[Number] = []
        given: list[Tensor] = []
        objects: list[Any] = []
        try:
            taken = of_value((args, kwargs), given, objects)
            like = of_module(module, constants, settings)
        except (Unlike, RecursionError):
            return None
        if objects and (self.methods.busy or self.watch.eights or not self.outside.isdisjoint(map(id, objects))):
            return None
        own = [x for part in module.modules() for kept in (part._parameters, part._buffers) for x in kept.values()]
        held = [x for x in own if x is not None]
        if numbers is None:
            numbers = tuple(self.tape.number(x) for x in (*held, *given))
        seen: dict[int, int] = {}
        pattern = tuple([seen.setdefault(n, len(seen)) for n in numbers])
        return _LayerCall((like, taken, pattern, modes()), settings, held, constants, given, objects, numbers)

    def _traced(
        self,
        module: nn.Module,
        call: _LayerCall,
        result: Any,
        start: int,
        first: int,
        writes: int,
        methods: tuple[MethodCall, ...],
    ) -> _Traced | None:
        tape = self.tape
        ops = tuple(tape.ops[start:])
        if any(isinstance(op.op, EagerPart) for op in ops):  # it runs one module's Python, and not another's
            return None
        mine = [op for at, op in enumerate(ops, start) if not any(m.start <= at < m.end for m in methods)]
        made = {n for op in mine for n in op.numbers}.union(*(m.answer for m in methods))
        place = {n: at for at, n in reversed(list(enumerate(call.numbers)))}
        known = [(at, self.watch.known(x)) for at, x in enumerate(call.constants)]
        constants = {tape.number(fake): at for at, fake in known if fake is not None}
        read = {n for op in mine for n in op.inputs}.union(*(m.numbers.values() for m in methods)) - made
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
        if not all(self._apart(call, m, first, fresh.values()) for m in methods):
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
            (*call.own, *call.given),
            tuple([m.within(start) for m in methods]),
        )

    def _apart(self, call: _LayerCall, method: MethodCall, first: int, fresh: Iterable[View]) -> bool:
        """Whether the tensors that an object takes and gives share no memory with what the layer returns, and what it
        takes is the layer's own, an argument, or made there."""
        outside = {id(x) for x in (*call.given, *call.own)}
        views = [(x, self.tape.view(x)) for x in method.tensors()]
        memories = {id(view.memory) for view in fresh}
        made = (id(x) in outside or (view.memory.born >= first and _stands_alone(view)) for x, view in views)
        return all(made) and memories.isdisjoint(id(view.memory) for _, view in views)

    def _again(self, known: _Traced, call: _LayerCall) -> Any:
        tape, watch = self.tape, self.watch
        move = {n: call.numbers[at] for n, at in known.place.items()}
        used = {n for op in known.ops for n in op.inputs}
        for n, at in known.constants.items():
            fake = watch.known(call.constants[at]) if n in used else None
            if fake is not None:
                move[n] = tape.number(fake)
        move.update((n, n) for n in self.literals)
        copy = _Copy(known, self, move)
        for method in known.methods:
            copy.up_to(method.start, method.first)
            copy.call(method, call)
        copy.up_to(len(known.ops), known.first + len(known.fakes))
        for at, number in known.writes.items():
            tape.write(tape.view(call.own[at]), move[number])
        results: dict[int, Tensor] = {}

        def stand(path: str, x: Tensor) -> Tensor:
            if id(x) in known.given:
                return call.given[known.given[id(x)]]
            if id(x) not in results:
                results[id(x)] = y = like(x)
                tape.stand_for(y, move[known.made[id(x)]])
            return results[id(x)]

        return replaced(known.result, stand)


class _Copy:
    """The ops of a traced layer, put on the tape once more in order, with the calls of methods in between."""

    def __init__(self, known: _Traced, repeats: Repeats, move: dict[int, int]) -> None:
        self.known, self.tape, self.watch, self.move = known, repeats.tape, repeats.watch, move
        self.regions = {known.region: repeats.watch.region}
        self.lines: dict[int, Origin] = {}  # by the identities of those there
        self.op, self.value = 0, known.first  # those that come next

    def up_to(self, op: int, value: int) -> None:
        """Copy the ops before one, which make the values before another."""
        known, tape, move = self.known, self.tape, self.move
        shift = len(tape.fakes) - self.value
        tape.fakes.extend(known.fakes[self.value - known.first : value - known.first])
        for n in range(self.value, value):
            move.setdefault(n, n + shift)  # literals that were met here stay
        for each in known.ops[self.op : op]:
            numbers = tuple([move[n] for n in each.numbers])
            tape.ops.append(each.of(move, numbers=numbers, origin=self._origin(each.origin)))
        self.op, self.value = op, value

    def _origin(self, origin: Origin) -> Origin:
        found = self.lines.get(id(origin))
        if found is None:
            watch, inner, kept = self.watch, origin.recompute, origin.kept_of
            module = watch.module + origin.module.removeprefix(self.known.path)
            for region in (inner, kept):
                if region not in self.regions:
                    self.regions[region] = watch.region or watch.new_region()
            around = self.regions[kept] if kept else ""
            found = self.lines[id(origin)] = Origin(module, origin.line, watch.block, self.regions[inner], around)
        return found

    def call(self, method: MethodCall, call: _LayerCall) -> None:
        """Call a method for this layer; its ops come from the lines from which they came there."""
        known, tape, watch = self.known, self.tape, self.watch
        taken = {id(x): at for at, x in enumerate(known.tensors)}
        here: dict[int, Tensor] = {}

        def stand(x: Tensor) -> Tensor:
            if id(x) in taken:
                return (*call.own, *call.given)[taken[id(x)]]
            if id(x) not in here:
                here[id(x)] = like(x)
                tape.stand_for(here[id(x)], self.move[method.numbers[id(x)]])
            return here[id(x)]

        args, kwargs = method.arguments(call.settings, stand)
        start, before, watch.module = len(tape.ops), watch.module, watch.module + method.module.removeprefix(known.path)
        try:
            with watch.paused(False):
                answer = method.again(call.objects[method.object], args, kwargs)
        finally:
            watch.module = before
        made = known.ops[method.start : method.end]
        if [op.op for op in made] == [op.op for op in tape.ops[start:]]:
            for at, op in enumerate(made, start):
                tape.ops[at] = replace(tape.ops[at], origin=self._origin(op.origin))
        self.move.update(zip(method.answer, map(tape.number, answer), strict=True))
        self.op, self.value = method.end, method.last


def like(fake: Tensor) -> Tensor:
    """Another fake that lies the same and, if that one did, needs a gradient without being a leaf."""
    assert isinstance(fake, FakeTensor)
    made = new_fake(fake.fake_mode, fake.shape, fake.stride(), fake.dtype, fake.device)
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
