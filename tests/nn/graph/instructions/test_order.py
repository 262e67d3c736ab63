"""What is done in which order: every value is there when it is read, moves go on beside work, and ranks agree."""

from dataclasses import replace

import pytest

from sbpflow import B, P, S
from sbpflow.boxing.graph.buckets import bucketed
from sbpflow.boxing.graph.physical import Physical
from sbpflow.nn.graph.instructions.computing import AddPart, Backward, Forward, SeedGradient
from sbpflow.nn.graph.instructions.instruction import Instruction
from sbpflow.nn.graph.instructions.moves import MoveNow, StartMove, WaitForMove
from sbpflow.nn.graph.instructions.order import Order
from sbpflow.nn.graph.instructions.overlap import AHEAD, Free, freed, overlapped
from sbpflow.nn.graph.lower.registers import Transfer, values_of
from sbpflow.nn.graph.lower.saved_inputs import read_again
from sbpflow.nn.graph.lower.segments import Segment, segments
from sbpflow.nn.graph.run.program import Program
from sbpflow.nn.graph.tasks.straight import schedule
from sbpflow.sbp import layout

from ..graphs import GRAPHS, LINE, Build, aten, check, sharded_parameters, thrice, total


def made(graph: Physical, *, overlap: bool | None = True, again: bool = False) -> Order:
    stages = segments(graph)
    names = {n: s.inputs for n, s in enumerate(stages) if isinstance(s, Segment)} if again else {}
    return schedule(graph, stages, names, overlap=overlap)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_read_is_there_and_nothing_is_left(name: str, overlap: bool) -> None:
    graph = GRAPHS[name]()
    plan = made(graph, overlap=overlap)
    there = {s.value.name for s in graph.sources}
    for do in plan.todo:
        assert set(do.reads) <= there, do
        there = there - set(do.reads) if isinstance(do, Free) else there | set(do.writes)
    assert there == {*(s.value.name for s in graph.sources), *plan.values, *plan.grads.values()}


@pytest.mark.parametrize("name", GRAPHS)
def test_moves_do_not_depend_on_what_ranks_keep(name: str) -> None:
    graph = bucketed(GRAPHS[name]())

    def moves(plan: Order) -> list[tuple[str, object]]:
        return [
            (do.word, plan.transfers[do.number])
            for do in plan.todo
            if isinstance(do, MoveNow | StartMove | WaitForMove)
        ]

    assert moves(made(graph)) == moves(made(graph, again=True))


@pytest.mark.parametrize("name", GRAPHS)
def test_every_start_has_its_wait_behind_it(name: str) -> None:
    plan = made(GRAPHS[name]())
    starts = {do.number: at for at, do in enumerate(plan.todo) if isinstance(do, StartMove)}
    waits = {do.number: at for at, do in enumerate(plan.todo) if isinstance(do, WaitForMove)}
    assert starts.keys() == waits.keys()
    for number, at in starts.items():
        between = plan.todo[at : waits[number]]
        assert 1 <= sum(isinstance(do, Forward | Backward) for do in between) <= 2 * AHEAD


def test_parameters_are_gathered_ahead_but_not_all_at_once() -> None:
    plan = made(sharded_parameters(8))
    under_way, most, beside = 0, 0, 0
    for do in plan.todo:
        under_way += {"start": 1, "wait": -1}.get(do.word, 0)
        most = max(most, under_way)
        beside += isinstance(do, Forward | Backward) and under_way > 0
    assert beside >= 12
    assert most <= 2 * (2 * AHEAD + 2)


def test_on_the_cpu_of_one_host_moves_are_made_at_once() -> None:
    assert not any(isinstance(do, StartMove) for do in made(sharded_parameters(4), overlap=None).todo)


def test_gathered_parameters_are_let_go_and_gathered_again() -> None:
    plan = made(sharded_parameters(4), overlap=False)
    text = [str(do) for do in plan.todo]
    again = [do for do in plan.todo if isinstance(do, MoveNow) and " again " in do.writes[0]]
    assert len(again) == 2  # of four weights; not of the first layer, whose input has no gradient, nor of the last
    first_grad = next(at for at, line in enumerate(text) if line.startswith("grad"))
    gone = {name for do in plan.todo[:first_grad] if isinstance(do, Free) for name in do.reads}
    gathers = {do.writes[0] for do in plan.todo[:first_grad] if isinstance(do, MoveNow)}
    assert len(gathers - gone) <= 2
    assert not any(" again " in line for line in map(str, schedule_kept().todo))


