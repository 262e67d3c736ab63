"""The network of a pipeline under a schedule: F, B and W of every chunk, and the registers between them.

    x.c     F of the chunk before -> F of c        dy.c   B of the chunk behind -> B of c
    act.c   F -> B                                 stash.c, gw.c   F -> W and B -> W, where W is apart
    w.c     the weights in several versions, from U of c, which has the gradients g.c from the last part of c; weights
            that are read unpinned are in none
    loss.r  a token from the end of route r to the start of the other one

An actor that does several things on a device, in turn or in an order, has the cases F0, B0, ... of its chunks; without
one every chunk has its own actors, of these names.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import inf

from ...placement.errors import ScheduleError
from ..protocol.network import Actor, Give, Network, Register, Take
from .chunk_ends import ChunkEnd, Folding, ended
from .definition import Definition, Marks, Shape

__all__ = ["Chunk", "Costs", "chunks", "network_of", "on_devices", "parts", "together", "version"]

UPDATE = -1  # before anything else on its device: others wait for it


@dataclass(frozen=True)
class Costs:
    """The costs of one chunk: the time of each part and of a hop, and the size of an activation. A hop goes to the next
    chunk or back. Once a step come the times to run its optimizer, gather its weights, and bring its gradients home.

    Of its `bytes` those that are `freed` go with B where W is apart, and the rest with W. F and B `exchange` for so
    long with other devices of their stage, as experts do: before and behind what they compute, or under what another
    task computes with which they run together.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    hop: float = 0.0
    bytes: int = 0
    update: float = 0.0
    freed: int = 0
    exchange: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if not 0 <= given < inf:
                raise ScheduleError(
                    f"Costs({field.name}={given})\n  give what it takes, a number of 0 or more that has an end"
                )
        if self.freed > self.bytes:
            raise ScheduleError(
                f"Costs(bytes={self.bytes}, freed={self.freed})\n"
                f"  B frees no more than there is: give freed={self.bytes}, or less"
            )


@dataclass(frozen=True)
class Chunk:
    """One chunk of a route: `place` is its position on it, `last` that of the last; chunk `number - 1` is before it."""

    number: int
    device: int
    route: int
    place: int
    last: int
    firings: int
    marks: Marks
    costs: Costs

    @property
    def queue(self) -> str:
        return f"device {self.device}"


def network_of(
    schedule: Definition,
    shape: Shape,
    costs: Costs | Sequence[Costs] = Costs(),
    overlap: Folding | None = None,
    *,
    validated: bool = False,
) -> Network:
    """The network of the schedule for one step; costs are those of every chunk, or of each. With `overlap` it has what
    these say is done once a step, and `validated` has optimizers step before all is known of all gradients."""
    actors, registers = parts(schedule, shape, costs)
    actors = together(schedule, shape, actors, costs)
    if overlap is not None:
        actors, registers = ended(actors, registers, _ends(schedule, shape, costs), overlap, validated=validated)
    name = (
        f"{schedule.name} p={shape.p} m={shape.m}" + f" v={shape.v}" * (shape.v > 1) + f" n={shape.n}" * (shape.n > 1)
    )
    return Network(tuple(actors), tuple(registers), name)


def on_devices(network: Network, devices: Sequence[int]) -> Network:
    """The network of a linear schedule with its chunks, each of which is a stage of its own, on these devices."""
    queues = {f"device {chunk}": f"device {device}" for chunk, device in enumerate(devices)}
    near = {chunk for chunk in range(1, len(devices)) if devices[chunk - 1] == devices[chunk]}
    inside = {f"x.{chunk}" for chunk in near} | {f"dy.{chunk - 1}" for chunk in near}  # nothing hops there
    actors = (replace(actor, queue=queues.get(actor.queue, actor.queue)) for actor in network.actors)
    registers = (replace(each, delay=0.0) if each.name in inside else each for each in network.registers)
    return replace(network, actors=tuple(actors), registers=tuple(registers))


def _ends(schedule: Definition, shape: Shape, costs: Costs | Sequence[Costs]) -> list[ChunkEnd]:
    """The ends of chunks, as their costs say; optimizers of weights in versions are there already."""
    found = []
    for chunk in chunks(schedule, shape, costs):
        of = chunk.costs
        steps = bool(of.update) and schedule.synchronous
        reduce = of.reduce if of.reduce or steps else None
        update = of.update if steps else None
        found.append(ChunkEnd(chunk.number, chunk.firings, of.gather or None, reduce, update))
    return found


