"""The oracle of boxing: one plain tensor on one device, cut and put together by torch, without `sbp/state.py`."""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import chain, combinations, permutations, product
from math import prod
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from sbpflow.placement import Cluster, Placement, cluster, placement
from sbpflow.sbp import B, Layout, P, S, Sbp, State, layout

GRIDS = [(4,), (2, 2), (2, 4), (2, 2, 2), (3, 2)]
SHAPES = {"even": (24, 48), "uneven": (11, 9), "tiny": (2, 3), "empty": (0, 5)}
SIGNATURES: tuple[Sbp, ...] = (S(0), S(1), B, P)
FOLD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}

Pair: TypeAlias = tuple[Layout, Layout]
Law: TypeAlias = Callable[[Layout, Layout], None]
T = TypeVar("T")


def grid(*shape: int) -> Placement:
    """CPU ranks 0, 1, ... in a grid of this shape."""
    return placement("cpu", range(prod(shape))).reshape(shape)


def network(name: str, axes: tuple[int, ...]) -> Cluster:
    """The cluster of this name; with two levels the last axis of the grid stays inside a node, the others do not."""
    return cluster(name).with_node(axes[-1] if len(axes) > 1 else 2) if name == "two_level" else cluster(name)


def public(p: Placement, shape: tuple[int, ...], kinds: Sequence[Sbp] = SIGNATURES) -> list[Layout]:
    """A layout for every signature that a user may write with these entries."""
    return [layout(p, sbp, shape, torch.float64) for sbp in product(kinds, repeat=p.ndim)]


def ordered(p: Placement, shape: tuple[int, ...]) -> list[Layout]:
    """A layout for every state without holes: nested splits of a dim in every order. An axis of one rank is B."""
    found = []
    for kinds in product(*((*range(len(shape)), "B", "P") if n > 1 else ("B",) for n in p.shape)):
        nests = [permutations([a for a in range(p.ndim) if kinds[a] == d]) for d in range(len(shape))]
        partial = tuple(a for a in range(p.ndim) if kinds[a] == "P")
        found += [Layout(p, State(dims, partial), shape, torch.float64) for dims in product(*nests)]
    return found


def holed(p: Placement, shape: tuple[int, ...]) -> list[Layout]:
    """A layout for every state with holes: what is left of a nested split after outer axes shared what they held."""
    found = []
    for whole in ordered(p, shape):
        for d, factors in enumerate(whole.state.dims):
            for gone in chain.from_iterable(combinations(factors[:-1], n) for n in range(1, len(factors))):
                left = tuple(-p.shape[f] if f in gone else f for f in factors)
                dims = (*whole.state.dims[:d], left, *whole.state.dims[d + 1 :])
                found.append(Layout(p, State(dims, whole.state.partial), shape, torch.float64))
    return list(dict.fromkeys(found))


def every_pair(layouts: Iterable[Layout], others: Iterable[Layout] | None = None) -> list[Pair]:
    """Each with each, or each with each of the others."""
    known = list(layouts)
    return list(product(known, known if others is None else others))


def sample(items: Iterable[T], count: int, seed: object = 0) -> list[T]:
    """A seeded choice of at most `count`, in their order of drawing."""
    known = list(items)
    return random.Random(str(seed)).sample(known, min(count, len(known)))


