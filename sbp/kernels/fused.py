"""Regions of a compiled graph: pointwise ops, norms and sums between two products are one kernel.

    product -> add -> norm -> gelu -> product        a region of three ops: it reads what the products made and its
               one kernel                            weights, and writes what the second product reads

A region reads each value from outside once, and writes what somebody outside reads. The ops of one stand behind
equally many others on the longest way to them, so that none of it waits for what reads it; views are passed through.
Regions end where a repeated block does, because equal blocks are to be alike.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..call import Call, refs_in
from ..logical import Logical
from ..traits import VIEWS, traits
from .kernels import Kernels, OpPass, is_rowwise, is_view

__all__ = ["FusedOp", "fused_ops"]


class FusedOp(NamedTuple):
    """The part of a region's kernel that counts for an op: whether it is by this op that each of its inputs is read and
    each of its outputs written, and its share of the launch."""

    reads: tuple[bool, ...]
    writes: tuple[bool, ...]
    share: float

    def of(self, kernels: Kernels) -> Kernels:
        """The kernels of the op inside of its region, which waits for its memory meanwhile."""
        forward, backward = (self._way(way) for way in kernels[:2])
        return kernels._replace(forward=forward, backward=backward)

    def _way(self, way: OpPass) -> OpPass:
        counted = zip(way.traffic, (*self.reads, *self.writes), strict=True)
        return OpPass(way.flops, tuple(t * here for t, here in counted), way.launches * self.share)


def fused_ops(logical: Logical, calls: Sequence[Call]) -> list[FusedOp | None]:
    """For each op its part of a region, or None where it is a kernel by itself, or none at all, as a view is."""
    ops = logical.ops
    root = {n: n for n in logical.fakes}  # of a view the value in whose memory it is
    depth: defaultdict[int, int] = defaultdict(int)  # of a value: kernels by themselves on the longest way to it
    region: list[object] = []
    for op, call in zip(ops, calls, strict=True):
        here = max((depth[root[n]] for n in op.inputs), default=0)
        if op.inputs and is_view(call):
            root.update(dict.fromkeys(op.numbers, root[op.inputs[0]]))
            region.append(None)
            continue
        fuses = bool(op.inputs) and _fuses(call)
        region.append((here, op.origin.block, op.origin.recompute, op.origin.kept_of, op.placement) if fuses else None)
        depth.update(dict.fromkeys(op.numbers, here + (not fuses)))
    made_in = {root[n]: at for op, at in zip(ops, region, strict=True) for n in op.numbers if root[n] == n}
    outside = _read_elsewhere(logical, region, root, made_in)
    many = Counter(at for at in region if at is not None)
    read: set[tuple[object, int]] = set()
    found: list[FusedOp | None] = []
    for op, at in zip(ops, region, strict=True):
        if at is None:
            found.append(None)
            continue
        reads = []
        for n in op.inputs:
            reads.append(made_in.get(root[n]) != at and (at, root[n]) not in read)
            read.add((at, root[n]))
        found.append(FusedOp(tuple(reads), tuple(n in outside for n in op.numbers), 1 / many[at]))
    return found


def _read_elsewhere(
    logical: Logical, region: Sequence[object], root: dict[int, int], made_in: dict[int, object]
) -> set[int]:
    """The values that somebody outside of the region reads which makes them, a result or a buffer among these."""
    found = {root[n] for n in (*refs_in(logical.result), *logical.writes.values())}
    found |= {root[loss.number] for loss in logical.losses}
    for op, at in zip(logical.ops, region, strict=True):
        for n in map(root.__getitem__, op.inputs):
            if at is None and root.get(op.numbers[0] if op.numbers else n) == n:
                continue  # a view of it, whose users count
            if made_in.get(n) != at:
                found.add(n)
    return found


def _fuses(call: Call) -> bool:
    """Whether a compiler takes it into a kernel with its neighbours."""
    if not is_rowwise(call):
        return False
    tags = call.op.tags
    if torch.Tag.pointwise in tags or torch.Tag.reduction in tags:
        return True
    name = call.op._schema.name.removeprefix("aten::")
    return name in _ALSO or bool(traits(call.name) & VIEWS)


_ALSO = frozenset(
    {
        "_softmax",
        "_log_softmax",
        "softmax",
        "log_softmax",
        "logsumexp",
        "dropout",
        "native_dropout",
        "layer_norm",
        "native_layer_norm",
        "rms_norm",
        "_fused_rms_norm",
        "cat",
        "stack",
        "tril",
        "triu",
    }
)
