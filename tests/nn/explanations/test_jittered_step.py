"""Steps on devices that compute unevenly: each rank by itself gives the same, more ranks wait longer, and a slow card
slows all that wait for it."""

from collections.abc import Callable, Iterator
from math import log1p, sqrt

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import Seconds, simulate
from sbpflow.actors.schedules.pipeline import Costs, network_of
from sbpflow.actors.schedules.published import published
from sbpflow.nn.explanations.jittered_step import JitteredStep, jittered_network
from sbpflow.nn.explanations.lockstep import Lockstep, lockstep
from sbpflow.nn.explanations.slowest import longest_of_scattered
from sbpflow.nn.plan.check import stepped
from sbpflow.nn.plan.plan import Plan
from sbpflow.placement import Jitter

STAGES, MICRO_BATCHES, TRIALS = 2, 3, 200
SCHEDULE = published("1f1b")
PIPE = network_of(SCHEDULE, SCHEDULE.shape(STAGES, MICRO_BATCHES), Costs(1.0, 1.2, 0.8, hop=0.1))
ONE = Network(
    (Actor("F0", "device 0", gives=(Give("x"),), firings=1, time=1.0), Actor("B0", "device 0", (Take("x"),), time=2.0)),
    (Register("x"),),
)


def by_hand(network: Network, of: Lockstep, jitter: Jitter, seed: int = 1) -> Seconds:
    """The step in each of many trials, with a number drawn for each task of each rank."""
    draw, width = np.random.default_rng(seed), sqrt(log1p(jitter.scatter**2))
    queues = {actor.name: actor.queue for actor in network.actors}
    times = {actor.name: actor.time for actor in network.actors}
    cards = sum(of.together.values())
    firsts = dict(zip(of.together, np.cumsum([0, *of.together.values()]), strict=False))
    slowness = np.ones(of.copies * cards)

    def one(copy: int) -> float:
        def time(actor: str, case: str, label: int) -> float:
            queue = queues[actor]
            first = copy * cards + firsts[queue]
            drawn = np.exp(width * draw.standard_normal(of.together[queue]) - width**2 / 2)
            return float(times[actor] * (drawn * slowness[first : first + of.together[queue]]).max())

        return simulate(network, time=time).end

    found = []
    for _ in range(TRIALS):
        mean = len(slowness) / jitter.one_in
        many = int(mean) + int(draw.random() < mean % 1)
        slowness[:] = 1.0
        slowness[draw.choice(len(slowness), many, replace=False)] += jitter.slow
        found.append(max(map(one, range(of.copies))))
    return np.array(found)


@pytest.mark.parametrize(
    "jitter",
    [Jitter(0.1), Jitter(0.0, slow=0.5, one_in=8), Jitter(0.05, slow=0.3, one_in=5), Jitter(0.1, slow=0.2, one_in=40)],
    ids=str,
)
@pytest.mark.parametrize(
    ("network", "of"),
    [
        (ONE, Lockstep(8, {"device 0": 1})),
        (ONE, Lockstep(1, {"device 0": 8})),
        (ONE, Lockstep(3, {"device 0": 2})),
        (PIPE, Lockstep(1, {"device 0": 2, "device 1": 2})),
        (PIPE, Lockstep(4, {"device 0": 1, "device 1": 1})),
    ],
    ids=["copies", "together", "both", "pipeline", "pipelines"],
)
def test_it_is_what_comes_of_drawing_for_each_rank(network: Network, of: Lockstep, jitter: Jitter) -> None:
    known, found = by_hand(network, of, jitter), jittered_network(network, of, jitter)
    either = sqrt(known.var() / TRIALS + found.steps.var() / len(found.steps))
    assert abs(found.expected - known.mean()) < 4 * either + 1e-9
    below = float((known < found.most * (1 + 1e-9)).mean())
    assert 0.90 <= below <= 1.0


def test_the_longest_of_many_is_that_of_drawing_as_many() -> None:
    draw, width = np.random.default_rng(0), sqrt(log1p(0.03**2))
    for count in (1, 8, 500, 16_384):
        drawn = np.exp(width * draw.standard_normal((200, count)) - width**2 / 2).max(1)
        assert abs(longest_of_scattered(0.03, count).mean() - drawn.mean()) < 4 * drawn.std() / sqrt(200)


@pytest.mark.parametrize("network", [ONE, PIPE], ids=["straight", "pipeline"])
@pytest.mark.parametrize(
    "jitter", [Jitter(0.03), Jitter(0.0, slow=0.1, one_in=64), Jitter(0.03, slow=0.1, one_in=64)], ids=str
)
def test_more_ranks_never_expect_less(network: Network, jitter: Jitter) -> None:
    for of in (copies, together):
        found = [jittered_network(network, of(network, 4**k), jitter).expected for k in range(8)]
        assert found == sorted(found)
        assert found[-1] > found[0]


def copies(network: Network, many: int) -> Lockstep:
    return Lockstep(many, dict.fromkeys(network.queues, 1))


