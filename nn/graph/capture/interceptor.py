"""The watch: sees every ATen call of a function on fakes, above autograd and before any decomposition.

It refuses calls that cannot be put on the tape, with the user's line: values that are not there, tensors from nowhere.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)

from ....boxing.record import user_line
from ....placement.device import FAMILIES
from ....placement.errors import SbpError
from ....sbp import Layout
from ....sbp.call import Ref, fill, map_tensors, tensors_in
from ....sbp.logical import Logical, Origin
from ....sbp.traits import named
from ...eager.capture import CallWatch, capture, fakes_of, made_of, seen_by, shared_fakes, sources_of
from ...eager.recurrent import FORMULAS
from ...model.fp8 import product
from ...model.recompute.attention_core import CoreCall, cores
from ...model.recompute.kept_ops import kept_ops
from ...model.recompute.recomputation import Recomputing
from ...tensors.memory_formats import as_laid
from .calls.described_card import DescribedCard
from .calls.known_answers import KnownAnswers
from .calls.policy import Asking, Policy, naming
from .calls.real_call import described, refused
from .calls.running_stats import BY_COUNTER, NORMS, counter_of, statistics
from .calls.strides import STRIDED, strided
from .calls.transforms import BelowTransforms, is_wrapped, transformed
from .tape import Tape

__all__ = ["WHILE_CAPTURED", "Known", "Interceptor", "data_dependent", "functional"]

aten = torch.ops.aten
_LITERALS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
_DROPS = tuple(getattr(aten, name + suffix).default for name in named("drops") for suffix in ("", "_"))
WHILE_CAPTURED = "while a graph was captured"  # begins the note on an op that torch refuses
_ITEM = "x.item(), or a tensor taken for a number,"
_SAID = {  # as users say what torch calls so
    "aten.is_nonzero.default": "an if on a tensor (or while, and, not, assert)",
    "aten.item.default": _ITEM,
    "aten._local_scalar_dense.default": _ITEM,
    "aten.index.Tensor": "x[mask], aten.index.Tensor,",
    "aten.nonzero.default": "x.nonzero(), or torch.where(mask) alone,",
    "aten.nonzero_numpy.default": "x.nonzero(), or torch.where(mask) alone,",
}
# Ops that pick tokens, such as in layers of experts.
_PICKS = ("aten.index.Tensor", "aten.nonzero.default", "aten.nonzero_numpy.default", "aten.masked_select.default")
_EIGHTS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)

# The fake that stands for a real tensor, by what it is; None if it is nothing that the capture may know.
Known = Callable[[Tensor], Tensor | None]

Used = Callable[[Any, Any, Any], tuple[Any, Any]]  # arguments of an op by arguments of an op
Look = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]  # at a call


def data_dependent(asked: str, line: str, module: str) -> SbpError:
    """The error for Python code, or an op, whose course depends on what a tensor holds."""
    where = f" in {module}" if module else ""
    experts = ", `inside PATH use dropless over AXIS` for layers of experts" if asked in _PICKS else ""
    asked = _SAID.get(asked, asked)
    return SbpError(
        f"capture: {asked} needs to know what a tensor holds\n"
        f"  called at {line}{where}; a graph is made once, before there are values\n"
        f"  choose by torch.where, keep shapes fixed (masks instead of picking){experts}, or run it eagerly between "
        f"captured parts: {_marked(module)}"
    )


def _marked(module: str) -> str:
    """How to mark what could not be captured."""
    if not module:
        return "loss_fn = flow.nn.eager(loss_fn) of the function that does it, or flow.nn.eager(model)"
    path = "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in module.split("."))
    return f"flow.nn.eager(model{path}), or in a plan: inside {module} run eager"


class Interceptor(CallWatch):  # type: ignore[no-untyped-call]
    """Puts every call on the tape. `literal` is told of tensors that are written down in the program."""

    def __init__(
        self,
        tape: Tape,
        known: Known,
        literal: Callable[[Tensor, Tensor], None],
        *,
        real: bool = False,
        card: DescribedCard | None = None,
    ) -> None:
        super().__init__()
        self.real = real  # whether kernels of this machine are those that will run
        self.card = card
        self.tape, self.known, self.literal = tape, known, literal
        self.module = self.block = self.region = ""
        self.regions = 0
        self.policy: Policy | None = None  # of the region
        self.inner: nn.Module | None = None
        self._answers = KnownAnswers(tape.number)
        self._paused = False
        self._look: Look | None = None
        self.below = BelowTransforms(tape, known, self.fake, self._run)
        self.drew = False  # whether anything was drawn while calls were let go by
        self.used: Used | None = None  # what ops take instead of parameters that rest in another type
        self.eights: dict[int, str] = {}  # how modules compute products of 8 bits, by their ids

    @contextmanager
    def paused(self, yes: bool = True) -> Iterator[None]:
        """Let calls go by that the program did not make; `paused(False)` is for those in between that it did make."""
        before, self._paused = self._paused, yes
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def looked_at(self, look: Look) -> Iterator[None]:
        """Let calls go by, and `look` at each of them."""
        before, self._look = self._look, look
        try:
            with self.paused():
                yield
        finally:
            self._look = before

    def here(self) -> Origin:
        """The place of the program: its module, line, block and region."""
        return Origin(self.module, user_line(), self.block, self.region)

    @contextmanager
    def recomputed(self, policy: Policy | None = None) -> Iterator[None]:
        """Have the backward make the calls inside again, except those that a policy keeps; a region inside of another
        is none."""
        before = self.region, self.policy
        if not self.region:
            self.region, self.policy = self.new_region(), policy
        try:
            yield
        finally:
            self.region, self.policy = before

    def run_again(self, said: Recomputing, run: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A module that is recomputed."""
        if not torch.is_grad_enabled() or self.region:
            return run(*args, **kwargs)
        if not said.only:
            with self.recomputed(naming(kept_ops(said.keep)) if said.keep else None):
                return run(*args, **kwargs)
        start, result = len(self.tape.ops), run(*args, **kwargs)
        ops = self.tape.ops[start:]
        found = cores([CoreCall(op.op, op.inputs, op.numbers) for op in ops])
        if not found:
            raise SbpError(
                f"recompute: {self.module or 'the model'}, called at {user_line()}, has no attention\n"
                "  there is neither a fused one in it nor a softmax between products\n"
                "  leave out only=, and in a plan `.core`, so that all of it is run again\n"
                "  or name the modules that have one, as in layers.[0].self_attn.core"
            )
        for places in found:
            region = self.new_region()
            for at in places:
                if not ops[at].origin.recompute:
                    self.tape.ops[start + at] = replace(ops[at], origin=replace(ops[at].origin, recompute=region))
        return result

    def new_region(self) -> str:
        self.regions += 1
        return f"{self.module or 'step'} {self.regions}"

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._paused:
            if self._look is not None:
                self._look(func, args, kwargs)
            self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
            return func(*args, **kwargs)
        self.tape.origin = self.here()
        foreign = [t for t in tensors_in([args, kwargs]) if not isinstance(t, FakeTensor)]
        if transformed() or any(map(is_wrapped, foreign)):
            if self.used is not None or self.eights:
                raise SbpError(
                    f"capture: a transform of torch.func at {self.tape.origin.line}, where modules are cast\n"
                    "  leave flow.nn.cast out, and convert the model by model.to(dtype)"
                )
            return self.below.call(func, args, kwargs)
        if foreign:
            if func in _LITERALS and self.known(args[0]) is None:
                out = self._run(func, args, kwargs)
                self.literal(args[0], out)
                return out
            args, kwargs = map_tensors(args, self.fake), map_tensors(kwargs, self.fake)
        if self.used is not None:
            args, kwargs = self.used(func, args, kwargs)
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            raise SbpError(
                f"capture: {func} draws by a generator of its own, at {self.tape.origin.line}\n"
                "  its state would be that of the first step; leave generator= out, and torch.manual_seed says what a "
                "graph draws"
            )
        if func in FORMULAS:  # its parts come by here
            with self:
                return FORMULAS[func](*args, **kwargs)
        if torch._C._is_any_autocast_enabled() and (cast := self._cast(func, args, kwargs)) is not None:
            return cast[0]
        if (made := self._of_8_bits(func, args, kwargs)) is not None:
            return made
        if func in _DROPS and (not args[2] or args[1] == 0):  # the input itself, which fakes do not show
            return args[0]
        if func is aten.set_.source_Tensor and args[0] is args[1]:  # nothing, as torch parametrizes a module
            return args[0]
        if self._answers.is_true(func, args):
            return True
        if func in NORMS:
            args = statistics(self.tape, func, args, counter_of(self.inner))
        if func in STRIDED:
            with self:
                made = strided(self.tape, func, args, kwargs)
            if made is not None:
                return made
        if func._schema.is_mutable:  # known before it is another view or size
            for tensor in tensors_in([args, kwargs]):
                self.tape.view(tensor)
        out = self._run(func, args, kwargs) if self.policy is None else self._asked(self.policy, func, args, kwargs)
        if any(y.layout is not torch.strided for y in tensors_in(out)):
            raise SbpError(
                f"capture: {func} makes a sparse tensor, at {self.tape.origin.line}\n"
                "  a graph has dense ones alone: leave it dense, or do it outside of the graph"
            )
        self.tape.record(func, args, kwargs, out)
        self._answers.see(func, args, out)
        return out

    def _asked(self, policy: Policy, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it; where the policy has it kept, it is no part of the region."""
        with Asking(policy) as asking:
            out = self._run(func, args, kwargs)
        if asking.saves:
            self.tape.origin = replace(self.tape.origin, recompute="", kept_of=self.region)
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if func is aten._grouped_mm.default and args[0].dtype not in (torch.bfloat16, *_EIGHTS):
                return self._grouped(*args, **kwargs)
            out = as_laid(func, args, func(*args, **kwargs))
            told, way_out = refused(func, args, kwargs) if self.real else (None, "")
        except (DataDependentOutputException, DynamicOutputShapeException):
            if counter_of(self.inner) is not None and args[0] is counter_of(self.inner):
                return BY_COUNTER
            raise data_dependent(str(func), self.tape.origin.line, self.module) from None
        except UnsupportedOperatorException as error:
            raise SbpError(
                f"capture: {func} cannot run without values\n"
                f"  called at {self.tape.origin.line}; torch knows no shapes of what it makes: {error}\n"
                "  give it a fake by torch.library.register_fake, or call it outside of the graph"
            ) from None
        except SbpError:
            raise
        except Exception as fakes:
            told, way_out = refused(func, args, kwargs, fakes)
        if told is None:
            return out
        where = f" in {self.module}" if self.module else ""
        note = f"{WHILE_CAPTURED}: {func} at {self.tape.origin.line}{where}"
        told.add_note(f"{note}\n  of {described(func, args, kwargs)}{way_out}")
        raise told from None

    def _grouped(self, a: Tensor, b: Tensor, offs: Tensor | None = None, *more: Any, **kwargs: Any) -> Tensor:
        """A grouped matrix product of a dtype that its kernels take and torch's check of fakes does not. The product of
        all rows and the first group stands in."""
        if b.dtype != a.dtype:
            raise SbpError(
                f"capture: a grouped matrix product of {a.dtype} and {b.dtype}, at {self.tape.origin.line}\n"
                "  cast one, as in x.to(weight.dtype)"
            )
        with self.paused(), torch.autocast(a.device.type, enabled=False):
            if a.ndim == b.ndim == 2 and offs is not None:  # groups of what is added up
                return (a @ b).expand(len(offs), -1, -1).contiguous()
            made: Tensor = a @ b if a.ndim == b.ndim else a[0] @ b if a.ndim == 3 else a @ b[0]
            return made

    def _of_8_bits(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """A product of a module that computes these in 8 bits, if this call is one."""
        how = self.eights.get(id(self.inner)) if self.eights else None
        if how is None:
            return None
        with self:
            return product(func, args, kwargs, how, f"at {user_line()} in {self.module or 'the model'}")

    def fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self.known(tensor)
        if fake is None:
            raise SbpError(
                f"capture: met a tensor {tuple(tensor.shape)} of {tensor.dtype} that is no input, parameter or buffer\n"
                f"  used at {self.tape.origin.line}; its values would be frozen into the graph\n"
                "  register it as a buffer of its module, or pass it as an argument"
            )
        return fake

    def _cast(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """Have autocast say its casts aloud: it calls them and the op anew, which come by here again."""
        kinds = {self.card.kind.name} if self.card else {t.device.type for t in tensors_in([args, kwargs])}
        on = (FAMILIES[kind].autocast for kind in kinds if kind in FAMILIES and torch.is_autocast_enabled(kind))
        key = next(on, None)
        if key is None or torch._C._dispatch_tls_is_dispatch_key_excluded(key):
            return None
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), str(key).rpartition(".")[2]):
            under = torch._C.DispatchKeySet(key)
            run = self.card.cast(func, args, kwargs) if self.card else partial(func.redispatch, under, *args, **kwargs)
            with self:
                return (run(),)
        if func._can_decompose() and self._casts(func, key, args, kwargs):
            with self:
                return (made_of(func, args, kwargs),)
        return None

    @staticmethod
    def _casts(func: Any, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether autocast knows one of the ops that this one is made of."""
        with _Names() as inner:
            made_of(func, args, kwargs)
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(n, str(key).rpartition(".")[2]) for n in inner.names)


