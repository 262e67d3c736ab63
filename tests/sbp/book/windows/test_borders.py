"""Paddings with what a tensor has itself, and rolls: where the dim is split, each rank's part is that of one device."""

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from sbpflow.sbp.check import check_rule

torch.manual_seed(1)
F64 = torch.float64
RING, GRID = flow.placement("cpu:[0-3]"), flow.placement("cpu:[0-5] as (height=2, width=3)")
MODES = ["circular", "reflect", "replicate"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("size", "before", "behind"), [*product([4, 5, 9], [-1, 0, 1, 3], [-1, 0, 2, 3])], ids=str)
def test_paddings_of_a_line(size: int, before: int, behind: int) -> None:
    x = torch.randn(2, size, dtype=F64)
    for op in ("_pad_circular", "reflection_pad1d", "replication_pad1d"):
        assert not check_rule(op, x, [before, behind]).wrong


@pytest.mark.parametrize("op", ["_pad_circular", "reflection_pad2d", "replication_pad2d"])
def test_paddings_of_a_plane_lack_nothing(op: str) -> None:
    found = check_rule(op, torch.randn(3, 5, 4, dtype=F64), [2, 0, 1, 2])
    assert str(found) == "every listed signature holds, and no other"


def held(x: Any, pads: list[int], mode: str, where: flow.Placement, sbp: Any) -> Any:
    """The padded tensor, which is held to one device with its gradient, and the moves of the forward."""
    plain: Any = x.clone().requires_grad_()
    split: Any = flow.tensor(x, placement=where, sbp=sbp).requires_grad_()
    with flow.record() as moves:
        found: Any = F.pad(split, pads, mode=mode)
    want: Any = F.pad(plain, pads, mode=mode)
    assert torch.equal(found.full_tensor(), want)
    weights = torch.randn_like(want)
    (found * flow.tensor(weights, placement=where, sbp=B)).sum().backward()
    (want * weights).sum().backward()
    torch.testing.assert_close(split.grad.full_tensor(), plain.grad)
    return found, [(m.route, m.bytes) for m in moves if m.bytes]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [4, 5, 7, 16])
def test_neighbours_send_what_a_border_needs(rows: int, mode: str) -> None:
    found, moves = held(torch.randn(1, 2, rows, 3, dtype=F64), [1, 1, 2, 1], mode, RING, S(2))
    assert found.sbp == (S(2),)
    assert {route for route, _ in moves} <= {"halo"}
    if rows == 16:  # of 19 rows a rank has 5 of 4: one of a neighbour's, and two from the other end
        assert moves == [("halo", 2 * 3 * 8 * (2 if mode == "circular" else 1))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pads", [[2, 1, 1, 3], [0, 0, 3, 0], [0, 2, 0, 0]], ids=str)
def test_both_dims_of_a_plane_are_split(pads: list[int], mode: str) -> None:
    found, _ = held(torch.randn(1, 1, 7, 8, dtype=F64), pads, mode, GRID, (S(2), S(3)))
    assert found.sbp == (S(2), S(3))


def test_a_dim_that_wraps_and_loses_places_stays_whole_and_is_right() -> None:
    held(torch.randn(1, 1, 9, 8, dtype=F64), [1, 1, -1, 3], "circular", RING, S(2))
    held(torch.randn(1, 1, 9, 8, dtype=F64), [1, 1, -1, 3], "circular", RING, S(3))
    held(torch.randn(1, 1, 9, 8, dtype=F64), [1, 1, -2, 3], "replicate", RING, S(2))


def test_what_was_padded_is_memory_of_its_own() -> None:
    x: Any = flow.tensor(torch.zeros(1, 16), placement=RING, sbp=S(1))
    F.pad(x, [1, -1], mode="replicate").add_(1)
    assert not x.full_tensor().any()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("shift", [0, 1, -1, 2, -3, 13])
@pytest.mark.parametrize("size", [1, 3, 4, 5, 9])
def test_rolls_of_a_line_lack_nothing(size: int, shift: int) -> None:
    for how in (([shift], [0]), ([shift, 1], [0, 0]), ([shift, -1], [-2, 1])):
        found = check_rule("roll", torch.randn(size, 4, dtype=F64), *how)
        assert str(found) == "every listed signature holds, and no other"
    assert not check_rule("roll", torch.randn(size, dtype=F64), [shift]).wrong


@pytest.mark.parametrize("rows", [3, 5, 7, 16])
@pytest.mark.parametrize("shift", [1, -2, 6])
def test_a_roll_takes_as_many_rows_as_it_is_long(rows: int, shift: int) -> None:
    x: Any = torch.randn(1, rows, 6, 2, dtype=F64, requires_grad=True)
    split: Any = flow.tensor(x.detach(), placement=RING, sbp=S(1)).requires_grad_()
    with flow.record() as moves:
        found = split.roll((shift, 2), (1, 2))
        weights = torch.randn(found.shape, dtype=F64)
        (found * flow.tensor(weights, placement=RING, sbp=S(1))).sum().backward()
    want = x.roll((shift, 2), (1, 2))
    (want * weights).sum().backward()
    assert found.sbp == (S(1),)
    assert torch.equal(found.full_tensor(), want)
    torch.testing.assert_close(split.grad.full_tensor(), x.grad)
    assert {m.route for m in moves if m.bytes} <= {"halo", "halo_sum", "all_reduce"}  # the last of the sum
    if rows == 16:  # four of a rank, none of which the sixth before is
        assert [m.bytes for m in moves if "halo" in m.route] == [min(abs(shift), 4) * 6 * 2 * 8] * 2


def test_two_rolls_of_a_plane_in_six_go_through_one_exchange() -> None:
    x = torch.randn(1, 1, 8, 9, dtype=F64)
    with flow.record() as moves:
        found: Any = flow.tensor(x, placement=GRID, sbp=(S(2), S(3))).roll((-1, 2), (2, 3))
    assert torch.equal(found.full_tensor(), x.roll((-1, 2), (2, 3)))
    assert next(m.route for m in moves if m.bytes) == "halo"
