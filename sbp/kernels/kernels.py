"""The kernels of an op, forward and backward: FLOPs, how often each tensor is read or written, launches, and how often
exponentials and the like are evaluated.

linear(x, w)     forward   2mnk; x, w and the result once       backward   the same for each factor that wants one
attention        forward   half of all where it is causal       backward   2.5 times the FLOPs
mul(x, y)        forward   x, y and the result once             backward   the gradient, what it saved, gradients
gelu(x)          forward   the same, and an erf of each         backward   the same, and an erf and an exp of each
embedding        forward   the rows that it takes               backward   zeros of the table, and rows added

Sums are not computed in the backward, as the gradient goes to all terms; they are priced as pointwise ops nevertheless,
because a term mostly has another user, and the gradients of both are added up.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ..call import Call, tensors_in
from ..traits import VIEWS, evaluations, traits
from .flops import ATTENTION, EXPERTS, flops

__all__ = ["EIGHT_BITS", "PAIR_PASSES", "Kernels", "OpPass", "is_rowwise", "is_view", "kernels_of"]


class OpPass(NamedTuple):
    """One way through an op, of the whole call: FLOPs; how often each tensor, inputs and then outputs, is read or
    written; launches; exponentials and the like of each element of its largest tensor."""

    flops: float
    traffic: tuple[float, ...]
    launches: float
    evaluations: float = 0.0


class Kernels(NamedTuple):
    """Both ways through an op, and whether it is fused attention."""

    forward: OpPass
    backward: OpPass
    attention: bool


def kernels_of(call: Call, wants: Sequence[bool] = ()) -> Kernels:
    """The kernels of a call; `wants` says of each tensor input whether its gradient is wanted."""
    wants = wants or (False,) * len(call.inputs)
    schema = call.op._schema.name
    count = flops(call)
    if schema in ATTENTION:
        return _attention(call, wants, count)
    if schema == "sbpflow::recurrent":
        return _recurrent(call, wants, count)
    if schema in EXPERTS:
        return _experts(call, wants, count)
    if count:
        return _product(call, wants, count)
    if schema in _ROWS:
        return _rows(call, wants, _ROWS[schema])
    by_tanh = schema == "aten::gelu" and call.bound["approximate"] == "tanh"
    return _evaluating("gelu/tanh" if by_tanh else call.name, _pointwise(call, wants, schema))


def is_view(call: Call) -> bool:
    """Whether nothing is computed, since all that comes out lies in the memory of what went in.

    Fakes alone cannot tell: layers that are alike share them, so that a sum at the end of one is the fake that went in;
    and what is a part of an op that was taken apart, or of a micro-batch, is a fake by itself. Then the op is asked.
    """
    if not getattr(call.op, "is_view", False):  # as its schema says, where it is an op of torch
        return False
    held = {x.untyped_storage()._cdata for x in call.inputs}
    if not held or all(y.untyped_storage()._cdata in held for y in call.outputs):
        return bool(held)
    if call.op._schema.name == "aten::to":  # may name a device, to which fakes cannot go
        return call.inputs[0].dtype == call.outputs[0].dtype
    with torch.no_grad():
        made = tensors_in(call.op(*call.args, **call.kwargs))
    return all(y.untyped_storage()._cdata in held for y in made)


def is_rowwise(call: Call) -> bool:
    """Whether it is no product, attention or look-up, but reads its inputs and writes its results."""
    schema = call.op._schema.name
    return not (schema in ATTENTION or schema in _ROWS or schema == "sbpflow::recurrent" or flops(call))


def _attention(call: Call, wants: Sequence[bool], count: float) -> Kernels:
    count *= 0.5 if call.bound.get("is_causal") or call.bound.get("causal") else 1.0
    forward = OpPass(count, (1.0,) * (len(wants) + len(call.outputs)), 1.0)
    if not any(wants):
        return Kernels(forward, _nothing(call), True)
    twice = (*(1.0 + want for want in wants), *(2.0 for _ in call.outputs))
    return Kernels(forward, OpPass(2.5 * count, twice, 1.0), True)


def _product(call: Call, wants: Sequence[bool], count: float) -> Kernels:
    """A product for each factor that wants a gradient, and a sum of rows for a term."""
    schema = call.op._schema.name
    term = _TERMS.get(schema)
    added = call.bound.get(term) if term else None
    factor = [x is not added for x in call.inputs]
    many = sum(factor)
    forward = OpPass(count, (1.0,) * (len(wants) + len(call.outputs)), max(1.0, many - 1.0))
    wanted = sum(want for want, is_factor in zip(wants, factor, strict=True) if is_factor)
    summed = any(want for want, is_factor in zip(wants, factor, strict=True) if not is_factor)
    if not (wanted or summed):
        return Kernels(forward, _nothing(call), False)
    inputs = (float(wanted) if is_factor else float(summed) for is_factor in factor)
    outputs = (float(wanted + summed) for _ in call.outputs)
    done = 2 * wanted / many  # of several factors, each product of two has two products in the backward
    if schema == EIGHT_BITS:  # each factor is looked through for its largest, read, and written in half as many bytes
        forward = forward._replace(traffic=tuple(t + 2.0 for t in forward.traffic), launches=5.0)
    more = forward.traffic[0] - 1.0
    backward = OpPass(done * count, tuple(t + more for t in (*inputs, *outputs)), wanted * forward.launches + summed)
    return Kernels(forward, backward, False)


def _recurrent(call: Call, wants: Sequence[bool], count: float) -> Kernels:
    """Moments follow each other, each with kernels of its own; the backward runs the layer once more."""
    moments = call.bound["x"].shape[0] * (1 + bool(call.bound["both"]))
    # The input's product is made at once; every moment reads the weights of its state, and has gates to compute.
    traffic = (*(1.0 for _ in call.inputs), *(1.0 + MOMENT_PASSES for _ in call.outputs))
    kind = call.bound["kind"]
    fused = kind == "lstm" and call.bound["lengths"] is None
    forward = OpPass(count, traffic, (2.0 if fused else MOMENT_LAUNCHES[kind]) * moments + 1.0)
    if not any(wants):
        return Kernels(forward, _nothing(call), False)
    return Kernels(forward, OpPass(3 * count, tuple(3 * t for t in traffic), 3 * forward.launches), False)


def _experts(call: Call, wants: Sequence[bool], count: float) -> Kernels:
    """Each token is taken once for every expert that it chose, and what these make is added up."""
    (made,) = call.outputs
    chosen = call.bound.get("chosen")
    taken = 1.0 if chosen is None else chosen.numel() / max(1, made.shape[:-1].numel())
    traffic = (*(1.0 for _ in call.inputs), 1.0 + PAIR_PASSES * taken)
    forward = OpPass(count, traffic, PAIR_PASSES)
    if not any(wants):
        return Kernels(forward, _nothing(call), False)
    return Kernels(forward, OpPass(3 * count, tuple(3 * t for t in traffic), 3 * forward.launches), False)


def _rows(call: Call, wants: Sequence[bool], table: str) -> Kernels:
    """Rows taken from a table: they are read and written; their gradients are added to zeros of the table."""
    rows = call.bound[table]
    of = [x is rows for x in call.inputs]
    forward = OpPass(0.0, (*(0.0 if it else 1.0 for it in of), *(2.0 for _ in call.outputs)), 1.0)
    if not any(wants):
        return Kernels(forward, _nothing(call), False)
    return Kernels(forward, OpPass(0.0, (*(1.0 for _ in of), *(3.0 for _ in call.outputs)), 2.0), False)


def _pointwise(call: Call, wants: Sequence[bool], schema: str) -> Kernels:
    """All that reads its inputs and writes its results once. Of several inputs one that alone wants a gradient is not
    looked at for that."""
    made = (1.0,) * len(call.outputs)
    forward = OpPass(0.0, (*(1.0 for _ in wants), *made), 1.0)
    wanted = sum(wants)
    if not wanted:
        return Kernels(forward, _nothing(call), False)
    if schema in _NORMS:  # one kernel for the input's gradient, and one for those of the weights
        also = float(wanted > wants[0])
        inputs = (float(wants[0]) + 1.0 + also, *(float(want) for want in wants[1:]))
        return Kernels(forward, OpPass(0.0, (*inputs, *(1.0 + also for _ in made)), 1.0 + also), False)
    said = traits(call.name) or traits(schema.removeprefix("aten::"))
    looks = not said & {*VIEWS, "linear"}
    saved = (looks and (len(wants) == 1 or not want or wanted > 1) for want in wants)
    inputs = tuple(float(want) + float(kept) for want, kept in zip(wants, saved, strict=True))
    return Kernels(forward, OpPass(0.0, (*inputs, *made), 1.0), False)


def _evaluating(name: str, kernels: Kernels) -> Kernels:
    """The kernels with the exponentials that they evaluate; where nobody wants a gradient there is no backward."""
    forward, back = evaluations(name)
    on = kernels.backward._replace(evaluations=back) if kernels.backward.launches else kernels.backward
    return kernels._replace(forward=kernels.forward._replace(evaluations=forward), backward=on)


def _nothing(call: Call) -> OpPass:
    return OpPass(0.0, (0.0,) * (len(call.inputs) + len(call.outputs)), 0.0)


EIGHT_BITS = "sbpflow::product_of_8_bits"
# Of a moment of a recurrent layer, a product, gates and the state: as many launches as it took on a CPU. Only an LSTM
# of whole sequences has them in one kernel there.
MOMENT_LAUNCHES = {"lstm": 20.0, "gru": 20.0, "rnn_tanh": 5.0, "rnn_relu": 5.0}
PAIR_PASSES = 8.0  # over tokens as often as they are taken: taken, computed, multiplied by shares, added up
MOMENT_PASSES = 8.0  # over what a moment gives: gates are four of its size, read and written

_TERMS: Mapping[str, str] = {
    "aten::linear": "bias",
    "aten::addmm": "self",
    "aten::baddbmm": "self",
    "aten::addbmm": "self",
    "aten::bilinear": "bias",
    "aten::convolution": "bias",
    **{f"aten::conv{n}d": "bias" for n in (1, 2, 3)},
    **{f"aten::conv_transpose{n}d": "bias" for n in (1, 2, 3)},
}
_ROWS: Mapping[str, str] = {
    "aten::embedding": "weight",
    "aten::index_select": "self",
    "aten::gather": "self",
    "aten::take_along_dim": "self",
    "aten::index": "self",
    "aten::nll_loss": "self",
    "aten::nll_loss_forward": "self",
}
_NORMS = frozenset(
    {
        "aten::layer_norm",
        "aten::native_layer_norm",
        "aten::rms_norm",
        "aten::_fused_rms_norm",
        "aten::group_norm",
        "aten::native_group_norm",
        "aten::batch_norm",
    }
)
