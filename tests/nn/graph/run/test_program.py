"""Programs make what one device makes, values and gradients, and send what their plans say."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.boxing import gather, record
from sbpflow.boxing.graph.buckets import bucketed
from sbpflow.boxing.graph.physical import Op, Physical, Value, Var
from sbpflow.nn.graph.compiler.backends import Backend
from sbpflow.nn.graph.instructions.moves import MoveNow, WaitForMove
from sbpflow.nn.graph.run.program import Program
from tests.ranks import Ranks

from ..graphs import F64, GRAPHS, LINE, Build, aten, check, sharded_parameters, sharded_states, shards_of, wholes


@pytest.mark.sampled(9)
@pytest.mark.parametrize("backend", ["autograd", "code"])
@pytest.mark.parametrize("name", GRAPHS)
def test_values_and_gradients_are_those_of_one_device(name: str, backend: Backend) -> None:
    graph = GRAPHS[name]()
    program = Program(graph, backend=backend)
    check(graph, program)
    assert not program.reasons
    assert {made.backend for made in program.compiled} == {backend}


@pytest.mark.parametrize("name", GRAPHS)
def test_moves_that_go_on_beside_segments_give_the_same(name: str) -> None:
    graph = GRAPHS[name]()
    check(graph, Program(graph, overlap=True))


@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_sent_is_what_the_plans_say(name: str) -> None:
    graph = GRAPHS[name]()
    program = Program(graph)
    given = shards_of(graph, wholes(graph))
    with record() as moves:
        program(given)
    gathered = [do for do in program.schedule.todo if isinstance(do, MoveNow | WaitForMove) and "again" in do.writes[0]]
    again = sum(program.schedule.transfers[do.number].plans[0].bytes for do in gathered)
    backs = sum(back.boxing.bytes for back in graph.backs if name != "maximum")
    planned = sum(graph.boxing(box).bytes for box in graph.boxes) + backs + again
    if name == "maximum":  # the way back to who held it is moves of its own
        assert moves.bytes > planned
    else:
        assert moves.bytes == planned


def run_all(names: list[str], backend: Backend, overlap: bool | None) -> None:
    for name in names:
        graph = bucketed(GRAPHS[name]())
        check(graph, Program(graph, backend=backend, overlap=overlap))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("backend", "overlap"), [("autograd", None), ("code", True)])
def test_real_ranks_agree_with_one_device(ranks4: Ranks, backend: Backend, overlap: bool | None) -> None:
    ranks4(run_all, list(GRAPHS), backend, overlap)


def test_a_step_leaves_no_graph_and_can_be_repeated_with_new_values() -> None:
    graph = GRAPHS["ZeRO-3"]()
    program = Program(graph)
    for seed in range(3):
        outcome = check(graph, program, wholes(graph, seed))
        assert all(x.grad_fn is None for held in (*outcome.values.values(), *outcome.grads.values()) for x in held)


def test_equal_layers_and_ranks_are_compiled_once() -> None:
    few, many = Program(sharded_parameters(3)), Program(sharded_parameters(12))
    assert len(many.compiled) == len(few.compiled) <= 4


@torch.library.custom_op("sbpflow_test::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() else x.clone()


def test_what_cannot_be_traced_runs_all_the_same_and_is_told() -> None:
    b = Build(LINE)
    x, w = b.input("x", (4, 6), B), b.source("w", (8, 6), S(0))
    made = Op(torch.ops.sbpflow_test.doubled.default, (x,), {}, (Value("y", b.values["x"].layout),), grad=False)
    b.steps.append(made)
    b.values["y"] = made.outputs[0]
    h = b.op(aten.linear.default, Var("y"), w, out=S(1))
    graph = b.graph(b.op(aten.sum.default, h, out=P))
    program = Program(graph)
    check(graph, program)
    assert {c.backend for c in program.compiled} == {"autograd"}
    assert all(reason.startswith("code: ") for reason in program.reasons)
    assert program.reasons
    assert program.memory()[0].activations > 4 * 8 // 4 * 8


def test_inference_saves_nothing() -> None:
    program = Program(GRAPHS["forward only"]())
    assert all(made.backward is None for made in program.compiled)
    assert {do.word for do in program.schedule.todo} <= {"run", "box", "start", "wait", "free"}


def test_shards_of_another_shape_are_refused() -> None:
    graph = GRAPHS["data parallel"]()
    program = Program(graph)
    given = shards_of(graph, wholes(graph))
    with pytest.raises(flow.SbpflowError, match=r"input x has shards of \[\(3, 6\)"):
        program({**given, "x": tuple(torch.zeros(3, 6, dtype=F64) for _ in range(4))})
    with pytest.raises(flow.SbpflowError, match="parameter w has shards of \\[\\]"):
        program({name: held for name, held in given.items() if name != "w"})


def test_the_line_in_the_record_is_the_users() -> None:
    graph = GRAPHS["data parallel"]()
    program, given = Program(graph), shards_of(graph, wholes(graph))
    with record() as moves:
        program(given)
    assert moves
    assert all(__file__ in move.line for move in moves)


def noisy(*, split: bool) -> Physical:
    """Dropout taken apart, noise by shape alone, numbers from nothing, and numbers by the values of a tensor."""
    b = Build(LINE)
    lie = S(0) if split else B
    x = b.source("x", (7, 3), lie)
    noise = b.op(aten.bernoulli.p, x, 0.5, out=lie, grad=False)
    y = b.op(aten.mul.Tensor, x, noise, out=lie)
    more = b.op(aten.rand_like.default, y, out=lie, grad=False)
    z = b.op(aten.mul.Tensor, y, more, out=lie)
    chance = b.input("chance", (7, 3), B)
    chance = b.op(aten.sigmoid.default, chance, out=B, grad=False)
    drawn = b.op(aten.bernoulli.default, chance, out=lie if not split else B, grad=False)
    fresh = b.op(aten.randn.default, [7, 3], dtype=F64, out=lie, grad=False)
    z = b.op(aten.add.Tensor, z, fresh, out=lie)
    loss = b.op(aten.sum.default, z, out=P if split else B)
    return b.graph(loss, result=[z, drawn, noise])


@pytest.mark.parametrize("split", [False, True])
def test_random_numbers_are_those_of_one_device(split: bool) -> None:
    graph = noisy(split=split)
    given = wholes(graph)
    torch.manual_seed(3)
    x, rng = given["x"], torch.random.get_rng_state()
    noise = torch.bernoulli(x, 0.5)
    more = torch.rand_like(x)
    drawn = torch.bernoulli(torch.sigmoid(given["chance"]))
    z = x * noise * more + torch.randn(7, 3, dtype=F64)
    torch.random.set_rng_state(rng)
    outcome = Program(graph)(shards_of(graph, given))
    names = [var.name for var in graph.result]
    for name, whole in zip(names, (z, drawn, noise), strict=True):
        assert torch.equal(gather(outcome.values[name], graph.layout(name)), whole)
    torch.testing.assert_close(gather(outcome.grads["x"], graph.sources[0].home), noise * more)


def seeded_draw(where: str) -> tuple[Tensor, Tensor]:
    b = Build(flow.placement(where))
    noise = b.op(aten.rand.default, [5], out=S(0), grad=False)
    graph = b.graph(result=noise)
    torch.manual_seed(4)
    made = Program(graph)({}).values[noise.name]
    return gather(made, graph.layout(noise.name)), torch.rand(1)


def test_processes_that_keep_nothing_draw_too(ranks4: Ranks) -> None:
    torch.manual_seed(4)
    whole, after = torch.rand(5), torch.rand(1)
    for rank, (mine, next_) in enumerate(ranks4(seeded_draw, "cpu:[1-2]")):
        assert torch.equal(next_, after)
        assert torch.equal(mine, whole) if rank in (1, 2) else mine.numel() == 0


def test_factories_make_their_part() -> None:
    b = Build(LINE)
    rows = b.op(aten.arange.default, 6, dtype=F64, out=S(0), grad=False)
    x = b.source("x", (6,), S(0))
    graph = b.graph(b.op(aten.sum.default, b.op(aten.mul.Tensor, x, rows, out=S(0)), out=P), result=rows)
    outcome = Program(graph)(shards_of(graph, wholes(graph)))
    assert torch.equal(gather(outcome.grads["x"], graph.sources[0].home), torch.arange(6, dtype=F64))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", [sharded_parameters, sharded_states, *map(GRAPHS.get, ("data parallel", "attention"))])
@pytest.mark.parametrize("limit", [1, 700, 1 << 20])
def test_buckets_send_the_same_bytes_in_fewer_moves(make, limit) -> None:  # type: ignore[no-untyped-def]
    graph = make(6, size=8) if make is sharded_parameters else make()
    packed = bucketed(graph, limit)
    check(packed, Program(packed))
    sent, calls = [], []
    for each in (graph, packed):
        program, given = Program(each), shards_of(each, wholes(each))
        with record() as moves:
            program(given)
        sent.append(moves.bytes)
        calls.append(len(moves))
    numbers = [back.bucket for back in packed.backs]
    assert sent[1] <= sent[0]  # two small all_reduces done at once send more than one large one in two halves
    if make is sharded_parameters:
        assert sent[1] == sent[0]
    assert calls[0] - calls[1] == len([n for n in numbers if n is not None]) - len(set(numbers) - {None})
    if limit == 1 << 20 and make is sharded_parameters:
        assert calls[1] < calls[0]


def test_uneven_gradients_stay_out_of_buckets() -> None:
    b = Build(LINE)
    x, w, v = b.input("x", (4, 6), B), b.source("w", (5, 6), S(0)), b.source("v", (8, 6), S(0))
    y = b.op(aten.linear.default, x, b.box(w, B, P), out=B)
    z = b.op(aten.linear.default, x, b.box(v, B, P), out=B)
    losses = [b.op(aten.sum.default, each, out=B) for each in (y, z)]
    assert [back.bucket for back in bucketed(replace(b.graph(*losses))).backs] == [0, None]
