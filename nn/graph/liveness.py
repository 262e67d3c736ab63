"""Memory: the bytes that a step takes at its peak on a rank, from when values are made and let go.

What is counted is storages, so that a view costs nothing and a value in two registers counts once. Inside a segment the
traced graph says what is made; what kernels take for themselves while they run is not seen.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor, fx

from ...boxing.graph.physical import Graph
from ...boxing.moves import LOCAL
from ...boxing.plan import Plan
from ...sbp import Layout
from ...sbp.call import tensors_in
from .joint import Traced, trace
from .local import Local, Localiser
from .overlap import Do
from .schedule import Schedule, schedule
from .segments import Segment, Stage

__all__ = ["Memory", "kept", "memory"]


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. Parameters are those of all sources but inputs; activations what is live beside parameters
    and gradients when most is."""

    parameters: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.activations


def memory(
    graph: Graph,
    stages: Sequence[Stage],
    localiser: Localiser,
    *,
    regather: bool = True,
    overlap: bool | None = None,
) -> dict[int, Memory]:
    """The peak of every rank of the graph; ranks whose segments are equal are worked out once."""
    ranks = _ranks(graph, stages, localiser, regather, overlap)
    return {rank: made.peak() for rank, made in ranks}


def kept(graph: Graph, stages: Sequence[Stage], localiser: Localiser, *, regather: bool = True) -> dict[int, int]:
    """The bytes on every rank that the forward leaves for the backward, beside parameters."""
    return {rank: made.behind() for rank, made in _ranks(graph, stages, localiser, regather, False)}


def _ranks(
    graph: Graph, stages: Sequence[Stage], localiser: Localiser, regather: bool, overlap: bool | None
) -> "Iterator[tuple[int, _Rank]]":
    known: dict[Any, Traced | None] = {}
    placements = {value.layout.placement for value in graph.values.values()}
    for rank in sorted({rank for where in placements for rank in where.flat}):
        traced = {}
        for number, stage in enumerate(stages):
            if isinstance(stage, Segment) and rank in stage.placement:
                traced[number] = _traced(known, localiser.segment(stage, rank))
        again = {n: tuple(stages[n].inputs[at] for at in made.again) for n, made in traced.items() if made}
        plan = schedule(graph, stages, again, regather=regather, overlap=overlap)
        yield rank, _Rank(graph, stages, plan, traced, rank)


def _traced(known: dict[Any, Traced | None], local: Local) -> Traced | None:
    if local.key not in known:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of its own parts
                known[local.key] = trace(local)
        except Exception:  # it runs by autograd, which keeps what goes in and comes out at least
            known[local.key] = None
    return known[local.key]


class _Inside(NamedTuple):
    """What running a traced graph makes: the bytes at its peak, and of each result the storage: the number of the
    input that it is a view of, or else a new one, by a name, and its bytes."""

    peak: int
    results: tuple[tuple[int | None, int, int], ...]


def _inside(module: fx.GraphModule) -> _Inside:
    nodes = list(module.graph.nodes)
    (result,) = module.graph.output_node().args
    ends: list[fx.Node] = []
    fx.map_arg(result, ends.append)
    last = {source: at for at, node in enumerate(nodes) for source in node.all_input_nodes}
    last.update(dict.fromkeys(ends, len(nodes)))
    given: dict[int, int] = {}
    size: dict[int, int] = {}
    until: dict[int, int] = {}
    made: list[list[int]] = []
    for at, node in enumerate(nodes):
        found = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in _tensors(node)}
        made.append([])
        for storage, nbytes in found.items():
            if node.op == "placeholder":
                given.setdefault(storage, len([n for n in nodes[:at] if n.op == "placeholder"]))
            elif storage not in given:
                if storage not in size:
                    made[at].append(storage)
                    size[storage] = nbytes
                until[storage] = max(until.get(storage, at), last.get(node, at))
    live = peak = 0
    gone: dict[int, list[int]] = {}
    for storage, at in until.items():
        gone.setdefault(at, []).append(storage)
    for at in range(len(nodes)):
        live += sum(size[storage] for storage in made[at])
        peak = max(peak, live)
        live -= sum(size[storage] for storage in gone.get(at, ()))
    results = []
    for node in ends:
        (value,) = _tensors(node)
        storage = value.untyped_storage()
        results.append((given.get(storage._cdata), storage._cdata, storage.nbytes()))
    return _Inside(peak, tuple(results))


def _tensors(node: fx.Node) -> list[Tensor]:
    return tensors_in(node.meta.get("val"))


