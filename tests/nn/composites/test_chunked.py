"""Chunked products compute and send what plain ones do, and all moves but one go on beside the computing."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from sbpflow.nn.graph.instructions.moves import MoveNow
from sbpflow.nn.graph.run.program import Program
from sbpflow.placement import Placement
from sbpflow.placement.errors import SbpError

from .products import Columns, weighed
from .ring import F64, numbers


def layers(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 12, bias=bias, dtype=F64), nn.GELU(), nn.Linear(12, 6, bias=bias, dtype=F64), Columns(6, 8)
    )


def hinted(model: nn.Sequential) -> nn.Sequential:
    flow.nn.shard(model, {"0.*": {"tensor": S(0)}, "2.weight": {"tensor": S(1)}, "3.weight": {"tensor": S(1)}})
    return model


def line(ranks: int) -> Placement:
    return flow.placement("cpu", range(ranks), names=("tensor",))


def learns(where: Placement, sbp: Any, *shape: int, bias: bool = True) -> None:
    model = hinted(layers(bias))
    alone = copy.deepcopy(model)
    flow.nn.inside(model, use="chunked", over="tensor")
    x, by = numbers(*shape, 6), numbers(*shape, 8, seed=1)
    laid = flow.tensor(x, placement=where, sbp=sbp).requires_grad_()
    loss = flow.compile(model, weighed, placement=where)(laid, by)
    x.requires_grad_()
    want = weighed(alone, x, by)
    want.backward()  # type: ignore[no-untyped-call]
    pairs: list[tuple[Any, Any]] = [(laid, x), *zip(model.parameters(), alone.parameters(), strict=True)]
    torch.testing.assert_close(loss.full_tensor(), want.detach(), rtol=1e-11, atol=1e-11)
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ranks", "shape"),
    [(2, (2, 8)), (4, (2, 32)), (4, (2, 13)), (4, (3,)), (3, (1, 1)), (1, (2, 4))],
    ids=["two", "four", "uneven", "fewer_than_ranks", "one_token", "one_rank"],
)
def test_products_in_pieces_compute_what_one_device_does(ranks: int, shape: tuple[int, ...]) -> None:
    learns(line(ranks), {"tensor": S(len(shape) - 1)}, *shape)


def test_rows_may_be_split_on_another_axis_too() -> None:
    where = flow.placement("cpu:[0-5] as (data=2, tensor=3)")
    learns(where, {"data": S(0), "tensor": S(1)}, 4, 7, bias=False)


def forward(chunked: bool) -> Any:
    """The step of a wide pair of layers, and the bytes that its forward sends, by route."""
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False))
    flow.nn.shard(model, {"0.*": {"tensor": S(0)}, "2.weight": {"tensor": S(1)}})
    if chunked:
        flow.nn.inside(model, use="chunked", over="tensor")
    x = flow.tensor(torch.zeros(2, 8, 64), placement=line(4), sbp={"tensor": S(1)})

    def cut(model: nn.Module, x: Tensor) -> Any:
        whole: Any = model(x)
        return whole.to_global(sbp={"tensor": S(1)})

    step = flow.compile(model, cut, placement=line(4))
    with torch.no_grad(), flow.record() as moves:
        step(x)
    sent: Counter[str] = Counter()
    for move in moves:
        sent[move.boxing.route] += move.boxing.total
    return step, {route: total for route, total in sent.items() if total}


def test_pieces_send_as_many_bytes_as_the_whole() -> None:
    (_, plain), (_, pieces) = forward(False), forward(True)
    assert pieces == plain
    assert pieces.keys() == {"all_gather", "reduce_scatter"}


def test_of_n_moves_one_is_waited_for() -> None:
    step, _ = forward(True)
    program = Program(step.physical, overlap=True)
    order = program.schedule
    routes = {"box": Counter[str](), "start": Counter[str]()}
    sends = [do for do in order.todo if do.word in routes and order.transfers[do.number].sends]
    for do in sends:
        routes[do.word][order.transfers[do.number].plans[0].route] += 1
    assert isinstance(sends[0], MoveNow)  # what is waited for goes before those that may take longer
    assert routes == {
        "box": {"all_gather": 1, "reduce_scatter": 1},
        "start": {"all_gather": 3, "reduce_scatter": 3},
    }


def test_a_weight_that_nothing_is_said_of_is_left_and_all_of_them_are_refused() -> None:
    model = layers()
    flow.nn.inside(model, use="chunked", over="tensor")
    step = flow.compile(model, weighed, placement=line(2))
    with pytest.raises(SbpError, match=r"no product there is one.*\n  0.weight \(12, 6\) is not said.*\n  say"):
        step.plan_for(numbers(2, 4, 6), numbers(2, 4, 8))
