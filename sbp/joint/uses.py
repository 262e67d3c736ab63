"""Uses of a graph's values: which ops take them, which are weights or made of these alone, which the backward lets
go."""

from collections import Counter
from collections.abc import Hashable, Sequence

from ..call import Call, frozen, refs_in, renumbered
from ..logical import Logical, LogicalOp
from ..traits import VIEWS, traits

__all__ = ["let_go", "returns", "saves", "static", "users", "weights"]


def users(logical: Logical) -> dict[int, list[int]]:
    """The ops that use each value, once for each use; results and written buffers count as uses by nobody."""
    found: dict[int, list[int]] = {}
    for at, op in enumerate(logical.ops):
        for number in op.inputs:
            found.setdefault(number, []).append(at)
    for number in (*dict.fromkeys(refs_in(logical.result)), *logical.writes.values()):
        found.setdefault(number, []).append(len(logical.ops))
    return found


def weights(logical: Logical) -> frozenset[int]:
    """The parameters, and values made of them alone, such as a cast."""
    found = {n for n, source in enumerate(logical.sources) if source.kind == "parameter"}
    for op in logical.ops:
        if op.inputs and found.issuperset(op.inputs):
            found.update(op.numbers)
    return frozenset(found)


def static(op: LogicalOp, call: Call) -> Hashable:
    """Parts of a call that decide its options, without its place in the graph."""
    shapes = tuple((tuple(x.shape), x.dtype) for x in (*call.inputs, *call.outputs))
    order = {n: k for k, n in enumerate(dict.fromkeys(op.inputs))}

    args = frozen(renumbered((op.args, op.kwargs), order))
    return op.op, args, shapes, op.grad, op.lies, op.fixed


def let_go(logical: Logical) -> dict[int, str]:
    """The values that a region makes and that may be let go, each with its region.

    While the backward goes through a region all of it is there, so that the largest one counts as kept. Where several
    are the largest the last counts, because all other repeated blocks are to be alike.
    """
    regions = {n: op.origin.recompute for op in logical.ops for n in op.numbers if op.origin.recompute}
    size: Counter[str] = Counter()
    for n, region in regions.items():
        size[region] += logical.fakes[n].nbytes
    largest = max(size.values(), default=0)
    kept = next((region for region in reversed(size) if size[region] == largest), "")
    return {n: region for n, region in regions.items() if region != kept}


def saves(users: Sequence[LogicalOp], region: str | None) -> bool:
    """Whether the backward pass of one of these looks at a value that they take.

    A value that its `region` lets go, and that only ops of the region take, is made again there."""
    if region and users and all(region in (op.origin.recompute, op.origin.kept_of) for op in users):
        return False
    return any(op.grad and not traits(op.op._schema.name.removeprefix("aten::")) & {*VIEWS, "linear"} for op in users)


def returns(logical: Logical, kind: str, index: int, number: int) -> bool:
    """Whether a node of this kind sends back a gradient of a value that it takes.

    Where there are losses, the gradient has to come from them."""
    if not logical.losses:
        return number in logical.wants_grad
    if kind == "op":
        return number in logical.wants_grad and not logical.reached.isdisjoint(logical.ops[index].numbers)
    return kind == "copy" and number in logical.reached
