"""A transformer block whose weights are split as Megatron does: by hand, by sbpflow and by DTensor. See ../eager.py."""

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import sbpflow as flow
from benchmarks.parts.alone import Times, aligned, alone, timed

__all__ = ["blocks", "show_blocks"]

WIDTH, HEADS, BATCH, LENGTH = 64, 4, 2, 16
CALLS = 10


class Copy(torch.autograd.Function):
    """Into a region of split weights: every rank has an addend of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """Out of it: every rank has an addend of the value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


SHAPES = {
    **{f"norm{i}.{w}": ((WIDTH,), "B") for i in (1, 2) for w in ("weight", "bias")},
    **dict.fromkeys(("query", "key", "value"), ((WIDTH, WIDTH), "S0")),
    "out": ((WIDTH, WIDTH), "S1"),
    "up": ((4 * WIDTH, WIDTH), "S0"),
    "down": ((WIDTH, 4 * WIDTH), "S1"),
}
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.25, -1), v)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def block(
    x: Tensor, p: dict[str, Tensor], attend: Attend, heads: int, enter: Callable[..., Any], leave: Callable[..., Any]
) -> Tensor:
    """A transformer block; by hand `enter` and `leave` are the collectives and `heads` the heads of this rank."""
    h = enter(F.layer_norm(x, (WIDTH,), p["norm1.weight"], p["norm1.bias"]))
    q, k, v = (
        F.linear(h, p[name]).view(BATCH, LENGTH, heads, WIDTH // HEADS).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    a = attend(q, k, v).transpose(1, 2).reshape(BATCH, LENGTH, heads * WIDTH // HEADS)
    x = x + leave(F.linear(a, p["out"]))
    h = enter(F.layer_norm(x, (WIDTH,), p["norm2.weight"], p["norm2.bias"]))
    y: Tensor = leave(F.linear(F.gelu(F.linear(h, p["up"])), p["down"]))
    return x + y


def blocks(rounds: int) -> Times:
    real = "RANK" in os.environ
    if real:
        flow.init(timeout=120)
    else:
        alone()
    me, ranks = dist.get_rank(), dist.get_world_size()
    mesh, placement = init_device_mesh("cpu", (ranks,)), flow.placement("cpu", range(ranks))
    whole = {name: torch.randn(shape) * 0.1 for name, (shape, _) in SHAPES.items()}
    x, cotangent = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)

    def local(t: Tensor, entry: str) -> Tensor:
        return t.chunk(ranks, int(entry[1]))[me].clone() if entry != "B" else t.clone()

    def peer(t: Tensor, entry: str) -> Tensor:
        entries = [Replicate() if entry == "B" else Shard(int(entry[1]))]
        return DTensor.from_local(local(t, entry), mesh, entries, run_check=False).detach()

    def ours(t: Tensor, entry: str) -> Tensor:
        made: Tensor = flow.tensor(t, placement=placement, sbp=flow.B if entry == "B" else flow.S(int(entry[1])))
        return made

    def step(make: Callable[[Tensor, str], Tensor], attend: Attend, end: Callable[[Any], Tensor], hand: bool) -> Way:
        p = {name: make(t, SHAPES[name][1]).requires_grad_() for name, t in whole.items()}
        start, g = make(x, "B").requires_grad_(), make(cotangent, "B")
        how = (HEADS // ranks, Copy.apply, Reduce.apply) if hand else (HEADS, as_it_is, as_it_is)

        def run() -> Tensor:
            y = end(block(start, p, attend, *how))
            y.backward(g)  # type: ignore[no-untyped-call]
            return y

        def again() -> None:
            run()
            for t in (start, *p.values()):
                t.grad = None

        return Way(again, [whole_of(run().detach()), *(whole_of(t.grad) for t in (start, *norms(p)))])

    def norms(p: dict[str, Tensor]) -> list[Tensor]:
        return [t for name, t in p.items() if name.startswith("norm")]

    table: dict[str, dict[str, Callable[[], object]]] = {}
    for name, attend in (("attention written out", written_out), ("scaled_dot_product_attention", fused)):
        ways = {
            "by hand": step(local, attend, as_it_is, True),
            "sbpflow": step(ours, attend, lambda y: y.to_global(sbp=flow.B), False),
        }
        if attend is written_out:
            ways["DTensor"] = step(peer, attend, lambda y: y.redistribute(mesh, [Replicate()]), False)
        for way, made in ways.items() if real else ():
            for value, hand in zip(made.values, ways["by hand"].values, strict=True):
                assert torch.allclose(value, hand, 1e-3, 1e-4), f"{way}, {name}: other values than by hand"
        who = f"{ranks} on Gloo" if real else f"0 of {ranks}, alone"
        table[f"{who}, {name}"] = {way: made.call for way, made in ways.items()}
    return timed(table, rounds, CALLS, meet=True)


@dataclass(frozen=True)
class Way:
    call: Callable[[], object]
    values: list[Tensor]  # the output and gradients, to be compared before anything is timed


def as_it_is(x: Any) -> Any:
    return x


def whole_of(t: Tensor | None) -> Tensor:
    assert t is not None
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def show_blocks(times: Times) -> Iterator[str]:
    yield (
        f"**A transformer block**, width {WIDTH}, {HEADS} heads, batch {BATCH} x {LENGTH}, tensor parallel, forward "
        "and backward, milliseconds and the ratio to the block by hand: local modules that call all_reduce twice "
        "each way. Alone these end at once; on two Gloo ranks they take most of the time of every way."
    )
    yield ""
    rows = [["ranks, attention", "by hand", "sbpflow", "ratio", "DTensor", "ratio"]]
    for what, ways in times.items():
        row = [what, f"{statistics.median(ways['by hand']) / 1e3:.2f}"]
        for way in ("sbpflow", "DTensor"):
            if way in ways:
                ratio = statistics.median(a / b for a, b in zip(ways[way], ways["by hand"], strict=True))
                row += [f"{statistics.median(ways[way]) / 1e3:.2f}", f"{ratio:.2f}"]
            else:
                row += ["refused", ""]
        rows.append(row)
    yield from aligned(rows)
