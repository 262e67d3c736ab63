"""Memory: the bytes that a step takes at its peak on a rank, from when values are made and let go.

What is counted is storages, so that a view costs nothing and a value in two registers counts once. Inside a segment the
traced graph says what is made, or an estimate where none can be traced; what kernels take for themselves while they run
is not seen.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple

from ....boxing.graph.physical import Physical
from ....boxing.plan import BoxingPlan, plan
from ....sbp import Layout
from ....sbp.logical import OffloadPlace
from ..compiler.inside import Estimate, Insides, SegmentBytes, insides
from ..lower.instructions import Instruction
from ..lower.localise import Localiser
from ..lower.offload import offload_of
from ..lower.order import Order, schedule
from ..lower.segments import Segment, Stage
from .equal_ranks import equal_ranks

__all__ = ["Kept", "RankMemory", "bytes_on", "kept", "memory"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. Parameters are those of all sources but inputs; activations what is live beside parameters
    and gradients when most is. `estimates` has of each segment that could not be traced the reason, and `moment` the
    values of the segment that runs when most is live. What is offloaded is `host` bytes of memory and `disk` bytes of
    files instead, and so many bytes are `stowed` in these in a step. Beside that stand `means` of late updates, which
    stay from step to step as an optimizer's states do."""

    parameters: int
    gradients: int
    activations: int
    estimates: tuple[str, ...] = ()
    moment: tuple[str, ...] = ()
    host: int = 0
    disk: int = 0
    stowed: tuple[int, int] = (0, 0)
    means: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.activations


def bytes_on(of: Layout, rank: int) -> int:
    """The bytes of a rank's shard of what lies so."""
    size = of.dtype.itemsize if rank in of.placement else 0
    for n in of.local_shape(rank) if size else ():
        size *= n
    return size


def memory(
    graph: Physical,
    stages: Sequence[Stage],
    localiser: Localiser,
    *,
    regather: bool = True,
    overlap: bool | None = None,
    apart: bool = False,
) -> dict[int, RankMemory]:
    """The peak of every rank of the graph; equal ranks are worked out once. `apart`: of a micro-batch of a pipeline."""
    found = _ranks(graph, stages, localiser, regather, overlap, apart)
    peaks = [(ranks, made.peak()) for ranks, made in found]
    return dict(sorted((rank, peak) for ranks, peak in peaks for rank in ranks))


class Kept(NamedTuple):
    """Memory left for the backward on a rank: bytes beside parameters, and values whose memory it is."""

    bytes: int
    values: frozenset[str]


def kept(graph: Physical, stages: Sequence[Stage], localiser: Localiser, *, regather: bool = True) -> dict[int, Kept]:
    """The memory that every rank keeps of a micro-batch from forward to backward."""
    left = [(ranks, made.behind()) for ranks, made in _ranks(graph, stages, localiser, regather, False, True)]
    return dict(sorted((rank, behind) for ranks, behind in left for rank in ranks))


def _ranks(
    graph: Physical, stages: Sequence[Stage], localiser: Localiser, regather: bool, overlap: bool | None, apart: bool
) -> "Iterator[tuple[list[int], _Rank]]":
    """Equal ranks, and the first of them."""
    for ranks in equal_ranks(graph):
        rank, traced = ranks[0], {}
        for number, stage in enumerate(stages):
            if isinstance(stage, Segment) and rank in stage.placement:
                traced[number] = insides(localiser.segment(stage, rank))
        again = {
            n: tuple(stages[n].inputs[at] for at in made.again)
            for n, made in traced.items()
            if isinstance(made, Insides)
        }
        plan = schedule(graph, stages, again, regather=regather, overlap=overlap, apart=apart)
        yield ranks, _Rank(graph, stages, plan, traced, rank)


def _ends_forward(do: Instruction) -> bool:
    return do.what in ("free", "stow")


