"""Actors that cannot be added are refused before anything runs; those that fail name themselves, and nobody hangs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow.actors import Actor, Added, Give, Network, Register, Take, bpipe, handed_on
from sbpflow.actors.protocol.state import Firing
from sbpflow.placement.errors import ScheduleError, TransportError
from sbpflow.placement.world import world
from tests.ranks import Fresh

from .models import MANY, data, layers, piped

Edit = Callable[[Network], Added]


def nothing(firing: Firing) -> Sequence[Any]:
    return []


def one(actor: Actor, *registers: Register, ranks: Any = None, work: Any = nothing) -> Edit:
    """An addition of one actor, which does nothing."""
    return lambda network: Added(network.adding([actor], registers), {actor.name: work}, ranks or {})


def waits_for_the_last(network: Network) -> Added:
    """F0 waits for what only comes when the last micro-batch is back."""
    late = Actor("late", "host", (Take("dy.0", slots=MANY),), (Give("go"),))
    opened = network.adding([late], [Register("go")]).reading("F0", Take("go"))
    return Added(opened, {"late": lambda firing: [None]}, {"host": 0})


def without(network: Network, name: str) -> Network:
    return replace(network, actors=tuple(a for a in network.actors if a.name != name))


def swapped(network: Network) -> Added:
    """B0 reads the gradient of another stage."""
    b0 = network.actor("B0")
    takes = tuple(replace(t, register="dy.1") if t.register == "dy.0" else t for t in b0.takes)
    extra = Actor("rest", "device 0", (Take("dy.0"),))
    return Added(network.replacing(replace(b0, takes=takes)).adding([extra]), {"rest": nothing})


def out_of_order(network: Network) -> Added:
    """An actor of two cases joins two streams: what it makes has no number of its own."""
    ends = [Actor(f"end {n}", "host", gives=(Give(f"half {n}"),), firings=MANY // 2) for n in "ab"]
    join = Actor("join", "host", (Take("half a", case="a"), Take("half b", case="b")), (Give("batch"),), MANY,
                 sequence=("a", "b"))  # fmt: skip
    opened = network.adding([*ends, join], map(Register, ("half a", "half b", "batch"))).reading("F0", Take("batch"))
    return Added(opened, dict.fromkeys(("end a", "end b", "join"), nothing), {"host": 0})


LAZY, HOST = Actor("idle", "device 0", firings=1), Actor("idle", "host", firings=1)
REFUSED: dict[str, tuple[Edit, str]] = {
    "deadlock": (
        waits_for_the_last,
        r"infeasible(.|\n)*F0 .*waits for go: 0 of 1 filled, by late(.|\n)*late .*waits for dy",
    ),
    "name": (one(replace(LAZY, name="F0")), r"2 actors are called F0\n  give each its own name"),
    "register": (one(LAZY, Register("x.1")), r"2 registers are called x.1"),
    "producer": (one(replace(LAZY, gives=(Give("x.1"),))), r"both F0 and idle fill x.1"),
    "queue": (one(HOST), r"idle is on the queue 'host', and nothing says which ranks have it\n  say ranks="),
    "no queue": (one(LAZY, ranks={"hots": 0}), r"the queue hots, which no actor is on"),
    "its queue": (one(LAZY, ranks={"device 1": 0}), r"the queue device 1, which is the step's own"),
    "rank": (one(HOST, ranks={"host": 7}), r"host is to lie on ranks 7\n  the step runs on ranks 0,1,2,3"),
    "no rank": (one(HOST, ranks={"host": ()}), r"host is to lie on ranks none"),
    "no place": (one(HOST, ranks={"host": "device 9"}), r"where 'device 9' does\n  the step has device 0"),
    "wire": (one(replace(HOST, queue="to host"), ranks={"to host": 0}), r"a queue is called 'to host'"),
    "overlap": (
        one(Actor("idle", "host", (Take("x.1"),)), ranks={"host": (0, 1)}),
        r"x.1 goes from ranks 0 to 0,1, which overlap",
    ),
    "several": (
        lambda network: Added(
            network.adding([replace(HOST, firings=MANY, gives=(Give("new"),))], [Register("new")]).reading(
                "F0", Take("new")
            ),
            {"idle": nothing},
            {"host": (1, 2)},
        ),
        r"new goes from ranks 1,2 to 0\n  between added actors values go from one rank to all",
    ),
    "no work": (
        lambda network: Added(network.adding([LAZY]), {}),
        r"nothing says what idle shall do\n  give it a function",
    ),
    "work of the step": (
        lambda network: Added(network, {"F0": nothing}),
        r"work is given for F0, which is the step's own",
    ),
    "work of nobody": (lambda network: Added(network, {"F9": nothing}), r"work is given for F9, which is no actor"),
    "gone": (lambda network: Added(without(network, "B0"), {}), r"there is no actor B0, which the step has"),
    "changed": (
        lambda network: Added(network.replacing(replace(network.actor("F0"), kind=5)), {}),
        r"F0 is another than in the step",
    ),
    "another's register": (swapped, r"B0 is to read dy.1 in the place of dy.0"),
    "order": (out_of_order, r"F0 works on micro-batches 0 0 1 1 2 2 3 3, and in the step on 0 1 2 3 4 5 6 7"),
    "initial": (
        lambda network: Added(network, {}, initial={"x.1": lambda: []}),
        r"initial values for x.1\n  initial= is of registers that were added",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_it_runs(case: str) -> None:
    edit, said = REFUSED[case]
    step = piped(layers())
    step.plan_for(*data())
    with pytest.raises(ScheduleError, match=said):
        step.add(edit)
    assert torch.isfinite(step(*data()).full_tensor())  # and the step is what it was


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda n: n.through("act.9", LAZY), r"no register act.9 that an actor fills\n  did you mean 'act.3'"),
        (lambda n: n.through("act.0"), "act.0 through 0 actors has 1 legs"),
        (lambda n: n.through("act.0", Actor("a", "a"), slots=[1]), "has 2 legs, and slots of 1"),
        (lambda n: n.reading("F9", Take("x.1")), r"there is no actor F9\n  there are F0"),
        (lambda n: n.replacing(Actor("evict", "host", firings=1)), "there is no actor evict"),
    ],
)
def test_a_network_is_edited_where_it_can_be(edit: Callable[[Network], Network], said: str) -> None:
    network = piped(layers()).plan_for(*data()).network
    with pytest.raises(ScheduleError, match=said):
        edit(network)


def test_a_step_that_has_run_is_not_opened() -> None:
    model = layers()
    step, batch = piped(model), data()
    step(*batch)
    with pytest.raises(ScheduleError, match=r"has run(.|\n)*add before the first run(.|\n)*or compile the model anew"):
        step.add(bpipe)
    again = piped(model)
    again.plan_for(*batch).add(bpipe)  # the fix
    assert step(*batch).item() > again(*batch).item()


def test_a_function_is_asked_for_every_plan() -> None:
    """A batch of another length is another step, with a network of its own."""
    step = piped(layers())
    step.add(bpipe)
    for rows in (16, 24):
        step(*data(rows=rows))
        assert "evict 0" in str(step.network)
    fixed, short = piped(layers()), data(rows=16)
    fixed.plan_for(*short).add(bpipe(fixed.network))
    fixed(*short)
    assert "evict 0" in str(fixed.network)


def test_only_a_planned_step_has_a_network() -> None:
    with pytest.raises(flow.SbpError, match="was not called yet"):
        _ = piped(layers()).network
    with pytest.raises(flow.SbpError, match="was not called yet"):
        piped(layers()).add(Added(Network((), ()), {}))


def test_a_step_of_one_function_has_none_and_says_what_has() -> None:
    model, batch = layers(1), data()
    straight = flow.compile(model, lambda m, x, y: (m(x) - y).square().mean(), placement=flow.placement("cpu", [0]))
    straight.plan_for(*batch)
    with pytest.raises(flow.SbpError, match=r"runs as one function(.|\n)*schedule='1f1b'"):
        _ = straight.network
    with pytest.raises(ScheduleError, match=r"runs as one function(.|\n)*schedule='1f1b'"):
        straight.add(one(LAZY))
    place = flow.placement("cpu", [0])
    loss = flow.compile(model, lambda m, x, y: (m(x) - y).square().mean(), placement=place, schedule="1f1b")
    ran: list[int] = []
    loss.plan_for(*batch).add(one(LAZY, work=lambda firing: ran.append(firing.label)))
    assert [actor.name for actor in loss.network.actors] == ["F0", "B0", "idle"]
    assert loss(*batch).item() == straight(*batch).item()
    assert ran == [0]


def test_an_actor_that_raises_is_named() -> None:
    def breaks(firing: Firing) -> Sequence[Any]:
        raise ZeroDivisionError("on purpose")

    step, batch = piped(layers()), data()
    step.plan_for(*batch).add(one(replace(LAZY, firings=2), work=breaks))
    with pytest.raises(ZeroDivisionError) as raised:
        step(*batch)
    assert raised.value.__notes__[0] == "in actor idle, micro-batch 0, on queue device 0"


@pytest.mark.parametrize("given", [[], [1, 2]])
def test_work_gives_a_value_for_every_register(given: list[int]) -> None:
    step, batch = piped(layers()), data()
    step.plan_for(*batch).add(
        lambda network: Added(
            network.through("act.0", Actor("stop", "stop")), {"stop": lambda firing: given}, {"stop": "device 0"}
        )
    )
    with pytest.raises(ScheduleError, match=f"fills 1 registers gave {len(given)} values") as raised:
        step(*batch)
    assert "in actor stop" in raised.value.__notes__[0]


def broken(rank: int) -> None:
    """On one rank an added actor raises."""

    def breaks(firing: Firing) -> Sequence[Any]:
        raise ZeroDivisionError("on purpose")

    step, batch = piped(layers()), data()
    idle = Actor("idle", f"device {rank}", firings=1)
    step.plan_for(*batch).add(one(idle, work=breaks))
    step(*batch)


def disagreeing(rank_of_more: int) -> str:
    """One rank adds another actor than the others; what it is told."""
    flow.init(timeout=20)
    step, batch = piped(layers()), data()
    rank = world().rank
    queue = "device 1" if rank == rank_of_more else "device 2"
    step.plan_for(*batch).add(one(Actor("idle", "more", firings=1), ranks={"more": queue}))
    try:
        step(*batch)
    except ScheduleError as error:
        return str(error)
    return "nothing"


def test_ranks_that_add_different_actors_are_told(fresh: Fresh) -> None:
    """Here the queue lies elsewhere, which the network itself does not say."""
    ended = fresh(4, disagreeing, 2)
    for each in ended:
        assert each.answer is not None, each.stderr
        assert "ranks 0 and 2 have different networks" in str(each.answer.value)
        assert "more on 1" in str(each.answer.value)


def failing() -> str:
    try:
        broken(2)
    except (ZeroDivisionError, TransportError) as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "nothing"


def test_an_actor_that_raises_on_one_rank_is_named_on_all(fresh: Fresh) -> None:
    for rank, each in enumerate(fresh(4, failing)):
        assert each.answer is not None, each.stderr
        assert (
            "in actor idle" in str(each.answer.value)
            if rank == 2
            else "rank 2 gave up in idle" in str(each.answer.value)
        )


def test_eviction_to_the_host_takes_five_lines() -> None:
    """Offload: what a stage keeps goes to the host and comes back, two micro-batches ahead of the backward."""
    step, plain, batch = piped(layers()), piped(layers()), data()
    network = step.plan_for(*batch).network
    out, back = Actor("evict", "copies out"), Actor("load", "copies in")
    network = network.through("act.0", out, back, slots=(1, MANY, 2))
    step.add(Added(network, {"evict": handed_on, "load": handed_on}, {"copies out": 0, "copies in": 0}))
    assert [step(*batch).item() for _ in range(2)] == [plain(*batch).item() for _ in range(2)]
    assert step.planned.program.proved.proof.peak["act.0"] == 1
