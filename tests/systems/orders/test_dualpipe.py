"""DualPipe and DualPipeV: the order of each rank is that of the public code, and what two tasks send is hidden."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

import sbpflow as flow
from sbpflow import B, S
from sbpflow.actors import Costs, Schedule, network_of, published, simulate
from sbpflow.placement import Placement
from sbpflow.placement.errors import ScheduleError
from tests.nn.graph.pipes import ALONE2, ALONE4, mlp, staged, trains

# Steps as the public code has them: how often, and what. 0 is the direction from which micro-batches come to a rank
# first; & is together, z leaves W for later, W is the first that was left.
DUAL: tuple[tuple[Callable[[int, int, int], int], str], ...] = (
    (lambda h, r, main: 2 * (h - r - 1), "F0"),
    (lambda h, r, main: r + 1, "F0 F1"),
    (lambda h, r, main: h - r - 1, "B1z W F1"),
    (lambda h, r, main: main, "F0&B1 F1&B0"),
    (lambda h, r, main: h - r - 1, "B1 F1&B0"),
    (lambda h, r, main: r + 1, "B1 B0"),
    (lambda h, r, main: h - r - 1, "W B0z"),
    (lambda h, r, main: r + 1, "W"),
)


class Op(NamedTuple):
    kind: str
    way: int  # the direction; of a route, or of a line down or up, the chunk on the device
    number: int
    joined: bool = False
    whole: bool = False  # a backward together with its W


def stepped(h: int, r: int, main: int) -> Iterator[Op]:
    """The ops of a rank that is r from its end, h being the number of ranks on its side."""
    did: Counter[str] = Counter()
    late: deque[Op] = deque()
    for step, (times, words) in enumerate(DUAL):
        for turn in range(times(h, r, main)):
            for at, word in enumerate(words.split()):
                if word == "W":
                    yield late.popleft()
                    continue
                pair = word.split("&")
                # In the middle the first two are apart, so that neither waits for the other.
                apart = step == 3 and turn == at == 0 and r == h - 1
                # Of the sixth step, its second half.
                lazy = word[-1] == "z" or (step == 5 and 2 * turn + at > r)
                for n, op in enumerate(pair):
                    kind, way, number = op[0], int(op[1]), did[op[:2]]
                    did[op[:2]] += 1
                    yield Op(kind, way, number, len(pair) == 2 and not n and not apart, kind == "B" and not lazy)
                    if kind == "B" and lazy:
                        late.append(Op("W", way, number))
                    elif kind == "B":
                        yield Op("W", way, number)
    assert not late


def of_dualpipe(p: int, m: int, rank: int) -> list[Op]:
    r = min(rank, p - 1 - rank)
    turned = rank >= p // 2
    ops = stepped(p // 2, r, m // 2 - p + r + 1)
    # The route from the first rank has the even micro-batches.
    return [op._replace(way=op.way ^ turned, number=2 * op.number + (op.way ^ turned)) for op in ops]


def of_dualpipe_v(p: int, m: int, rank: int) -> list[Op]:
    return list(stepped(p, rank, m - 2 * p + rank + 1))


PUBLIC = {"dualpipe": of_dualpipe, "dualpipe_v": of_dualpipe_v}


def check_order(name: str, p: int, m: int) -> None:
    for rank, row in enumerate(published(name).rows(published(name).shape(p, m))):
        public = [op[:4] for op in PUBLIC[name](p, m, rank)]
        assert [(op.kind, op.chunk // p, op.number, op.joined) for op in row] == public


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 10), (6, 12), (8, 20), (16, 40)])
def test_dualpipe_has_the_public_order(p: int, m: int) -> None:
    check_order("dualpipe", p, m)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 7), (4, 10), (8, 16), (8, 25)])
def test_dualpipe_v_has_the_public_order(p: int, m: int) -> None:
    check_order("dualpipe_v", p, m)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_orders_end_for_every_number_of_devices_and_micro_batches(name: str) -> None:
    """The public code has an even number of devices, and two micro-batches for each at least."""
    schedule = published(name)
    for p in range(1, 7):
        for m in range(1, 2 * p + 3):
            run = simulate(network_of(schedule, schedule.shape(p, m)))
            assert run.finished, (p, m)
            assert len(schedule.show(p, m).slots) == p


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1)])
def test_bubble_and_activations_are_the_published_ones(name: str, p: int, times: tuple[int, int, int]) -> None:
    """(PP/2-1)(F&B + B - 3W) where B hands on its gradient only with its W, as the public code does; less else."""
    schedule, (f, b, w) = published(name), times
    stages = p if name == "dualpipe" else 2 * p
    shape = schedule.shape(p, 4 * p)
    spent = {f"order of {s}": iter(list(held(PUBLIC[name](p, 4 * p, s), f, b, w))) for s in range(p)}

    def long(actor: str, case: str, label: int) -> float:
        return sum(next(spent[actor]) for _ in case.split("&"))

    run = simulate(network_of(schedule, shape, Costs(f, b, w)), time=long)
    idle = max(run.span(f"device {s}") - run.busy(f"device {s}") for s in range(p))
    drawn = schedule.show(p, 4 * p, costs=Costs(f, b, w))
    formula = (stages // 2 - 1) * ((f + b + w) + (b + w) - 3 * w)
    assert idle == formula
    assert drawn.end - drawn.run.busy("device 0") < formula
    assert set(drawn.slots) == {stages + 1}


def held(ops: list[Op], f: int, b: int, w: int) -> Iterator[int]:
    """The times of ops where a whole backward has its W in it."""
    done = set()
    for op in ops:
        if op.kind == "B" and op.whole:
            done.add(op[1:3])
        yield f if op.kind == "F" else b + w * op.whole if op.kind == "B" else w * (op[1:3] not in done)


def test_exchanges_of_two_tasks_that_run_together_are_hidden() -> None:
    """With exchanges half as long as the forward, those of 1F1B take their time, and most of DualPipe's do not."""
    costs = Costs(2, 2, 2, exchange=1)
    line, dual, turned = (
        published(name).show(p, 20, costs=costs) for name, p in (("1f1b", 8), ("dualpipe", 8), ("dualpipe_v", 4))
    )
    assert line.hidden == 0
    assert dual.hidden > 0.5
    assert turned.hidden > 0.75
    assert dual.end < 0.7 * line.end
    assert "of exchanges 0.0 % hidden" in str(line)
    assert "link 0" in str(line)
    for bar, of in zip(line.links[0], line.rows[0], strict=True):
        assert (bar.start, bar.end) == (of.end, of.end + 1)


