"""torch's own answer to a call: kernels refuse what fakes let pass, and say in their own words what is wrong.

A float64 batch for a float32 layer has a fake result, and sizes that do not fit are told by fakes in other words than
by kernels. So calls of tensors of several dtypes are tried on real ones of one element, and those that fakes refuse on
real ones of their shapes.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .....sbp.call import frozen, numbered, refilled, tensors_in

__all__ = ["described", "refused"]

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Dtypes: TypeAlias = Sequence[torch.dtype]

# Calls that people write, whose kernels look at all that they are given. Others, such as backwards and embedding_bag,
# read memory that is not theirs where arguments are made up.
_TRIED = {
    "linear", "bilinear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "layer_norm",
    "native_layer_norm", "group_norm", "native_group_norm", "batch_norm", "instance_norm", "rms_norm",
    "scaled_dot_product_attention", "embedding", "nll_loss", "nll_loss_nd", "nll_loss2d", "cross_entropy_loss",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "prelu",
}  # fmt: skip
MOST = 1 << 24  # elements of arguments with which a call that fakes refused is made once more


class _Refusal(NamedTuple):
    """The error of a call with tensors of some dtypes, and dtypes with which torch makes the same call."""

    kind: type[Exception]
    text: str
    runs: Dtypes


_known: dict[Hashable, _Refusal | None] = {}


def refused(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None = None
) -> tuple[Exception | None, str]:
    """The error that torch has for this call, and a way out that was tried.

    `error` is that of fakes, None if these went through."""
    tensors = tensors_in([args, kwargs])
    if op.namespace != "aten" or op._schema.name.removeprefix("aten::") not in _TRIED:
        return error, ""
    if len({x.dtype for x in tensors}) > 1 and torch.Tag.pointwise not in op.tags:
        found = _of_dtypes(op, args, kwargs, tensors)
        if found is not None:
            named = zip(_named(op, args, kwargs), found.runs, strict=True)
            casts = [f"{name}.to({dtype})" for (name, x), dtype in named if x.dtype is not dtype]
            return found.kind(found.text), f"\n  with {' and '.join(casts)} it runs"
    if error is None or sum(x.numel() for x in tensors) > MOST:
        return error, ""
    return _tried(op, (args, kwargs), [x.shape for x in tensors], [x.dtype for x in tensors]) or error, ""


def _of_dtypes(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
) -> _Refusal | None:
    """Whether kernels refuse these dtypes and take others: tried on tensors of one element, once for each kind."""
    small, shapes, dtypes = _small(op, args, kwargs), [(1,) * x.dim() for x in tensors], [x.dtype for x in tensors]
    kind = op, frozen(numbered(small)), tuple(shapes), tuple(dtypes)
    if kind not in _known:
        error = _tried(op, small, shapes, dtypes)
        runs = next((o for o in _others(dtypes) if _tried(op, small, shapes, o) is None), None) if error else None
        _known[kind] = _Refusal(type(error), str(error), runs) if error and runs else None
    return _known[kind]


def _others(dtypes: Dtypes) -> Iterator[Dtypes]:
    """Dtypes that might go together, where these do not: all of a kind that most have, or indices that are int64."""
    for to in sorted({t for t in dtypes if t.is_floating_point}, key=dtypes.count, reverse=True):
        yield [to] * len(dtypes)
        yield [to if t.is_floating_point else torch.int64 for t in dtypes]


def _small(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a call that says the same of tensors that are of size one in all dims."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    kept = {}
    for argument in op._schema.arguments:
        value: Any = given.get(argument.name)
        if tensors_in([value]):
            kept[argument.name] = value
        elif not argument.has_default_value():  # a shape, a number of groups
            whole = type(value) is int and not argument.name.startswith("dim")
            sizes = isinstance(value, list | tuple) and all(type(part) is int for part in value)
            kept[argument.name] = 1 if whole else [1] * len(value) if sizes else value
    return (), kept


def _tried(
    op: torch._ops.OpOverload, arguments: Arguments, shapes: Sequence[Sequence[int]], dtypes: Dtypes
) -> Exception | None:
    """The error of torch's kernels for a call of tensors of these shapes and dtypes, if there is one."""
    where = [x.device for x in tensors_in(arguments)]
    with unset_fake_temporarily(), torch.no_grad():
        real = [
            torch.zeros(shape, dtype=dtype, device=device)
            for shape, dtype, device in zip(shapes, dtypes, where, strict=True)
        ]
        args, kwargs = refilled(arguments, real)
        try:
            op(*args, **kwargs)
        except NotImplementedError:  # not of this device
            return None
        except Exception as error:
            return error.with_traceback(None)
    return None


def described(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The tensors of a call, by the names that its op has for them: `input (4, 7) float32, weight (8, 6) float32`."""
    return ", ".join(
        f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in _named(op, args, kwargs)
    )


def _named(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    names = [argument.name for argument in op._schema.arguments]
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        found = tensors_in([value])
        for at, x in enumerate(found):
            yield name if isinstance(value, Tensor) else f"{name}[{at}]", x
