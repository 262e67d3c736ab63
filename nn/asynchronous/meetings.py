"""Meetings: models of groups of ranks that train apart come together, all at once or a part at a time.

    group 0: w0     mean of w0, w1   ->   outer model, in pieces: its optimizer's step towards the mean
    group 1: w1                      ->   all groups go on from there

The weights of groups are addends along an axis, so their mean goes to the pieces of the outer model by a
reduce_scatter, and back it goes by `refit`. Local SGD is an outer SGD of rate 1, which takes the mean itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...placement.errors import SbpError
from ..refit.addends import addends
from ..refit.refit import refit
from ..tensors.tensor import GlobalTensor

__all__ = ["meet"]


def meet(
    model: nn.Module, apart: Sequence[nn.Module], optimizer: Optimizer | None = None, *, axis: str, part: str = ""
) -> None:
    """Bring models that trained apart together in an outer model, and let all go on from it.

    `apart` are the models of the groups along an axis of the outer model's placement, of the same names. The outer
    optimizer takes how far the outer model is from their mean for a gradient (DiLoCo); without one the mean is taken as
    it is (local SGD). `part` names a module of which alone that is done, so that meetings of parts are streamed.
    Buffers of floats become means, and others those of the first group. Every process calls it.
    """
    outer, each = _part(model, part), [_part(one, part) for one in apart]
    if not each:
        raise SbpError("meet: there are no models\n  give those of the groups, as in meet(model, models, axis='data')")
    lists = [dict(one.named_parameters()) for one in each]
    named = dict(outer.named_parameters())
    buffers = [dict(one.named_buffers()) for one in each]
    names = {"parameters": (list(named), [*map(list, lists)])}
    names["buffers"] = [name for name, _ in outer.named_buffers()], [*map(list, buffers)]
    for what, (mine, theirs) in names.items():
        strange = next((at for at, of in enumerate(theirs) if of != mine), None)
        if strange is not None:
            raise SbpError(
                f"meet: model {strange} of those apart has other {what} than the outer one\n"
                "  make all of them alike, as copies of one model"
            )
    frozen = next((name for name, x in named.items() if not x.requires_grad and any(_learns(name, lists))), None)
    if frozen is not None:
        raise SbpError(
            f"meet: {frozen} is frozen in the outer model, and trained in one of those apart, which would be lost\n"
            "  freeze it in all of them, or in none: requires_grad_(False)"
        )
    if optimizer is not None:
        known = {id(x) for group in optimizer.param_groups for x in group["params"]}
        lost = next((name for name, x in named.items() if x.requires_grad and id(x) not in known), None)
        if lost is not None:
            raise SbpError(
                f"meet: {lost} of the outer model is none of the optimizer's\n"
                "  make the optimizer of model.parameters(), behind flow.nn.to_global"
            )
    for name, x in named.items():
        if x.requires_grad:  # frozen ones are alike
            mean = _mean(x, [held[name] for held in lists], axis)
            if optimizer is None:
                _take(x, mean)
            else:
                x.grad = x.detach() - mean
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    for name, buffer in outer.named_buffers():
        of = [held[name] for held in buffers]
        if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
            _take(buffer, _mean(buffer, of, axis))
        else:
            _take(buffer, of[0].to_global(placement=buffer.placement, sbp=buffer.sbp))  # type: ignore[attr-defined]
    for one in each:
        refit(outer, one)


def _learns(name: str, lists: Sequence[dict[str, nn.Parameter]]) -> list[bool]:
    return [held[name].requires_grad for held in lists]


def _part(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = ", ".join(path for path, _ in model.named_children())
        raise SbpError(f"meet: {type(model).__name__} has no module {name!r}\n  it has {known}") from None


def _mean(x: Tensor, parts: Sequence[Tensor], axis: str) -> Tensor:
    if not isinstance(x, GlobalTensor):
        raise SbpError(
            "meet: the outer model is on no ranks yet\n  say which: flow.nn.to_global(model, placement, S(0))"
        )
    with torch.no_grad():
        total: Tensor = addends(parts, x.placement, axis).to_global(sbp=x.sbp)
        return total / len(parts)


def _take(x: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        x.copy_(new)
