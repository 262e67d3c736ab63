"""Backends: from a local segment to a callable forward and backward.

    autograd   torch runs the ops and keeps what its backward needs; right for anything
    code       both are traced once and run as generated Python, outside autograd
    inductor   both are traced once and compiled to kernels
    auto       inductor on CUDA where it works, else code

One that cannot take a segment hands it on to the one above it, and says why in `reason`. All keep to one convention:
forward(*inputs) returns the outputs and, last, a tuple of what was saved; backward(*saved, *again, *cotangents) returns
the gradients of the wanted inputs, where `again` are the inputs of these numbers. A tensor from outside that does not
lie in memory as it was traced is copied first: the user's, one that was moved, or a gradient.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ....boxing.graph.memory_order import lay
from ....placement.device import FAMILIES, card_here
from ....placement.errors import MissingError, ShapeError
from ..lower.localise import Local, Spec
from .joint import Traced, gradients, trace, traced
from .recorder import Recording
from .simplify import tidied
from .split_backward import Apart, apart
from .split_backward import by_autograd as halves_by_autograd

__all__ = ["Backend", "Compiled", "compiled", "compiled_types"]

Backend: TypeAlias = Literal["auto", "autograd", "code", "inductor"]
Function: TypeAlias = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Compiled:
    """A segment that can run, and what it is: the backend, and why an earlier choice was passed over."""

    forward: Function
    backward: Function | None
    again: tuple[int, ...]
    owns: tuple[bool, ...]  # for each gradient, whether its memory is nobody else's
    backend: Backend
    reason: str = ""
    apart: Apart | None = None  # the backward in two, where that was asked for
    saved: int = 1  # tensors, or what autograd keeps as one


def compiled(local: Local, backend: Backend, weights: Sequence[bool] | None = None) -> Compiled:
    """The segment by this backend, or by the next that can.

    `weights` says of each wanted input whether it is a weight: the gradients of these are then a function of their own.
    """
    reasons: list[str] = []
    card = any(spec.device.type != "cpu" for spec in (*local.inputs, *local.makes))
    for name in _order(backend, card):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of its own parts; where they are errors, so too
                return replace(_laid(_BY[name](local, weights), local), reason="; ".join(reasons))
        except ShapeError:
            raise  # the rule is wrong, and stays so
        except Exception as error:  # a tracer or compiler may raise anything
            reasons.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    raise AssertionError(reasons)


def _laid(made: Compiled, local: Local) -> Compiled:
    """The same for tensors that lie in any order."""
    inputs = list(local.inputs)
    forward = _laid_call(made.forward, inputs)
    if made.backward is None:
        return replace(made, forward=forward)
    makes = local.makes
    cotangents = [makes[at] for at in local.returns]
    backward = _laid_call(made.backward, [inputs[at] for at in made.again] + cotangents, made.saved)
    both = made.apart
    if both is not None:
        kept, again = [len(half) for half in both.saved], [[inputs[at] for at in half] for half in both.again]
        first = _laid_call(both.first, again[0] + cotangents, kept[0])
        both = replace(both, first=first, second=_laid_call(both.second, again[1], kept[1]))
    return replace(made, forward=forward, backward=backward, apart=both)


def _laid_call(run: Function, specs: Sequence[Spec], first: int = 0) -> Function:
    """A function whose tensors from the `first` on are laid as these specs say."""
    wanted = tuple(spec.strides for spec in specs)
    last = first + len(specs)
    stride = Tensor.stride

    def call(*given: Any) -> tuple[Any, ...]:
        if tuple(map(stride, given[first:last])) == wanted:
            return run(*given)
        laid = [
            _strided(lay(x, spec.order), steps) for x, spec, steps in zip(given[first:last], specs, wanted, strict=True)
        ]
        return run(*given[:first], *laid, *given[last:])

    return call if specs else run


def _strided(x: Tensor, wanted: tuple[int, ...]) -> Tensor:
    """A tensor that lies right with these strides: some kernels, as that of group norm, look at dims of one element."""
    return x if x.stride() == wanted or not x.numel() else x.as_strided(x.shape, wanted)


def _order(backend: Backend, card: bool) -> tuple[Backend, ...]:
    if backend == "auto":
        backend = "inductor" if card and inductor_works() else "code"
    chain: tuple[Backend, ...] = ("inductor", "code", "autograd")
    return chain[chain.index(backend) :]


def compiled_types(backend: Backend) -> frozenset[str]:
    """The types of devices on which runs of ops become one kernel, also where such devices are only described."""
    works = card_here() is None or inductor_works()
    if backend == "inductor":
        return frozenset(FAMILIES)
    return frozenset(name for name, of in FAMILIES.items() if backend == "auto" and of.card and works)


def by_autograd(local: Local, weights: Sequence[bool] | None = None) -> Compiled:
    wants = frozenset(local.wants)

    def forward(*inputs: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() if i in wants else x.detach() for i, x in enumerate(inputs)]
            outputs = local.run(leaves)
        return *(y.detach() for y in outputs), ((leaves, outputs),)

    def backward(saved: tuple[list[Tensor], list[Tensor]], *cotangents: Tensor) -> tuple[Tensor, ...]:
        leaves, outputs = saved
        with torch.enable_grad():
            return tuple(gradients(local, leaves, outputs, cotangents))

    def plain(*inputs: Tensor) -> tuple[Any, ...]:
        return *local.run(inputs), ()

    if not wants:
        return Compiled(plain, None, (), (), "autograd")
    halves = None if weights is None else halves_by_autograd(local, weights)
    return Compiled(forward, backward, (), (False,) * len(wants), "autograd", apart=halves)


def by_code(local: Local, weights: Sequence[bool] | None = None) -> Compiled:
    made = traced(local)
    forward = tidied(made.forward, made.fakes)
    backward = made.backward and tidied(made.backward, made.fakes)
    halves = None
    if weights is not None and made.backward is not None:
        both = apart(replace(made, backward=backward), weights)
        parts = [tidied(half, made.fakes).module.forward for half in (both.first, both.second)]
        halves = Apart(parts[0], parts[1], both.saved, both.again, both.owns)
    run, rerun = forward.module.forward, backward and backward.module.forward
    return Compiled(run, rerun, made.again, made.owns, "code", apart=halves, saved=made.saved)


@cache
def inductor_works() -> bool:
    """Whether inductor can compile for the cards here."""
    from torch.utils._triton import has_triton

    return card_here() is not None and has_triton()


def by_inductor(local: Local, weights: Sequence[bool] | None = None) -> Compiled:
    from torch._inductor import compile_fx, decomposition

    inner = getattr(compile_fx, "compile_fx_inner", None)
    table = getattr(decomposition, "select_decomp_table", None)
    if inner is None or table is None:
        raise MissingError(f"torch {torch.__version__} has no compile_fx_inner\n  use backend='code'")
    made = trace(local, table(), strided=True)
    count, saved = len(local.outputs), made.saved
    run = _kernels(inner, made, made.forward, backward=False)

    def forward(*inputs: Tensor) -> tuple[Any, ...]:
        out = run(inputs)
        return *out[:count], tuple(out[count : count + saved])

    if made.backward is None:
        return Compiled(forward, None, (), (), "inductor")
    both = None if weights is None else apart(made, weights)  # before a compiler changes the graph
    rerun = _kernels(inner, made, made.backward, backward=True)

    def backward(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(rerun(values))

    halves = None
    if both is not None and weights is not None:
        into = len(weights) - sum(weights)
        early = _kernels(inner, made, both.first, backward=True)
        late = _kernels(inner, made, both.second, backward=True)

        def first(*values: Tensor) -> tuple[Any, ...]:
            found = early(values)
            return *found[:into], tuple(found[into:])

        def second(*values: Tensor) -> tuple[Any, ...]:
            return tuple(late(values))

        halves = Apart(first, second, both.saved, both.again, both.owns)
    return Compiled(forward, backward, made.again, made.owns, "inductor", apart=halves, saved=saved)


def _kernels(
    inner: Any, made: Traced, calls: Recording, *, backward: bool
) -> Callable[[Sequence[Tensor]], Sequence[Any]]:
    """A graph compiled; tensors that lie in memory otherwise than it counts on are copied first."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config

    module: Any = calls.module
    graph = module.graph
    (result,) = graph.output_node().args
    flat = [node for part in result for node in (part if isinstance(part, tuple) else (part,))]
    graph.output_node().args = (tuple(flat),)
    module.recompile()
    examples = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    # Shapes and strides are looked at here once for a segment, not by each kernel.
    unasked = {name: False for name in ("size_asserts", "alignment_asserts") if hasattr(config, name)}
    with torch.no_grad(), config.patch(unasked), tracing(TracingContext(made.fakes)):
        run = inner(module, examples, is_backward=backward)
    strides = [tuple(x.stride()) for x in examples]
    sizes = [tuple(x.shape) for x in examples]

    def call(values: Sequence[Tensor]) -> Sequence[Any]:
        given = [
            x if x.stride() == stride or not x.numel() else _restrided(x, size, stride)
            for x, size, stride in zip(values, sizes, strides, strict=True)
        ]
        del values
        out: Sequence[Any] = run(given)
        return out

    return call


def _restrided(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(size, stride, dtype=x.dtype, device=x.device).copy_(x)


_BY: dict[Backend, Callable[[Local, Sequence[bool] | None], Compiled]] = {
    "autograd": by_autograd,
    "code": by_code,
    "inductor": by_inductor,
}