class _Rank:
    """Runs a schedule for one rank with storages in the place of tensors."""

    def __init__(
        self,
        graph: Physical,
        stages: Sequence[Stage],
        plan: Order,
        traced: Mapping[int, Insides | Estimate],
        rank: int,
    ) -> None:
        self.graph, self.stages, self.plan, self.traced, self.rank = graph, stages, plan, traced, rank
        self.fresh = count()
        self.bytes: dict[int, int] = {}
        self.held: dict[str, tuple[int, ...]] = {}
        self.first: dict[str, tuple[int, ...]] = {}  # of each register, where it first lay
        self.uses: Counter[int] = Counter()
        self.live = self.most = 0
        self.host: dict[int, OffloadPlace] = {}  # storages that are no memory of the device
        self.copies: dict[int, int] = {}  # of storages, there
        self.there: Counter[str] = Counter()
        self.stowed: Counter[str] = Counter()
        self.fullest_host: Counter[str] = Counter()
        self.last = self.fullest = -1  # the segment that ran last, and the one when most was live

    def sources(self) -> int:
        """Take what is there; the bytes that stay."""
        parameters = 0
        for source in self.graph.sources:
            size = self.size(source.value.layout)
            if source.kind != "input":
                parameters += size
            self.hold(source.value.name, [self.new(size if source.kind == "input" else 0)])
        return parameters

    def behind(self) -> Kept:
        """The values that are live between forward and backward."""
        self.sources()
        # What a backward runs again writes that, or nothing where only its own backward reads what it keeps.
        forward = (do.what == "run" and do.writes and do.writes[0].kind != "again" for do in self.plan.todo)
        runs = (at for at, run in enumerate(forward) if run)
        last = max(runs, default=-1)
        for do in (*self.plan.todo[: last + 1], *takewhile(_ends_forward, self.plan.todo[last + 1 :])):
            if do.what in ("run", "draw", "box", "free", "stow"):
                self.do(do)
        values = frozenset(name for name, held in self.first.items() if any(self.uses[storage] for storage in held))
        return Kept(self.live, values)

    def peak(self) -> RankMemory:
        parameters = self.sources()
        for do in self.plan.todo:
            before = self.most
            self.do(do)
            if do.what in ("run", "grad"):
                self.last = do.number
            if self.most > before:
                self.fullest = self.last
        gradients = sum(self.size(self.plan.layouts[register]) for register in self.plan.grads.values())
        estimates = tuple(made.reason for made in self.traced.values() if isinstance(made, Estimate))
        full = self.stages[self.fullest] if self.fullest >= 0 else None
        moment = tuple(y.name for op in full.ops for y in op.outputs) if isinstance(full, Segment) else ()
        host, disk = self.fullest_host["cpu"], self.fullest_host["disk"]
        stowed = self.stowed["cpu"], self.stowed["disk"]
        return RankMemory(parameters, gradients, max(self.most - gradients, 0), estimates, moment, host, disk, stowed)

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
                self.count(storage, self.bytes[storage])
        self.drop(register)
        self.held[register] = held
        self.first.setdefault(register, held)
        self.most = max(self.most, self.live)

    def drop(self, register: str) -> None:
        for storage in self.held.pop(register, ()):
            self.uses[storage] -= 1
            if not self.uses[storage]:
                self.count(storage, -self.bytes[storage])

    def count(self, storage: int, nbytes: int) -> None:
        to = self.host.get(storage)
        if to is None:
            self.live += nbytes
        else:
            self.there[to] += nbytes
            self.fullest_host[to] = max(self.fullest_host[to], self.there[to])

    def passing(self, nbytes: int) -> None:
        """Bytes that are live for a moment."""
        self.most = max(self.most, self.live + nbytes)

    def do(self, do: Instruction) -> None:
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
        elif do.what == "stow":
            self.stow(do)
        elif do.what == "fetch":
            self.hold(do.writes[0], [self.new(self.bytes[storage]) for storage in self.held.get(do.reads[0], ())])
        elif do.what == "land":
            self.hold(do.writes[0], self.held.get(do.reads[0], ()))
            self.drop(do.reads[0])
        elif do.what == "add" and do.number > 2:
            pass  # in place
        else:
            for register in do.writes:
                layout = self.plan.layouts.get(register)  # none where a generator stood
                self.hold(register, [self.new(self.size(layout) if layout else 0)])

    def stow(self, do: Instruction) -> None:
        """Copies on the host; one that is there already serves again."""
        said = offload_of(self.stages[do.number])
        assert said is not None
        found = []
        for storage in self.held.get(do.reads[0], ()):
            there = self.copies.get(storage)
            if there is None or not self.uses[there]:
                there = self.copies[storage] = self.new(self.bytes[storage])
                self.host[there] = said.to
                self.stowed[said.to] += self.bytes[storage]
            found.append(there)
        self.hold(do.writes[0], found)

    def segment(self, do: Instruction) -> None:
        stage = self.stages[do.number]
        if do.number not in self.traced or not isinstance(stage, Segment):
            return
        made = self.traced[do.number]
        if isinstance(made, Estimate):
            self.passing(made.forward if do.what == "run" else made.backward)
            for register in do.writes:
                if register in self.plan.layouts:
                    self.hold(register, [self.new(self.size(self.plan.layouts[register]))])
                else:
                    there = [self.held[name][0] for name in (*do.reads, *do.writes[: len(stage.outputs)])]
                    self.hold(register, [*there, self.new(made.kept)])
        elif do.what == "run":
            given = [self.held[name][0] for name in do.reads]
            found = self.run(made.forward, given)
            for register, storage in zip(do.writes[: len(stage.outputs)], found, strict=False):
                self.hold(register, [storage])
            for register in do.writes[len(stage.outputs) :]:  # what it saved
                self.hold(register, found[len(stage.outputs) :])
        else:
            assert made.backward is not None
            taken = (*do.reads[1 : 1 + len(made.again)], *do.reads[len(do.reads) - len(stage.returns) :])
            given = [*self.held[do.reads[0]], *(self.held[name][0] for name in taken)]
            for register, storage in zip(do.writes, self.run(made.backward, given), strict=True):
                self.hold(register, [storage])

    def run(self, inside: SegmentBytes, given: Sequence[int]) -> list[int]:
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

    def move(self, do: Instruction) -> None:
        transfer = self.plan.transfers[do.number]
        sources = [self.held[name][0] for name in do.reads[-len(transfer.pairs) :] if name in self.held]
        if len(transfer.pairs) > 1:
            packed = sum(self.size(src) for src, _ in transfer.pairs)
            whole = self.new(sum(self.size(dst) for _, dst in transfer.pairs))
            self.passing(packed + self.bytes[whole])
            arrived = [whole] * len(transfer.pairs)
        else:
            (pair,) = transfer.pairs
            own = transfer.encodings or transfer.is_cut_off(do.writes[0])
            arrived = [self.new(self.size(pair[1])) if own else self.arrives(plan(*pair), sources)]
        if do.what == "start":
            self.hold(do.writes[0], [*sources, *arrived])
            return
        for register, storage in zip(do.writes, arrived, strict=False):
            self.hold(register, [storage])

    def arrives(self, way: BoxingPlan, sources: Sequence[int]) -> int:
        """The storage of what a move brings: that of what was there where it is a view."""
        return sources[0] if sources and way.is_view(self.rank) else self.new(self.size(way.dst))
