"""Memory is worked out once for ranks that hold as much of everything, and is what it would be for each alone."""

from collections.abc import Callable
from typing import Any

import pytest

from sbpflow import B, P, S
from sbpflow.boxing.graph.physical import Physical
from sbpflow.nn.graph.lower.equal_ranks import equal_ranks
from sbpflow.nn.graph.lower.localise import Localiser
from sbpflow.nn.graph.lower.segments import segments
from sbpflow.nn.graph.memory import liveness
from sbpflow.nn.graph.memory.liveness import RankMemory, memory
from sbpflow.nn.graph.run import task_memory
from sbpflow.nn.graph.run.variant import Variant

from .. import graphs
from ..graphs import LINE, Build, aten

MADE: dict[str, Callable[[], Physical]] = {
    **{f"{n} rows": lambda n=n: graphs.uneven(n) for n in (1, 3, 5, 8)},  # type: ignore[misc]
    **{
        of.__name__: of
        for of in (
            *(graphs.data_parallel, graphs.tensor_parallel, graphs.sharded_parameters, graphs.sharded_states),
            *(graphs.pipeline, graphs.thrice, graphs.vocabulary, graphs.split_classes, graphs.maximum, graphs.addends),
            *(graphs.attention, graphs.odd_wires, graphs.forward_only),
        )
    },
}


def told(graph: Physical) -> tuple[dict[int, RankMemory], dict[int, Any]]:
    """In one go, and task by task."""
    found = task_memory.memory_of_tasks(Variant(graph, {}, split=False, backend="auto"), 0, regather=True)
    tasks = {rank: (one.chunks, one.once, one.after, one.stays) for ranks, one in found for rank in ranks}
    return memory(graph, segments(graph), Localiser(graph)), tasks


@pytest.mark.parametrize("name", MADE)
def test_what_is_told_of_equal_ranks_is_what_is_told_of_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = MADE[name]()
    together = told(graph)
    for each in (liveness, task_memory):
        monkeypatch.setattr(each, "equal_ranks", lambda graph: [[rank] for of in equal_ranks(graph) for rank in of])
    assert told(graph) == together
    assert list(together[0]) == sorted(together[0])


def test_a_rank_that_keeps_its_memory_is_not_equal_to_one_that_makes_zeros() -> None:
    """Of a B that becomes P one rank has all, in the memory where it was."""
    b = Build(LINE)
    y = b.op(aten.neg.default, b.box(b.source("x", (8, 4), B), P), out=P)
    assert equal_ranks(b.graph(result=y)) == [[0], [1, 2, 3]]


def test_uneven_pieces_are_told_apart() -> None:
    b = Build(LINE)
    y = b.op(aten.relu.default, b.source("x", (6, 4), S(0)), out=S(0))
    assert equal_ranks(b.graph(result=y)) == [[0, 1], [2, 3]]
