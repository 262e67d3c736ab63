"""Products of 8 bits: weights rest as they are, and products of rows and a matrix are computed in float8.

    y = x @ w.T                       scales           x and w as     gradients as
    fp8           by tensor           one for each     e4m3           e5m2, which reach further
    fp8_rowwise   by row and column   one for each     e4m3           e4m3, with a scale for each row

A scale brings the largest magnitude to the largest number of the type. Ranks that have a part of a product scale what
they have: a piece is scaled no worse than the whole, so that results differ between layouts by the rounding of 8 bits.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...placement import Placement
from ...placement.device import family
from ...placement.errors import SbpError
from .annotate import note, placement_of

__all__ = ["EIGHTS", "UNIT", "eights_of", "note_eight", "product", "refuse_eights"]

aten = torch.ops.aten
EIGHTS = ("fp8", "fp8_rowwise")  # as `cast` calls them
UNIT = 16  # kernels want columns, and what is summed over, to be a multiple
NOTED = "_sbpflow_fp8"
LEAST = (8, 9)  # compute capability of cards that have such products

_NARROW, _FAR = torch.float8_e4m3fn, torch.float8_e5m2
_CARRIED = (torch.float32, torch.bfloat16, torch.float16)  # in which results may come


def note_eight(module: nn.Module, how: str | None) -> None:
    """Say that a module's products with weights are of 8 bits; None takes it back."""
    note(module, NOTED, how)


def eights_of(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """The note on how a module computes products of 8 bits, by its id; modules without one are left out."""
    parts = (part for root in modules.values() for part in root.modules())
    return {id(part): said for part in parts if (said := part.__dict__.get(NOTED)) is not None}


def refuse_eights(modules: Mapping[str, nn.Module], rest: Placement | None) -> None:
    """An error where a card has no products of 8 bits. Layers that are placed nowhere live on `rest`."""
    said = eights_of(modules)
    if not said:
        return
    where = placement_of(modules)
    for path, part in ((path, part) for root in modules.values() for path, part in root.named_modules()):
        home = where.get(path) or rest
        if id(part) in said and home is not None and (has := family(home.type).without_eights()):
            raise SbpError(
                f"cast: {path or 'the model'} is to compute in {said[id(part)]} on {home}\n"
                f"  the card has compute capability {has}, and such products take 8.9\n"
                f'  take another type, as in flow.nn.cast(model, {{"{path or "*"}": "bf16"}})'
            )


def _scale(x: Tensor, dim: int | None, dtype: torch.dtype) -> Tensor:
    """The number that a unit of the 8 bits stands for: one, or one a row (dim 1) or column (dim 0)."""
    most = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return (most.to(torch.float32) / torch.finfo(dtype).max).clamp(min=1e-30)


def _times(a: Tensor, b: Tensor, by_row: bool, wide: torch.dtype, far: bool = False) -> Tensor:
    """a [m, k] @ b [k, n] of 8 bits, added up in float32; `far`: the left one is a gradient."""
    if not a.numel() or not b.numel():
        return a.new_zeros((a.shape[0], b.shape[1]), dtype=wide)
    left = _FAR if far and not by_row else _NARROW
    scales = _scale(a, 1 if by_row else None, left), _scale(b, 0 if by_row else None, _NARROW)
    narrow = (a / scales[0]).to(left).contiguous(), (b / scales[1]).to(_NARROW).t().contiguous().t()
    if by_row and a.is_cpu:  # for which torch 2.11 has no product with scales of rows
        return ((narrow[0].float() @ narrow[1].float()) * scales[0] * scales[1]).to(wide)
    out = torch.bfloat16 if by_row else wide if wide in _CARRIED else torch.float32
    made: Tensor = torch._scaled_mm(*narrow, scale_a=scales[0], scale_b=scales[1], out_dtype=out)
    return made.to(wide)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _filled(x: Tensor) -> Tensor:
    """Rows of zeros behind what kernels would sum over in an odd number."""
    return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % UNIT))


@torch.library.custom_op("sbpflow::product_of_8_bits", mutates_args=())
def _product(x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
    """x [..., k] by weight [n, k]."""
    return _times(_rows(x), weight.t(), by_row, x.dtype).view(*x.shape[:-1], len(weight))


@torch.library.custom_op("sbpflow::product_of_8_bits_backward", mutates_args=())
def _product_backward(grad: Tensor, x: Tensor, weight: Tensor, by_row: bool) -> tuple[Tensor, Tensor]:
    g, rows = _rows(grad), _rows(x)
    dx = _times(g, weight, by_row, x.dtype, far=True).view(x.shape)
    return dx, _times(_filled(g).t(), _filled(rows), by_row, weight.dtype, far=True)


@_product.register_fake
def _(x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], len(weight)))


@_product_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, by_row: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    x, weight, ctx.by_row = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_product_backward(grad, *ctx.saved_tensors, ctx.by_row), None


_product.register_autograd(_backward, setup_context=_remember)
_op: Any = torch.ops.sbpflow.product_of_8_bits.default


def product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], how: str, where: str) -> Tensor | None:
    """A product of rows and a matrix, with what is added to it, of 8 bits; None where the op is none. Kernels take
    sizes that are multiples of 16, and `where` names the module and line of what has others."""
    found = _PRODUCTS.get(func)
    if found is None or kwargs:
        return None
    x, weight, bias = found(*args)
    if weight.ndim != 2 or x.ndim < 2 or not (x.is_floating_point() and weight.is_floating_point()):
        return None
    if odd := [size for size in weight.shape if size % UNIT]:
        raise SbpError(
            f"{how}: a product of {tuple(x.shape)} and a matrix {tuple(weight.shape)}, {where}\n"
            f"  products of 8 bits take sizes that are multiples of {UNIT}, and {odd[0]} is none\n"
            "  leave this module out, and name those that fit: a type of 16 bits or more takes any size"
        )
    made: Tensor = _op(x, weight, how == "fp8_rowwise")
    return made if bias is None else made + bias


_PRODUCTS: dict[Any, Callable[..., tuple[Tensor, Tensor, Tensor | None]]] = {
    aten.linear.default: lambda x, weight, bias=None: (x, weight, bias),
    aten.addmm.default: lambda bias, x, weight: (x, weight.t(), bias),
    aten.mm.default: lambda x, weight: (x, weight.t(), None),
    aten.matmul.default: lambda x, weight: (x, weight.t(), None),
}
