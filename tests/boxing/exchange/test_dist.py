"""Real ranks: every move has the value, gradient and bytes that it has in one process, and on one plain tensor."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow.boxing import Pending, between, box, box_async, gather, record, scatter
from sbpflow.boxing.exchange.execute import transport
from sbpflow.placement import DtypeError, Placement, placement, use_cluster
from sbpflow.placement.ranks import Nested
from sbpflow.placement.world import owned, world
from sbpflow.sbp import B, Layout, P, S, Sbp, layout
from sbpflow.sbp.signature import Reduction
from tests.boxing.oracle import SHAPES, Pair, drawn, every_pair, grid, network, public, sample, value
from tests.ranks import Fresh, Ranks

WAYS = pytest.mark.parametrize("native", [None, False, True], ids=["shared", "messages", "collectives"])
Image: TypeAlias = tuple[torch.dtype, tuple[int, ...], bytes]


class Trip(NamedTuple):
    """What one rank saw of a move there and of its gradient back; None where it is not a rank of that side."""

    out: Image | None
    grad: Image | None
    sent: int
    sent_back: int


Trips: TypeAlias = list[dict[int, Trip]]


def image(tensor: Tensor) -> Image:
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), data.view(torch.uint8).numpy().tobytes()


def restored(seen: Image) -> Tensor:
    dtype, shape, data = seen
    return (torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)


def of_dtype(lie: Layout, dtype: torch.dtype) -> Layout:
    return Layout(lie.placement, lie.state, lie.shape, dtype, lie.grad_partial, lie.sbp)


def entrusted(lies: Layout, seed: object) -> list[Tensor]:
    """The shards to start from that this process owns, or the token of one that owns none."""
    pieces = dict(zip(lies.placement.flat, cast(lies, seed), strict=True))
    mine = [pieces[r] for r in owned(lies.placement)] or [torch.empty(0, dtype=lies.dtype)]
    return [piece.requires_grad_(lies.dtype.is_floating_point or lies.dtype.is_complex) for piece in mine]


def cast(lies: Layout, seed: object) -> list[Tensor]:
    """Shards of any dtype: drawn as whole numbers, which wrap, round or get an imaginary part."""
    shards, _ = drawn(of_dtype(lies, torch.int64), seed)
    if lies.dtype.is_complex:
        return [torch.complex(shard.double(), 2 * shard.double()).to(lies.dtype) for shard in shards]
    return [shard.to(lies.dtype) for shard in shards]


def travel(src: Layout, dst: Layout) -> dict[int, Trip]:
    """Move there and back, on whatever transport; what each owned rank saw."""
    sent = transport().sent.bytes
    mine = entrusted(src, "shards")
    start = Counter(sent)
    out = box(mine, src, dst)
    there = sent - start
    outs: dict[int, Image] = dict(zip(owned(dst.placement), map(image, out), strict=False))
    grads: dict[int, Image] = {}
    if mine[0].requires_grad:
        torch.autograd.backward(out, entrusted(dst.dual, "gradient"))
        grads = {r: image(m.grad) for r, m in zip(owned(src.placement), mine, strict=False) if m.grad is not None}
    back = sent - start - there
    assert all(there[r] == between(src, dst).sent(r) for r in owned(src.placement)), "bytes unlike the plan's"
    assert outs or not out[0].numel(), "a token holds something"
    return {r: Trip(outs.get(r), grads.get(r), there[r], back[r]) for r in between(src, dst).ranks if r in outs | grads}


def travels(cases: Sequence[Pair], prices: str | None, native: bool | None) -> Trips:
    """All cases on a rank."""
    flow.init(native=native)
    axes = cases[0][0].placement.shape
    with use_cluster(network(prices, axes)) if prices else nullcontext():
        return [travel(src, dst) for src, dst in cases]


@cache
def expected(cases: tuple[Pair, ...], prices: str | None) -> Trips:
    """The same in this process, which owns all ranks; checked against one plain tensor and against the plan's bytes."""
    trips = travels(cases, prices, None)
    for (src, dst), trip in zip(cases, trips, strict=True):
        if src.dtype is not torch.float64:
            continue  # the plain tensor has no sums for some
        outs = [trip[r].out for r in dst.placement.flat]
        assert torch.equal(value([restored(o) for o in outs if o], dst), drawn(src, "shards")[1]), f"{src} -> {dst}"
    return trips


