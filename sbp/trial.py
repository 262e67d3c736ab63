"""Simulated ranks: one call, run whole and run on shards, and whether the two agree.

    whole    inputs ────── op ──────> outputs          cotangents ── backward ──> gradients
                │ cut                     = ?              │ cut by the dual         = ?
    ranks    shards ── op or local ─> shards           shards ────── backward ──> shards

One process, no communication; the ranks run one after the other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import product
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..placement import placement
from .call import Piece, Way, in_order, map_tensors, tensors_in
from .layout import Layout, RunLayout
from .state import Runs, Spans, State

__all__ = ["TriedOp", "Trial", "one_thread", "states_of"]

TriedOp: TypeAlias = torch._ops.OpOverload | Callable[..., Any]
COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Trial:
    """One call on real tensors and a simulated grid: run whole once, and then on shards as often as wanted.

    With `runs`, each rank holds a run of the ranks that rules look at.
    """

    def __init__(
        self,
        op: TriedOp,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sizes: tuple[int, ...] = (),
        runs: Runs | None = None,
    ) -> None:
        self.op, self.args, self.runs = op, args, runs
        self.kwargs = in_order(op, kwargs) if isinstance(op, torch._ops.OpOverload) else dict(kwargs)
        shape = tuple(map(len, runs.lengths)) if runs else sizes
        self.placement = placement("cpu", range(prod(shape))).reshape(shape)
        self.inputs = [t.detach() for t in tensors_in([*args, *self.kwargs.values()])]
        self.learns = self._learns()
        self._shards: dict[tuple[int, State], list[Tensor]] = {}
        leaves, given, outputs = self._run(self.op, self.inputs)
        self.outputs = [t.detach().clone() for t in outputs]
        # An op may change an input in place, as batch_norm its running statistics: then that is a result too.
        self.changed = {
            at: after.detach().clone()
            for at, (before, after) in enumerate(zip(self.inputs, given, strict=True))
            if not torch.equal(before.nan_to_num(), after.detach().nan_to_num())
        }
        self.cotangents = [torch.randn_like(t) if t.requires_grad else None for t in outputs]
        self.gradients = _backward(outputs, self.cotangents, leaves)

    def _run(
        self, call: Callable[..., Any], inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Leaves that gradients flow back to, what the op was given (it may change that), and what came out."""
        leaves = [t.detach().requires_grad_(learns) for t, learns in zip(inputs, self.learns, strict=True)]
        given = [t.clone() for t in leaves]
        put = iter(given)
        args, kwargs = map_tensors((list(self.args), self.kwargs), lambda _: next(put))
        return leaves, given, tensors_in(call(*args, **kwargs))

    def _learns(self) -> list[bool]:
        """The inputs that have a gradient: all floating ones, but for ops that are not differentiable in some."""
        self.learns = [t.is_floating_point() or t.is_complex() for t in self.inputs]
        floating = self.learns
        try:
            self._run(self.op, self.inputs)
        except RuntimeError as error:
            if "differentiable" not in str(error):
                raise
            for at, _ in enumerate(floating):
                self.learns = [floating[at] and at == other for other in range(len(floating))]
                try:
                    self._run(self.op, self.inputs)
                except RuntimeError:
                    floating[at] = False
        return floating

    def _cut(self, states: Sequence[State]) -> list[list[Tensor]]:
        """For each input what each rank holds of it."""
        for at, (whole, state) in enumerate(zip(self.inputs, states, strict=True)):
            if (at, state) not in self._shards:
                self._shards[at, state] = scatter(whole, self._layout(whole, state))
        return [self._shards[at, state] for at, state in enumerate(states)]

    def differs(self, way: Way) -> str | None:
        """The first thing that is not as the way says, or None."""
        try:
            return self._differs(way)
        except Exception as error:  # whatever an op may raise on shards that it cannot take
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"

    def _differs(self, way: Way) -> str | None:
        ins = [self._layout(t, s) for t, s in zip(self.inputs, way.inputs, strict=True)]
        outs = [self._layout(t, s) for t, s in zip(self.outputs, way.outputs, strict=True)]
        shards, runs = self._cut(way.inputs), []
        for rank in self.placement.flat:
            piece = Piece(rank, tuple(ins), tuple(outs))
            call = self.op if way.local is None else _with(way.local, piece)
            runs.append(self._run(call, [shard[rank] for shard in shards]))
        for at, (whole, lay) in enumerate(zip(self.outputs, outs, strict=True)):
            if trouble := unlike([outputs[at] for _, _, outputs in runs], whole, lay):
                return f"output {at}, {trouble}"
        for at, whole in self.changed.items():
            if trouble := unlike([given[at] for _, given, _ in runs], whole, ins[at]):
                return f"input {at}, changed in place, {trouble}"
        return self._backward_differs(way, runs)

    def _backward_differs(self, way: Way, runs: list[tuple[list[Tensor], list[Tensor], list[Tensor]]]) -> str | None:
        if any(state.partial and state.reduction != "sum" for state in (*way.inputs, *way.outputs)):
            return None  # the gradient of a maximum goes to whoever held it, which is not the op's affair
        live = frozenset(axis for s in (*way.inputs, *way.outputs) for axis in (*s.split, *s.partial))
        cuts: list[list[Tensor] | None] = []
        for cotangent, state in zip(self.cotangents, way.outputs, strict=True):
            lay = None if cotangent is None else self._layout(cotangent, _dual(state, live))
            cuts.append(None if cotangent is None or lay is None else scatter(cotangent, lay))
        found = []
        for at, (leaves, _, outputs) in enumerate(runs):
            found.append(_backward(outputs, [None if cut is None else cut[at] for cut in cuts], leaves))
        for at, (whole, state) in enumerate(zip(self.gradients, way.inputs, strict=True)):
            if whole is not None:
                shards = [gradients[at] for gradients in found]
                lay = self._layout(whole, _dual(state, live))
                if trouble := unlike([t for t in shards if t is not None], whole, lay):
                    return f"gradient of input {at}, {trouble}"
        return None

    def tries(self, ranks: int) -> Iterator[Way]:
        """Every signature on one axis whose shards the op takes, and whose results could be read as the outputs."""
        if any(t.numel() == 0 for t in (*self.inputs, *self.outputs)):
            return  # nothing can differ
        for inputs in product(*(states_of(t, ranks) for t in self.inputs)):
            if any(state.split or state.partial for state in inputs):
                fits = self._fits(inputs, ranks)
                for outputs in product(*fits):
                    yield Way(inputs, outputs)

    def _fits(self, inputs: tuple[State, ...], ranks: int) -> list[list[State]]:
        """For each output the states that its shards, made from inputs in these states, could be in."""
        shards = self._cut(inputs)
        try:
            runs = [self._run(self.op, [shard[rank] for shard in shards])[2] for rank in self.placement.flat]
            return [
                [
                    state
                    for state in states_of(whole, ranks)
                    if unlike([outputs[at] for outputs in runs], whole, self._layout(whole, state)) is None
                ]
                for at, whole in enumerate(self.outputs)
            ]
        except Exception:  # the op cannot take such shards
            return [[]]

    def _layout(self, whole: Tensor, state: State) -> Layout:
        if self.runs:
            return RunLayout(self.runs, state, tuple(whole.shape), whole.dtype)
        return Layout(self.placement, state, tuple(whole.shape), whole.dtype)