class _Names(CallWatch):  # type: ignore[no-untyped-call]
    """Notes the names of all ops, and of those that they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.add(func.name())
        if func._can_decompose():
            with self:
                return made_of(func, args, kwargs)
        return func(*args, **kwargs)


def functional(function: Callable[..., Any], args: Any, kwargs: Any, layouts: Sequence[Layout]) -> Logical:
    """A function on tensors that lie so, in the place of the `Ref`s among its arguments, as ops that write nowhere."""
    seen = capture(function, args, kwargs, layouts)
    in_place = any(part.op._schema.is_mutable for part in seen.ops)
    return _on_tape(function, args, kwargs, layouts) if in_place else seen


def _on_tape(function: Callable[..., Any], args: Any, kwargs: Any, layouts: Sequence[Layout]) -> Logical:
    """A function that writes in place, captured as a step that does: cells of LSTMs are such."""
    tape, inputs = Tape(), fakes_of(layouts)
    for x in inputs:
        tape.source(x.requires_grad_(x.is_floating_point() or x.is_complex()))
    with shared_fakes(), seen_by(Interceptor(tape, _nothing, _refused)):
        made = function(*fill(tuple(args), inputs), **fill(kwargs, inputs))
    return Logical(sources_of(inputs), tuple(tape.ops), map_tensors(made, lambda y: Ref(tape.number(y))))


def _nothing(real: Tensor) -> None:
    """A formula knows no tensor but its arguments."""


def _refused(real: Tensor, fake: Tensor) -> None:
    raise LookupError("a formula has a constant")
