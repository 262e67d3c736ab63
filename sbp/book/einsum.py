"""einsum and tensordot: their arguments already name the factors."""

from collections.abc import Sequence
from dataclasses import replace

from ..call import Call, Match
from ..pattern import Dim, Operand, lay
from ..registry import register

__all__ = ["einsum", "tensordot"]


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