class Hosts:
    """New ranks, two of them on each host of a name of its own."""

    def __init__(self, fresh: Fresh) -> None:
        self.fresh = fresh

    def __call__(self, function: Callable[..., Trips], *args: object) -> list[Trips]:
        ended = self.fresh(4, function, *args, environment=lambda rank: {"SBPFLOW_HOST": f"host{rank // 2}"})
        return [end.answer.value for end in ended if end.answer is not None]


def astray(
    ranks: Ranks | Hosts, cases: Iterable[Pair], native: bool | None = None, prices: str | None = None
) -> list[str]:
    """The cases that go another way on real ranks than in one process, and what differs."""
    cases = tuple(cases)
    found = ranks(travels, cases, prices, native)
    wrong = []
    for k, ((src, dst), want) in enumerate(zip(cases, expected(cases, prices), strict=True)):
        seen: dict[int, Trip] = {}
        for trips in found:
            seen |= trips[k]
        if seen != want:
            wrong += [f"{src} -> {dst}: rank {r}: {told(seen.get(r), want.get(r))}" for r in sorted(seen | want)]
    return [text for text in wrong if not text.endswith("same")]


def told(seen: Trip | None, want: Trip | None) -> str:
    if seen is None or want is None:
        return "same" if seen is want else f"{seen} instead of {want}"
    differing = [name for name, a, b in zip(Trip._fields, seen, want, strict=True) if a != b]
    return ", ".join(f"{n} {shown(getattr(seen, n))} not {shown(getattr(want, n))}" for n in differing) or "same"


def shown(field: Image | int | None) -> object:
    return restored(field).tolist() if isinstance(field, tuple) else field


def lies(p: Placement, shape: tuple[int, ...] = (11, 9)) -> list[Layout]:
    """Every signature, and for each B also the one whose gradient is partial."""
    found = []
    for plain in public(p, shape, (*map(S, range(len(shape))), B, P)):
        spots = [axis for axis, entry in enumerate(plain.sbp) if entry is B and p.shape[axis] > 1]
        for chosen in itertools.product([False, True], repeat=len(spots)):
            partial = tuple(itertools.compress(spots, chosen))
            found.append(Layout(p, plain.state, shape, plain.dtype, partial, plain.sbp))
    return found


def pairs(p: Placement, q: Placement | None = None, shape: tuple[int, ...] = (11, 9)) -> list[Pair]:
    return list(itertools.product(lies(p, shape), lies(q or p, shape)))


@pytest.mark.sampled(4)
@WAYS
@pytest.mark.parametrize("shape", [*SHAPES.values(), (), (3,), (5, 2, 3)], ids=str)
def test_every_move_on_one_axis(ranks4: Ranks, shape: tuple[int, ...], native: bool | None) -> None:
    assert astray(ranks4, pairs(grid(4), shape=shape), native) == []


@pytest.mark.sampled(1)
@WAYS
@pytest.mark.parametrize("size", SHAPES)
def test_every_move_on_two_axes(ranks4: Ranks, size: str, native: bool | None) -> None:
    assert astray(ranks4, every_pair(public(grid(2, 2), SHAPES[size])), native) == []


@pytest.mark.sampled(2)
@WAYS
@pytest.mark.parametrize("size", SHAPES)
def test_moves_on_two_axes_with_partial_gradients(ranks4: Ranks, size: str, native: bool | None) -> None:
    assert astray(ranks4, sample(pairs(grid(2, 2), shape=SHAPES[size]), 25, size), native) == []


@pytest.mark.sweep
@WAYS
@pytest.mark.parametrize("size", SHAPES)
def test_every_move_on_two_axes_with_partial_gradients(ranks4: Ranks, size: str, native: bool | None) -> None:
    assert astray(ranks4, pairs(grid(2, 2), shape=SHAPES[size]), native) == []


@pytest.mark.sampled(2)
@WAYS
@pytest.mark.parametrize("prices", ["flat", "two_level"])
def test_moves_of_several_steps(ranks4: Ranks, prices: str, native: bool | None) -> None:
    """Where bytes are dear, and one axis dearer than the other, routes are longer."""
    cases = sample(every_pair(public(grid(2, 2), SHAPES["uneven"])), 60, prices)
    assert astray(ranks4, cases, native, prices) == []


