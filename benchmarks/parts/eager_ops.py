"""Single ops on one rank of four: plain torch on its shard, sbpflow and DTensor. See ../eager.py."""

import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import sbpflow as flow
from benchmarks.parts.alone import RANKS, Times, aligned, alone, timed
from sbpflow.sbp import Sbp

__all__ = ["first", "ops", "show_first", "show_ops"]

CALLS = 100

Spec: TypeAlias = tuple[tuple[int | str, ...], str, bool]  # shape on a rank, "n" the batch; layout; wants a gradient


@dataclass(frozen=True)
class Op:
    """An op and what it is called with. Weights want no gradient: theirs would have to be added up between ranks."""

    name: str
    inputs: tuple[Spec, ...]
    call: Callable[..., Tensor]


X, W, V = (("n", 16), "S0", True), ((16, 16), "B", False), ((16,), "B", False)
X3, Q = (("n", 16, 64), "S0", True), (("n", 4, 16, 16), "S0", True)
OPS: tuple[Op, ...] = (
    Op("add", (X, X), lambda x, y: x + y),
    Op("x * 2.0", (X,), lambda x: x * 2.0),
    Op("mm", (X, W), torch.mm),
    Op("relu", (X,), torch.relu),
    Op("softmax", (X,), lambda x: torch.softmax(x, -1)),
    Op("layer_norm", (X, V, V), lambda x, w, b: F.layer_norm(x, (16,), w, b)),
    Op("rms_norm", (X, V), lambda x, w: F.rms_norm(x, (16,), w)),
    Op("linear, 3-D", (X3, ((64, 64), "B", False), ((64,), "B", False)), F.linear),
    Op("sdpa", (Q, Q, Q), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    Op("embedding", (((2, 16), "ids", False), ((32, 16), "S1", True)), F.embedding),
    Op("view", (X3,), lambda x: x.view(-1, 16, 4, 16)),
    Op("transpose", (X3,), lambda x: x.transpose(1, 2)),
    Op("cat", (X, X), lambda x, y: torch.cat([x, y], -1)),
)


def value(spec: Spec, n: int, ranks: int) -> Tensor:
    """A tensor of a spec as one rank (`ranks` = 1) or all together have it."""
    shape, entry, _ = spec
    sizes = [n if size == "n" else int(size) for size in shape]
    if entry == "ids":
        return torch.arange(sizes[0] * sizes[1]).reshape(sizes) % 32
    if entry[0] == "S":
        sizes[int(entry[1])] *= ranks
    return torch.randn(sizes)


class Plain:
    name = "plain"

    def make(self, spec: Spec, n: int) -> Tensor:
        return value(spec, n, 1).requires_grad_(spec[2])

    def like(self, y: Tensor) -> Tensor:
        """A cotangent for y."""
        return torch.ones_like(y)


class Peer(Plain):
    """DTensor on a mesh; every axis of it splits alike, or only the first."""

    name = "DTensor"

    def __init__(self, mesh: DeviceMesh, alike: bool = True) -> None:
        self.mesh, self.alike = mesh, alike

    def make(self, spec: Spec, n: int) -> Tensor:
        entry = Shard(int(spec[1][1])) if spec[1][0] == "S" else Replicate()
        entries = [entry if axis == 0 or self.alike else Replicate() for axis in range(self.mesh.ndim)]
        if spec[1][0] == "S" and not self.alike:
            n *= 2  # a rank holds half of the tensor, not a quarter
        made: Tensor = DTensor.from_local(value(spec, n, 1), self.mesh, entries, run_check=False)
        return made.detach().requires_grad_(spec[2])


class Ours(Plain):
    name = "sbpflow"

    def __init__(self, placement: flow.Placement, alike: bool = True) -> None:
        self.placement, self.alike = placement, alike

    def make(self, spec: Spec, n: int) -> Tensor:
        entry: Sbp = flow.S(int(spec[1][1])) if spec[1][0] == "S" else flow.B
        sbp = tuple(entry if axis == 0 or self.alike else flow.B for axis in range(self.placement.ndim))
        made: Tensor = flow.tensor(value(spec, n, RANKS), placement=self.placement, sbp=sbp)
        return made.requires_grad_(spec[2])


def ops(rounds: int) -> Times:
    alone()
    systems = (Plain(), Ours(flow.placement("cpu", range(RANKS))), Peer(init_device_mesh("cpu", (RANKS,))))
    table: dict[str, dict[str, Callable[[], object]]] = defaultdict(dict)
    for op in OPS:
        for system in systems:
            try:
                forward, both = calls(op, system)
                forward(), both()
            except Exception as error:
                print(f"{system.name} {op.name}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            table[op.name][system.name] = forward
            table[f"{op.name} +b"][system.name] = both
    return timed(table, rounds, CALLS)


def calls(op: Op, system: Plain) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward alone, on tensors that want no gradient, and forward with backward."""
    inputs = [system.make(spec, 2 if len(spec[0]) > 2 else 16) for spec in op.inputs]
    still, call = [x.detach() for x in inputs], op.call
    cotangent = system.like(call(*still))
    leaves = [x for x in inputs if x.requires_grad]

    def both() -> None:
        call(*inputs).backward(cotangent)  # type: ignore[no-untyped-call]
        for x in leaves:
            x.grad = None

    return lambda: call(*still), both


def first(rounds: int) -> Times:
    """Milliseconds would round to nothing here: microseconds as all else. Rounds do not repeat a first call."""
    alone()
    gc.disable()  # a collection would fall on some call
    fresh = count(5)
    meshes = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    grids = flow.placement("cpu", range(RANKS)), flow.placement("cpu", [[0, 1], [2, 3]])
    for warm in (Ours(grids[0]), Peer(meshes[0])):  # the very first op loads what all others need
        torch.neg(warm.make(X, 4))
    found: Times = defaultdict(lambda: defaultdict(list))
    with torch.no_grad():
        for op in OPS:
            for k, grid in enumerate(("1-D", "2-D")):
                for alike in (True, False)[: k + 1]:
                    systems = (Ours(grids[k], alike), Peer(meshes[k], alike))
                    for what in ("layout", "shape", "shape"):
                        n = next(fresh)
                        op.call(*(Plain().make(spec, n) for spec in op.inputs))
                        op.call(*(Plain().make(spec, 4 * n) for spec in op.inputs))
                        for system in systems:
                            inputs = [system.make(spec, n) for spec in op.inputs]
                            start = time.perf_counter()
                            try:
                                op.call(*inputs)
                            except RuntimeError:
                                continue  # DTensor has no sdpa on CPU
                            found[f"{grid}, new {what}"][system.name].append((time.perf_counter() - start) * 1e6)
    return found


def over(times: dict[str, list[float]], way: str) -> float:
    """The time that a way takes longer than plain torch in the same round, the median."""
    return statistics.median(a - b for a, b in zip(times[way], times["plain"], strict=True))


def show_ops(times: Times) -> Iterator[str]:
    yield (
        "**Time that an op adds**, microseconds over plain torch on the rank's own shard, and ours over DTensor's. "
        "Rank 0 of 4, batch split, weights B, nothing sent; +b: with backward, for the gradient of what is split "
        "(of `embedding`: the weight, split by columns)."
    )
    yield ""
    head = ["op", "plain", "sbpflow adds", "DTensor adds", "ratio"]
    rows = [[*head, *(f"{name} +b" if name == "plain" else name for name in head[1:])]]
    ratios: list[float] = []
    for op in OPS:
        row = [op.name]
        for what in (op.name, f"{op.name} +b"):
            cell = times.get(what, {})
            ours = over(cell, "sbpflow") if "sbpflow" in cell else None
            peer = over(cell, "DTensor") if "DTensor" in cell else None
            row.append(f"{statistics.median(cell['plain']):.1f}")
            row += [f"{us:.1f}" if us is not None else "refused" for us in (ours, peer)]
            row.append(f"{ours / peer:.2f}" if ours is not None and peer is not None else "")
            ratios += [ours / peer] if ours is not None and peer is not None else []
        rows.append(row)
    yield from aligned(rows)
    yield ""
    if ratios:
        yield f"Median ratio {statistics.median(ratios):.2f}, largest {max(ratios):.2f}."


def show_first(times: Times) -> Iterator[str]:
    yield (
        "**First calls**, forward, milliseconds, over the same ops. New layout: signatures that the op has not met on "
        "that grid; new shape: the same signatures, another batch."
    )
    yield ""
    rows = [["call", "sbpflow median", "max", "DTensor median", "max", "ratio"]]
    for what, ways in times.items():
        row = [what]
        for way in ("sbpflow", "DTensor"):
            us = ways.get(way, [])
            row += [f"{statistics.median(us) / 1e3:.2f}", f"{max(us) / 1e3:.2f}"] if us else ["refused", ""]
        both = [statistics.median(ways[way]) for way in ("sbpflow", "DTensor") if ways.get(way)]
        rows.append([*row, f"{both[0] / both[1]:.2f}" if len(both) > 1 else ""])
    yield from aligned(rows)
