"""Seconds of an optimizer's step, by its kernels."""

from dataclasses import replace

import pytest

from sbpflow.placement import Calibration, Device
from sbpflow.sbp.joint.source_options import update_seconds
from sbpflow.sbp.kernels.update_kernels import ONE_KERNEL, UpdateKernels

SHEET = Device("sheet", {"float32": 1e3}, 1e9, 1e2, type="cpu")
UNTIMED = replace(SHEET, fitted=Calibration(0.5, 0.25, 0.01, "here", 0.0))
TIMED = replace(SHEET, fitted=Calibration(0.5, 0.25, 0.01, "here", 0.0, update=0.7))
LOOP = UpdateKernels(launches=8, together=True, more=13)


@pytest.mark.parametrize(
    ("device", "update", "seconds"),
    [
        (SHEET, ONE_KERNEL, 7 * 200 / 100),
        (SHEET, LOOP, 20 * 200 / 100),
        (UNTIMED, ONE_KERNEL, 7 * 200 / 25),  # as before there were such constants
        (TIMED, ONE_KERNEL, 0.7 * 7 * 200 / 25 + 0.01),
        (TIMED, LOOP, 20 * 200 / 25 + 8 * 0.01),
        (replace(TIMED, type="cuda"), LOOP, 20 * 200 / 25),  # one launch for all parameters
        (replace(TIMED, type="cuda"), LOOP._replace(together=False), 20 * 200 / 25 + 8 * 0.01),
    ],
)
def test_an_update_touches_what_its_kernels_do(device: Device, update: UpdateKernels, seconds: float) -> None:
    assert update_seconds(200, 2, None, device, update=update) == pytest.approx(seconds)