@pytest.mark.sweep
def test_moves_between_hosts_of_two_ranks_each(fresh: Fresh) -> None:
    """Rows of the grid share memory, columns do not, and the whole goes by messages."""
    cases = [pair for size in SHAPES for pair in sample(pairs(grid(2, 2), shape=SHAPES[size]), 40, size)]
    cases += pairs(grid(4)) + pairs(placement("cpu", [0, 1]), placement("cpu", [1, 2, 3]))
    assert astray(Hosts(fresh), cases, prices="flat") == []  # as guessed for two hosts, other routes are quickest


@pytest.mark.sweep
@WAYS
@pytest.mark.parametrize("axes", [(2, 2, 2), (2, 4)], ids=str)
def test_moves_on_eight_ranks(ranks8: Ranks, axes: tuple[int, ...], native: bool | None) -> None:
    p = grid(*axes)
    cases = [pair for name, shape in SHAPES.items() for pair in sample(pairs(p, shape=shape), 12, (axes, name))]
    assert astray(ranks8, cases, native) == []


@pytest.mark.sweep
@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("first", [S(0), S(1), B, P], ids=str)
def test_moves_on_three_axes(ranks8: Ranks, first: Sbp, size: str) -> None:
    """An eighth of all, for each takes a tenth of a second on eight ranks; every source goes one way."""
    layouts = public(grid(2, 2, 2), SHAPES[size])
    for k, src in enumerate(layouts):
        if src.sbp[0] is first:
            ends = sample([(src, dst) for dst in layouts], len(layouts) // 8, (src.sbp, size))
            assert astray(ranks8, ends, (None, False, True)[k % 3]) == []


RELATIONS: dict[str, tuple[Nested, Nested]] = {
    "reordered": ([0, 1, 2, 3], [3, 1, 0, 2]),
    "disjoint": ([0, 1], [2, 3]),
    "disjoint, larger": ([2], [0, 1, 3]),
    "disjoint, smaller": ([3, 1, 0], [2]),
    "others look on": ([1], [3]),
    "overlapping": ([0, 1, 2], [1, 2, 3]),
    "larger": ([1, 2], [0, 1, 2, 3]),
    "larger by one": ([0, 1, 2], [0, 1, 2, 3]),
    "from one": ([2], [0, 1, 2, 3]),
    "smaller": ([0, 1, 2, 3], [3, 1]),
    "to one": ([0, 1, 2, 3], [2]),
    "regrid, finer": ([0, 1, 2, 3], [[0, 1], [2, 3]]),
    "regrid, coarser": ([[0, 1], [2, 3]], [0, 1, 2, 3]),
    "regrid, turned": ([0, 1, 2, 3], [[0, 2], [1, 3]]),
    "rows to columns": ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
    "a row": ([[0, 1], [2, 3]], [2, 3]),
    "pairs to three": ([[0, 1], [2, 3]], [0, 3, 2]),
}


@pytest.mark.sampled(2)
@WAYS
@pytest.mark.parametrize("relation", RELATIONS)
def test_every_move_between_placements(ranks4: Ranks, relation: str, native: bool | None) -> None:
    p, q = (placement("cpu", ranks) for ranks in RELATIONS[relation])
    cases = [pair for shape in SHAPES.values() for pair in sample(pairs(p, q, shape), 16, shape)]
    assert astray(ranks4, cases, native) == []


@pytest.mark.sweep
@WAYS
@pytest.mark.parametrize(
    "relation", [name for name, (p, q) in RELATIONS.items() if placement("cpu", p).ndim + placement("cpu", q).ndim > 2]
)
def test_really_every_move_between_grids(ranks4: Ranks, relation: str, native: bool | None) -> None:
    p, q = (placement("cpu", ranks) for ranks in RELATIONS[relation])
    for shape in SHAPES.values():
        assert astray(ranks4, pairs(p, q, shape), native) == []


FLOAT8 = [dtype for name, dtype in sorted(vars(torch).items()) if name.startswith("float8_")]
NUMBERS = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex32, torch.complex64, torch.complex128),
]


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@WAYS
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_every_dtype_with_sums_makes_every_move(ranks4: Ranks, dtype: torch.dtype, native: bool | None) -> None:
    cases = [(of_dtype(a, dtype), of_dtype(b, dtype)) for a, b in pairs(grid(4)) + sample(pairs(grid(2, 2)), 10)]
    assert astray(ranks4, cases, native) == []


@pytest.mark.sampled(1)
@WAYS
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_dtype_without_sums_makes_every_other_move(
    ranks4: Ranks, dtype: torch.dtype, native: bool | None
) -> None:
    known = [of_dtype(lie, dtype) for lie in lies(grid(4)) + lies(grid(2, 2)) if not {P} & {*lie.sbp, *lie.dual.sbp}]
    assert astray(ranks4, every_pair(known), native) == []


