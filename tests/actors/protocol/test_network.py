"""Networks: what does not fit together is refused with a word on how to mend it."""

from dataclasses import replace

import pytest

from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.placement.errors import ScheduleError

A = Actor("a", "q", gives=(Give("x"),), firings=2)
B = Actor("b", "q", (Take("x"),))
X = Register("x", 2)

WRONG = {
    "2 actors are called a": ((A, A, B), (X,)),
    "2 registers are called x": ((A, B), (X, X)),
    "b uses y, which is no register": ((A, replace(B, takes=(Take("y"),))), (X,)),
    "a uses y, which is no register": ((replace(A, gives=(Give("y"),)), B), (X,)),
    "both a and c fill x": ((A, B, replace(A, name="c")), (X,)),
    "a fills x in 2 ways": (
        (replace(A, gives=(Give("x", case="1"), Give("x", case="2")), sequence=("1", "2")), B),
        (X,),
    ),
    "a takes nothing and has no firings": ((replace(A, firings=0), B), (X,)),
    "a is to fire -1 times": ((replace(A, firings=-1), B), (X,)),
    r"a takes -1.0 and \{\}": ((replace(A, time=-1.0), B), (X,)),
    r"a takes 0.0 and \{'1': 2.0\}": ((replace(A, times=(("1", 2.0),)), B), (X,)),
    "cannot be: Take.*slots=0": ((A, replace(B, takes=(Take("x", slots=0),))), (X,)),
    "cannot be: Take.*every=0": ((A, replace(B, takes=(Take("x", every=0),))), (X,)),
    "cannot be: Take.*low=-1": ((A, replace(B, takes=(Take("x", low=-1),))), (X,)),
    "cannot be: Take.*case='1'": ((A, replace(B, takes=(Take("x", case="1"),))), (X,)),
    "cannot be: Give.*slots=-2": ((replace(A, gives=(Give("x", slots=-2),)), B), (X,)),
    "a does 1 twice at once, in 1&2&1": ((replace(A, sequence=("1", "1&2&1")), B), (X,)),
    "x has 0 of 0 slots filled": ((A, B), (Register("x", 0),)),
    "x has 3 of 2 slots filled": ((A, B), (Register("x", 2, 3),)),
    "a delay of -1.0": ((A, B), (Register("x", delay=-1.0),)),
    "nobody fills x, and of its slots 0 are filled": ((B,), (X,)),
    "nobody fills x, and of its slots 1 are filled": (
        (replace(B, takes=(Take("x", slots=2),)),),
        (Register("x", 2, 1),),
    ),
    "x is read from the back by one of 2 readers": (
        (A, B, replace(B, name="c", takes=(Take("x", lifo=True),))),
        (X,),
    ),
    "from the back by one of 1 readers, 2 slots": ((A, replace(B, takes=(Take("x", slots=2, lifo=True),))), (X,)),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_with_a_fix(what: str) -> None:
    actors, registers = WRONG[what]
    with pytest.raises(ScheduleError, match=rf"^mine: .*{what}.*\n  .+"):
        Network(actors, registers, "mine")


def test_a_network_knows_its_queues_and_who_fills_what() -> None:
    network = Network((A, B, Actor("c", "r", (Take("x"),))), (X,))
    assert network.queues == ("q", "r")
    assert network.producers == {"x": "a"}
    assert (network.actor("b"), network.register("x")) == (B, X)


CHANGES = {
    "high": ((A, B), (Register("x", 3),)),
    "initial": ((A, B), (Register("x", 2, 1),)),
    "low": ((A, replace(B, takes=(Take("x", low=1),))), (X,)),
    "lifo": ((A, replace(B, takes=(Take("x", lifo=True),))), (X,)),
    "rates": ((A, replace(B, takes=(Take("x", slots=2, every=3),))), (X,)),
    "firings": ((replace(A, firings=3), B), (X,)),
    "queue": ((replace(A, queue="r"), B), (X,)),
    "priority": ((replace(A, kind=1), B), (X,)),
    "order": ((replace(A, sequence=("1", "1", "2")), B), (X,)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_fingerprint_tells_networks_apart(what: str) -> None:
    assert Network(*CHANGES[what]).fingerprint != Network((A, B), (X,)).fingerprint


def test_the_fingerprint_does_not_depend_on_what_things_take() -> None:
    """Ranks measure; that must not make them differ."""
    measured = Network((replace(A, time=0.25), B), (X,))
    assert measured.fingerprint == Network((A, B), (X,)).fingerprint