class _Rank:
    """Runs a schedule for one rank with storages in the place of tensors."""

    def __init__(
        self,
        graph: Graph,
        stages: Sequence[Stage],
        plan: Schedule,
        traced: Mapping[int, Traced | None],
        rank: int,
    ) -> None:
        self.graph, self.stages, self.plan, self.traced, self.rank = graph, stages, plan, traced, rank
        self.insides: dict[fx.GraphModule, _Inside] = {}
        self.fresh = count()
        self.bytes: dict[int, int] = {}
        self.held: dict[str, tuple[int, ...]] = {}
        self.uses: Counter[int] = Counter()
        self.live = self.most = 0

    def sources(self) -> int:
        """Take what is there; the bytes that stay."""
        parameters = 0
        for source in self.graph.sources:
            size = self.size(source.value.layout)
            if source.kind != "input":
                parameters += size
            self.hold(source.value.name, [self.new(size if source.kind == "input" else 0)])
        return parameters

    def behind(self) -> int:
        """What is live between forward and backward."""
        self.sources()
        runs = (at for at, do in enumerate(self.plan.todo) if do.what == "run" and " again " not in do.writes[0])
        last = max(runs, default=-1)
        for do in self.plan.todo[: last + 2]:
            if do.what in ("run", "draw", "box", "free"):
                self.do(do)
        return self.live

    def peak(self) -> Memory:
        parameters = self.sources()
        for do in self.plan.todo:
            self.do(do)
        gradients = sum(self.size(self.plan.layouts[register]) for register in self.plan.grads.values())
        return Memory(parameters, gradients, max(self.most - gradients, 0))

    def size(self, layout: Layout) -> int:
        """Bytes that the rank holds of a tensor."""
        if self.rank not in layout.placement:
            return 0
        numel = 1
        for n in layout.local_shape(self.rank):
            numel *= n
        return numel * layout.dtype.itemsize

    def new(self, nbytes: int) -> int:
        storage = next(self.fresh)
        self.bytes[storage] = nbytes
        return storage

    def hold(self, register: str, storages: Iterable[int]) -> None:
        held = tuple(storages)
        for storage in held:
            self.uses[storage] += 1
            if self.uses[storage] == 1:
                self.live += self.bytes[storage]
        self.drop(register)
        self.held[register] = held
        self.most = max(self.most, self.live)

    def drop(self, register: str) -> None:
        for storage in self.held.pop(register, ()):
            self.uses[storage] -= 1
            if not self.uses[storage]:
                self.live -= self.bytes[storage]

    def passing(self, nbytes: int) -> None:
        """Bytes that are live for a moment."""
        self.most = max(self.most, self.live + nbytes)

    def do(self, do: Do) -> None:
        if do.what == "free":
            for register in do.reads:
                self.drop(register)
        elif do.what in ("run", "grad"):
            self.segment(do)
        elif do.what in ("box", "start"):
            self.move(do)
        elif do.what == "wait":
            held = self.held.get(do.reads[0], ())
            self.drop(do.reads[0])
            # What arrived stands behind what was sent.
            for register, storage in zip(do.writes, held[-len(do.writes) :], strict=False):
                self.hold(register, [storage])
        elif do.what == "add" and do.number > 2:
            pass  # in place
        else:
            for register in do.writes:
                layout = self.plan.layouts.get(register)  # none where a generator stood
                self.hold(register, [self.new(self.size(layout) if layout else 0)])

    def segment(self, do: Do) -> None:
        stage = self.stages[do.number]
        if do.number not in self.traced or not isinstance(stage, Segment):
            return
        made = self.traced[do.number]
        if made is None:
            for register in do.writes:
                if register in self.plan.layouts:
                    self.hold(register, [self.new(self.size(self.plan.layouts[register]))])
                else:
                    self.hold(register, [self.held[name][0] for name in (*do.reads, *do.writes[: len(stage.outputs)])])
        elif do.what == "run":
            given = [self.held[name][0] for name in do.reads]
            found = self.run(made.forward, given)
            for register, storage in zip(do.writes[: len(stage.outputs)], found, strict=False):
                self.hold(register, [storage])
            if f"saved {do.number}" in do.writes:
                self.hold(f"saved {do.number}", found[len(stage.outputs) :])
        else:
            assert made.backward is not None
            taken = (*do.reads[1 : 1 + len(made.again)], *do.reads[len(do.reads) - len(stage.returns) :])
            given = [*self.held[do.reads[0]], *(self.held[name][0] for name in taken)]
            for register, storage in zip(do.writes, self.run(made.backward, given), strict=True):
                self.hold(register, [storage])

    def run(self, module: fx.GraphModule, given: Sequence[int]) -> list[int]:
        inside = self.insides.get(module)
        if inside is None:
            inside = self.insides[module] = _inside(module)
        self.passing(inside.peak)
        made: dict[int, int] = {}
        found = []
        for view_of, name, nbytes in inside.results:
            if view_of is not None:
                found.append(given[view_of])
                continue
            if name not in made:
                made[name] = self.new(nbytes)
            found.append(made[name])
        return found

    def move(self, do: Do) -> None:
        transfer = self.plan.transfers[do.number]
        sources = [self.held[name][0] for name in do.reads[-len(transfer.pairs) :] if name in self.held]
        if len(transfer.pairs) > 1:
            packed = sum(self.size(src) for src, _ in transfer.pairs)
            whole = self.new(sum(self.size(dst) for _, dst in transfer.pairs))
            self.passing(packed + self.bytes[whole])
            arrived = [whole] * len(transfer.pairs)
        else:
            arrived = [self.arrives(transfer.plans[0], sources)]
        if do.what == "start":
            self.hold(do.writes[0], [*sources, *arrived])
            return
        for register, storage in zip(do.writes, arrived, strict=False):
            self.hold(register, [storage])

    def arrives(self, way: Plan, sources: Sequence[int]) -> int:
        """The storage of what a move brings: that of what was there where it is a view."""
        local = all(move.kind in LOCAL for move in way.moves)
        if sources and local and self.rank in way.src.placement and self.rank in way.dst.placement:
            programs = way.programs(self.rank)
            if all(program.view for parts in programs for program in parts):
                return sources[0]
        return self.new(self.size(way.dst))
