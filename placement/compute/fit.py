"""A device's constants by times of its kernels, and how far off they are for sizes that were left out.

    seconds  =  FLOPs / rate  +  bytes / bandwidth  +  launch

Of exponentials, and of updates in place, the bytes so many times. A launch is that of a kernel of a step where calls
were timed, which on a CPU is longer than that of the kernel alone by what Python and autograd do. On a card these have
a time of their own, the host's, since it launches what comes next while the card computes. Each rate is that which
makes relative errors small, given the others. Where the datasheet is that of the device its peaks stay, and the rates
are shares of them; else the rates are the peaks, of which the device reaches all.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from ..errors import PlacementError
from ..hardware import Calibration, Device
from .timing import KernelTime

__all__ = ["fitted_device", "mean_times"]

UNSIZED = "launch", "call", "host", "copy"  # kinds of which there are no sizes to leave out


def fitted_device(sheet: Device, times: Sequence[KernelTime], source: str, *, known: bool) -> Device:
    """The device with constants of these times; `known` says that the datasheet is that of this device."""
    every_other = [time for kind in _kinds(times) for time in kind[::2]]
    left = [time for kind in _kinds(times) for time in kind[1::2] if time.kind not in UNSIZED]
    found = _Rates.of(every_other)
    errors = [abs(found.seconds(time) / time.seconds - 1) for time in left]
    return _Rates.of(times).device(sheet, source, median(errors) if errors else 0.0, known)


def mean_times(each: Sequence[Sequence[KernelTime]]) -> list[KernelTime]:
    """The times of several ranks in the mean."""
    return [
        times[0]._replace(seconds=sum(time.seconds for time in times) / len(times)) for times in zip(*each, strict=True)
    ]


def _kinds(times: Sequence[KernelTime]) -> list[list[KernelTime]]:
    names = dict.fromkeys((time.kind, time.dtype) for time in times)
    return [[time for time in times if (time.kind, time.dtype) == name] for name in names]


class _Rates:
    """Rates by which kernels take as long as they were timed, in the mean."""

    def __init__(self, launch: float, memory: float, products: dict[str, float], attention: float | None) -> None:
        self.launch, self.memory, self.products, self.attention = launch, memory, products, attention
        self.copies, self.functions, self.call, self.host = 0.0, 1.0, launch, 0.0
        self.update: float | None = None

    @classmethod
    def of(cls, times: Sequence[KernelTime]) -> "_Rates":
        of = {kind: [time for time in times if time.kind == kind] for kind in {time.kind for time in times}}
        launch = median(time.seconds for time in of["launch"])
        memory = _rate(of["pointwise"], lambda time: time.bytes, lambda time: launch)
        found = cls(launch, memory, {}, None)

        def rest(time: KernelTime) -> float:
            return launch + time.bytes / memory

        for dtype in dict.fromkeys(time.dtype for time in of["product"]):
            mine = [time for time in of["product"] if time.dtype == dtype]
            found.products[dtype] = _rate(mine, lambda time: time.flops, rest)
        if of.get("attention"):
            found.attention = _rate(of["attention"], lambda time: time.flops, rest)
        if of.get("function"):
            found.functions = max(1.0, 1.0 + memory * _seconds(of["function"], lambda time: time.evaluated, rest))
        if of.get("update"):
            found.update = memory / _rate(of["update"], lambda time: time.bytes, lambda time: launch)
        if of.get("call"):
            found.call = max(launch, median(time.seconds for time in of["call"]))
        found.host = max((time.seconds for time in of.get("host", [])), default=0.0)
        found.copies = max((time.bytes / time.seconds for time in of.get("copy", [])), default=0.0)
        return found

    def seconds(self, time: KernelTime) -> float:
        """The predicted seconds of a kernel."""
        rate = self.attention if time.kind == "attention" and self.attention else self.products.get(time.dtype, 1.0)
        slower = self.update or 1.0 if time.kind == "update" else 1.0
        touched = slower * time.bytes + (self.functions - 1) * time.evaluated
        return time.flops / rate + touched / self.memory + self.launch

    def device(self, sheet: Device, source: str, error: float, known: bool) -> Device:
        first = next(iter(self.products))  # that in which attention is timed
        peaks = sheet.flops if known else {**sheet.flops, **self.products}
        memory = sheet.memory_bandwidth if known else self.memory
        share = self.attention and min(1.0, self.attention / peaks[first])
        constants = Calibration(
            product=min(1.0, self.products[first] / peaks[first]),
            memory=min(1.0, self.memory / memory),
            launch=self.call,
            source=source,
            error=error,
            attention=share,
            functions=self.functions,
            update=self.update,
            host=self.host,
        )
        host = self.copies or sheet.host_bandwidth
        return replace(sheet, flops=peaks, memory_bandwidth=memory, host_bandwidth=host, fitted=constants)


def _rate(
    times: Sequence[KernelTime], work: Callable[[KernelTime], float], rest: Callable[[KernelTime], float]
) -> float:
    """Work a second such that `work / rate + rest` is near the seconds."""
    each = _seconds(times, work, rest)
    if each <= 0:  # all of it is the rest: no slower than that
        raise PlacementError(
            f"the {times[0].kind} kernels of {times[0].dtype} took no longer than their launches\n"
            "  measure again while the machine does nothing else"
        )
    return 1 / each


def _seconds(
    times: Sequence[KernelTime], work: Callable[[KernelTime], float], rest: Callable[[KernelTime], float]
) -> float:
    """Seconds of a piece of work such that `work x seconds + rest` is near all seconds, by squares of relative errors;
    below 0 where the rest alone is more."""
    above = sum((work(time) / time.seconds) ** 2 for time in times)
    return sum(work(time) / time.seconds * (1 - rest(time) / time.seconds) for time in times) / above
