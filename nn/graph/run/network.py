"""Lowering: tasks as actors, what they hand on as registers, with the marks of a schedule.

The skeleton is the schedule's own pipeline: F, B and W of every chunk, and between them act, stash, gw, x and dy. What
tasks hand on lies in these registers where they join the two, and in registers of its own where they do not: skip
connections, and what a far chunk's backward reads. A register that nothing lies in is a token.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ....actors.protocol.network import Actor, Give, Network, Register, Take
from ....actors.schedules.chunk_ends import ChunkEnd, Folding, ended
from ....actors.schedules.definition import Shape
from ....actors.schedules.pipeline import Costs, parts, together
from ....actors.schedules.schedule import Schedule
from ....placement.errors import ScheduleError
from ..lower.registers import LocalRegister
from ..microbatch.batch import PieceKind
from ..tasks.chunks import Chunks
from ..tasks.task import Hop, Name, Tasks
from .pairs import moving

__all__ = ["Bundle", "Ends", "Lowered", "links_of", "lowered", "shape_of", "skeleton", "task_actors"]


@dataclass(frozen=True)
class Ends:
    """The ends of chunks that a network has besides."""

    chunks: tuple[ChunkEnd, ...]
    folding: Folding
    validated: bool


@dataclass(frozen=True)
class Bundle:
    """The content of a register's slot: what its maker puts there, and what its reader finds. They differ by hops."""

    sent: tuple[LocalRegister, ...]
    come: tuple[LocalRegister, ...]
    hops: tuple[Hop, ...] = ()


@dataclass(frozen=True)
class Lowered:
    """The network, and for every task the registers in which it finds and leaves bundles."""

    network: Network
    bundles: Mapping[str, Bundle]
    takes: Mapping[Name, tuple[str, ...]]
    gives: Mapping[Name, tuple[str, ...]]


