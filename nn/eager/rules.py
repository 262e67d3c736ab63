"""`flow.rule` and `flow.check_rule`: rules for ops of one's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import Function

from ...boxing.record import user_line
from ...placement.errors import SbpError
from ...sbp import check, registry
from ...sbp.check import RuleReport
from ...sbp.rule import define, register
from .dispatch import forget
from .functions import Applied, function_name

__all__ = ["check_rule", "rule"]


def rule(op: str | type[Function], text: str | None = None) -> Any:
    """Say how an op's dims may be split: a line of the rule language, or a decorated function of a `Call`.

    `op` is a custom op's name, "mylib::op", or a torch.autograd.Function. The language is in docs/reference/rules.md.

        flow.rule("mylib::scale", "b t d, d -> b t d")

        @flow.rule("mylib::scale")
        def scale(call): return Match(...)
    """
    name = function_name(op) if isinstance(op, type) else op
    forget()
    known = registry.known()
    if text is not None:
        define(name, text, user_line())
        return None

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        if name in known:
            raise SbpError(f"{name} has a rule already\n  keep one of the two")
        return register(name)(function)

    return put


def check_rule(op: str | torch._ops.OpOverload | type[Function], *args: Any, **kwargs: Any) -> RuleReport:
    """Split these arguments as the op's rule says, run, put together and compare, forward and backward.

    Prints what is wrong, and which signatures would hold as well but are not listed.
    """
    if isinstance(op, type):
        return check.check_rule(Applied(op), *args, name=function_name(op), **kwargs)  # type: ignore[arg-type]
    return check.check_rule(op, *args, **kwargs)
