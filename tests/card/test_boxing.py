"""Moves between layouts on four played cards have the values of the host, whatever way they go, and nothing races."""

import itertools
import random

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.sbp import Split

from .host import as_on_host

Signature = flow.sbp.Sbp | tuple[flow.sbp.Sbp, ...]
LINE: list[Signature] = [S(0), S(1), B, P]
SQUARE: list[Signature] = [(a, b) for a in (S(0), S(1), B, P) for b in (S(0), S(1), B, P)]
SHAPES = [(8, 12), (5, 7), (1, 2), (0, 3), (3, 0), (9,), (4, 6, 2)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 2 if dtype == torch.bool else torch.arange(count) - 3).to(dtype).reshape(shape)


def moved(grid: str, src: Signature, dst: Signature, shape: tuple[int, ...], dtype: torch.dtype, way: str) -> None:
    def program(kind: str) -> list[Tensor]:
        p = flow.placement(f"{kind}:{grid}")
        x = filled(shape, dtype).to(kind)
        a, b = flow.layout(p, src, shape, dtype), flow.layout(p, dst, shape, dtype)
        shards = flow.boxing.scatter(x, a)
        del x  # memory of what is sent is free as soon as that can be
        if way == "box":
            out = flow.box(shards, a, b)
        else:
            pending = flow.boxing.box_async(shards, a, b)
            del shards
            torch.ones(64, device=kind)  # takes memory that was given back too early
            out = pending.wait()
            del pending
        y = [shard.clone() for shard in out]
        del out
        return [*y, flow.boxing.gather(y, b)]

    as_on_host(program, near=0)


def possible(src: Signature, dst: Signature, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    both = [*(src if isinstance(src, tuple) else [src]), *(dst if isinstance(dst, tuple) else [dst])]
    split = all(not isinstance(each, Split) or each.dim < len(shape) for each in both)
    return split and not (P in both and dtype == torch.bool)


CASES = [
    (grid, src, dst, shape, dtype, way)
    for grid, kinds in (("[0-3]", LINE), ("[0-2]", LINE), ("[0-3] as (a=2, b=2)", SQUARE))
    for src, dst in itertools.product(kinds, kinds)
    for shape, dtype, way in itertools.product(SHAPES, DTYPES, ["box", "box_async"])
    if possible(src, dst, shape, dtype)
]


def some(seed: int, count: int) -> None:
    for case in random.Random(seed).sample(CASES, count):
        try:
            moved(*case)
        except BaseException as error:
            error.add_note(str(case))
            raise


def test_moves_of_some_kinds_keep_their_values() -> None:
    some(0, 60)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 11))
def test_moves_keep_their_values(seed: int) -> None:
    some(seed, 150)


@pytest.mark.parametrize("sides", ["host to cards", "cards to host", "cards to other cards"])
@pytest.mark.parametrize("way", ["box", "box_async"])
def test_moves_between_placements_keep_their_values(sides: str, way: str) -> None:
    ends = {"host to cards": ("cpu", "cuda"), "cards to host": ("cuda", "cpu")}.get(sides, ("cuda", "cuda"))
    for src, dst in itertools.product(LINE, LINE):
        there, here = (flow.placement(f"{kind}:{at}") for kind, at in zip(ends, ("[0-1]", "[2-3]"), strict=True))
        whole = filled((5, 7), torch.float64)
        a, b = (flow.layout(at, sbp, (5, 7), torch.float64) for at, sbp in ((there, src), (here, dst)))
        shards = flow.boxing.scatter(whole.to(ends[0]), a)
        out = flow.box(shards, a, b) if way == "box" else flow.boxing.box_async(shards, a, b).wait()
        del shards
        assert torch.equal(flow.boxing.gather(out, b).cpu(), whole), (src, dst)