def scatter(whole: Tensor, lay: Layout) -> list[Tensor]:
    """The shards of a tensor on each rank; where that is an addend, it is a random one."""
    p, partial = lay.placement, lay.state.partial
    terms = _terms(whole, prod(p.shape[axis] for axis in partial), lay.state.reduction)
    shards = []
    for rank in p.flat:
        at = 0
        for axis in partial:
            at = at * p.shape[axis] + p.coords(rank)[axis]
        shards.append(_cut(terms[at], lay.spans(rank)))
    return shards


def unlike(shards: Sequence[Tensor], whole: Tensor, lay: Layout) -> str | None:
    """The first difference between the ranks' shards and what the layout makes of the whole; None if there is none."""
    p, groups = lay.placement, dict[tuple[int, ...], list[int]]()
    if lay.state.partial and whole.dtype == torch.bool:
        return "a partial value of booleans"
    for rank, shard in zip(p.flat, shards, strict=True):
        if tuple(shard.shape) != lay.local_shape(rank) or shard.dtype != whole.dtype:
            return f"rank {rank}: {shard.dtype} {tuple(shard.shape)} instead of {whole.dtype} {lay.local_shape(rank)}"
        where = tuple(0 if a in lay.state.partial else i for a, i in enumerate(p.coords(rank)))
        groups.setdefault(where, []).append(rank)
    if lay.state.adds:
        return _unlike_overlaps(shards, whole, lay)
    for ranks in groups.values():
        value = reduce(COMBINE[lay.state.reduction], [shards[rank].detach() for rank in ranks])
        want = _cut(whole, lay.spans(ranks[0]))
        if not _close(value, want):
            return f"ranks {ranks}: {_short(value)} instead of {_short(want)}"
    return None


