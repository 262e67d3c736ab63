"""The tensors of an op by its schema: how many go in and come out, and under which names."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..placement.errors import did_you_mean

__all__ = ["Operands", "named_op", "operands", "suggest"]


@dataclass(frozen=True, slots=True)
class Operands:
    """The tensor arguments and results of an op by name, True for lists, and the names of all its arguments."""

    inputs: Mapping[str, bool]
    outputs: Mapping[str, bool]
    arguments: tuple[str, ...]


@lru_cache(maxsize=1 << 14)
def operands(op: str | torch._ops.OpOverload) -> Operands | None:
    """The tensors of an op, or of the op by a rule's name; None where torch knows nothing of its namespace.

    >>> operands("addmm").inputs
    {'self': False, 'mat1': False, 'mat2': False}
    """
    try:
        schema = (named_op(op) if isinstance(op, str) else op)._schema
    except LookupError:
        if _is_known(str(op).rpartition("::")[0] or "aten"):
            raise
        return None
    return Operands(
        {p.name: "List" in str(p.type) for p in schema.arguments if "Tensor" in str(p.type)},
        {
            p.name or f"result {i}": "List" in str(p.type)
            for i, p in enumerate(schema.returns)
            if "Tensor" in str(p.type)
        },
        tuple(p.name for p in schema.arguments),
    )


def named_op(name: str) -> torch._ops.OpOverload:
    """The op of a name as rules and plans spell it; a LookupError where there is none."""
    namespace, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace or "aten"), packet, None)
    op = getattr(found, overload or "default", None) if isinstance(found, torch._ops.OpOverloadPacket) else None
    if not isinstance(op, torch._ops.OpOverload):
        raise LookupError(name)
    return op


def _is_known(namespace: str) -> bool:
    return namespace in {known.partition("::")[0] for known in torch._C._dispatch_get_all_op_names()}


def suggest(name: str) -> str:
    """The end of an error about an op that is not known."""
    known = [op.removeprefix("aten::") for op in torch._C._dispatch_get_all_op_names()]
    overloads = sorted(op for op in known if op.partition(".")[0] == name.partition(".")[0])
    return did_you_mean(name, overloads or known, None if overloads else "see torch.ops")
