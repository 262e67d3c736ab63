"""Every option of a call holds: what ranks run under it gives the whole call's value and gradients."""

import random
from typing import Any

import pytest
import torch

from sbpflow.sbp.call import Call, tensors_in
from sbpflow.sbp.check import check_way
from sbpflow.sbp.joint.options import Reach, options, source_states, way_of
from sbpflow.sbp.schema import named_op

CALLS: list[tuple[Any, ...]] = [
    ("mm", torch.rand(4, 8), torch.rand(8, 4)),
    ("linear", torch.rand(4, 4, 8), torch.rand(12, 8), torch.rand(12)),
    ("add.Tensor", torch.rand(4, 8), torch.rand(8)),
    ("mul.Tensor", torch.rand(4, 8), torch.rand(4, 8)),
    ("layer_norm", torch.rand(4, 4, 8), [8], torch.rand(8), torch.rand(8)),
    ("view", torch.rand(4, 4, 24), [4, 4, 3, 4, 2]),
    ("reshape", torch.rand(4, 4, 8), [16, 8]),
    ("split.Tensor", torch.rand(4, 4, 24), 8, 2),
    ("chunk", torch.rand(4, 24), 2, 1),
    ("transpose.int", torch.rand(4, 4, 8), 1, 2),
    ("embedding", torch.rand(12, 8), torch.randint(12, (4, 4))),
    ("sum.dim_IntList", torch.rand(4, 8), [0]),
    ("mean.dim", torch.rand(4, 8), [1]),
    ("amax", torch.rand(4, 8), [1]),
    ("gather", torch.rand(8, 8), 1, torch.randint(8, (8, 1))),
    ("index.Tensor", torch.rand(4, 12, 8), [torch.randint(4, (6,))]),
    ("index_select", torch.rand(4, 12), 0, torch.randint(4, (6,))),
    ("slice.Tensor", torch.rand(12, 8), 1, 2, 6),
    ("select.int", torch.rand(12, 4), 1, 2),
    ("amax", torch.rand(4, 12, 8), [0]),
    ("expand", torch.rand(12, 1), [12, 4]),
    ("constant_pad_nd", torch.rand(12, 8), [1, 1]),
    ("scaled_dot_product_attention", torch.rand(4, 4, 6, 4), torch.rand(4, 4, 6, 4), torch.rand(4, 4, 6, 4)),
    ("cat", [torch.rand(4, 8), torch.rand(4, 8)], 1),
    ("_log_softmax", torch.rand(4, 8), 1, False),
    ("convolution", torch.rand(4, 4, 6, 6), torch.rand(4, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
]


def asked(call: tuple[Any, ...], sizes: tuple[int, ...]) -> Call:
    op, args = named_op(call[0]), call[1:]
    return Call(op, args, {}, tuple(tensors_in(op(*args))), (), sizes)


def reach(call: Call, rng: random.Random) -> list[Reach]:
    """Each input may come in any plain state, or cut in three or four first, as packed heads are."""
    found = []
    for x in call.inputs:
        holes = [(d, (-k, 1)) for d, n in enumerate(x.shape) for k in (2, 3) if n % (2 * k) == 0]
        floats = x.is_floating_point()
        found.append(Reach(tuple(source_states(tuple(x.shape), call.sizes, holes)), floats, floats))
    return found


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_every_option_holds(call: tuple[Any, ...]) -> None:
    rng = random.Random(0)
    of = asked(call, (2, 2))
    found = options(of, reach(of, rng), [y.is_floating_point() for y in of.outputs])
    for option in rng.sample(found, min(8, len(found))):
        states = tuple(lie.state for lie in option.inputs)
        way = way_of(Call(of.op, of.args, {}, of.outputs, states, of.sizes), tuple(lie.state for lie in option.outputs))
        assert (way.inputs, way.outputs) == (states, tuple(lie.state for lie in option.outputs))
        assert check_way(of.op, of.args, {}, way, of.sizes) is None, option


def test_options_are_told_apart_and_do_not_depend_on_the_run() -> None:
    of = asked(CALLS[1], (2, 2))
    some = options(of, reach(of, random.Random(0)), [True])
    assert len({(o.inputs, o.outputs) for o in some}) == len(some)
    assert some == options(of, reach(of, random.Random(1)), [True])


def test_columns_and_rows_of_a_linear_are_among_its_options() -> None:
    x, w = torch.rand(4, 8), torch.rand(8, 8)
    of = Call(torch.ops.aten.linear.default, (x, w), {}, (x @ w.T,), (), (2,))
    lies = [Reach(tuple(source_states((n, 8), (2,), ())), n == 4, True) for n in (4, 8)]
    said = {
        tuple(lie.state.sbp(1)[0] for lie in (*o.inputs, *o.outputs)): tuple(lie.grads for lie in o.inputs)
        for o in options(of, lies, [True])
    }
    from sbpflow import B, P, S

    assert said[B, S(0), S(1)] == ((0,), ())  # the gradient of x comes as addends
    assert said[S(1), S(1), P] == ((), ())
    assert said[S(0), B, S(0)] == ((), (0,))
    assert said[P, B, P] == ((), (0,))


@pytest.mark.parametrize(("n", "ranks", "fits"), [(8, 4, True), (6, 4, False), (17, 4, True), (0, 2, False)])
def test_a_source_is_cut_evenly_or_in_pieces_nearly_alike(n: int, ranks: int, fits: bool) -> None:
    states = source_states((n,), (ranks,), ())
    assert any(state.split for state in states) is fits


@pytest.mark.parametrize("name", ["full", "zeros", "ones", "empty.memory_format"])
def test_what_a_constant_fills_may_lie_in_any_pieces(name: str) -> None:
    shape, args = [8, 9, 1], [2.5] if name == "full" else []
    call = Call(named_op(name), (shape, *args), {}, (torch.empty(shape),), (), (2, 4))
    found = options(call, [], [False], [[(2, (0,))]])
    assert {option.outputs[0].state for option in found} == {*source_states((8, 9, 1), (2, 4), [(2, (0,))])}
    assert {option.share for option in found if option.outputs[0].state.dims[0] == (0, 1)} == {8}
    drawn = Call(named_op("rand"), (shape,), {}, (torch.empty(shape),), (), (2, 4))
    assert not any(option.outputs[0].state.split for option in options(drawn, [], [False]))
