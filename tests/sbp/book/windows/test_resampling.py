"""Upsampling by whole factors leans on neighbours; by any other it stays whole, and is right."""

from typing import Any

import pytest
import torch
from torch.nn.functional import interpolate

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
