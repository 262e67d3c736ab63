"""Constants of a device by times of kernels."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sbpflow.placement import Calibration, Device, PlacementError
from sbpflow.placement.compute import timing
from sbpflow.placement.compute.fit import fitted_device, mean_times
from sbpflow.placement.compute.hosts import devices_of, unlike
from sbpflow.placement.compute.timing import KernelTime, kernel_times
from sbpflow.placement.network.hosts import Hosts

LAUNCH, MEMORY, RATES, ATTENTION, HOST = 2e-6, 1e11, {"float32": 2e12, "float64": 5e11}, 5e11, 1e10
FUNCTIONS, UPDATE, CALL = 2.5, 0.7, 3e-5
SIZES = (32, 64, 128, 256, 512, 1024)


def of_a_device(slower: float = 1.0) -> list[KernelTime]:
    """The times of a device that keeps exactly to the formula."""
    rows = [KernelTime("launch", "float32", 0.0, 0.0, slower * LAUNCH)] * 2
    rows.append(KernelTime("call", "float32", 0.0, 0.0, slower * CALL))
    for dtype, rate in RATES.items():
        for n in SIZES:
            work, size = 2.0 * n**3, 12.0 * n**2
            rows.append(KernelTime("product", dtype, work, size, slower * (work / rate + size / MEMORY + LAUNCH)))
    for n in SIZES:
        work, size = 64.0 * n**2, 256.0 * n
        seconds = slower * (work / ATTENTION + size / MEMORY + LAUNCH)
        rows.append(KernelTime("attention", "float32", work, size, seconds))
        rows.append(KernelTime("pointwise", "float32", 0.0, 12.0 * n**2, slower * (12.0 * n**2 / MEMORY + LAUNCH)))
        size, evaluated = 10.0 * n**2, 12.0 * n**2  # a GELU and its backward
        seconds = slower * ((size + (FUNCTIONS - 1) * evaluated) / MEMORY + LAUNCH)
        rows.append(KernelTime("function", "float32", 0.0, size, seconds, evaluated))
        seconds = slower * (UPDATE * 28.0 * n**2 / MEMORY + LAUNCH)
        rows.append(KernelTime("update", "float32", 0.0, 28.0 * n**2, seconds))
    return [*rows, KernelTime("copy", "uint8", 0.0, 1e6, 1e6 / HOST)]


SHEET = Device("sheet", {"float32": 4e12, "float64": 1e12, "int8": 1e13}, 1.0, 2e11)


def test_shares_of_a_datasheet_come_back() -> None:
    found = fitted_device(SHEET, of_a_device(), "here", known=True)
    assert (found.flops, found.memory_bandwidth) == (SHEET.flops, SHEET.memory_bandwidth)
    assert found.host_bandwidth == pytest.approx(HOST)
    fitted = found.fitted or Calibration(1, 1, 0, "", 0)
    figures = fitted.product, fitted.memory, fitted.launch, fitted.attention
    assert figures == pytest.approx((0.5, 0.5, CALL, 0.125))
    assert (fitted.functions, fitted.update) == pytest.approx((FUNCTIONS, UPDATE))
    assert fitted.source == "here"
    assert fitted.error == pytest.approx(0.0, abs=1e-9)


def test_of_a_device_without_a_datasheet_the_peaks_are_what_it_reaches() -> None:
    found = fitted_device(SHEET, of_a_device(), "here", known=False)
    assert found.flops == pytest.approx({**RATES, "int8": 1e13})
    assert found.memory_bandwidth == pytest.approx(MEMORY)
    fitted = found.fitted or Calibration(1, 1, 0, "", 0)
    assert (fitted.product, fitted.memory) == pytest.approx((1.0, 1.0))
    assert fitted.attention == pytest.approx(ATTENTION / RATES["float32"])


def test_a_card_computes_while_its_host_launches_so_that_each_has_seconds_of_its_own() -> None:
    times = [time._replace(kind="host") if time.kind == "call" else time for time in of_a_device()]
    fitted = fitted_device(SHEET, times, "here", known=True).fitted
    assert fitted is not None
    assert (fitted.launch, fitted.host) == (LAUNCH, CALL)
    on_a_cpu = fitted_device(SHEET, of_a_device(), "here", known=True).fitted
    assert on_a_cpu is not None
    assert (on_a_cpu.launch, on_a_cpu.host) == (CALL, 0)


def test_the_error_is_that_of_sizes_that_were_left_out() -> None:
    """Every other size takes a quarter longer than the others say."""
    times = of_a_device()
    products = [at for at, time in enumerate(times) if time.kind == "product"]
    for at in products[1::2]:
        times[at] = times[at]._replace(seconds=times[at].seconds * 1.25)
    only = [
        time
        for time in times
        if time.kind not in ("attention", "function") and (time.kind != "pointwise" or time.bytes < 1e5)
    ]
    fitted = fitted_device(SHEET, only, "here", known=True).fitted
    assert fitted is not None
    assert fitted.error == pytest.approx(0.2)


def test_kernels_that_take_no_longer_than_their_launch_are_refused() -> None:
    times = [time._replace(seconds=LAUNCH / 2) if time.kind == "product" else time for time in of_a_device()]
    with pytest.raises(
        PlacementError, match="product kernels of float32 took no longer than their launches\n  measure"
    ):
        fitted_device(SHEET, times, "here", known=True)


def test_hosts_that_are_slower_have_devices_of_their_own() -> None:
    hosts = Hosts((0, 0, 1, 1))
    rows = [of_a_device(), of_a_device(), of_a_device(2.0), of_a_device(2.0)]
    devices = devices_of(hosts, ("a", "b"), rows, "cpu", "today")
    assert devices[0].flops["float32"] == pytest.approx(2 * devices[1].flops["float32"])
    assert "of b, today, torch" in (devices[1].fitted or Calibration(1, 1, 0, "", 0)).source
    (other,) = unlike(hosts, devices)
    assert (other.ranks, other.device) == ((2, 3), devices[1])
    assert unlike(hosts, (devices[0], replace(devices[0], memory_bandwidth=0.95 * MEMORY))) == ()


def test_ranks_count_in_the_mean() -> None:
    assert [time.seconds for time in mean_times([of_a_device(), of_a_device(3.0)])][:1] == pytest.approx([2 * LAUNCH])


def test_without_times_of_calls_and_updates_a_launch_is_the_empty_kernels_and_updates_are_not_told() -> None:
    times = [time for time in of_a_device() if time.kind not in ("call", "update")]
    fitted = fitted_device(SHEET, times, "here", known=True).fitted
    assert fitted is not None
    assert fitted.launch == pytest.approx(LAUNCH)
    assert fitted.update is None


def test_functions_that_take_no_longer_than_their_bytes_have_no_price() -> None:
    """As on cards, which evaluate while they wait for memory."""
    times = [
        time._replace(seconds=time.bytes / MEMORY + LAUNCH) if time.kind == "function" else time
        for time in of_a_device()
    ]
    fitted = fitted_device(SHEET, times, "here", known=True).fitted
    assert fitted is not None
    assert fitted.functions == pytest.approx(1.0)


def test_kernels_of_this_machine_are_timed_by_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WHILE": 1e-4, "RUNS": 1, "SHORT": 1e-4, "MANY": 1}.items():
        monkeypatch.setattr(timing, name, value)
    met: list[int] = []
    times = kernel_times(torch.device("cpu"), lambda: met.append(1))
    assert len(met) == len(times)
    assert all(time.seconds > 0 for time in times)
    assert {time.kind for time in times} == {time.kind for time in of_a_device()}  # all that a fit goes by


def test_ranks_that_share_a_core_take_as_many_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "usable_cores", lambda: 2)
    monkeypatch.setattr(timing, "_own", lambda run, together: 0.25)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    case = timing._Case("launch", torch.float32, 0.0, 0.0, lambda: lambda: None)
    monkeypatch.setattr(timing, "_cases", lambda device: [case])
    here = torch.device("cpu")
    assert [kernel_times(here, lambda: None, ranks)[0].seconds for ranks in (1, 2, 4)] == [0.25, 0.25, 0.5]


class Clock:
    """A card's clock, which a kernel of ten milliseconds sets forward; the host is done with it at once."""

    def __init__(self) -> None:
        self.card, self.runs = 0.0, 0

    def run(self) -> None:
        self.card, self.runs = self.card + 10.0, self.runs + 1

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.card)
        event.elapsed_time = lambda other: other.at - event.at
        return event

    def synchronize(self) -> None: ...


def test_a_kernel_runs_for_a_while_by_the_card_and_not_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "family", lambda kind: SimpleNamespace(card=True, module=clock))
    assert timing._mean(clock.run, torch.device("cuda")) == pytest.approx(0.01)
    assert clock.runs == 1 + timing.WHILE / 0.01