def together(network: Network, many: int) -> Lockstep:
    return Lockstep(1, dict.fromkeys(network.queues, many))


def test_one_slow_card_slows_all_that_wait_for_it_by_its_share() -> None:
    for of in (copies, together):
        found = jittered_network(ONE, of(ONE, 8), Jitter(slow=0.25, one_in=8))
        assert found.expected == pytest.approx(1.25 * found.plain)
        assert found.most == pytest.approx(1.25 * found.plain)
        seldom = jittered_network(ONE, of(ONE, 8), Jitter(slow=0.25, one_in=32))  # every fourth cluster has one
        assert seldom.waiting == pytest.approx(0.25 * 0.25 * found.plain, rel=0.3)


def test_many_ranks_take_no_more_runs_of_the_clock_than_few(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[Network]()

    def counted(network: Network, *, others: Callable[[str, float], Seconds]) -> object:
        ran.append(network)
        return simulate(network, others=others)

    monkeypatch.setattr("sbpflow.nn.explanations.jittered_step.simulate", counted)
    of = Lockstep(1024, {"device 0": 8, "device 1": 8})
    found = jittered_network(PIPE, of, Jitter(0.03, slow=0.1, one_in=1000))
    assert len(ran) == 1
    assert found.waiting > 0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.relu(self.up(x)))
        return made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(net(x).square().mean())


@pytest.fixture
def given() -> Iterator[tuple[nn.Module, Tensor]]:
    with torch.device("meta"):
        yield Net(), torch.empty(4096, 512)


TENSOR = "layers.*.up.weight: tensor=S(0)\nlayers.*.down.weight: tensor=S(1)\n"
PLANS = [
    ("grid cuda (data=8)", Lockstep(8, {"device 0": 1})),
    ("grid cuda (data=8)\n**: data=S(0)", Lockstep(1, {"device 0": 8})),
    ("grid cuda (data=8)\nstates **: data=S(0)", Lockstep(8, {"device 0": 1})),
    ("grid cuda (data=4)\n8 micro-batches", Lockstep(4, {"device 0": 1})),
    (f"grid cuda (data=4, tensor=2)\n{TENSOR}", Lockstep(4, {"device 0": 2})),
    (
        f"grid cuda (pipe=2, data=2, tensor=2)\n{TENSOR}pipe layers over pipe by 1f1b, 4 micro-batches",
        Lockstep(2, {"device 0": 2, "device 1": 2}),
    ),
]


@pytest.mark.parametrize(("plan", "expected"), PLANS, ids=[plan.splitlines()[0] for plan, _ in PLANS])
def test_ranks_that_move_inside_of_tasks_go_together(
    given: tuple[nn.Module, Tensor], plan: str, expected: Lockstep
) -> None:
    with flow.use_cluster("h100x8"):
        step, checked = stepped(Plan(f"{plan}\ninput x <- data=S(0)"), *given, loss_fn=loss_fn)
        assert lockstep(step, checked.report) == expected


def predicted(given: tuple[nn.Module, Tensor], plan: str, jitter: Jitter | None, **more: object) -> flow.Prediction:
    on = flow.cluster("h100x8")
    how = {"cluster": on.with_jitter(jitter)} if more.get("on_device") else {"cluster": on, "jitter": jitter}
    return flow.predict(*given, f"{plan}\ninput x <- data=S(0)", loss_fn=loss_fn, **how)


@pytest.mark.parametrize("plan", [PLANS[0][0], PLANS[5][0]], ids=["straight", "pipeline"])
def test_a_prediction_has_it_by_its_question_or_by_the_device(given: tuple[nn.Module, Tensor], plan: str) -> None:
    plain, none = predicted(given, plan, None), predicted(given, plan, Jitter())
    assert none.seconds == plain.seconds == plain.checked.seconds
    assert str(none) == str(plain)
    assert none.dict() == plain.dict()
    uneven = Jitter(0.05, slow=0.2, one_in=64, seed=3)
    found, again = (predicted(given, plan, uneven, on_device=on) for on in (False, True))
    assert found.jittered is not None
    assert again.jittered is not None
    assert np.array_equal(found.jittered.steps, again.jittered.steps)
    assert found.checked.seconds == plain.seconds < found.seconds < found.jittered.most
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.days(1e9) == pytest.approx(plain.days(1e9) * found.seconds / plain.seconds)
    assert found.dict()["jitter"]["waiting"] == found.seconds - plain.seconds
    other = predicted(given, plan, Jitter(0.05, slow=0.2, one_in=64, seed=4)).jittered
    assert other is not None
    assert other.expected != found.jittered.expected == pytest.approx(other.expected, rel=0.02)


def test_it_says_what_was_assumed() -> None:
    said = str(JitteredStep(Jitter(0.03, slow=0.2, one_in=1000), 1.0, np.array([1.0, 1.5])))
    assert said == (
        "expected 1.25 s, 95% of steps under 1.48 s, of which 250 ms for waiting on the slowest; "
        "assumed tasks scatter by 3 %, one card in 1,000 takes 20 % longer, seed 0"
    )
