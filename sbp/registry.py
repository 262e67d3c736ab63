"""The rule book's index: from the name of an op to the function that says how its calls may be split.

A line of a `.rules` file and a Python function end up here alike: a function of a `Call` that returns a `Match`, a list
of `Way`s, or None where it has nothing to say of this call (which is then taken apart, or run gathered).
"""

from dataclasses import replace
from functools import cache

import torch

from .call import Call, Match
from .precision import exact_groups
from .rule import RULES, Rule, RuleAnswer

__all__ = ["find", "has_rule", "known", "rule_for"]


@cache
def known() -> dict[str, Rule]:
    """Every rule, by the name of its op."""
    try:
        from . import book as book
    except BaseException:  # half a book would gather in silence what the other half covers
        RULES.clear()
        raise
    return RULES


def has_rule(op: torch._ops.OpOverload) -> bool:
    """Whether the book has a line for this very op."""
    packet, dot, overload = Call(op, (), {}, ()).name.partition(".")
    return bool({packet + dot + overload, packet.removesuffix("_") + dot + overload} & known().keys())


def rule_for(op: torch._ops.OpOverload, name: str) -> Rule | None:
    """The op's own rule, or that of all pointwise ops if torch says that it is one."""
    return known().get(_entry(op, name))


def _entry(op: torch._ops.OpOverload, name: str) -> str:
    """The name under which an op's rule stands in the book, if it has one."""
    packet, dot, overload = name.partition(".")
    # What writes in place splits as what does not: add_.Tensor as add.Tensor; a copy, such as expand_copy, as the view.
    plain = packet.removesuffix("_").removesuffix("_copy") + dot + overload
    if name in known() or plain in known():
        return name if name in known() else plain
    shared = torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags
    return "pointwise" if shared else name


def find(call: Call) -> RuleAnswer:
    """The book's entry for a call."""
    entry = _entry(call.op, call.name)
    rule = known().get(entry)
    if entry not in (call.name, "pointwise"):
        call = replace(call)
        call.__dict__["name"] = entry  # rules of several ops tell them apart by the names that they stand under
    found = rule(call) if rule is not None else None
    if isinstance(found, Match):
        linear = exact_groups(call, found.linear)
        if call.op._schema.is_mutable:
            # What is written to lies afterwards as it did before: x *= y with a partial y is not for a whole x.
            linear = tuple(group for group in linear if 0 in group)
        return found if linear == found.linear else replace(found, linear=linear)
    return found