def summed(dtype: torch.dtype) -> str:
    lie = of_dtype(lies(grid(4))[-1], dtype)
    start = Counter(transport().sent.bytes)
    with pytest.raises(DtypeError, match="cannot be summed") as refused:
        box(entrusted(lie, 0), lie, lie.to(B))
    assert transport().sent.bytes == start
    return str(refused.value)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_a_sum_that_torch_lacks_is_refused_alike_before_anything_is_sent(ranks4: Ranks, dtype: torch.dtype) -> None:
    assert set(ranks4(summed, dtype)) == {summed(dtype)}
    assert astray(ranks4, pairs(grid(4))[:3]) == []


EXTREMES = [
    (p, q, kind)
    for p, q in [([0, 1, 2, 3], [0, 1, 2, 3]), ([0, 1], [2, 3]), ([0, 1, 2], [1, 2, 3]), ([[0, 1], [2, 3]], [3, 0, 1])]
    for kind in ("max", "min")
]


@pytest.mark.sampled(2)
@WAYS
@pytest.mark.parametrize(("here", "there", "kind"), EXTREMES, ids=str)
def test_extremes_of_ranks(ranks4: Ranks, here: Nested, there: Nested, kind: Reduction, native: bool | None) -> None:
    """A maximum's value, and its gradient at the ranks that hold it; ties share."""
    p, q = placement("cpu", here), placement("cpu", there)
    from_ = [lie for lie in public(p, (11, 9), (S(0), B, P(kind))) if P(kind) in lie.sbp]
    cases = [*itertools.product(from_, public(q, (11, 9), (S(0), S(1), B, P(kind))))]
    assert astray(ranks4, cases, native) == []


def thirds(cases: Sequence[Pair]) -> list[dict[int, Image]]:
    """Sums that round; so the order in which they are taken shows."""
    flow.init(native=False)
    found = []
    for src, dst in cases:
        shards = [(shard / 3).to(src.dtype) for shard in entrusted(src, "thirds")]
        found.append(dict(zip(owned(dst.placement), map(image, box(shards, src, dst)), strict=False)))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_rounded_sums_have_the_bits_that_they_have_in_one_process(ranks4: Ranks, dtype: torch.dtype) -> None:
    drawn_ = pairs(grid(4), shape=(24, 48)) + sample(pairs(grid(2, 2)), 40) + pairs(grid(4), placement("cpu", [1, 2]))
    cases = [(of_dtype(a, dtype), of_dtype(b, dtype)) for a, b in drawn_ if a.state.partial]
    found = [
        {r: seen for rank in ranks for r, seen in rank.items()} for ranks in zip(*ranks4(thirds, cases), strict=True)
    ]
    assert found == thirds(cases)


def in_flight(cases: Sequence[Pair], seed: int) -> list[dict[int, Image]]:
    """Up to three moves under way at a time, ended in any order (one for all ranks), with a plain move in between."""
    dice = random.Random(seed)
    waiting: dict[int, Pending] = {}
    found: list[dict[int, Image]] = [{} for _ in cases]
    for k, (src, dst) in enumerate(cases):
        waiting[k] = box_async(entrusted(src, k), src, dst)
        if k % 5 == 0:
            box(entrusted(src, k), src, dst)
        while len(waiting) > (2 if k + 1 < len(cases) else 0):
            chosen = dice.choice(sorted(waiting))
            there = owned(cases[chosen][1].placement)
            found[chosen] = dict(zip(there, map(image, waiting.pop(chosen).wait()), strict=False))
    return found


@pytest.mark.sampled(3)
@WAYS
@pytest.mark.parametrize("seed", range(3))
def test_several_moves_under_way_do_not_meet(ranks4: Ranks, seed: int, native: bool | None) -> None:
    some = pairs(grid(4)) + pairs(grid(2, 2)) + pairs(placement("cpu", [0, 1]), placement("cpu", [1, 2, 3]))
    cases = sample(some, 80, seed)
    ranks4(travels, cases[:1], None, native)
    found = [
        {r: seen for rank in ranks for r, seen in rank.items()}
        for ranks in zip(*ranks4(in_flight, cases, seed), strict=True)
    ]
    assert found == in_flight(cases, seed)


