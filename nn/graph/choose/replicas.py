"""Replicas: values of arguments, buffers and constants alone are made anew on each placement that uses them.

Rotary angles, attention masks and positions would else travel from the first stage of a pipeline to every other, with
each micro-batch. Buffers that they are made of go there once. Every rank of a pipeline has the arguments from the
caller; a rank that has not pays for them, and then makes only values that are cheaper to make than to send.
"""

from dataclasses import replace

import torch

from ....boxing.boxing import between
from ....placement import Placement, default_cluster
from ....sbp import B, layout
from ....sbp.joint.op_cost import alone
from ....sbp.joint.placements import Homes
from ....sbp.kernels.kernels import is_view
from ....sbp.logical import Logical, LogicalOp, Origin

__all__ = ["with_replicas"]


def with_replicas(logical: Logical, where: Homes, *, arguments_everywhere: bool = False) -> Logical:
    """The graph with such ops repeated; `where` says where its ops run."""
    if len(set(where.ops)) < 2:
        return logical
    return _Replicas(logical, where, arguments_everywhere).made()


class _Replicas:
    def __init__(self, logical: Logical, where: Homes, arguments_everywhere: bool) -> None:
        self.logical, self.where, self.everywhere = logical, where, arguments_everywhere
        kept = [n for n, s in enumerate(logical.sources) if s.kind != "parameter" and not s.requires_grad]
        self.free = {n for n in kept if logical.sources[n].name not in logical.writes}
        self.given = {n for n in self.free if logical.sources[n].kind == "input"}  # and what depends on these
        self.makers: dict[int, int] = {}  # value -> the op that makes it, if that is free
        for at, op in enumerate(logical.ops):
            drawn = torch.Tag.nondeterministic_seeded in op.op.tags
            if self.free.issuperset(op.inputs) and not drawn and op.lies is None:
                self.free.update(op.numbers)
                self.given.update(() if self.given.isdisjoint(op.inputs) else op.numbers)
                self.makers.update(dict.fromkeys(op.numbers, at))
        self.ops: list[LogicalOp] = []
        self.known: dict[tuple[int, Placement], int] = {}  # value and placement -> its replica
        self.next = max(logical.fakes, default=-1) + 1

    def made(self) -> Logical:
        for op, there in zip(self.logical.ops, self.where.ops, strict=True):
            new = {n: self.on(n, there, op.origin) for n in op.inputs}
            home = there if self.free.issuperset(op.numbers) else op.placement  # where it was, whoever else uses it
            self.ops.append(op.of(new, placement=home))
        return replace(self.logical, ops=tuple(self.ops)) if self.known else self.logical

    def worth(self, number: int, there: Placement) -> bool:
        """Whether it is better made on a placement than sent there with each micro-batch."""
        if number not in self.given or (number, there) in self.known:
            return True
        spent, left, met = 0.0, [number], {number}
        while left:
            n = left.pop()
            at = self.makers.get(n)
            if at is None:
                had = n not in self.given or self.everywhere
                spent += 0.0 if had else self.sending(n, self.where.sources[n], there)
            elif self.where.ops[at] is not there and (n, there) not in self.known:
                call = self.logical.call(self.logical.ops[at])
                spent += 0.0 if is_view(call) else alone(call, default_cluster(there).device_of(there))
                left += [x for x in self.logical.ops[at].inputs if x not in met]
                met.update(self.logical.ops[at].inputs)
        return spent <= self.sending(number, self.where.ops[self.makers[number]], there)

    def sending(self, number: int, here: Placement, there: Placement) -> float:
        """Seconds of its way, whole on either side."""
        fake = self.logical.fakes[number]
        src, dst = (layout(place, B, tuple(fake.shape), fake.dtype) for place in (here, there))
        return between(src, dst).price.time

    def on(self, number: int, there: Placement, user: Origin) -> int:
        """The value as it is made on a placement, for the first who needs it there."""
        at = self.makers.get(number)
        if at is None or self.where.ops[at] is there or not self.worth(number, there):
            return number
        if (number, there) not in self.known:
            op = self.logical.ops[at]
            new = {n: self.on(n, there, user) for n in op.inputs}
            numbers = tuple(range(self.next, self.next + len(op.numbers)))
            self.next += len(numbers)
            self.known.update(zip([(n, there) for n in op.numbers], numbers, strict=True))
            origin = Origin(user.module, op.origin.line)  # without a block, because equal blocks lack this op
            self.ops.append(op.of(new, numbers=numbers, origin=origin, placement=there, grad=False))
        return self.known[number, there]
