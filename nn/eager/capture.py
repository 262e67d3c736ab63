"""Capture: which ATen calls a torch function makes of logical tensors, and what comes out, without computing anything.

The function runs on fake tensors of the logical shapes. A mode at the pre-dispatch key sees every call above autograd
and before anything is decomposed: `F.cross_entropy` is one `cross_entropy_loss`, indexing is slices and selects.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ...placement import placement
from ...placement.device import FAMILIES
from ...sbp import Layout
from ...sbp.call import Ref, fill, frozen, map_tensors, tensors_in
from ...sbp.logical import Logical, LogicalOp, Source
from ...sbp.state import State
from ..tensors.memory_formats import as_laid

__all__ = [
    "CallWatch",
    "alone",
    "asks_for_grad",
    "autocast_state",
    "capture",
    "capturing",
    "detached",
    "fakes_of",
    "made_of",
    "new_fake",
    "quiet",
    "seen_by",
    "shared_fakes",
    "sources_of",
]


_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


def made_of(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of an op by those that it is made of, which a mode that a program is in would not see."""
    with torch._C.DisableTorchFunction():
        return op.decompose(*args, **kwargs)


# SchemaCheckMode is one of three that torch lets stand at this key; nothing of what it does is used.
class CallWatch(SchemaCheckMode):  # type: ignore[no-untyped-call]
    """A mode that sees every ATen call above autograd, and answers it."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, _dispatch_key=torch._C.DispatchKey.PreDispatch)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.see(func, args, kwargs or {})

    def see(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that goes by, above autograd."""
        raise NotImplementedError


class _Notes(CallWatch):  # type: ignore[no-untyped-call]
    """Notes calls as ops of a graph, whose sources are the inputs."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.sources = sources_of(inputs)
        self.noted: list[LogicalOp] = []
        self.outs: list[Any] = []  # as ops returned them
        self.fakes = list(inputs)  # by number
        self.numbers = {id(tensor): number for number, tensor in enumerate(inputs)}

    def see(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = as_laid(op, args, op(*args, **kwargs))
        self.note(op, map_tensors(args, self._ref), map_tensors(kwargs, self._ref), out, torch.is_grad_enabled())
        return out

    def note(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, grad: bool) -> None:
        outputs = tuple(tensors_in(out))
        for tensor in outputs:
            if id(tensor) not in self.numbers:
                self.numbers[id(tensor)] = len(self.fakes)
                self.fakes.append(tensor)
        self.noted.append(LogicalOp(op, args, kwargs, outputs, tuple([self.numbers[id(t)] for t in outputs]), grad))
        self.outs.append(out)

    def _ref(self, tensor: Tensor) -> Any:
        number = self.numbers.get(id(tensor))
        if number is None and (
            tensor.is_meta or isinstance(tensor, FakeTensor)
        ):  # torch.zeros_like returns another object than its op
            number = next((n for n, other in enumerate(self.fakes) if _is_same(tensor, other)), None)
            if number is None:
                raise LookupError("a tensor that no captured call made")
        return tensor if number is None else Ref(number)  # a constant of the function stays what it is

    def graph(self, function: Any, result: Any) -> Logical:
        """The function as a graph, with its result as it is where nobody watches: torch makes tuples of ops' lists."""
        is_op = isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
        is_list = type(result) is list and any(result is out for out in self.outs)
        result = tuple(result) if is_list and not is_op else result
        return Logical(self.sources, tuple(self.noted), map_tensors(result, self._ref))


class _Capturing(threading.local):
    """How many captures a thread is in: modes are of a thread, and stages of a pipeline go on meanwhile."""

    depth = 0


_capturing = _Capturing()


@cache
def shared_fakes() -> FakeTensorMode:
    """Made at the first use: it loads torch._dynamo, which would double the time of `import sbpflow`."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def capturing() -> bool:
    """Whether fakes are running through a function right now."""
    return _capturing.depth > 0


def _fake(layout: Layout) -> Tensor:
    """A tensor of the logical shape and dtype, on the placement's kind of device, without values."""
    with shared_fakes():
        return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=layout.placement.type)


