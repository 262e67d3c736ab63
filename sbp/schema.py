"""The tensors of an op by its schema: how many go in and come out, and under which names."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

import torch

__all__ = ["Operands", "operands", "suggest"]


@dataclass(frozen=True, slots=True)
class Operands:
    """The tensor arguments and results of an op by name, True for lists, and the names of all its arguments."""

    inputs: Mapping[str, bool]
    outputs: Mapping[str, bool]
    arguments: tuple[str, ...]


@lru_cache(maxsize=1 << 14)
def operands(op: str | torch._ops.OpOverload) -> Operands | None:
    """Of an op, or of the op that goes by a rule's name; None where torch knows nothing of its namespace.

    >>> operands("addmm").inputs
    {'self': False, 'mat1': False, 'mat2': False}
    """
    schema = _schema(op) if isinstance(op, str) else op._schema
    if schema is None:
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


def _schema(name: str) -> torch._C.FunctionSchema | None:
    full = name if "::" in name else f"aten::{name}"
    namespace, _, op = full.partition("::")
    packet, _, overload = op.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    if found is None and namespace not in {known.partition("::")[0] for known in torch._C._dispatch_get_all_op_names()}:
        return None
    if (overload or "default") not in (found.overloads() if found else ()):
        raise LookupError(name)
    schema: torch._C.FunctionSchema = getattr(found, overload or "default")._schema
    return schema


def suggest(name: str) -> str:
    """Names that one may have meant."""
    known = [op.removeprefix("aten::") for op in torch._C._dispatch_get_all_op_names()]
    near = get_close_matches(name, known, 3) or [op for op in known if op.partition(".")[0] == name][:3]
    overloads = sorted(op for op in known if op.partition(".")[0] == name.partition(".")[0])[:6]
    return "did you mean " + ", ".join(overloads or near) + "?" if overloads or near else "see torch.ops"
