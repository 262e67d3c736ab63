"""Upsampling by whole factors leans on neighbours; by any other it stays whole, and is right."""

from typing import Any

import pytest
import torch
from torch.nn.functional import interpolate, pixel_shuffle, pixel_unshuffle

import sbpflow as flow
from sbpflow import B, S
from sbpflow.sbp.check import check_rule

torch.manual_seed(1)
F64 = torch.float64
PLANE = torch.randn(1, 2, 7, 5, dtype=F64)


@pytest.mark.parametrize(
    "call",
    [
        ("upsample_nearest2d.vec", PLANE, None, [2.0, 3.0]), ("upsample_nearest2d", PLANE, [21, 5]),
        ("upsample_bilinear2d.vec", PLANE, None, False, [2.0, 3.0]), ("upsample_bilinear2d", PLANE, [21, 10], False),
        ("upsample_linear1d.vec", PLANE[0], [20], False, None), ("upsample_nearest1d", PLANE[0], [11]),
    ],
    ids=lambda call: call[0],
)  # fmt: skip
def test_the_rule_is_right(call: tuple[Any, ...]) -> None:
    assert not check_rule(*call).wrong


@pytest.mark.parametrize("how", [{"size": (16, 9)}, {"scale_factor": 1.5}, {"scale_factor": 2, "align_corners": True}])
def test_others_are_gathered(how: Any) -> None:
    where = flow.placement("cpu:[0-2]")
    found: Any = interpolate(flow.tensor(PLANE, placement=where, sbp=S(2)), mode="bilinear", **how)
    assert found.sbp == (B,)
    torch.testing.assert_close(found.full_tensor(), interpolate(PLANE, mode="bilinear", **how))


def test_one_row_a_side_is_sent() -> None:
    where = flow.placement("cpu:[0-3]")
    with flow.record() as moves:
        found: Any = interpolate(
            flow.tensor(PLANE.tile(1, 1, 4, 1), placement=where, sbp=S(2)), scale_factor=2, mode="bilinear"
        )
    assert found.sbp == (S(2),)
    assert [(m.route, m.bytes) for m in moves if m.bytes] == [("halo", 2 * 2 * 5 * 8)]


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_channels_become_places_and_back(rows: int) -> None:
    for op, shape in (("pixel_shuffle", (2, 8, rows, 3)), ("pixel_unshuffle", (2, 3, 2 * rows, 4))):
        assert str(check_rule(op, torch.randn(shape, dtype=F64), 2)) == "every listed signature holds, and no other"


@pytest.mark.parametrize(("rows", "sent"), [(8, 0), (9, 1), (6, 1)])
def test_an_image_is_shuffled_in_pieces(rows: int, sent: int) -> None:
    """Nothing is sent where ranks have whole places, else a row of the image."""
    where, x = flow.placement("cpu:[0-3]"), torch.randn(1, 3, 2 * rows, 6, dtype=F64)
    with flow.record() as moves:
        folded: Any = pixel_unshuffle(flow.tensor(x, placement=where, sbp=S(2)), 2)
        found: Any = pixel_shuffle(folded, 2)
    assert folded.sbp == found.sbp == (S(2),)
    assert torch.equal(found.full_tensor(), x)
    assert {m.route for m in moves if m.bytes} <= {"halo"}
    assert max((m.bytes for m in moves), default=0) <= 2 * sent * 2 * 3 * 6 * 8