def new_fake(
    fakes: FakeTensorMode, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """A new tensor without values: what `torch.empty_strided` makes in the mode of fakes, but that no mode is asked.

    A deep model has thousands, and a question to all modes takes seven times as long."""
    with torch._C.DisableTorchFunction(), no_dispatch():
        return FakeTensor(fakes, torch.empty_strided(shape, strides, dtype=dtype, device="meta"), torch.device(device))


def detached(fake: Tensor) -> Tensor:
    """A tensor without values on the memory of another, outside of autograd; no mode is asked either."""
    assert isinstance(fake, FakeTensor)
    with torch._C.DisableTorchFunction(), no_dispatch():
        return FakeTensor(fake.fake_mode, fake.detach(), fake.device)


def fakes_of(layouts: Sequence[Layout]) -> list[Tensor]:
    """Tensors of the logical shapes and dtypes, without values."""
    return [_fake(layout) for layout in layouts]


def alone(shape: Sequence[int], dtype: torch.dtype, order: tuple[int, ...] = (), gaps: tuple[int, ...] = ()) -> Layout:
    """The layout of a tensor on one rank: capture looks at shape, dtype and strides alone."""
    return Layout(_ALONE, State(((),) * len(shape)), tuple(shape), dtype, order=order, gaps=gaps)


_ALONE = placement("cpu", range(1))


def sources_of(fakes: Sequence[Tensor]) -> tuple[Source, ...]:
    """The inputs of a captured function."""
    return tuple([Source(str(n), "input", x, x.requires_grad) for n, x in enumerate(fakes)])


def capture(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    layouts: Sequence[Layout],
    *,
    grad: bool = False,
) -> Logical:
    """The ATen calls of `function` with tensors of these layouts, which stand in its arguments as Refs.

    An op that writes in place gives the number of what it writes to; an op's `grad` is whether gradients were on.
    With `grad` they require it: inside, an op may take another kernel then, and that one serves without as well.
    """
    name = getattr(function, "__name__", "")
    odd = any(layout.order for layout in layouts) and any(word in name for word in _KERNELS)
    if not odd and not grad and not _sees_metas(function) and not torch._C._is_any_autocast_enabled():
        try:
            return _of_builtin(function, args, kwargs, [_meta(layout) for layout in layouts])
        except Exception:  # a tensor is made inside, or torch has no meta function: fakes can more, at a price
            pass
    inputs = fakes_of(layouts)
    if grad:
        inputs = [x.requires_grad_(x.is_floating_point() or x.is_complex()) for x in inputs]
    with shared_fakes():
        notes, result = _watched(function, args, kwargs, inputs)
    return notes.graph(function, result)


# How the results of these lie in memory depends on the device's kernel, of which metas know nothing.
_KERNELS = ("conv", "group_norm", "scaled_dot_product_attention")


def _sees_metas(function: Any) -> bool:
    """Whether a function may tell metas from other tensors: `x.is_meta`, or Python code that looks at devices."""
    return getattr(function, "__name__", "") == "__get__" or mentions(function, _PLACES)


def _watched(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], inputs: Sequence[Tensor]
) -> tuple[_Notes, Any]:
    notes = _Notes(inputs)
    with seen_by(notes):
        return notes, function(*fill(tuple(args), inputs), **fill(kwargs, inputs))


