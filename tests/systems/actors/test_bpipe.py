"""BPipe: stages that keep much have others keep some of it; the order of a stage and the numbers stay as they were."""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import actors
from sbpflow.actors import Costs, Network, held_at_once, network_of, published, simulate
from sbpflow.actors.added import value_link
from sbpflow.actors.added.bpipe import _kept
from sbpflow.actors.added.room import lying
from sbpflow.boxing.exchange import value_message
from sbpflow.nn.graph.run.pipeline import Pipelined
from sbpflow.placement.errors import ScheduleError
from sbpflow.placement.world import world
from tests.ranks import Ranks

ROWS, WIDTH = 4, 32


def kept(network: Network) -> list[str]:
    """The registers in which activations lie."""
    return [r.name for r in network.registers if r.name.startswith("act.") and not r.name.endswith("in order")]


def order(run: actors.Simulation, stage: int) -> list[str]:
    return [str(ran) for ran in run.of(f"device {stage}")]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("stages", "most"), [(4, 3), (5, 4), (6, 4), (8, 5), (16, 9)])
@pytest.mark.parametrize("time", [0.0, 0.5])
def test_no_stage_keeps_more_than_half_of_what_the_first_did(stages: int, most: int, time: float) -> None:
    schedule = published("1f1b")
    plain = network_of(schedule, schedule.shape(stages, 4 * stages), Costs())
    added = actors.bpipe(plain, time)
    before, run = simulate(plain), simulate(added.network)
    held = held_at_once(run, kept(run.network), added.ranks)
    assert run.finished
    assert max(held.values()) == most == ceil((stages + 2) / 2)
    assert max(held_at_once(before, kept(plain)).values()) == stages
    assert [order(run, s) for s in range(stages)] == [order(before, s) for s in range(stages)]
    assert run.end == before.end  # copies take place beside the computing


def test_marks_hold_the_peak_whatever_things_take() -> None:
    """Slots of all registers on a stage together are no more than there may be."""
    for stages in range(4, 17):
        plain = network_of(published("1f1b"), published("1f1b").shape(stages, 2 * stages))
        added, room = actors.bpipe(plain), Counter[str]()
        for register, stage in lying(added.network, kept(added.network), added.ranks).items():
            room[stage] += added.network.register(register).high
        assert max(room.values()) == ceil((stages + 2) / 2)


@pytest.mark.parametrize("schedule", ["interleaved", "zb_v"])
def test_stages_of_several_chunks_are_refused(schedule: str) -> None:
    made = published(schedule)
    with pytest.raises(ScheduleError, match="levels"):
        actors.bpipe(network_of(made, made.shape(4, 8)))


def test_what_two_read_is_not_levelled() -> None:
    """Its slots are free when both have read it, and what was handed on would be missed by one of them."""
    plain = network_of(published("1f1b"), published("1f1b").shape(6, 12))
    (register, *_), (last, *others) = kept(plain), reversed(plain.actors)
    read = replace(last, takes=(*last.takes, replace(last.takes[0], register=register)))
    both = replace(plain, actors=(*reversed(others), read))
    assert register not in {name for name, _ in _kept(both).values()}
    assert len(_kept(both)) == len(_kept(plain)) - 1