def test_what_was_made_of_parameters_is_gathered_again_too() -> None:
    b = Build(LINE)
    x, w, v = b.source("x", (8, 8), S(0)), b.source("w", (8, 8), S(0)), b.source("v", (8, 8), S(0))
    half = b.op(aten.mul.Tensor, w, 0.5, out=S(0))  # as a cast to a lower precision
    h = b.op(aten.linear.default, x, b.box(half, B, P), out=S(0))
    b.block = "next"
    graph = b.graph(total(b, b.op(aten.linear.default, h, b.box(v, B, P), out=S(0)), P))
    gathered = [do for do in made(graph, overlap=False).todo if isinstance(do, MoveNow) and " again " in do.writes[0]]
    assert [do.reads for do in gathered] == [(half.name,)]
    check(graph, Program(graph))


def schedule_kept() -> Order:
    graph = sharded_parameters(4)
    return schedule(graph, segments(graph), regather=False)


def test_what_backward_reads_is_found_without_values() -> None:
    graph = sharded_parameters(2)
    first, segment = (s for s in segments(graph) if isinstance(s, Segment))
    x, w, c = segment.inputs
    assert read_again(graph, segment) == {x, w}
    assert read_again(graph, first) == {"x"}  # for no gradient goes on to x
    assert c in segment.wants


def test_a_value_is_moved_back_once_and_its_gradients_are_added_first() -> None:
    graph = thrice()
    plan = made(graph, overlap=False)
    adds = [do for do in plan.todo if isinstance(do, AddPart)]
    assert len([do for do in adds if do.writes == (f"d {graph.steps[0].outputs[0].name}",)]) == 2
    backward = plan.todo[next(at for at, do in enumerate(plan.todo) if isinstance(do, SeedGradient)) :]
    assert len([do for do in backward if isinstance(do, MoveNow)]) == len(graph.backs)


def test_a_bucket_is_one_move_where_its_last_member_is_ready() -> None:
    plan = made(bucketed(sharded_parameters(4, size=8)), overlap=False)
    (bucket,) = [at for at, do in enumerate(plan.todo) if isinstance(do, MoveNow) and len(do.writes) > 1]
    last = max(at for at, do in enumerate(plan.todo) if isinstance(do, Backward))
    assert bucket == last + 2  # behind the last segment, and what that lets go
    assert plan.todo[bucket].writes[0] == "home c3"


def test_a_loss_may_be_a_parameter_itself() -> None:
    b = Build(LINE)
    w = b.source("w", (), B)
    plan = made(b.graph(w))
    assert [do.word for do in plan.todo] == ["seed"]
    assert plan.grads == {"w": "home w"}


def do(kind: type[Instruction], number: int, reads: str, writes: str) -> Instruction:
    return kind(number, values_of(reads.split()), values_of(writes.split()))


def test_a_chain_of_moves_keeps_its_order() -> None:
    rows, columns, whole = (layout(LINE, sbp, (8, 8)) for sbp in (S(0), S(1), B))
    transfers = [Transfer(((rows, columns),)), Transfer(((columns, whole),))]
    todo = [do(Forward, 0, "x", "y"), do(MoveNow, 0, "p", "q"), do(MoveNow, 1, "q", "r"),
            do(Forward, 1, "y", "z"), do(Forward, 2, "r z", "out")]  # fmt: skip
    order = [(do.word, do.number) for do in overlapped(todo, transfers, always=True)]
    assert order.index(("wait", 0)) < order.index(("start", 1)) < order.index(("run", 1)) < order.index(("wait", 1))
    assert order.index(("start", 0)) < order.index(("run", 0))


def test_values_go_after_their_last_use() -> None:
    todo = [do(Forward, 0, "x", "y unused"), do(Forward, 1, "y", "z")]
    assert [str(do) for do in freed(todo, {"z"})] == [
        "run 0: x -> y, unused",
        "free 0: x, unused -> ",
        "run 1: y -> z",
        "free 0: y -> ",
    ]


def test_gradients_of_inputs_come_home_too() -> None:
    b = Build(LINE)
    x, w = b.source("x", (4, 6), B, P), b.input("w", (8, 6), S(0))
    graph = b.graph(total(b, b.op(aten.linear.default, x, w, out=S(1)), P))
    asked = replace(graph, sources=(replace(graph.sources[0], kind="input"), *graph.sources[1:]), backs=())
    plan = made(asked)
    assert plan.layouts[plan.grads["x"]] is layout(LINE, B, (4, 6), b.values["x"].layout.dtype)
