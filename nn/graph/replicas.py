"""Replicas: what is made of buffers and constants alone is made anew on each placement that uses it.

Rotary angles and causal masks would else travel from the first stage of a pipeline to every other, with each
micro-batch; buffers that they are made of go there once.
"""

from dataclasses import replace

import torch

from ...placement import Placement
from ...sbp.call import Ref, fill
from ...sbp.joint.homes import Homes
from ...sbp.logical import Logical, LogicalOp, Origin

__all__ = ["with_replicas"]


def with_replicas(logical: Logical, where: Homes) -> Logical:
    """The graph with such ops repeated; `where` says where its ops run."""
    if len(set(where.ops)) < 2:
        return logical
    return _Replicas(logical, where).made()


class _Replicas:
    def __init__(self, logical: Logical, where: Homes) -> None:
        self.logical, self.where = logical, where
        kept = [n for n, s in enumerate(logical.sources) if s.kind in ("buffer", "constant") and not s.requires_grad]
        self.free = {n for n in kept if logical.sources[n].name not in logical.writes}
        self.makers: dict[int, int] = {}  # value -> the op that makes it, if that is free
        for at, op in enumerate(logical.ops):
            drawn = torch.Tag.nondeterministic_seeded in op.op.tags
            if self.free.issuperset(op.inputs) and not drawn and op.lies is None:
                self.free.update(op.numbers)
                self.makers.update(dict.fromkeys(op.numbers, at))
        self.ops: list[LogicalOp] = []
        self.known: dict[tuple[int, Placement], int] = {}  # value and placement -> its replica
        self.next = max(logical.fakes, default=-1) + 1

    def made(self) -> Logical:
        for op, there in zip(self.logical.ops, self.where.ops, strict=True):
            refs = {n: Ref(self.on(n, there, op.origin)) for n in op.inputs}
            home = there if self.free.issuperset(op.numbers) else op.placement  # where it was, whoever else uses it
            self.ops.append(replace(op, args=fill(op.args, refs), kwargs=fill(dict(op.kwargs), refs), placement=home))
        return replace(self.logical, ops=tuple(self.ops)) if self.known else self.logical

    def on(self, number: int, there: Placement, user: Origin) -> int:
        """The value as it is made on a placement, for the first who needs it there."""
        at = self.makers.get(number)
        if at is None or self.where.ops[at] is there:
            return number
        if (number, there) not in self.known:
            op = self.logical.ops[at]
            refs = {n: Ref(self.on(n, there, user)) for n in op.inputs}
            numbers = tuple(range(self.next, self.next + len(op.numbers)))
            self.next += len(numbers)
            self.known.update(zip([(n, there) for n in op.numbers], numbers, strict=True))
            args, kwargs = fill(op.args, refs), fill(dict(op.kwargs), refs)
            origin = Origin(user.module, op.origin.line)  # of no block: others of these have none of it
            self.ops.append(
                replace(op, args=args, kwargs=kwargs, numbers=numbers, origin=origin, placement=there, grad=False)
            )
        return self.known[number, there]