def layers(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def compiled(model: nn.Sequential) -> Any:
    flow.nn.pipeline(model, [flow.placement("cpu", [rank]) for rank in range(len(model))])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return flow.compile(model, loss, optimizer, micro_batches=2 * len(model))


class Seen(NamedTuple):
    """Of three steps: losses and weights, the order of the devices' tasks, and by stage how many bundles of activations
    were alive at once, at most."""

    losses: list[float]
    weights: list[Tensor]
    order: dict[str, list[str]]
    alive: dict[str, int]


class Marked(list[Any]):
    """A bundle that can be watched, which tuples cannot."""


class Alive:
    """Counts bundles by where they lie, as long as anyone has them."""

    def __init__(self) -> None:
        self.now, self.most = Counter[str](), Counter[str]()

    def see(self, place: str, value: Any) -> Any:
        if value is None or isinstance(value, Marked):  # it was only handed on
            return value
        value = Marked(value)
        self.now[place] += 1
        self.most[place] = max(self.most[place], self.now[place])
        weakref.finalize(value, self.gone, place)
        return value

    def gone(self, place: str) -> None:
        self.now[place] -= 1


def trained(levelled: bool, stages: int = 4) -> Seen:
    model = layers(stages)
    step, alive = compiled(model), Alive()
    x, y = torch.randn(2, 2 * stages * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    step.plan_for(x, y)
    added = actors.bpipe(step.network)
    if levelled:
        step.add(added)
    places, work = lying(step.network, kept(step.network), added.ranks), Pipelined.work

    def watched(self: Pipelined, actor: actors.Actor) -> Callable[[Any], Any]:
        run = work(self, actor)

        def fire(firing: Any) -> Any:
            gives = [places.get(give.register) for give in actor.gives]
            return [value if of is None else alive.see(of, value) for of, value in zip(gives, run(firing), strict=True)]

        return fire

    rank, unpacked = world().rank, value_message.unpacked

    def arrived(sizes: Tensor, data: Tensor) -> Any:
        return alive.see(f"device {rank}", tuple(unpacked(sizes, data)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipelined, "work", watched)
        patch.setattr(value_link, "unpacked", arrived)
        losses = [step(x, y).full_tensor().item() for _ in range(3)]
    record = step.planned.program.outcome
    done = {queue: [str(ran) for ran in record.of(queue)] for queue in record.network.queues if "device" in queue}
    return Seen(losses, [p.full_tensor().detach() for p in model.state_dict().values()], done, dict(alive.most))


def same(a: Seen, b: Seen) -> bool:
    equal = all(torch.equal(p, q) for p, q in zip(a.weights, b.weights, strict=True))
    return a.losses == b.losses and equal and a.order == b.order


def test_a_step_is_bitwise_the_same_with_less_alive_at_once() -> None:
    plain, levelled = trained(False), trained(True)
    assert same(plain, levelled)
    assert max(plain.alive.values()) == 4
    assert max(levelled.alive.values()) <= 3


def test_the_memory_that_is_told_is_levelled_too() -> None:
    """In slots of a stage: 4, 3, 2, 1 become 3, 3, 2, 3."""
    step = compiled(layers(4))
    step.plan_for(*torch.randn(2, 8 * ROWS, WIDTH))
    before = {rank: of.activations for rank, of in step.planned.memory().items()}
    step.add(actors.bpipe)
    after = {rank: of.activations for rank, of in step.planned.memory().items()}
    slot = 2 * ROWS * WIDTH * 4  # what comes in and what goes out, which is sent
    more = {rank: (after[rank] - before[rank]) / slot for rank in before}
    assert more == {0: -0.5, 1: 0, 2: 0, 3: 2}  # of what stage 0 evicts, the half that is sent is told as under way


def test_a_history_of_autograd_goes_nowhere() -> None:
    """The clones of what autograd keeps would be no leaves of its graph any more: gradients would be wrong."""
    model = layers(4)
    flow.nn.pipeline(model, [flow.placement("cpu", [rank]) for rank in range(4)])
    step = flow.compile(model, loss, torch.optim.SGD(model.parameters(), 0.1), micro_batches=8, backend="autograd")
    with pytest.raises(ScheduleError, match=r"history of autograd(.|\n)*backend='code'") as raised:
        step.plan_for(*torch.randn(2, 32, WIDTH)).add(actors.bpipe)(*torch.randn(2, 32, WIDTH))
    assert "evict 0" in raised.value.__notes__[0]


@pytest.mark.sweep
def test_real_ranks_do_the_same(ranks4: Ranks) -> None:
    for rank, (plain, levelled) in enumerate(zip(ranks4(trained, False), ranks4(trained, True), strict=True)):
        assert max(plain.alive.values()) == 4 - rank
        assert same(plain, levelled)
        assert max(levelled.alive.values()) <= 3
