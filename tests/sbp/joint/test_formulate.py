"""The problem made of a graph: its best choice is that of trying all, and runs of equal blocks share everything."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from sbpflow.nn.eager.capture import capture
from sbpflow.placement import cluster
from sbpflow.sbp.call import Ref
from sbpflow.sbp.joint.demands import Demands, RestPins
from sbpflow.sbp.joint.formulate import Formulated, formulate
from sbpflow.sbp.joint.known_options import KnownOptions
from sbpflow.sbp.joint.placements import homes
from sbpflow.sbp.joint.solver.solve import solve
from sbpflow.sbp.logical import Logical, Loss, Origin, Source

LINE, GRID = flow.placement("cpu", range(2)), flow.placement("cpu:[0-3] as (a=2, b=2)")
CPU = cluster("cpu")


def logical(function: Any, shapes: Sequence[tuple[int, ...]], blocks: tuple[str, ...] = ()) -> Logical:
    """The graph of a function of some inputs, of which all but the first are parameters."""
    lies = [flow.layout(flow.placement("cpu", range(1)), B, shape) for shape in shapes]
    seen = capture(function, [Ref(n) for n in range(len(shapes))], {}, lies)
    ops = zip(seen.ops, blocks or ("",) * len(seen.ops), strict=True)
    sources = tuple(
        Source(f"w{n}" if n else "x", "parameter" if n else "input", s.fake, requires_grad=n > 0)
        for n, s in enumerate(seen.sources)
    )
    return replace(
        seen,
        sources=sources,
        ops=tuple(replace(op, origin=Origin(block=block)) for op, block in ops),
        losses=(Loss(seen.result.number),),
    )


def formulated(graph: Logical, place: flow.Placement, **demands: Any) -> Formulated:
    return formulate(graph, homes(graph, place), lambda _: CPU, Demands(**demands))


def two_layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.linear(torch.relu(F.linear(x, w)), v).sum()


def skip(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    return (y + torch.relu(y)).sum()


FUNCTIONS = [
    (two_layers, [(8, 4), (16, 4), (4, 16)]),
    (skip, [(8, 4), (4, 4)]),
    (lambda x, w: F.layer_norm(x @ w, [4]).sum(), [(8, 4), (4, 4)]),
]


@pytest.mark.parametrize("demands", [{}, {"real_sums": True}])
def test_on_one_rank_nothing_is_chosen_and_nothing_moves(demands: dict[str, Any]) -> None:
    made = formulated(logical(skip, [(8, 4), (4, 4)]), flow.placement("cpu", [0]), **demands)
    assert {len(node.candidates) for node in made.nodes} == {1}
    assert [float(edge.matrix.sum()) for edge in made.problem.edges] == [0.0] * len(made.problem.edges)


@pytest.mark.parametrize(("function", "shapes"), FUNCTIONS, ids=["two_layers", "skip", "norm"])
def test_the_choice_is_the_best_of_all(function: Any, shapes: list[tuple[int, ...]]) -> None:
    problem = formulated(logical(function, shapes), LINE).problem
    counts = [len(cost) for cost in problem.costs]
    assert 1 < np.prod(counts) < 4e7
    best = np.zeros((1,) * len(counts))
    for at, cost in enumerate(problem.costs):
        best = best + cost.reshape([-1 if k == at else 1 for k in range(len(counts))])
    for edge in problem.edges:
        shape = [counts[k] if k in (edge.i, edge.j) else 1 for k in range(len(counts))]
        best = best + (edge.matrix if edge.i < edge.j else edge.matrix.T).reshape(shape)
    found = solve(problem)
    assert found.cost == pytest.approx(best.min(), rel=1e-12)
    assert found.cost == pytest.approx(problem.cost(found.choice), rel=1e-12)
    assert found.bound <= found.cost <= found.greedy


def test_equal_blocks_share_their_candidates_and_matrices() -> None:
    def deep(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = x + torch.relu(F.linear(x, w))
        return x.sum()

    layers = 8
    names = tuple(f"layers.{k}" for k in range(layers) for _ in range(3))
    graph = logical(deep, [(8, 4), *[(4, 4)] * layers], (*names, ""))
    found = formulated(graph, GRID)
    tied = [t for t in found.problem.tied if t >= 0]
    assert tied
    assert max(tied.count(t) for t in set(tied)) >= layers - 4  # the first and last ones see other neighbours
    few = formulated(logical(deep, [(8, 4), *[(4, 4)] * 6], (*names[:18], "")), GRID)
    assert len({id(e.matrix) for e in found.problem.edges}) == len({id(e.matrix) for e in few.problem.edges})


def test_what_another_formulation_has_worked_out_is_taken_and_changes_nothing() -> None:
    known = KnownOptions()
    graph = logical(two_layers, [(8, 4), (16, 4), (4, 16)])
    asked: list[Demands] = [
        Demands(states=2),
        Demands(pins={"w1": (S(0), B)}, states=2),
        Demands(states=1),
        Demands(states=2, sharded=True),
        Demands(states=2),
    ]
    sizes = []
    for demands in asked:
        alone, shared = (
            formulate(graph, homes(graph, GRID), lambda _: CPU, demands, known=given) for given in (None, known)
        )
        sizes.append(len(known.options) + len(known.matrices))
        assert [node.candidates for node in shared.nodes] == [node.candidates for node in alone.nodes]
        for name in ("costs", "memory"):
            mine, other = getattr(shared.problem, name), getattr(alone.problem, name)
            assert all(np.array_equal(a, b) for a, b in zip(mine, other, strict=True))
        pairs = zip(shared.problem.edges, alone.problem.edges, strict=True)
        assert all((a.i, a.j) == (b.i, b.j) and np.array_equal(a.matrix, b.matrix) for a, b in pairs)
    assert sizes[0] < sizes[1] < 2 * sizes[0]  # some of it was there
    assert sizes[-1] == sizes[-2]  # all of it was


def test_a_copy_whose_gradient_is_wanted_is_another_than_one_whose_is_not() -> None:
    """Two inputs alike, of which one is trained: it may lie in more ways, and did not where the other came first."""

    def twice(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return (x @ w + x @ w.t() + y @ w + y @ w.t()).sum()

    graph, counts = logical(twice, [(8, 8)] * 3), dict[bool, int]()
    x, w, y = graph.sources
    for wants in (False, True), (True, False), (True, True), (False, False):
        inputs = (replace(s, kind="input", requires_grad=grad) for s, grad in zip((x, y), wants, strict=True))
        first, last = inputs
        found = formulated(replace(graph, sources=(first, w, last)), GRID)
        copies = {node.index: len(node.candidates) for node in found.nodes if node.kind == "copy"}
        for number, grad in zip((0, 2), wants, strict=True):
            assert counts.setdefault(grad, copies[number]) == copies[number]
    assert counts[True] > counts[False]


def test_a_pinned_source_has_no_other_candidates() -> None:
    graph = logical(two_layers, [(8, 4), (16, 4), (4, 16)])
    found = formulated(graph, LINE, pins={"w1": (S(0),)})
    (node,) = [n for n in found.nodes if n.kind == "source" and n.index == 1]
    assert [c.lie.state.sbp(1) for c in node.candidates] == [(S(0),)]


def test_gradients_that_are_left_open_may_come_in_pieces_with_each_micro_batch_or_behind_all() -> None:
    """With each of them they go beside what is computed: a ZeRO-2 by hand took .4 % less than "proved best"."""

    def ways(*words: Any) -> set[Any]:
        posed = formulated(logical(two_layers, FUNCTIONS[0][1]), LINE, rests={"w1": RestPins(*words)})
        return set(posed.nodes[1].candidates)

    cut, left = ((0, S(0)),), ((0, None),)
    assert ways(cut, cut) | ways(None, cut) <= ways(left, left)


def test_moves_of_several_users_are_paid_once() -> None:
    """q, k and v take one input; what it costs to gather it for all three is one gather."""

    def three(x: Tensor, w: Tensor) -> Tensor:
        y = torch.relu(F.linear(x, w))
        return (F.linear(y, w) + F.linear(y, w) * F.linear(y, w)).sum()

    graph = logical(three, [(4, 4), (4, 4)])
    found = formulated(graph, LINE)
    (relu,) = [op.numbers[0] for op in graph.ops if op.op._schema.name == "aten::relu"]
    (copy,) = [k for k, n in enumerate(found.nodes) if n.kind == "copy" and n.index == relu]
    touching = [e for e in found.problem.edges if copy in (e.i, e.j)]
    assert len(touching) == 1 + 3


def test_columns_then_rows_where_weights_are_large() -> None:
    """Of a large weight and a small batch nothing but one sum moves forward."""
    graph = logical(two_layers, [(2, 512), (2048, 512), (512, 2048)])
    found = formulated(graph, LINE)
    solution = solve(found.problem)
    lies = {
        graph.sources[n.index].name: n.candidates[k].lie.state.sbp(1)
        for n, k in zip(found.nodes, solution.choice, strict=True)
        if n.kind == "source"
    }
    assert (lies["w1"], lies["w2"]) == ((S(0),), (S(1),))
