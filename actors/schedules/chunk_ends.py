"""The ends of a chunk: its work once a step, as actors of the pipeline that its micro-batches go through.

    G.c   gathers its weights before its first F             on a link       wg.c   until its last firing
    R.c   brings its gradients home behind its last B or W   on a link       g.c
    U.c   its optimizer, as soon as these are home           on its device   home.c
    N.c   adds what it knows of all gradients, their norms and whether all are finite, to what it is told, and tells on
    V.c   is told what all know, and makes good what U.c did knowing less

N goes from chunk to chunk in the order in which these come home, V the other way round. A link is a queue beside that
of a device, so that one chunk's gradients travel while another computes. G and R in parts fire so many times.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...placement.errors import ScheduleError
from ..protocol.network import Actor, Give, Network, Register, Take
from ..protocol.simulate import simulate

__all__ = ["ChunkEnd", "Folding", "ended"]

BEHIND = "FBWRNUV"  # what goes first of what is ready
FIRST = -2  # before anything else


@dataclass(frozen=True, kw_only=True)
class Folding:
    """The folding of work that is done once a step under the micro-batches.

    once     whether weights in pieces are gathered, and gradients brought home, once a step for each chunk, where each
             micro-batch would do so
    parts    in how many parts a chunk's gradients go home, and its weights come
    beside   whether that has queues of its own, or goes on the devices'
    """

    once: bool = False
    parts: int = 1
    beside: bool = True

    def __post_init__(self) -> None:
        if type(self.parts) is not int or self.parts < 1:
            raise ScheduleError(f"Folding(parts={self.parts!r})\n  give it a number of 1 or more, as in 2")
        for name in ("once", "beside"):
            if type(getattr(self, name)) is not bool:
                raise ScheduleError(f"Folding({name}={getattr(self, name)!r})\n  say True or False")

    def queue(self, device: str) -> str:
        """The queue of what is gathered and brought home for chunks on a device."""
        return device.replace("device", "link", 1) if self.beside else device


@dataclass(frozen=True)
class ChunkEnd:
    """The end of one chunk of so many `firings`, with the seconds of each thing that is done; None: it is not.

    `readers` are other chunks of the device that read what it gathers, `makers` those whose gradients are added to its.
    """

    chunk: int
    firings: int
    gather: float | None = None
    reduce: float | None = None
    update: float | None = None
    readers: tuple[int, ...] = ()
    makers: tuple[int, ...] = ()


def ended(
    actors: Sequence[Actor],
    registers: Sequence[Register],
    ends: Sequence[ChunkEnd],
    overlap: Folding,
    *,
    validated: bool = False,
) -> tuple[list[Actor], list[Register]]:
    """The actors and registers of a pipeline with the ends of its chunks; `validated`: with N and V, too."""
    made = _Ending(actors, registers, {end.chunk: end for end in ends}, overlap)
    for end in ends:
        if end.gather is not None:
            made.gather(end, end.gather)
        if end.reduce is not None:
            made.reduce(end, end.reduce)
        if end.update is not None:
            made.update(end, end.update)
    if validated:
        made.validate([end.chunk for end in ends if end.update is not None])
    return list(made.actors.values()), made.registers


class _Ending:
    def __init__(
        self, actors: Sequence[Actor], registers: Sequence[Register], ends: Mapping[int, ChunkEnd], overlap: Folding
    ) -> None:
        self.actors = {actor.name: actor for actor in actors}
        self.registers, self.ends, self.overlap = list(registers), ends, overlap
        self.of: dict[str, tuple[str, str]] = {}  # of a task: the actor, and the case where it has several
        for actor in actors:
            if actor.name[1:].isdigit():
                self.of[actor.name] = actor.name, ""
            else:
                self.of.update({part: (actor.name, part) for part in actor.parts})
        self.filled: dict[int, str] = {}

    def queue(self, chunk: int) -> str:
        return self.actors[self.of[f"F{chunk}"][0]].queue

    def add(self, actor: Actor, *registers: str) -> None:
        self.actors[actor.name] = actor
        self.registers += [Register(name) for name in registers]

    def changed(self, task: str, change: Callable[[Actor, str], Actor]) -> None:
        name, case = self.of[task]
        self.actors[name] = change(self.actors[name], case)

    def gather(self, end: ChunkEnd, seconds: float) -> None:
        name, parts = f"wg.{end.chunk}", self.overlap.parts
        link = self.overlap.queue(self.queue(end.chunk))
        gives = (Give(name, every=parts),)
        self.add(Actor(f"G{end.chunk}", link, (), gives, parts, seconds / parts, kind=FIRST, place=end.chunk), name)
        for chunk in (end.chunk, *end.readers):
            for task in (f"{kind}{chunk}" for kind in "FBW"):
                if task in self.of:
                    every = self.ends[chunk].firings

                    def taking(actor: Actor, case: str, every: int = every) -> Actor:
                        return replace(actor, takes=(*actor.takes, Take(name, every=every, case=case)))

                    self.changed(task, taking)

    def full(self, chunk: int) -> str:
        """The register that a chunk's last part fills when all its gradients are there."""
        if chunk not in self.filled:
            self.filled[chunk] = name = f"g.{chunk}"
            every = self.ends[chunk].firings

            def giving(actor: Actor, case: str) -> Actor:
                return replace(actor, gives=(*actor.gives, Give(name, every=every, case=case)))

            self.changed(f"W{chunk}" if f"W{chunk}" in self.of else f"B{chunk}", giving)
            self.registers.append(Register(name))
        return self.filled[chunk]

    def reduce(self, end: ChunkEnd, seconds: float) -> None:
        parts, home = self.overlap.parts, f"home.{end.chunk}"
        takes = tuple(Take(self.full(chunk), every=parts) for chunk in (end.chunk, *end.makers))
        gives = (Give(home, every=parts),) if end.update is not None else ()
        link = self.overlap.queue(self.queue(end.chunk))
        made = Actor(
            f"R{end.chunk}", link, takes, gives, parts, seconds / parts, kind=BEHIND.index("R"), place=-end.chunk
        )
        self.add(made, *[give.register for give in gives])

    def update(self, end: ChunkEnd, seconds: float) -> None:
        takes = (Take(f"home.{end.chunk}"),)
        self.add(Actor(f"U{end.chunk}", self.queue(end.chunk), takes, time=seconds, kind=BEHIND.index("U")))

    def validate(self, chunks: Sequence[int]) -> None:
        """With N and V, in the order in which gradients come home where everything takes as long as is said."""
        run = simulate(Network(tuple(self.actors.values()), tuple(self.registers)))
        home = {ran.actor: at for at, ran in enumerate(sorted(run.firings, key=lambda ran: ran.end))}
        order = sorted(chunks, key=lambda chunk: home.get(f"R{chunk}", 0))
        for at, chunk in enumerate(order):
            here, link = self.queue(chunk), self.overlap.queue(self.queue(chunk))
            before, behind = at > 0, at < len(order) - 1
            takes = [Take(f"home.{chunk}"), *[Take(f"norm.{chunk}")] * before]
            told = f"norm.{order[at + 1]}" if behind else f"all.{chunk}.{chunk}"
            self.add(
                Actor(f"N{chunk}", link, tuple(takes), (Give(f"known.{chunk}"), Give(told)), kind=BEHIND.index("N")),
                f"known.{chunk}", told,
            )  # fmt: skip
            stepping = self.actors[f"U{chunk}"]
            takes = [*stepping.takes, Take(f"known.{chunk}")]
            self.add(replace(stepping, takes=tuple(takes), gives=(Give(f"stepped.{chunk}"),)), f"stepped.{chunk}")
            verdict = f"all.{order[at + 1]}.{chunk}" if behind else f"all.{chunk}.{chunk}"
            on = [f"all.{chunk}.{order[at - 1]}"] * before
            takes = [Take(f"stepped.{chunk}"), Take(verdict)]
            self.add(Actor(f"V{chunk}", here, tuple(takes), tuple(map(Give, on)), kind=BEHIND.index("V")), *on)
