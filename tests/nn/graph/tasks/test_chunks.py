"""Chunks and tasks of a graph: what runs where for one micro-batch, and what is handed to whom."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sbpflow import B, S
from sbpflow.boxing.graph.move_table import moves_of
from sbpflow.boxing.graph.physical import Physical
from sbpflow.nn.graph.lower.segments import segments
from sbpflow.nn.graph.tasks.chunks import Chunks, chunks, groups
from sbpflow.nn.graph.tasks.task import Name, Tasks
from sbpflow.nn.graph.tasks.tasks import tasks

from ..graphs import Build, aten, total
from ..pipes import line

PLACES = line(0, 1, 2, 3)
PAIR = line((0, 1))[0]


def layers(b: Build, x: Any, places: list[Any]) -> Any:
    """A layer on each placement, one behind the other."""
    for number, place in enumerate(places):
        w = b.source(f"w{number}", (4, 4), B, where=place)
        if b.values[x.name].layout.placement != place:
            x = b.box(x, B, where=place)
        x = b.op(aten.sin.default, b.op(aten.linear.default, x, w, out=B), out=B)
    return x


def chain(*numbers: int) -> Physical:
    places = [PLACES[n] for n in numbers]
    b = Build(places[0])
    return b.graph(total(b, layers(b, b.input("x", (2, 4), B), places), B))


def cut(graph: Physical, split: bool = False) -> tuple[Chunks, Tasks]:
    stages = segments(graph)
    where = chunks(graph, stages)
    return where, tasks(graph, stages, where, {}, apart={} if split else None, regather=True)


@pytest.mark.parametrize(
    ("numbers", "group"),
    [
        ((0,), (0,)),
        ((0, 1), (0, 1)),
        ((0, 0, 1, 1, 1), (0, 1)),
        ((0, 1, 0, 1), (0, 1, 0, 1)),
        ((0, 1, 1, 0), (0, 1, 0)),
        ((3, 1, 2), (0, 1, 2)),
    ],
)
def test_a_chunk_begins_where_something_comes_in(numbers: tuple[int, ...], group: tuple[int, ...]) -> None:
    where, _ = cut(chain(*numbers))
    assert where.group == group
    ranks = list(dict.fromkeys(numbers))
    assert [where.ranks(n) for n in range(len(ranks))] == [(rank,) for rank in ranks]


def test_placements_that_share_ranks_are_one_group() -> None:
    a, b, c, d = PLACES
    assert groups([a, c, PAIR, b, d]) == {a: 0, c: 1, PAIR: 0, b: 0, d: 4}


def test_a_buffer_that_nothing_reads_joins_no_groups() -> None:
    """Llama's `rotary_emb.original_inv_freq` lies on all ranks, and made one stage of four."""
    b = Build(PLACES[0])
    x = layers(b, b.input("x", (2, 4), B), [PLACES[0], PLACES[1]])
    b.source("kept", (4,), B, where=PAIR)
    where, _ = cut(b.graph(total(b, x, B)))
    assert where.group == (0, 1)
    assert [where.ranks(n) for n in (0, 1)] == [(0,), (1,)]


@pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (0, 1, 0, 1), (0, 0, 1)])
@pytest.mark.parametrize("split", [False, True])
def test_every_chunk_goes_forward_and_backward(numbers: tuple[int, ...], split: bool) -> None:
    where, made = cut(chain(*numbers), split)
    chunk_numbers = range(len(where.group))
    assert {Name("F", c) for c in chunk_numbers} | {Name("B", c) for c in chunk_numbers} <= made.tasks.keys()
    assert all(name.kind != "W" for name in made.tasks) or split


@pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (0, 1, 0, 1)])
def test_hops_go_forward_and_back_between_neighbours(numbers: tuple[int, ...]) -> None:
    _, made = cut(chain(*numbers))
    pairs = {(str(hop.source), str(hop.target)) for hop in made.hops}
    last = len(numbers) - 1
    assert pairs == {(f"F{c}", f"F{c + 1}") for c in range(last)} | {(f"B{c + 1}", f"B{c}") for c in range(last)}