def parts(
    schedule: Definition, shape: Shape, costs: Costs | Sequence[Costs] = Costs()
) -> tuple[list[Actor], list[Register]]:
    """The actors and registers of that network, for one who has more to add before it is whole."""
    listed = chunks(schedule, shape, costs)
    actors: list[Actor] = []
    registers: list[Register] = []
    for chunk in listed:
        made, between = _Parts(schedule, shape, chunk, listed).make()
        actors += made
        registers += between
    if schedule.rows(shape):
        actors = _ordered(schedule, shape, actors)
    elif schedule.pool:
        actors, between = _in_turn(schedule, shape, listed, actors)
        registers += between
    return actors, registers


def chunks(schedule: Definition, shape: Shape, costs: Costs | Sequence[Costs] = Costs()) -> list[Chunk]:
    """All chunks with what they are to do, in the order of the model, route by route."""
    routes = schedule.routes(shape)
    total = shape.p * (shape.v if schedule.way != "routes" else routes)
    each = [costs] * total if isinstance(costs, Costs) else list(costs)
    if routes == 2 and len(each) == shape.p:
        each *= 2  # both routes go through the same layers
    each = each[:total]
    if len(each) < total:
        raise ScheduleError(
            f"{schedule.name}: costs of {len(each)} chunks for {total}\n  give one for each, or one for all"
        )
    long = shape.p if schedule.way == "routes" else total
    found = []
    for number, cost in enumerate(each):
        route, place = divmod(number, long)
        many = len(range(route, shape.m, routes)) * shape.n
        device, marks = schedule.device(shape, number), schedule.marks(shape, number)
        found.append(Chunk(number, device, route, place, long - 1, many, marks, cost))
    return found


