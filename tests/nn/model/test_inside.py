"""Notes of how to compute: what they meet, which of them counts, and what is refused."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from sbpflow.nn.model.inside import uses_of
from sbpflow.placement.errors import PlacementError, SbpError, ShapeError
from tests.nn.graph.pipes import of, text

WHERE = flow.placement("cpu:[0-1] as (context=2)")


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = nn.functional.scaled_dot_product_attention(x, x, x)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Attention(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.inner(x))
        return out


def planned(model: nn.Module, **how: Any) -> str:
    with torch.no_grad():
        return flow.compile(model, placement=WHERE, **how).plan_for(torch.ones(2, 6, 4)).text()


def test_a_note_counts_for_all_that_is_in_a_module() -> None:
    model = nn.Sequential(Block(), Block())
    flow.nn.inside(model[1:], use="ring", over="context")
    text = planned(model)
    assert text.count("ring_part(") == 2
    assert text.count("scaled_dot_product_attention(") == 1


def test_notes_stay_in_copies_and_pickles_and_are_taken_back() -> None:
    model = flow.nn.inside(Block(), use="ring", over="context")
    flow.nn.inside(model, use="striped", over="context")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [str(use) for use in uses_of({"": other})[""]] == [
            "inside the model use striped over context",
            "inside the model use ring over context",
        ]
    flow.nn.inside(model, use=None)
    assert uses_of({"": model}) == {}
    assert "ring_part(" not in planned(model)


def test_a_note_made_after_the_plan_makes_another() -> None:
    model = Block()
    step = flow.compile(model, placement=WHERE)
    with torch.no_grad():
        assert "ring_part(" not in step.plan_for(torch.ones(2, 6, 4)).text()
        flow.nn.inside(model.inner, use="ring", over="context")
        assert "ring_part(" in step.plan_for(torch.ones(2, 6, 4)).text()


def test_annotations_show_notes() -> None:
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    flow.nn.inside([part for part in model.modules() if type(part).__name__ == "Attention"], use="ring", over="context")
    assert "inner: Attention  use ring over context" in str(flow.nn.annotations(model))


def test_eager_calls_go_on_as_they_are() -> None:
    x = torch.randn(2, 6, 4)
    laid = flow.tensor(x, placement=WHERE, sbp=S(1))
    model = flow.nn.inside(Attention(), use="ring", over="context")
    torch.testing.assert_close(model(laid).full_tensor(), Attention()(x))


def test_on_an_axis_of_one_rank_there_is_nothing_to_do() -> None:
    model = flow.nn.inside(Block(), use="ring", over="other")
    one = flow.placement("cpu:[0-1] as (other=1, context=2)")
    with torch.no_grad():
        assert "ring_part(" not in flow.compile(model, placement=one).plan_for(torch.ones(2, 6, 4)).text()


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "name": (lambda m: flow.nn.inside(m, use="rnig", over="context"), SbpError, "no composite 'rnig'.*\n.*'ring'"),
    "no_axis": (lambda m: flow.nn.inside(m, use="ring"), PlacementError, "say over which axis"),
    "no_module": (lambda m: flow.nn.inside([m, 3], use="ring", over="a"), PlacementError, "found int"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_at_once(case: str) -> None:
    call, kind, said = WRONG[case]
    with pytest.raises(kind, match=said):
        call(Block())


def test_an_axis_that_the_placement_lacks_is_refused() -> None:
    model = flow.nn.inside(Block(), use="ring", over="contxt")
    with pytest.raises(PlacementError, match=r"inside the model use ring over contxt: no axis(.*\n)+.*mean 'context'"):
        planned(model)


def test_a_module_in_which_nothing_is_called_is_refused() -> None:
    model = Block()
    flow.nn.inside(model.out, use="ring", over="context")
    with pytest.raises(SbpError, match=r"inside out use ring over context: no attention was called.*\n.*are linear"):
        planned(model)


def test_a_note_that_another_hides_is_refused() -> None:
    model = flow.nn.inside(Block(), use="ring", over="other")
    flow.nn.inside(model.inner, use="ring", over="context")
    with pytest.raises(SbpError, match="use ring over other: inside inner use ring over context counts there"):
        planned(model)


def test_of_a_list_one_module_is_enough_and_none_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Attention())
    flow.nn.inside(model, use="ring", over="context")
    assert planned(model).count("ring_part(") == 2
    flow.nn.inside(model, use=None)
    flow.nn.inside(model[:1], use="ring", over="context")
    with pytest.raises(SbpError, match="inside 0 use ring over context: no attention was called there"):
        planned(model)


def next_words(model: nn.Module, words: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words).flatten(0, 1), wanted.flatten())


def test_slices_of_sequences_are_refused() -> None:
    model = of("gpt")
    flow.nn.inside(model, use="ring", over="context")
    step = flow.compile(model, next_words, placement=WHERE, slices=2)
    with pytest.raises(SbpError, match="inside the model use ring over context: attention of a slice"):
        step.plan_for(*text(0), *text(1))


def part(x: Tensor, weight: Tensor, rows: list[int]) -> Tensor:
    return x[:, rows[0] : rows[1]] @ weight


library: Any = torch.library.Library("inside_test", "DEF")  # type: ignore[no-untyped-call]
library.define("part(Tensor x, Tensor weight, int[] rows) -> Tensor")
library.impl("part", part, "CompositeImplicitAutograd")


@flow.nn.composite("streamed_product", of="mm", noun="product of matrices")
def streamed_product(axis: flow.nn.Axis, x: flow.nn.AxisValue, weight: flow.nn.AxisValue) -> Any:
    """Every rank has its rows of both, and the weight goes round."""
    rows, held, total = x.lying(S(0)), weight.lying(S(0)), None
    for turn in range(axis.size):
        piece = held.turned(turn)
        more = axis.run(torch.ops.inside_test.part, rows, piece, piece.indices(0), gives=S(0), round=turn)
        total = more if total is None else axis.run(torch.ops.aten.add.Tensor, total, more, gives=S(0), round=turn)
    return total


@flow.nn.composite("wrong_shape", of="mm")
def wrong_shape(axis: flow.nn.Axis, x: flow.nn.AxisValue, w: flow.nn.AxisValue) -> flow.nn.AxisValue:
    made: flow.nn.AxisValue = axis.run(torch.ops.aten.t, x.lying(S(0)), gives=S(1))
    return made


@flow.nn.composite("wrong_call", of="mm")
def wrong_call(axis: flow.nn.Axis, x: flow.nn.AxisValue, w: flow.nn.AxisValue) -> flow.nn.AxisValue:
    made: flow.nn.AxisValue = axis.run(torch.ops.aten.mm, x.lying(S(0)), x.lying(S(0)), gives=S(0))
    return made


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(20, dtype=torch.float64).reshape(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight)


def test_users_add_theirs_and_gradients_follow() -> None:
    where = flow.placement("cpu:[0-3] as (context=4)")
    model, alone = flow.nn.inside(Product(), use="streamed_product", over="context"), Product()
    x = torch.randn(8, 4, dtype=torch.float64)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x).square().sum()
        return out

    flow.nn.shard(model, {"weight": S(0)})
    with flow.record() as moves:
        loss: Any = flow.compile(model, loss_fn, placement=where)(x)
    want = loss_fn(alone, x)
    want.backward()  # type: ignore[no-untyped-call]
    mine: Any = model.weight.grad
    torch.testing.assert_close(loss.full_tensor(), want.detach())
    torch.testing.assert_close(mine.full_tensor(), alone.weight.grad)
    assert "all_gather" not in [move.boxing.route for move in moves]


@pytest.mark.parametrize(
    ("use", "kind", "said"),
    [("wrong_shape", SbpError, r"gives \[\(\(4, 6\).*\n  mm makes"), ("wrong_call", ShapeError, "cannot be called so")],
)
def test_a_composite_that_is_wrong_says_so(use: str, kind: type[Exception], said: str) -> None:
    model = flow.nn.inside(Product(), use=use, over="context")
    with pytest.raises(kind, match=said), torch.no_grad():
        flow.compile(model, placement=WHERE).plan_for(torch.ones(6, 4, dtype=torch.float64))


def test_two_composites_of_one_name_are_refused() -> None:
    with pytest.raises(SbpError, match="there is a composite 'ring' already"):
        flow.nn.composite("ring", of="mm")(lambda axis, x, w: x)