def test_two_that_run_together_begin_when_both_can() -> None:
    """Device 1 has nothing to send back before its forward: a pair waits for the gradient, and one by one does not."""
    together = Schedule("pair", table=("F0 F1+ B0 F2+ B1 B2", "F0 B0 F1 B1 F2 B2"))
    apart = Schedule("pair", table=("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"))
    assert together.show().end > apart.show().end
    assert together.show().order == together.table
    assert Schedule.read(str(together)) == together


@pytest.mark.parametrize("row", ["F0+ B0 F1 B1", "F0+ F1 B0 B1", "F0 F1 B0+ B1", "F0 F1 B0 B1+"])
def test_a_pair_is_a_forward_and_the_backward_of_another(row: str) -> None:
    with pytest.raises(ScheduleError, match=r"cannot do .* together with"):
        Schedule("pair", table=(row,))


def test_pairs_that_wait_for_each_other_are_told() -> None:
    with pytest.raises(ScheduleError, match="waits for"):
        Schedule("own", table=("F0 F1+ B0 B1", "F0 F1 B0 B1")).show()


@pytest.mark.parametrize(("name", "stages"), [("dualpipe", ALONE4), ("dualpipe_v", ALONE2)])
def test_dual_orders_train_as_one_device(name: str, stages: list[Placement]) -> None:
    trains(staged(mlp().double(), stages, name), micro_batches=8, schedule=name)


def test_dualpipe_v_trains_layers_whose_experts_are_on_several_ranks() -> None:
    model = staged(mlp(8).double(), [flow.placement("cpu", [0, 1]), flow.placement("cpu", [2, 3])], "dualpipe_v")
    flow.nn.shard(model, {"0.0.weight": S(0), "*.bias": B})
    trains(model, micro_batches=4, schedule="dualpipe_v")