def _unlike_overlaps(shards: Sequence[Tensor], whole: Tensor, lay: Layout) -> str | None:
    """The same of pieces that overlap, where they add up; what other axes repeat counts once."""
    p, total = lay.placement, torch.zeros_like(whole)
    counts = lay.state.split | {*lay.state.partial}
    for rank, shard in zip(p.flat, shards, strict=True):
        if all(at == 0 or axis in counts for axis, at in enumerate(p.coords(rank))):
            places = [
                torch.tensor([at for span in held for at in range(*span)], dtype=torch.long, device="cpu")
                for held in lay.spans(rank)
            ]
            total[torch.meshgrid(*places, indexing="ij")] += shard.detach()
    return None if _close(total, whole) else f"all ranks: {_short(total)} instead of {_short(whole)}"


def _backward(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradient of each leaf, zero where nothing flows to it; None for what has none."""
    flows = [(out, g) for out, g in zip(outputs, cotangents, strict=True) if out.requires_grad and g is not None]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted or all(g is None for g in cotangents):
        return [None] * len(leaves)
    if flows:
        outs, grads = zip(*flows, strict=True)
        found = iter(torch.autograd.grad(outs, wanted, grads, materialize_grads=True))
    else:
        found = iter([torch.zeros_like(leaf) for leaf in wanted])
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _dual(state: State, live: frozenset[int]) -> State:
    """How the gradient lies; a B on an axis where something is split or partial has a partial gradient."""
    windows = tuple(window and window._replace(adds=True) for window in state.windows)
    return State(state.dims, tuple(sorted(live - state.split - set(state.partial))), windows=windows)


def _terms(whole: Tensor, count: int, reduction: str) -> list[Tensor]:
    """Random tensors that combine to the whole."""
    if count == 1:
        return [whole]
    if reduction == "sum":
        if whole.dtype == torch.bool:
            raise TypeError("booleans do not add up")
        noise = whole.is_floating_point() or whole.is_complex()
        draw = torch.randn_like if noise else (lambda t: torch.randint_like(t, -3, 4))
        terms = [draw(whole) for _ in range(count - 1)]
        return [*terms, whole - sum(terms)]
    holder = torch.randint(count, whole.shape, device="cpu")
    away = 1 if reduction == "min" else -1
    return [torch.where(holder == i, whole, whole + away * torch.randint_like(whole, 1, 4)) for i in range(count)]


def _cut(whole: Tensor, spans: Sequence[Spans]) -> Tensor:
    """These index ranges of every dim; a tensor of its own, since ops may write into it."""
    for dim, held in enumerate(spans):
        parts = [whole.narrow(dim, lo, hi - lo) for lo, hi in held]
        whole = torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else whole.narrow(dim, 0, 0)
    return whole.clone()


def _close(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    eps = torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=2000 * eps, atol=2000 * eps, equal_nan=True)  # sums are reordered


def _with(local: Callable[..., Any], piece: Piece) -> Callable[..., Any]:
    return lambda *args, **kwargs: local(piece, *args, **kwargs)


def _short(value: Tensor) -> str:
    return " ".join(repr(value.detach()).split())[:100]


def states_of(whole: Tensor, ranks: int) -> list[State]:
    """The states of a tensor on one axis: whole, an addend, or split along a dim that has something for every rank."""
    ndim = whole.dim()
    states = [State(((),) * ndim)]
    if whole.dtype != torch.bool:
        states.append(State(((),) * ndim, (0,)))
    splits = [State(tuple((0,) if d == dim else () for d in range(ndim))) for dim in range(ndim)]
    return states + [state for dim, state in enumerate(splits) if whole.shape[dim] >= ranks]


@contextmanager
def one_thread() -> Iterator[None]:
    """On tiny tensors threads that wait for each other take a thousand times longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
