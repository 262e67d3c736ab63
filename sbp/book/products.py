"""Products that need more than a line. The arguments of einsum and tensordot name the factors already; grouped products
have a matrix for each group of rows."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import prod

from ..call import Call, Match
from ..pattern import Dim, Operand, lay
from ..rule import register
from .labels import Labels, labelled, named, position

__all__ = ["einsum", "tensordot"]

EIGHT_UNIT = 16  # elements of which kernels of 8 bits want columns, and what is summed over, to be a multiple
UNIT = 16  # bytes of which kernels of groups want rows to be a multiple, also those of pieces


@register("einsum")
def einsum(call: Call) -> Match | None:
    """Letters are factors; those that the result lacks are summed over, and the product is linear in each operand."""
    equation = call.bound["equation"].replace(" ", "").replace("...", "*")
    sides, arrow, result = equation.partition("->")
    terms = sides.split(",")
    letters = [letter for letter in sides if letter != ","]
    if not arrow:
        result = "*" * ("*" in letters) + "".join(sorted(c for c in set(letters) if c != "*" and letters.count(c) == 1))
    # A letter twice in one operand takes its diagonal, for which both dims would have to be split alike.
    marks = {c: "never" for term in terms for c in term if term.count(c) > 1}
    marks = {c: "sum" for c in letters if c not in result} | marks
    return _product(call, terms, result, marks)


@register("tensordot")
def tensordot(call: Call) -> Match | None:
    """The dims that are paired are summed over."""
    names = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    one, other = ([next(names) for _ in range(tensor.dim())] for tensor in call.inputs)
    paired = {}
    for here, there in zip(call.bound["dims_self"], call.bound["dims_other"], strict=True):
        other[there] = one[here]
        paired[one[here]] = "sum"
    return _product(call, [one, other], [name for name in (*one, *other) if name not in paired], paired)


def _product(call: Call, terms: Sequence[Sequence[str]], result: Sequence[str], marks: dict[str, str]) -> Match | None:
    if len(terms) != len(call.inputs):
        return None
    patterns = [Operand(tuple(Dim(name, marks.get(name, "")) for name in term)) for term in terms]
    match = lay(
        [(pattern, tensor.shape) for pattern, tensor in zip(patterns, call.inputs, strict=True)],
        [(Operand(tuple(Dim(name) for name in result)), tensor.shape) for tensor in call.outputs],
        {},
    )
    alone = tuple((i,) for i in range(len(terms)))
    return match and replace(match, linear=alone, hollow=True)


@register("_grouped_mm")
def grouped(call: Call) -> Match | None:
    """Columns are split, and what is summed over. Rows never: which of them belong to which matrix is only known when
    it runs."""
    bound = call.bound
    rows, matrices = bound["self"], bound["mat2"]
    if rows.dim() != 2 or matrices.dim() != 3 or bound["bias"] is not None:
        return None

    def split(name: str, size: int) -> Hashable:
        return name if call.sizes and size % (UNIT // rows.dtype.itemsize * prod(call.sizes)) == 0 else None

    inner, columns = split("inner", matrices.shape[1]), split("columns", matrices.shape[2])
    labels: dict[str, list[Hashable]] = {"self": [None, inner], "mat2": [None, inner, columns]}
    if bound["offs"] is not None:
        labels["offs"] = [None]
    linear = [(position(call, "self"),), (position(call, "mat2"),)]
    return labelled(call, named(call, **labels), [[None, columns]], reduced={"inner": "sum"}, linear=linear)


@register("sbpflow::product_of_8_bits")
def of_8_bits(call: Call) -> Match:
    """As linear, in pieces that kernels take; rounded, and so linear in nothing."""
    x, weight = call.inputs
    rows: list[Hashable] = [("rows", d) for d in range(x.dim() - 1)]
    inner, columns = (
        name if call.sizes and size % (EIGHT_UNIT * prod(call.sizes)) == 0 else None
        for name, size in (("inner", weight.shape[1]), ("columns", weight.shape[0]))
    )
    return labelled(call, [[*rows, inner], [columns, inner]], [[*rows, columns]], reduced={"inner": "sum"})


@register("sbpflow::experts")
def experts(call: Call) -> Match:
    """Tokens may be split, and choices, over which the result sums; the inner dim too, unless a gate lies beside it."""
    up, down = call.bound["up"], call.bound["down"]
    inner = "inner" if up.shape[2] == down.shape[1] else None
    labels: dict[str, list[Hashable]] = {
        "x": ["tokens", None],
        "chosen": ["tokens", "choices"],
        "share": ["tokens", "choices"],
        "up": [None, None, inner],
        "down": [None, inner, "out"],
    }
    linear = [(position(call, name),) for name in ("share", "down")]
    sums: dict[Hashable, str] = {"choices": "sum", "inner": "sum"}
    return labelled(call, named(call, **labels), [["tokens", "out"]], reduced=sums, linear=linear, hollow=True)


@register("sbpflow::module_experts")
def module_experts(call: Call) -> Match:
    """Of a module's own code it is known alone that its result is a sum over choices."""
    return labelled(call, _weighed(call, ["tokens", None]), [["tokens", None]], reduced={"choices": "sum"}, hollow=True)


@register("sbpflow::experts_part")
def experts_part(call: Call) -> Match:
    """Tokens may be split. Experts are those of a rank, which are told by their numbers."""
    return labelled(call, _weighed(call, [None, "tokens", None]), [[None, "tokens", None]], hollow=True)


@register("sbpflow::stacked_experts")
def stacked_experts(call: Call) -> Match:
    """Tokens may be split; the rows of a token are one for each expert."""
    tokens: Labels = [None, "tokens", None]
    weights = {name: [[None] * w.dim() for w in call.bound[name]] for name in ("stacks", "shared")}
    return labelled(call, named(call, x=tokens, **weights), [tokens], hollow=True)


def _weighed(call: Call, tokens: Labels) -> list[Labels]:
    """The labels of tokens, choices, shares and weights."""
    choices: Labels = ["tokens", "choices" if len(tokens) == 2 else None]
    weights = {name: [[None] * w.dim() for w in call.bound[name]] for name in ("stacks", "shared")}
    first = next(name for name in call.bound)
    return named(call, **{first: tokens, "chosen": choices, "share": choices, **weights})
