"""The demo: every move between two signatures of a matrix on four simulated ranks, run, checked, priced and drawn."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..placement import Placement, placement
from ..placement.errors import MissingError, SbpflowError, TransportError
from ..placement.world import world
from ..sbp import B, Layout, P, S, Sbp, layout
from ..sbp.trial import one_thread
from .box import box
from .boxing import Boxing, between
from .exchange.execute import transport
from .picture.draw import axis_graph, boxing_graph, picture
from .picture.matrix import moves_matrix
from .routes.bound import lower_bound

__all__ = ["DemoMove", "demo", "shards_of", "trial", "whole_of"]

SHAPE, UNEVEN = (512, 512), (7, 1)
KINDS: tuple[Sbp, ...] = (S(0), S(1), B, P)
REPEATS = 3


class DemoMove(NamedTuple):
    """One move that was made: whether every value came out right, bytes that left any rank, seconds in this process."""

    boxing: Boxing
    bound: float
    right: bool
    sent: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Bytes over the bound; 1 where both are 0."""
        return self.boxing.bytes / self.bound if self.bound else float("inf") if self.boxing.bytes else 1.0


def demo(out: Path, *, as_json: bool = False) -> None:
    """Print every move between two signatures on a 2 x 2 placement, and write pictures of them into `out`."""
    if world().rank is not None:
        raise TransportError("the demo simulates its four ranks in one process\n  start it without a launcher")
    p = placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))
    about = f"Every move of a float32 {SHAPE} tensor between two signatures on\n{p!r}, four ranks in this process.\n"
    print(about, file=sys.stderr if as_json else sys.stdout)
    start = time.perf_counter()
    with one_thread():
        trials = [trial(way) for way in every_boxing(p, SHAPE)]
        uneven = [trial(way) for way in every_boxing(p, UNEVEN)]
    took = time.perf_counter() - start
    if as_json:
        moves = [{**one._asdict(), "boxing": str(one.boxing), "bytes": one.boxing.bytes} for one in (*trials, *uneven)]
        print(json.dumps({"moves": moves, "seconds": took, "pictures": list(draw(trials, p, out))}, indent=1))
    else:
        print(f"{table(trials)}\n\n{summary(trials, uneven)}\n{took:.1f} s; pictures:", flush=True)
        for line in draw(trials, p, out):
            print(f"  {line}")
    wrong = [one.boxing for one in (*trials, *uneven) if not one.right]
    if wrong:
        raise SbpflowError(f"{len(wrong)} moves gave wrong values\n  the first is {wrong[0]}")


def every_boxing(p: Placement, shape: tuple[int, ...]) -> list[Boxing]:
    """The boxings of all pairs of signatures, source by source."""
    known = [layout(p, sbp, shape) for sbp in product(KINDS, repeat=p.ndim)]
    return [between(src, dst) for src, dst in product(known, known)]


def trial(way: Boxing) -> DemoMove:
    """Make the move on random whole numbers, which float32 adds exactly in any order."""
    random = torch.Generator().manual_seed(0)
    whole = torch.randint(-8, 8, way.src.shape, generator=random, device="cpu").to(way.src.dtype)
    shards = shards_of(whole, way.src, random)
    before = transport().sent.bytes.total()
    found = box(shards, way.src, way.dst)
    sent = transport().sent.bytes.total() - before
    took = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        box(shards, way.src, way.dst)
        took.append(time.perf_counter() - start)
    right = whole_of(found, way.dst)
    same = right is not None and torch.equal(right, whole)
    return DemoMove(way, lower_bound(way.src, way.dst), same, sent, min(took))


def shards_of(whole: Tensor, how: Layout, random: torch.Generator) -> list[Tensor]:
    """The shards of each rank, cut from the whole without boxing; where partial, random terms that add up to it."""
    places = list(product(*(range(how.placement.shape[axis]) for axis in how.state.partial)))
    terms = [torch.randint(-8, 8, whole.shape, generator=random, device="cpu").to(whole.dtype) for _ in places[1:]]
    by_place = dict(zip(places, [whole - sum(terms), *terms], strict=True))
    return [by_place[_term(how, rank)][how.slices(rank)].clone() for rank in how.placement.flat]


