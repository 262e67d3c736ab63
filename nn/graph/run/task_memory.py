"""The memory of a micro-batch's tasks on a rank: what each takes while it runs, and what a chunk keeps between two."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from ....sbp.logical import OffloadPlace
from ..instructions.instruction import Instruction, Storages
from ..instructions.moves import MoveInstruction, Pause
from ..instructions.offload import offloads
from ..instructions.overlap import freed, overlapped
from ..lower.equal_ranks import equal_ranks
from ..lower.segments import kept, made_by
from ..memory.liveness import RankMemory, TaskMemory, inside_of_rank, run
from ..tasks.task import Name, Tasks
from ..tasks.tasks import tasks
from .variant import Variant

__all__ = ["ChunkMemory", "RouteMemory", "host_copies", "memory_of_tasks"]

Again: TypeAlias = Mapping[int, tuple[str, ...]]  # by stage, the inputs that its backward takes once more


@dataclass(frozen=True)
class ChunkMemory:
    """Bytes of a chunk on a rank. A micro-batch under way keeps so many for its backward, by place, and `results` stay
    of each. Tasks take `passing` ones beside that while they run, by kind, and `sums` of gradients are there from the
    first backward on, which takes `first` with those that it makes. `fullest` is the segment that ran when a task took
    most."""

    kept: Mapping[OffloadPlace | None, int]
    results: int
    passing: Mapping[str, int]
    sums: int
    first: int
    fullest: int


@dataclass(frozen=True)
class RouteMemory:
    """The memory of equal ranks on a route: of their chunks by number, of what is made `once` and stays, and of what is
    there `after` all micro-batches. Each of a value that `stays` is counted with what its chunk keeps."""

    chunks: Mapping[int, ChunkMemory]
    once: int
    after: int
    gradients: int
    stays: frozenset[str]
    storages: Storages

    def told(self, activations: int, fullest: int) -> RankMemory:
        return RankMemory.of(self.storages, self.gradients, activations, fullest)


def memory_of_tasks(variant: Variant, shift: int, *, regather: bool) -> Iterator[tuple[list[int], RouteMemory]]:
    """The memory of each group of equal ranks; their chunks are numbered from `shift` on.

    Tasks are made as these ranks have them, which may be of another process. The halves of a backward are one here, and
    what a bucket is packed into, which is kept from step to step, is not of this one.
    """
    stages, where = variant.stages, variant.where
    graph = replace(variant.graph, backs=tuple(replace(back, bucket=None) for back in variant.graph.backs))
    groups = equal_ranks(graph)
    inside = [inside_of_rank(stages, variant.localiser, ranks[0]) for ranks in groups]
    for numbers, again in _together([again for _, again in inside]):
        made = tasks(graph, stages, where, again, apart=None, regather=regather)
        ends = _Ends.of(made)
        for ranks, (traced, _) in ((groups[number], inside[number]) for number in numbers):
            storages = Storages(graph, stages, made.layouts, made.transfers, traced, ranks[0])
            for n in sorted(where.given):
                for name in made_by(stages[n]):
                    storages.take(name)
            stay = {*storages.held, *kept(graph), *(y for do in made.before for y in do.writes)}
            mine = [chunk for chunk, group in enumerate(where.group) if ranks[0] in where.ranks(group)]
            yield ranks, _of_route(made, ends, storages, mine, stay, shift)


def host_copies(variant: Variant, *, regather: bool) -> Mapping[int, Mapping[OffloadPlace, int]]:
    """The bytes of a micro-batch that each chunk sends to the host or the disk, on the rank that sends most; none where
    nothing is offloaded."""
    found: dict[int, dict[OffloadPlace, int]] = {}
    if not offloads(variant.stages):
        return found
    for _, route in memory_of_tasks(variant, 0, regather=regather):
        for chunk, memory in route.chunks.items():
            mine = found.setdefault(chunk, {})
            for place, size in memory.kept.items():
                if place is not None:
                    mine[place] = max(size, mine.get(place, 0))
    return found


def _together(wanted: Sequence[Again]) -> list[tuple[list[int], Again]]:
    """Groups of ranks, by number, that have the same tasks wherever two of them run one stage, and what their backwards
    take again. Of a pipeline each stage has other ranks, and the tasks of all are made once."""
    made: list[tuple[list[int], dict[int, tuple[str, ...]]]] = []
    for number, mine in enumerate(wanted):
        fitting = (one for one in made if all(one[1].get(n, names) == names for n, names in mine.items()))
        numbers, again = next(fitting, ([], {}))
        if not numbers:
            made.append((numbers, again))
        numbers.append(number)
        again.update(mine)
    return [(numbers, again) for numbers, again in made]


class _Ends(NamedTuple):
    """The work of all ranks before and behind all micro-batches, listed once. A pipeline moves weights and
    gradients of all layers, of which a rank takes part in those of its stage."""

    before: Sequence[Instruction]
    after: Sequence[Instruction]

    @classmethod
    def of(cls, made: Tasks) -> "_Ends":
        stay = {*made.grads.values(), *made.sums.values()}
        after = freed(overlapped(made.after, made.transfers), stay)
        return cls(overlapped(made.before, made.transfers), list(after))


def _takes_part(do: Instruction, memory: Storages) -> bool:
    """Whether a rank sends or gets something by this."""
    if not isinstance(do, MoveInstruction):
        return True
    return any(memory.rank in of.placement for pair in memory.transfers[do.number].pairs for of in pair)


def _of_route(
    made: Tasks, ends: _Ends, storages: Storages, mine: Sequence[int], stay: set[str], shift: int
) -> RouteMemory:
    given = storages.live[None]
    once = run((do for do in ends.before if _takes_part(do, storages)), storages).left[None]
    names = [Name("F", chunk) for chunk in mine]
    names += [name for chunk in reversed(mine) if (name := Name("B", chunk)) in made.tasks]
    done: dict[Name, TaskMemory] = {}
    stays: frozenset[str] = frozenset()
    for name, todo in zip(names, _parts(made, names, stay), strict=True):
        done[name] = run(todo, storages)
        if name.kind == "F":
            stays = frozenset(x for x, held in storages.first.items() if any(storages.uses[of] for of in held))
    storages.live[None] = 0  # behind all micro-batches; what is left of one is counted already
    slots: dict[int, int] = {}  # bytes of sums, by the chunk that has them first
    for chunk in reversed(mine):
        before, task = storages.live[None], made.tasks.get(Name("B", chunk))
        for slot in dict.fromkeys(made.sums[part] for part in task.sums) if task else ():
            storages.take(slot)
        slots[chunk] = storages.live[None] - before
    sums = storages.live[None]
    homeward = run((do for do in ends.after if _takes_part(do, storages)), storages)
    gradients = sum(storages.size(made.layouts[register]) for register in made.grads.values())
    chunks = {}
    for chunk in mine:
        ahead, back = (done.get(Name(kind, chunk), TaskMemory()) for kind in ("F", "B"))
        results = ahead.left[None] + back.left[None]
        own = ahead.left[None] - results + (given if chunk == mine[0] else 0)
        passing = {"F": ahead.peak - ahead.left[None], "B": back.peak, "W": back.peak}
        passing["U"] = homeward.peak * slots[chunk] // max(1, sums)
        fullest = max(ahead, back, key=lambda one: one.peak - max(0, one.left[None])).fullest
        chunks[chunk + shift] = ChunkMemory(
            {**ahead.left, None: own}, results, passing, slots[chunk], back.first, fullest
        )
    return RouteMemory(chunks, once, sums + homeward.peak, gradients, stays, storages)


def _parts(made: Tasks, names: Sequence[Name], stay: set[str]) -> list[list[Instruction]]:
    """The work of each task, one behind the other: values are freed behind their last use by any of them. What came for
    a task is there when it begins, and what it hands on until it has ended."""
    todo: list[Instruction] = []
    for number, name in enumerate(names):
        come = [hop.come for hop in made.hops if hop.target == name]
        sent = [hop.sent for hop in made.hops if hop.source == name]
        todo.append(Pause(number, (), tuple(come)))
        todo += overlapped(made.tasks[name].todo, made.transfers)
        todo.append(Pause(-1, tuple(sent)))
    parts: list[list[Instruction]] = []
    for do in freed(todo, stay):
        if isinstance(do, Pause) and do.number >= 0:
            parts.append([])
        parts[-1].append(do)
    return parts