def indices(size: int, factors: Sequence[int], where: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Which indices of a dim the rank at `where` holds, by cutting range(size) once for every factor."""
    held = [torch.arange(size)]
    for f in factors:
        cuts = [piece.tensor_split(sizes[f] if f >= 0 else -f) for piece in held]
        held = [cut[where[f]] for cut in cuts] if f >= 0 else list(chain.from_iterable(cuts))
    return torch.cat(held)


def held(lies: Layout, rank: int) -> list[Tensor]:
    """For each dim, the indices that the rank holds."""
    where, sizes = lies.placement.coords(rank), lies.placement.shape
    return [indices(n, f, where, sizes) for n, f in zip(lies.shape, lies.state.dims, strict=True)]


def cut(whole: Tensor, lies: Layout, rank: int) -> Tensor:
    """The rank's piece of one whole tensor."""
    for dim, index in enumerate(held(lies, rank)):
        whole = whole.index_select(dim, index)
    return whole.clone()


def term(lies: Layout, rank: int) -> tuple[int, ...]:
    """Which addend a rank holds (a piece of): its place on the partial axes."""
    where = lies.placement.coords(rank)
    return tuple(where[a] for a in lies.state.partial)


def drawn(lies: Layout, seed: object = 0) -> tuple[list[Tensor], Tensor]:
    """Random shards, an addend of its own for every place on the partial axes, and the value that they mean together.

    Small whole numbers, so that a sum has one value in whatever order it is taken.
    """
    dice = torch.Generator().manual_seed(random.Random(str(seed)).getrandbits(32))
    places = product(*(range(lies.placement.shape[a]) for a in lies.state.partial))
    terms = {at: torch.randint(-50, 51, lies.shape, generator=dice).to(lies.dtype) for at in places}
    shards = [cut(terms[term(lies, r)], lies, r) for r in lies.placement.flat]
    return shards, reduce(FOLD[lies.state.reduction], terms.values())


def value(shards: Sequence[Tensor], lies: Layout) -> Tensor:
    """What the shards mean together; every rank must hold its shape, replicas the same, and nothing may be missing."""
    assert len(shards) == lies.placement.size, f"{len(shards)} shards"
    terms: dict[tuple[int, ...], Tensor] = {}
    for rank, shard in zip(lies.placement.flat, shards, strict=True):
        at = held(lies, rank)
        assert shard.shape == tuple(map(len, at)), f"rank {rank} has shape {tuple(shard.shape)}"
        assert shard.dtype is lies.dtype, f"rank {rank} has {shard.dtype}"
        whole = terms.setdefault(term(lies, rank), torch.full(lies.shape, torch.nan, dtype=lies.dtype))
        whole[torch.meshgrid(*at, indexing="ij") if at else ()] = shard
    for rank, shard in zip(lies.placement.flat, shards, strict=True):
        assert torch.equal(cut(terms[term(lies, rank)], lies, rank), shard), f"rank {rank} differs from a replica"
    assert not any(whole.isnan().any() for whole in terms.values()), "some elements are nowhere"
    return reduce(FOLD[lies.state.reduction], terms.values())


def assert_means(shards: Sequence[Tensor], lies: Layout, whole: Tensor) -> None:
    """The shards are those of this value."""
    found = value(shards, lies)
    assert torch.equal(found, whole), f"means {found.tolist()}, not {whole.tolist()}"


def broken(pairs: Iterable[Pair], law: Law) -> list[str]:
    """The pairs that break a law, and how: one test looks at many, and tells of all that fail."""
    found = []
    for src, dst in pairs:
        try:
            law(src, dst)
        except Exception as error:
            there = "" if src.placement is dst.placement else f" on {dst.placement}"
            said = (str(error).splitlines() or [""])[0]
            found.append(f"{src} -> {dst.lie}{there}: {type(error).__name__} {said}")
    return found


def with_gradients(p: Placement, shape: tuple[int, ...], kinds: Sequence[Sbp] = SIGNATURES) -> list[Layout]:
    """A layout for every signature with every way for its gradient to lie."""
    found = []
    for plain in public(p, shape, kinds):
        free = [a for a, entry in enumerate(plain.sbp) if entry is B]
        for axes in chain.from_iterable(combinations(free, n) for n in range(len(free) + 1)):
            found.append(Layout(p, plain.state, shape, plain.dtype, axes, plain.sbp))
    return found


def logical(shards: Sequence[Tensor], lies: Layout) -> Tensor:
    """The value as autograd may differentiate it, built from the first replica of each piece alone."""
    terms: dict[tuple[int, ...], Tensor] = {}
    for rank, shard in zip(lies.placement.flat, shards, strict=True):
        if rank == first(lies, rank, alike(lies)):
            at = held(lies, rank)
            spot = torch.meshgrid(*at, indexing="ij") if at else ()
            whole = terms.get(term(lies, rank), torch.zeros(lies.shape, dtype=lies.dtype))
            terms[term(lies, rank)] = whole.index_put(spot, shard) if at else shard
    stack = torch.stack(list(terms.values()))
    if lies.state.reduction == "sum":
        return stack.sum(0)
    # amax and amin share the gradient evenly among those that tie.
    return stack.amax(0) if lies.state.reduction == "max" else stack.amin(0)


def alike(lies: Layout) -> set[int]:
    """The axes on which every rank holds the same."""
    return {a for a in range(lies.placement.ndim) if a not in lies.state.split and a not in lies.state.partial}


def first(lies: Layout, rank: int, axes: set[int]) -> int:
    """The rank at the front of these axes and at this rank's place on all others."""
    where = tuple(0 if a in axes else i for a, i in enumerate(lies.placement.coords(rank)))
    return next(r for r in lies.placement.flat if lies.placement.coords(r) == where)


def assert_gradients(grads: Sequence[Tensor], shards: Sequence[Tensor], lies: Layout, cotangent: Tensor) -> None:
    """The shards' gradients are those of a loss that is linear in their logical value, with `cotangent` its factors.

    Along an axis that is B, ranks hold each the whole gradient, or addends of it if the gradient is P there.
    """
    leaves = [shard.detach().clone().requires_grad_() for shard in shards]
    loss = (logical(leaves, lies) * cotangent).sum()
    wanted = torch.autograd.grad(loss, leaves, allow_unused=True)
    sums: dict[int, Tensor] = {}
    for rank, grad in zip(lies.placement.flat, grads, strict=True):
        front = first(lies, rank, set(lies.grad_partial))
        sums[front] = sums[front] + grad if front in sums else grad
    for rank, found in sums.items():
        want = wanted[lies.placement.flat.index(first(lies, rank, alike(lies)))]
        assert torch.equal(found, want), f"rank {rank} has gradient {found.tolist()}, not {want.tolist()}"