def curved(src: Layout, dst: Layout) -> dict[int, Image]:
    """The gradient of a gradient: that of sum(box(x)**3) goes through the transpose, and that through its own."""
    x = entrusted(src, "curved")
    out = box(x, src, dst)
    first = torch.autograd.grad([o.pow(3).sum() for o in out], x, create_graph=True)
    second = torch.autograd.grad([g.pow(2).sum() for g in first], x)
    return dict(zip(owned(src.placement), map(image, second), strict=False))


@pytest.mark.parametrize("there", [[0, 1, 2, 3], [2, 3], [3, 0, 1]], ids=str)
def test_gradients_have_gradients(ranks4: Ranks, there: list[int]) -> None:
    p, q = grid(4), placement("cpu", there)
    for src, dst in pairs(p, q):
        found = ranks4(curved, src, dst)
        assert {r: seen for rank in found for r, seen in rank.items()} == curved(src, dst), f"{src} -> {dst}"


def from_odd_memory() -> list[bool]:
    """Shards that are transposed, strided, expanded, conjugated or negated views."""
    flow.init(native=None)
    p, rank = grid(4), world().rank or 0
    whole = torch.arange(48.0).reshape(6, 8)
    kept = []
    for src, dst in itertools.permutations(public(p, (6, 8), (S(0), S(1), B)), 2):
        piece = whole[src.slices(rank)]
        wants = scatter(whole.double(), dst)[0]
        turned = piece.double().T.contiguous().T
        strided = torch.stack([piece.double(), -piece.double()], -1)[..., 0]
        kept += [torch.equal(box([odd], src, dst)[0], wants) for odd in (turned, strided)]
        lie, to = of_dtype(src, torch.complex128), of_dtype(dst, torch.complex128)
        (conj,) = box([torch.complex(turned, turned).conj()], lie, to)
        kept.append(torch.equal(conj, torch.complex(wants, -wants)))
        (minus,) = box([torch.complex(turned, turned).conj().imag], src, dst)
        kept.append(torch.equal(minus, -wants))
    same = torch.ones(()).double().expand(6, 8)
    kept.append(torch.equal(gather([same], layout(p, P, (6, 8), torch.float64)), 4 * same))
    return kept


def test_shards_may_lie_in_memory_as_they_like(ranks4: Ranks) -> None:
    assert all(all(kept) for kept in ranks4(from_odd_memory))


def scattered_and_gathered() -> bool:
    whole = torch.arange(99.0).double().reshape(11, 9)
    known = lies(grid(4)) + lies(grid(2, 2)) + lies(placement("cpu", [2, 0]))
    return all(torch.equal(gather(scatter(whole, lie), lie), whole) for lie in known if owned(lie.placement))


def test_what_is_scattered_gathers_to_the_same(ranks4: Ranks) -> None:
    assert ranks4(scattered_and_gathered) == [True] * 4


def recorded() -> list[tuple[str, str, str]]:
    src, dst = layout(grid(4), S(0), (8,), torch.float64), layout(grid(4), B, (8,), torch.float64, grad_sbp=P)
    with record() as moves:
        torch.autograd.backward(box(entrusted(src, 0), src, dst), entrusted(dst.dual, 0))
    return [(move.op, move.route, move.line.rpartition("/")[2]) for move in moves]


def test_a_record_on_real_ranks_names_the_users_line(ranks4: Ranks) -> None:
    line = recorded.__code__.co_firstlineno + 3
    here = f"test_dist.py:{line}"
    seen = [("box", "all_gather", here), ("box backward", "reduce_scatter", here)]
    assert ranks4(recorded) == [seen] * 4 == [recorded()] * 4


FREE = [("B", "S(0)"), ("B", "P"), ("S(1)", "P"), ("B", "B"), ("P", "P"), ("S(0)", "S(0)")]


def moved_nothing(src: str, dst: str) -> bool:
    start = Counter(transport().sent.calls)
    a, b = layout(grid(4), src, (8, 8), torch.float64), layout(grid(4), dst, (8, 8), torch.float64)
    (shard,) = entrusted(a, 0)
    (out,) = box([shard], a, b)
    shares = out.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
    return transport().sent.calls == start and (shares or ("P" in dst and src != dst))


@pytest.mark.parametrize(("src", "dst"), FREE)
def test_a_free_move_makes_no_call_and_no_copy(ranks4: Ranks, src: str, dst: str) -> None:
    assert ranks4(moved_nothing, src, dst) == [True] * 4