def test_a_forward_hands_its_own_backward_what_that_needs() -> None:
    _, made = cut(chain(0, 1))
    assert {(str(a), str(b)) for a, b in made.edges} == {("F0", "B0"), ("F1", "B1")}


def test_weights_gradients_are_added_up_where_they_are_made() -> None:
    _, made = cut(chain(0, 1, 2))
    sums = {str(name): task.sums for name, task in made.tasks.items() if task.sums}
    assert {name: len(registers) for name, registers in sums.items()} == {"B0": 1, "B1": 1, "B2": 1}
    assert set(made.grads) == {"w0", "w1", "w2"}


def around(b: Build) -> Any:
    """The first layer's result is used by the second and by the last."""
    first = layers(b, b.input("x", (2, 4), B), [PLACES[0]])
    second = b.op(aten.sin.default, b.box(first, B, where=PLACES[1]), out=B)
    third = b.op(aten.sin.default, b.box(second, B, where=PLACES[2]), out=B)
    return b.op(aten.mul.Tensor, third, b.box(first, B, where=PLACES[2]), out=B)


def lent(b: Build) -> Any:
    """A weight of the first placement is used on the second."""
    w = b.source("w", (4, 4), B)
    y = b.op(aten.linear.default, b.input("x", (2, 4), B), w, out=B)
    moved = b.box(w, B, where=PLACES[1])
    return b.op(aten.linear.default, b.box(y, B, where=PLACES[1]), moved, out=B)


def labelled(b: Build) -> Any:
    """An argument that lies on the first placement is used on the second."""
    x = b.input("x", (2, 4), B)
    y = b.box(layers(b, x, [PLACES[0]]), B, where=PLACES[1])
    return b.op(aten.mul.Tensor, y, b.box(x, B, where=PLACES[1]), out=B)


def of(make: Callable[[Build], Any]) -> tuple[Chunks, Tasks]:
    b = Build(PLACES[0])
    return cut(b.graph(total(b, make(b), B)))


def test_a_value_hops_over_a_chunk() -> None:
    where, made = of(around)
    assert where.group == (0, 1, 2)
    assert {("F0", "F2"), ("B2", "B0")} <= {(str(hop.source), str(hop.target)) for hop in made.hops}


def test_a_weight_goes_to_another_group_once_a_step_and_its_gradient_comes_back() -> None:
    where, made = of(lent)
    assert len(where.once) == len(made.before) == 1
    assert all(hop.sent != "w" for hop in made.hops)
    assert "w" in made.grads
    assert made.after


def test_an_argument_is_not_sent_from_rank_to_rank() -> None:
    where, made = of(labelled)
    assert len(where.given) == 1
    assert len([hop for hop in made.hops if hop.target.kind == "F"]) == 1


def test_an_argument_that_every_rank_has_is_told_as_no_move() -> None:
    b = Build(PLACES[0])
    graph = b.graph(total(b, labelled(b), B))
    piped = replace(graph, given=True)
    forward = [[row.name for row in moves_of(each) if row.direction == "forward"] for each in (graph, piped)]
    assert [names.count("x") for names in forward] == [1, 0]
    assert len(forward[1]) == 1


def test_a_stage_that_trains_nothing_has_no_backward() -> None:
    b = Build(PLACES[0])
    x = b.op(aten.sin.default, b.input("x", (2, 4), B), out=B)
    y = layers(b, b.box(x, B, where=PLACES[1]), [PLACES[1]])
    _, made = cut(b.graph(total(b, y, B)))
    assert not made.tasks.get(Name("B", 0)) or not made.tasks[Name("B", 0)].todo
    assert made.tasks[Name("B", 1)].todo


def test_a_group_of_two_ranks_is_one_hop_from_another() -> None:
    b = Build(PAIR)
    w = b.source("w", (4, 4), S(0))
    y = b.op(aten.linear.default, b.input("x", (2, 4), B), w, out=S(1))
    y = b.op(aten.sin.default, b.box(y, B, where=PLACES[2]), out=B)
    where, made = cut(b.graph(total(b, y, B)))
    assert [where.ranks(n) for n in (0, 1)] == [(0, 1), (2,)]
    assert [(str(hop.source), str(hop.target)) for hop in made.hops] == [("F0", "F1"), ("B1", "B0")]
