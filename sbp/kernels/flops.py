"""FLOPs of ops: what the forward of a call multiplies and adds, as torch counts it."""

from collections.abc import Callable
from math import prod

from ..call import Call

__all__ = ["ATTENTION", "EXPERTS", "PRODUCTS", "flops"]


def flops(call: Call) -> float:
    """Floating point operations of the forward of what has many for its size; 0 for all else."""
    count = _COUNTS.get(call.op._schema.name)
    return count(call) if count else 0.0


def _product(name: str, dim: int = -1) -> Callable[[Call], float]:
    return lambda call: float(2 * call.outputs[0].numel() * call.bound[name].shape[dim])


def _convolution(call: Call) -> float:
    weight = call.bound["weight"]
    return float(2 * call.outputs[0].numel() * prod(weight.shape[1:]))


def _transposed(call: Call) -> float:
    return float(2 * call.bound["input"].numel() * prod(call.bound["weight"].shape[1:]))


def _attention(call: Call) -> float:
    query, key, value = (call.bound[name] for name in ("query", "key", "value"))
    return float(2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _einsum(call: Call) -> float:
    """Flops of operands multiplied one after the other, each time over all letters that are there."""
    sides, arrow, result = call.bound["equation"].replace(" ", "").partition("->")
    letters, sizes = [], dict[str, int]()
    for term, x in zip(sides.split(","), call.inputs, strict=True):
        head, dots, tail = term.partition("...")
        between = [f"...{d}" for d in range(x.dim() - len(head) - len(tail), 0, -1)] if dots else []
        letters.append([*head, *between, *tail])
        sizes.update({c: max(n, sizes.get(c, 1)) for c, n in zip(letters[-1], x.shape, strict=True)})
    if not arrow:
        result = "".join(c for c in sizes if sides.count(c) == 1)
    total, have = 0, {*letters[0]}
    for n, term in enumerate(letters[1:], 2):
        have |= {*term}
        total += 2 * prod(sizes[c] for c in have)
        later = {c for rest in letters[n:] for c in rest}
        have = {c for c in have if c in later or c in result or len(c) > 1}
    return float(total)


def _tensordot(call: Call) -> float:
    of = call.bound["self"].shape
    return float(2 * call.outputs[0].numel() * prod(of[d] for d in call.bound["dims_self"]))


def _grouped(call: Call) -> float:
    """The work of a grouped product. Each row meets the matrix of one group; where groups cut the matrix, each column
    meets some of the rows."""
    one, other = call.bound["self"], call.bound["mat2"]
    rows = prod(one.shape) if other.dim() == 3 else prod(one.shape[-2:])
    return float(2 * rows * other.shape[-1])


def _slice(call: Call) -> float:
    """Flops of the attention of a slice, which looks back at earlier ones, on average."""
    query, width = call.bound["query"], call.bound["value"].shape[-1]
    return float(prod(query.shape[:-1]) * call.bound["length"] * (query.shape[-1] + width))


def _ring_part(call: Call) -> float:
    """Flops of all queries with one of so many parts of the keys."""
    return _attention(call) / float(call.bound["parts"])


def _window_attention(call: Call) -> float:
    """Flops of all queries with as many keys as their windows are wide."""
    share: float = min(1.0, call.bound["width"] / max(1, call.bound["key"].shape[-2]))
    return _attention(call) * share


def _recurrent(call: Call) -> float:
    """Every moment takes each weight once."""
    moments = prod(call.bound["x"].shape[:-1])
    return float(2 * moments * sum(w.numel() for w in call.bound["weights"] if w.dim() == 2))


def _experts(call: Call) -> float:
    """Flops of each token with the weights of every expert that it chose; where no choices are given, of each row with
    those of its own. What experts share is taken for terms."""
    bound = call.bound
    stacks = bound.get("stacks") or [bound[name] for name in ("up", "down") if name in bound]
    each = sum(w.numel() / len(w) for w in stacks)
    chosen = bound.get("chosen")
    pairs = prod(bound["x"].shape[:-1]) if chosen is None else chosen.numel()
    return float(2 * pairs * each)


# Layers of experts, whose backward computes once more what is inside.
EXPERTS = frozenset(
    {"sbpflow::experts", "sbpflow::module_experts", "sbpflow::experts_part", "sbpflow::stacked_experts"}
)

# Fused attention, whose kernels reach another share of the peak than products do.
ATTENTION = frozenset(
    {
        "aten::scaled_dot_product_attention",
        "sbpflow::attend",
        "sbpflow::ring_part",
        "sbpflow::window_attention",
    }
)

_COUNTS: dict[str, Callable[[Call], float]] = {
    "aten::mm": _product("self"),
    "aten::addmm": _product("mat1"),
    "aten::bmm": _product("self"),
    "aten::baddbmm": _product("batch1"),
    "aten::matmul": _product("self"),
    "aten::linear": _product("input"),
    "aten::mv": _product("self"),
    "aten::addbmm": lambda call: float(2 * prod(call.bound["batch1"].shape) * call.bound["batch2"].shape[-1]),
    "aten::bilinear": lambda call: float(2 * call.outputs[0].numel() * prod(call.bound["weight"].shape[1:])),
    "aten::einsum": _einsum,
    "aten::tensordot": _tensordot,
    "aten::_grouped_mm": _grouped,
    "aten::scaled_dot_product_attention": _attention,
    "sbpflow::attend": _slice,
    "sbpflow::product_of_8_bits": _product("x"),
    "sbpflow::ring_part": _ring_part,
    "sbpflow::window_attention": _window_attention,
    "sbpflow::recurrent": _recurrent,
    **dict.fromkeys(EXPERTS, _experts),
    **{f"aten::conv{n}d": _convolution for n in (1, 2, 3)},
    **{f"aten::conv_transpose{n}d": _transposed for n in (1, 2, 3)},
    "aten::convolution": _convolution,
}
PRODUCTS = frozenset(_COUNTS) - ATTENTION