def version(schedule: Definition, shape: Shape, chunk: int, number: int) -> int:
    """After how many updates are the weights that a micro-batch sees, forward and backward."""
    if schedule.synchronous:
        return 0
    if schedule.unpinned:
        raise ScheduleError(
            f"{schedule.name}: a micro-batch sees no one version of the weights, as nobody holds one for it\n"
            f"  see how late they are: {schedule.name}.delays(p, m)"
        )
    every = schedule.value(schedule.update, shape, chunk)
    return max(0, number // every - schedule.value(schedule.versions, shape, chunk) + 1)


class _Parts:
    """The actors of one chunk in the making, and the registers that they fill."""

    def __init__(self, schedule: Definition, shape: Shape, chunk: Chunk, listed: Sequence[Chunk]) -> None:
        self.schedule, self.shape, self.chunk = schedule, shape, chunk
        self.registers: list[Register] = []
        self.takes: dict[str, list[Take]] = {"F": [], "B": [], "W": []}
        self.gives: dict[str, list[Give]] = {"F": [], "B": [], "W": []}
        self.lanes = shape.n if schedule.slices and shape.n > 1 else 0
        before = listed[chunk.number - 1] if chunk.place else chunk
        self.hop = before.costs.hop if before.device != chunk.device else 0.0
        self.hop_behind = 0.0
        if chunk.place < chunk.last and listed[chunk.number + 1].device != chunk.device:
            self.hop_behind = chunk.costs.hop

    def make(self) -> tuple[list[Actor], list[Register]]:
        schedule, chunk = self.schedule, self.chunk
        c, marks, many = chunk.number, chunk.marks, chunk.firings
        versions = schedule.value(schedule.versions, self.shape, c) if schedule.versions else 0
        data = 0 if chunk.place else many
        if chunk.place:
            self.through(f"x.{c}", Register("", many, delay=self.hop), "", "F", self.taken(f"F{c - 1}", "F"))
            self.gives["B"].append(Give(f"dy.{c - 1}"))
        elif versions or schedule.turns or self.lanes or self.taken(f"D{c}", "F").skips:
            # What takes something else first would go by its numbers: here are those of the data.
            self.through(f"x.{c}", Register("", data, data), "", "F", self.taken(f"D{c}", "F"))
        self.activations()
        if chunk.place < chunk.last:
            self.gives["F"].append(Give(f"x.{c + 1}"))
            self.through(f"dy.{c}", Register("", many, delay=self.hop_behind), "", "B", self.taken(f"B{c + 1}", "B"))
        if schedule.lifo:
            self.through(f"all.{c}", Register("", many), "F", "B", Take("", slots=many, every=many))
        if schedule.split:
            self.through(f"gw.{c}", Register("", marks.dy), "B", "W", self.taken(f"B{c}", "W", marks.low_w))
        if schedule.turns and schedule.routes(self.shape) > 1:
            self.token()
        if versions:
            self.weights(versions)
        return list(self.actors()), self.registers

    def through(self, name: str, register: Register, src: str, dst: str, take: Take | None = None) -> None:
        self.registers.append(replace(register, name=name))
        if src:
            self.gives[src].append(Give(name))
        self.takes[dst].append(replace(take or Take(""), register=name))

    def taken(self, maker: str, user: str, low: int = 0) -> Take:
        """How a part of this chunk takes what another makes: that of the same micro-batch, whatever order they have."""
        return Take("", low=low, skips=self.schedule.skips(self.shape, maker, f"{user}{self.chunk.number}"))

    def activations(self) -> None:
        """Activations that F leaves for B and W. Slots are counted in one register; of slices, each has its own too,
        so that backward goes from the last of a sequence to the first."""
        c, marks, schedule = self.chunk.number, self.chunk.marks, self.schedule
        holder = "stash" if schedule.split else "act"
        for name, high, low, user in (("act", marks.act, marks.low_b, "B"), ("stash", marks.stash, 0, "W")):
            if user == "W" and not schedule.split:
                continue
            for lane in range(self.lanes):
                part = f"{name}.{c}.{lane}"
                self.registers.append(Register(part, min((high - 2) // self.lanes + 2, self.shape.m)))
                self.gives["F"].append(Give(part, case=f"F{c}.{lane}"))
                self.takes[user].append(Take(part, case=f"{user}{c}.{lane}"))
            held = self.chunk.costs.bytes if name == holder else 0
            take = replace(self.taken(f"F{c}", user, low), lifo=schedule.lifo)
            self.through(f"{name}.{c}", Register("", high, bytes=held), "F", user, take)

    def token(self) -> None:
        """The end of a route lets the other one begin."""
        route = self.chunk.route
        if self.chunk.place == self.chunk.last:
            self.gives["F"].append(Give(f"loss.{route}"))
        if not self.chunk.place:
            other = 1 - route
            self.through(f"loss.{other}", Register("", self.chunk.firings + 1, other), "", "F")

    def weights(self, versions: int) -> None:
        """Every micro-batch holds the weights that its forward had until its last part is done. Weights that are read
        unpinned are in no register: an update changes them as soon as it has gradients, whoever has read them."""
        c, every = self.chunk.number, self.schedule.value(self.schedule.update, self.shape, self.chunk.number)
        last = "W" if self.schedule.split else "B"
        self.registers.append(Register(f"g.{c}"))
        self.gives[last].append(Give(f"g.{c}", every=every))
        if self.schedule.unpinned:
            return
        self.registers.append(Register(f"w.{c}", versions, versions))
        for kind in ("F", "B", "W") if self.schedule.split else ("F", "B"):
            self.takes[kind].append(Take(f"w.{c}", every=every))

    def actors(self) -> Iterator[Actor]:
        schedule, shape, chunk = self.schedule, self.shape, self.chunk
        c, costs = chunk.number, chunk.costs
        group = schedule.value(schedule.group, shape, c) * shape.n
        unit = (
            max(1, schedule.value(schedule.unit, shape, c) * shape.n // schedule.routes(shape)) if schedule.unit else 0
        )
        place = chunk.place if schedule.way == "routes" else c
        times = {
            "F": costs.forward + costs.exchange,
            "B": costs.backward + costs.exchange + (0.0 if schedule.split else costs.weight),
            "W": costs.weight,
        }
        for kind in "FBW" if schedule.split else "FB":
            lanes = range(self.lanes)[:: 1 if kind == "F" else -1]
            yield Actor(
                f"{kind}{c}",
                chunk.queue,
                tuple(self.takes[kind]),
                tuple(self.gives[kind]),
                firings=chunk.firings if kind == "F" and not chunk.place else 0,
                time=times[kind],
                kind=schedule.first.index(kind),
                place=place if kind == "F" and not schedule.deep else -place,
                unit=unit,
                group=group,
                sequence=tuple(f"{kind}{c}.{lane}" for lane in lanes),
            )
        if schedule.versions:
            takes, gives = (Take(f"g.{c}"),), () if schedule.unpinned else (Give(f"w.{c}"),)
            yield Actor(f"U{c}", chunk.queue, takes, gives, time=costs.update, kind=UPDATE)


def _ordered(schedule: Definition, shape: Shape, actors: Sequence[Actor]) -> list[Actor]:
    """One actor for each device, which does everything in order."""
    made: list[Actor] = []
    known = {actor.name: actor for actor in actors}
    for device, row in enumerate(schedule.rows(shape)):
        sequence = tuple(f"{op.kind}{op.chunk}" for op in row)
        taken = [known.pop(name) for name in dict.fromkeys(sequence)]
        made.append(_merged(f"order of {device}", taken, sequence))
    return [*made, *known.values()]


def _merged(name: str, of: Sequence[Actor], sequence: tuple[str, ...]) -> Actor:
    """One actor that does what several did, in this order."""
    takes = tuple(replace(take, case=part.name) for part in of for take in part.takes)
    gives = tuple(replace(give, case=part.name) for part in of for give in part.gives)
    times = tuple((part.name, part.time) for part in of)
    return Actor(
        name, of[0].queue, takes, gives, len(sequence), kind=of[0].kind, unit=of[0].unit, sequence=sequence, times=times
    )


def together(
    schedule: Definition,
    shape: Shape,
    actors: Sequence[Actor],
    costs: Costs | Sequence[Costs],
    only: Callable[[str, str], bool] = lambda forward, backward: True,
) -> list[Actor]:
    """The actors of an order. Two tasks that run together are one firing, which begins when both can, and ends for
    both. `only` says for which two that is done; others run one behind the other, which never waits for more."""
    rows = schedule.rows(shape)
    if not any(op.joined for row in rows for op in row):
        return list(actors)
    made: list[Actor] = []
    listed = chunks(schedule, shape, costs)
    for actor, row in zip(actors, rows, strict=False):
        words = [f"{op.kind}{op.chunk}" for op in row]
        joined = [op.joined and only(*words[at : at + 2]) for at, op in enumerate(row)]
        sequence = tuple("".join(word + " &"[both] for word, both in zip(words, joined, strict=True)).split())
        times = dict(actor.times)
        for word in sequence:
            if "&" in word:
                forward, backward = word.split("&")
                both = [times[forward], times[backward]]
                sent = [listed[int(name[1:])].costs.exchange for name in (forward, backward)]
                times[word] = max(*both, sum(both) - sum(sent), sum(sent))
        cases = tuple((word, times[word]) for word in dict.fromkeys(sequence))
        made.append(replace(actor, firings=len(sequence), sequence=sequence, times=cases))
    return [*made, *actors[len(rows) :]]


def _in_turn(
    schedule: Definition, shape: Shape, listed: Sequence[Chunk], actors: Sequence[Actor]
) -> tuple[list[Actor], list[Register]]:
    """One actor for the forwards of each device and one for its backwards, with the pool of slots between the two."""
    made: list[Actor] = []
    registers: list[Register] = []
    known = {actor.name: actor for actor in actors}
    for device in range(shape.p):
        mine = [chunk for chunk in listed if chunk.device == device]
        group = schedule.value(schedule.group, shape, mine[0].number)
        high = max(1, min(schedule.value(schedule.pool, shape, mine[0].number), len(mine) * shape.m))
        # A last group that is smaller has its turn sooner than the delay line would let backward begin.
        low = high - 1 if shape.m % group == 0 else 0
        pool = f"pool.{device}"
        registers.append(Register(pool, high))
        up = [chunk.number for chunk in mine]
        for kind, order in (("F", up), ("B", up[::-1])):
            merged = _merged(
                f"{kind} of {device}", [known.pop(f"{kind}{c}") for c in up], _rounds(kind, order, group, shape.m)
            )
            if kind == "F":
                merged = replace(merged, gives=(*merged.gives, Give(pool)))
            else:
                merged = replace(merged, takes=(*merged.takes, Take(pool, low=low)))
            made.append(merged)
    return [*made, *known.values()], registers


def _rounds(kind: str, order: Sequence[int], group: int, m: int) -> tuple[str, ...]:
    """Each chunk for a group of micro-batches, then the next chunk."""
    group = min(group, m)
    starts = range(0, m, group)
    return tuple(f"{kind}{c}" for at in starts for c in order for _ in range(min(group, m - at)))