def whole_of(shards: Sequence[Tensor], how: Layout) -> Tensor | None:
    """The logical tensor that shards amount to; None where ranks that hold the same piece differ, or one is missing."""
    terms: dict[tuple[int, ...], Tensor] = {}
    for rank, shard in zip(how.placement.flat, shards, strict=True):
        if tuple(shard.shape) != how.local_shape(rank):
            return None
        blank = torch.full(how.shape, float("nan"), dtype=how.dtype, device="cpu")
        terms.setdefault(_term(how, rank), blank)[how.slices(rank)] = shard
    for rank, shard in zip(how.placement.flat, shards, strict=True):
        if not torch.equal(terms[_term(how, rank)][how.slices(rank)], shard):
            return None
    return torch.stack(list(terms.values())).sum(0)


def _term(how: Layout, rank: int) -> tuple[int, ...]:
    return tuple(how.placement.coords(rank)[axis] for axis in how.state.partial)


def table(trials: Sequence[DemoMove]) -> str:
    """A block of lines for each source, no line over 100 characters."""
    lines: list[str] = []
    for k, one in enumerate(trials):
        way = one.boxing
        if not k or way.src is not trials[k - 1].boxing.src:
            head = _row(f"{way.src.lie} ->", "route", "KiB/rank", "bound", "ratio", "us priced", "here")
            lines += ["", head] if lines else [head]
        ratio = f"{one.ratio:.2f}" if way.bytes else "free"
        cost = (f"{way.bytes / 1024:.4g}", f"{one.bound / 1024:.4g}", ratio)
        route = way.route if one.right else f"WRONG VALUE: {way.route}"
        lines.append(_row(f"   {way.dst.lie}", route, *cost, f"{way.price.time * 1e6:.0f}", f"{one.seconds * 1e6:.0f}"))
    return "\n".join(lines)


def _row(to: str, route: str, *cells: str) -> str:
    return f"{to:<15}  {route:<43}" + "".join(f"{cell:>{n}}" for cell, n in zip(cells, (9, 8, 6, 10, 6), strict=True))


def summary(trials: Sequence[DemoMove], uneven: Sequence[DemoMove]) -> str:
    """The table in a few lines."""
    right, odd = sum(one.right for one in trials), sum(one.right for one in uneven)
    plain = [one for one in trials if not one.boxing.dst.state.partial]
    free = [one for one in trials if not one.bound]
    as_planned = sum(one.sent == one.boxing.total for one in trials)
    lines = (
        f"{len(trials)} pairs: {right} values right; {odd} of {len(uneven)} with uneven and empty shards, {UNEVEN}",
        f"at the lower bound of bytes: {_ratios(trials)}",
        f"without P in the target: {_ratios(plain)}",
        f"free: {len(free)} pairs, which sent {sum(one.sent for one in free)} bytes;"
        f" {as_planned} of {len(trials)} sent what their boxing said, to the byte",
        f"priced: by the cluster {trials[0].boxing.cluster.name!r}, each rank a process; here: in this one process",
    )
    return "\n".join(lines)


def _ratios(trials: Sequence[DemoMove]) -> str:
    ratios = [one.ratio for one in trials]
    exact, mean = sum(ratio < 1.001 for ratio in ratios), sum(ratios) / len(ratios)
    return f"{exact} of {len(ratios)}; ratio {mean:.2f} on average, {max(ratios):.2f} at worst"


def draw(trials: Sequence[DemoMove], p: Placement, out: Path) -> Iterator[str]:
    """Write the pictures, and say of each where it is, or in one line why it is not."""
    out.mkdir(parents=True, exist_ok=True)
    title = f"Every move between two signatures: float32 {SHAPE} on {p}"
    matrix = out / "moves.svg"
    matrix.write_text(moves_matrix([one.boxing for one in trials], title), encoding="utf-8")
    yield f"{matrix}: the table above"
    most = max((one.boxing for one in trials), key=lambda way: (len(way.moves), way.price.time))
    graphs = {
        "axis.svg": (axis_graph(p.reshape((p.size,)), SHAPE, between), "the moves on a placement of one axis"),
        "boxing.svg": (boxing_graph(most), f"who holds what on the way {most.src.lie} -> {most.dst.lie}"),
    }
    for name, (text, about) in graphs.items():
        try:
            yield f"{picture(text, out / name)}: {about}"
        except MissingError as error:
            yield str(error)