def shape_of(schedule: Schedule, where: Chunks, m: int, slices: int = 1) -> Shape:
    """The pipeline that chunks make, if the schedule has it."""
    count, groups = len(where.group), max(where.group) + 1
    if schedule.linear:
        return schedule.shape(count, m, n=slices)
    if schedule.way == "routes":
        shape = schedule.shape(groups, m)
        wanted = list(range(shape.p))  # the other route goes back over the same
    else:
        least = schedule.v if schedule.way == "vee" else 1  # there and back are two at least
        shape = schedule.shape(groups, m, v=max(least, count // groups))
        wanted = [schedule.device(shape, chunk) for chunk in range(shape.p * shape.v)]
    if list(where.group) != wanted:
        ranks = ["ranks " + ",".join(map(str, where.ranks(group))) for group in range(groups)]
        raise ScheduleError(
            f"schedule {schedule.name} wants {len(wanted)} chunks of layers, on {', '.join(_names(ranks, wanted))}\n"
            f"  as they are placed, there are {count}: {', '.join(_names(ranks, where.group))}\n"
            "  place layers so by flow.nn.place(layer, placement), or take '1f1b', which runs on any"
        )
    return shape


def _names(ranks: list[str], groups: list[int] | tuple[int, ...]) -> list[str]:
    return [ranks[group] for group in groups]


def lowered(
    kinds: Mapping[PieceKind, Sequence[tuple[Tasks, Chunks]]],
    schedule: Schedule,
    m: int,
    name: str,
    slices: int = 1,
    ends: Ends | None = None,
    *,
    late: bool = False,
) -> dict[PieceKind, Lowered]:
    """The network of a step of m micro-batches, each in so many slices, and what lies in its registers for each kind.
    With a `late` end all of them go forward through the last chunk before one goes back.

    Micro-batches take the routes by turns, if there are several; chunks are numbered route by route.
    """
    routes = next(iter(kinds.values()))
    tasks, where = routes[0]
    trains = any(task.kind == "B" for task in tasks.tasks)
    count = len(where.group)
    inside = moving(kinds.values())
    actors, registers = skeleton(schedule, [of for _, of in routes], m, slices, trains, inside)
    if late:
        actors, registers = _waiting(actors, registers, count - 1, m)
    if ends is not None:
        actors, registers = ended(actors, registers, ends.chunks, ends.folding, validated=ends.validated)
    shape = shape_of(schedule, where, m, slices) if trains else None
    made = _Lowering(actors, registers, m * slices, slices if trains else 1, schedule, shape)
    for kind, each in kinds.items():
        made.bundles.setdefault(kind, {})  # one chunk that only goes forward hands nothing on
        for route, (tasks, of) in enumerate(each):
            if of.group != routes[route][1].group:
                first = _told(next(iter(kinds)))
                raise ScheduleError(
                    f"{name}: micro-batches of {_told(kind)} run in other chunks than those of {first}\n"
                    "  pass a batch whose samples micro_batches= divides, and whose tokens slices= does"
                )
            made.route(kind, tasks, route * count)
    many = f"{m} micro-batches" + (f" of {slices} slices" if slices > 1 else "")
    return made.done(f"{name}, {schedule.name}, {many}" if trains else f"{name}, {many}")


def _waiting(
    actors: list[Actor], registers: list[Register], chunk: int, many: int
) -> tuple[list[Actor], list[Register]]:
    """The same, where the backward of a chunk waits for the forward of all micro-batches, by tokens."""
    name = f"all forward.{chunk}"
    last = Take(name, slots=many, every=many)
    more: dict[str, Callable[[Actor], Actor]] = {
        f"F{chunk}": lambda actor: replace(actor, gives=(*actor.gives, Give(name))),
        f"B{chunk}": lambda actor: replace(actor, takes=(*actor.takes, last)),
    }
    made = [more[actor.name](actor) if actor.name in more else actor for actor in actors]
    return made, [*registers, Register(name, many)]


def skeleton(
    schedule: Schedule,
    routes: Sequence[Chunks],
    m: int,
    slices: int,
    trains: bool,
    inside: Collection[str],
    costs: Sequence[Costs] = (),
) -> tuple[list[Actor], list[Register]]:
    """The actors of m micro-batches and the registers between them; `costs` are of each chunk of all routes.

    `inside` has the tasks with moves inside. Of two that an order joins one has some, or they run one behind the other:
    nothing would be hidden, and the forward be handed on later.
    """
    where = routes[0]
    costs = costs or [Costs()] * sum(len(of.group) for of in routes)
    if not trains:
        return _forward(where, m * slices, costs)
    queues = [f"device {group}" for of in routes for group in _groups(where, of)]
    return _training(schedule, shape_of(schedule, where, m, slices), queues, costs, inside)


def links_of(ranks: Mapping[str, tuple[int, ...]], network: Network) -> dict[str, tuple[int, ...]]:
    """The ranks of the queues beside those of devices."""
    links = ((Folding().queue(device), of) for device, of in ranks.items())
    return {link: of for link, of in links if link in network.queues}


def _groups(first: Chunks, of: Chunks) -> list[int]:
    """The groups of a route's chunks, as the first route numbers them."""
    number = {frozenset(first.ranks(group)): group for group in first.group}
    return [number[frozenset(of.ranks(group))] for group in of.group]


def _told(kind: PieceKind) -> str:
    return " of ".join(f"{n} {what}" for n, what in zip(kind.sizes, ("samples", "tokens"), strict=False))


def _training(
    schedule: Schedule, shape: Shape, queues: Sequence[str], costs: Sequence[Costs], inside: Collection[str]
) -> tuple[list[Actor], list[Register]]:
    actors, registers = parts(schedule, shape, costs)
    actors = together(schedule, shape, actors, costs, lambda *pair: not set(inside).isdisjoint(pair))
    known = {f"{kind}{chunk}": queue for chunk, queue in enumerate(queues) for kind in "FBWU"}
    return [replace(actor, queue=known.get(actor.name, actor.queue)) for actor in actors], registers


def _forward(where: Chunks, m: int, costs: Sequence[Costs]) -> tuple[list[Actor], list[Register]]:
    """An inference: chunks behind each other, with two slots between them."""
    actors, registers = [], []
    count = len(where.group)
    for chunk, group in enumerate(where.group):
        takes = (Take(f"x.{chunk}"),) if chunk else ()
        gives = (Give(f"x.{chunk + 1}"),) if chunk < count - 1 else ()
        firings = 0 if chunk else m
        seconds = costs[chunk].forward + costs[chunk].exchange
        actors.append(Actor(f"F{chunk}", f"device {group}", takes, gives, firings, seconds, place=-chunk))
        registers += [Register(f"x.{chunk}", 2, delay=costs[chunk - 1].hop)] if chunk else []
    return actors, registers


def task_actors(actors: Iterable[Actor]) -> dict[str, str]:
    """The actor of each task, by the task's name; slices of a sequence are one task."""
    return {(part or actor.name).partition(".")[0]: actor.name for actor in actors for part in actor.parts}


class _Lowering:
    def __init__(
        self,
        actors: list[Actor],
        registers: list[Register],
        many: int,
        slices: int,
        schedule: Schedule,
        shape: Shape | None,
    ) -> None:
        self.many, self.slices, self.schedule, self.shape = many, slices, schedule, shape
        self.actors = {actor.name: actor for actor in actors}
        self.registers = {register.name: register for register in registers}
        self.of = task_actors(actors)
        self.bundles: dict[PieceKind, dict[str, Bundle]] = defaultdict(dict)
        self.takes: dict[PieceKind, dict[Name, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.gives: dict[PieceKind, dict[Name, list[str]]] = defaultdict(lambda: defaultdict(list))

    def route(self, kind: PieceKind, tasks: Tasks, shift: int) -> None:
        """Registers between the tasks of one kind and route; their chunks are numbered from `shift` on."""
        for (maker, reader), held in tasks.edges.items():
            self.join(kind, maker.shifted(shift), reader.shifted(shift), held, ())
        hops: dict[tuple[Name, Name], list[Hop]] = defaultdict(list)
        for hop in tasks.hops:
            hops[hop.source.shifted(shift), hop.target.shifted(shift)].append(hop)
        for (source, target), listed in hops.items():
            self.join(kind, source, target, (), tuple(listed))

    def join(
        self, kind: PieceKind, maker: Name, reader: Name, held: tuple[LocalRegister, ...], hops: tuple[Hop, ...]
    ) -> None:
        """Joins two tasks by what one hands to the other, in the skeleton's register or in one of its own.

        Backward goes from the last slice of a sequence to the first: what it has of forward lies in one for each.
        """
        base = _skeleton(maker, reader)
        if base not in self.registers:
            base = f"{maker}-{reader}"
        back = maker.kind == "F" != reader.kind
        for lane in range(self.slices) if back and self.slices > 1 else [None]:
            self.lay(kind, base if lane is None else f"{base}.{lane}", (maker, reader), lane, held, hops)

    def lay(
        self,
        kind: PieceKind,
        name: str,
        ends: tuple[Name, Name],
        lane: int | None,
        held: tuple[LocalRegister, ...],
        hops: tuple[Hop, ...],
    ) -> None:
        """A register between two tasks, or between their cases for one slice of each sequence, and its bundle."""
        if name not in self.registers:
            self.more(name, *ends, lane)
        if hops:
            moved = sum(hop.pair[1].numel * hop.pair[1].dtype.itemsize for hop in hops)
            self.registers[name] = replace(self.registers[name], bytes=max(moved, self.registers[name].bytes))
        sent = (*held, *(hop.sent for hop in hops))
        come = (*held, *(hop.come for hop in hops))
        self.bundles[kind][name] = Bundle(sent, come, hops)
        for of, end in zip((self.gives, self.takes), ends, strict=True):
            of[kind][end].append(name)

    def more(self, name: str, maker: Name, reader: Name, lane: int | None) -> None:
        """A register that the skeleton lacks, with a slot for every micro-batch."""
        self.registers[name] = Register(name, self.many)
        skips = self.schedule.skips(self.shape, str(maker), str(reader)) if self.shape is not None else ()
        give, take = Give(name, case=self.case(maker, lane)), Take(name, case=self.case(reader, lane), skips=skips)
        actor = self.actors[self.of[str(maker)]]
        self.actors[actor.name] = replace(actor, gives=(*actor.gives, give))
        actor = self.actors[self.of[str(reader)]]
        self.actors[actor.name] = replace(actor, takes=(*actor.takes, take))

    def case(self, task: Name, lane: int | None) -> str:
        """Of an actor that has several."""
        if self.slices > 1:
            return "" if lane is None else f"{task}.{lane}"
        return str(task) if self.actors[self.of[str(task)]].sequence else ""

    def done(self, name: str) -> dict[PieceKind, Lowered]:
        network = Network(tuple(self.actors.values()), tuple(self.registers.values()), name)

        def listed(ports: Mapping[Name, list[str]]) -> dict[Name, tuple[str, ...]]:
            return {task: tuple(names) for task, names in ports.items()}

        return {
            kind: Lowered(network, bundles, listed(self.takes[kind]), listed(self.gives[kind]))
            for kind, bundles in self.bundles.items()
        }


def _skeleton(maker: Name, reader: Name) -> str:
    """The register of the schedule's pipeline that joins two tasks, as it would be called."""
    match maker.kind + reader.kind, reader.chunk - maker.chunk:
        case "FB", 0:
            return f"act.{maker.chunk}"
        case "FW", 0:
            return f"stash.{maker.chunk}"
        case "BW", 0:
            return f"gw.{maker.chunk}"
        case "FF", 1:
            return f"x.{reader.chunk}"
        case "BB", -1:
            return f"dy.{reader.chunk}"
    return ""