@contextmanager
def seen_by(watch: CallWatch) -> Iterator[None]:
    """Inside, a watch sees every call of a function on tensors without values.

    Modes that a program is in, such as a default device, do not see them: torch hands them an op where it is asked for
    what the op is made of.
    """
    _capturing.depth += 1
    try:
        with quiet(), torch.enable_grad(), enable_python_dispatcher(), torch._C.DisableTorchFunction(), watch:
            yield
    finally:
        _capturing.depth -= 1


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is logged of what fails on fakes: it fails again with torch's own error, or is answered another way."""
    silent, _fake_log.disabled = _fake_log.disabled, True
    try:
        yield
    finally:
        _fake_log.disabled = silent


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The kinds of device on which autocast is on, with its dtype there."""
    return tuple([(on, torch.get_autocast_dtype(on)) for on in FAMILIES if torch.is_autocast_enabled(on)])


def _meta(layout: Layout) -> Tensor:
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")


# What torch's own functions of one op call, by themselves and the kinds of their arguments, once it was seen.
_ops: dict[Any, LogicalOp] = {}
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def _of_builtin(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Tensor]
) -> Logical:
    """Capture on meta tensors: quicker than fakes, and enough where Python code does not look at devices.

    Which op a builtin calls seldom depends on shapes, so that for other shapes that op alone is run.
    """
    # Indexing leaves out a slice that takes all of a dim; no other builtin looks at sizes before it calls its op.
    sized = function in _INDEXING
    metas = tuple((x.dtype, x.shape if sized else x.dim(), x.is_contiguous() or x.stride()) for x in inputs)
    kind = function, frozen((args, kwargs)), metas
    known = _ops.get(kind)
    if known is not None:
        notes = _Notes(inputs)
        fake_args, fake_kwargs = fill(known.args, inputs), fill(known.kwargs, inputs)
        out = as_laid(known.op, fake_args, known.op(*fake_args, **fake_kwargs))
        notes.note(known.op, known.args, known.kwargs, out, known.grad)
        return notes.graph(function, out)
    notes, result = _watched(function, args, kwargs, inputs)
    seen = notes.graph(function, result)
    if any(map(_is_meta, (part for op in seen.ops for part in (*op.args, *op.kwargs.values())))):
        raise LookupError("a constant was made without values")
    if len(seen.ops) == 1:
        (op,) = seen.ops
        if not op.op._schema.is_mutable:
            again = op.op(*fill(op.args, notes.fakes), **fill(op.kwargs, notes.fakes))
            if [t.shape for t in tensors_in(again)] != [t.shape for t in op.outputs]:
                raise LookupError("torch's two meta functions of this op differ")  # nll_loss_nd has such a pair
        if result is notes.outs[0] and not mentions(function, _SHAPES):
            _ops[kind] = op
    return seen


def _is_meta(value: Any) -> bool:
    """Whether an argument holds what makes no sense elsewhere: a tensor that no Ref stands for, or the device."""
    if isinstance(value, torch.device):
        return value.type == "meta"
    return any(t.is_meta for t in tensors_in(value))


# What a Python function looks at if fakes, metas or other shapes might take another way through it.
_GRADS = frozenset({"requires_grad", "is_grad_enabled"})
_PLACES = frozenset({"device", *(f"is_{kind}" for kind in FAMILIES), "is_meta", "is_quantized"})
_SHAPES = frozenset({"shape", "size", "dim", "ndim", "numel", "len", "stride", "is_contiguous"})


def asks_for_grad(function: Any) -> bool:
    """Whether a Python function looks at what requires grad, so that fakes would take another way through it."""
    return mentions(function, _GRADS)


@cache
def mentions(function: Any, names: frozenset[str]) -> bool:
    """Whether a Python function, or one that it calls by name, uses any of these names."""
    return _mentions(function, names, set())


def _mentions(function: Any, names: frozenset[str], seen: set[Any]) -> bool:
    if not isinstance(function, FunctionType) or function in seen or len(seen) > 64:
        return False
    seen.add(function)
    used = _names(function.__code__)
    return bool(used & names) or any(_mentions(function.__globals__.get(name), names, seen) for name in used)


def _names(code: CodeType) -> set[str]:
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.shape == b.shape and a.stride() == b.stride()
