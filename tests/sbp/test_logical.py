"""The logical graph with other numbers, and without what nobody uses."""

import torch

from sbpflow.sbp.call import Ref
from sbpflow.sbp.logical import Logical, LogicalOp, Loss, Source

aten = torch.ops.aten
X = torch.zeros(2)


def op(kind: torch._ops.OpOverload, number: int, *args: object) -> LogicalOp:
    return LogicalOp(kind, args, {}, (X,), (number,))


GRAPH = Logical(
    (Source("0", "input", X), Source("state", "buffer", X)),
    (
        op(aten.relu.default, 2, Ref(0)),
        op(aten.neg.default, 3, Ref(2)),  # nobody uses it
        op(aten.add.Tensor, 4, Ref(1), Ref(2)),
        op(aten.sum.default, 5, Ref(2)),
        op(aten.exp.default, 6, Ref(5)),
    ),
    {"out": [Ref(6)]},
    (Loss(6, 5),),
    {"state": 4},
)


def test_every_place_of_a_value_gets_its_new_number() -> None:
    made = GRAPH.map({2: 20, 4: 40, 5: 50, 6: 60})
    assert [made_op.numbers for made_op in made.ops] == [(20,), (3,), (40,), (50,), (60,)]
    assert [made_op.inputs for made_op in made.ops] == [(0,), (20,), (1, 20), (20,), (50,)]
    assert (made.result, made.losses, dict(made.writes)) == ({"out": [Ref(60)]}, (Loss(60, 50),), {"state": 40})


def test_what_is_returned_written_or_a_loss_stays() -> None:
    assert GRAPH.ends == {4, 5, 6}
    assert [kept.numbers for kept in GRAPH.pruned().ops] == [(2,), (4,), (5,), (6,)]
    assert GRAPH.pruned([3]).ops == GRAPH.ops


def test_an_op_of_other_values_is_otherwise_the_same() -> None:
    old = GRAPH.ops[2]
    new = old.of({1: 9}, numbers=(8,))
    assert (new.op, new.inputs, new.numbers, old.inputs) == (old.op, (9, 2), (8,), (1, 2))
