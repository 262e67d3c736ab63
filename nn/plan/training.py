"""Trainings of days: what failures, saves and restarts make of the seconds of a step, and how often to save.

    work of `every` steps | save | work of `every` steps | sa   stop   restart | work of `every` steps | save | ...

Stops are independent and equally likely at any second, of a rate that grows with the devices. One that meets work, a
save or a restart takes back to the last save. So the work and the save behind it, w seconds, take in expectation

    exp(rate restart) (exp(rate w) - 1) / rate

and the steps between saves are those with which all of the training takes least.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, exp, expm1, inf, log1p, sqrt

from ...boxing.figures import duration
from ...placement.errors import SbpError

__all__ = ["PUBLISHED", "Failures", "TrainingCost"]

HOUR, DAY = 3600.0, 86_400.0  # seconds
STOPS, OF_DAYS, OF_DEVICES = 419, 54, 16_384  # unplanned stops of Llama 3's training of 405B, as published
THROUGHPUT = 2e12  # bytes a second that the storage of these devices is said to sustain
NEAR = 3  # numbers of equal parts on each side of the best, as the last part may be shorter


@dataclass(frozen=True)
class Failures:
    """Failures of a training: unplanned stops of a device and hour, and the time to save and to be back.

    `storage` is bytes a second and device, at which weights and states are written while the step waits, and read
    when it is back; `restart` is seconds until that, for finding the fault and starting again. Defaults are published
    figures: 419 stops in 54 days of 16,384 devices and storage of 2 TB/s for these (Llama 3), and less than 10
    minutes to find a fault (MegaScale). Other clusters have several times as many stops.

    >>> round(1 / (Failures().rate * 16384), 1)  # hours between stops
    3.1
    """

    rate: float = STOPS / (OF_DAYS * 24 * OF_DEVICES)
    storage: float = THROUGHPUT / OF_DEVICES
    restart: float = 600.0

    def __post_init__(self) -> None:
        for name, least, usual in (
            ("rate", 0 <= self.rate < inf, "2e-5 (stops of a device and hour)"),
            ("storage", self.storage > 0, "1.2e8 (bytes a second and device)"),
            ("restart", 0 <= self.restart < inf, "600 (seconds)"),
        ):
            if not least:
                raise SbpError(
                    f"failures cannot be: {name} = {getattr(self, name)}\n"
                    f"  a number {'above 0' if name == 'storage' else 'from 0'}, as in {name} = {usual}"
                )

    def __str__(self) -> str:
        return (
            f"{self.rate:.3g} stops a device and hour, {self.storage / 1e9:.3g} GB/s a device to save, "
            f"{duration(self.restart)} to start again"
        )


PUBLISHED = Failures()


@dataclass(frozen=True)
class TrainingCost:
    """The days and the money of so many steps of so many seconds on devices that fail.

    `saved` is bytes of weights and states.

    >>> llama = TrainingCost(steps=800_000, step=5.0, devices=16384, saved=14 * 405 * 10**9)
    >>> round(llama.between / 3600, 1), round(llama.share, 2)
    (3.1, 0.93)
    """

    steps: int
    step: float
    devices: int
    saved: int
    failures: Failures = PUBLISHED
    price: float | None = field(default=None, kw_only=True)  # of a device and hour

    @property
    def between(self) -> float:
        """Seconds between two stops, in the mean."""
        rate = self.failures.rate * self.devices
        return HOUR / rate if rate else inf

    @property
    def save(self) -> float:
        """Seconds of a save."""
        return self.saved / self.failures.storage / self.devices

    @property
    def back(self) -> float:
        """Seconds from a stop until it goes on from the last save."""
        return self.failures.restart + self.save

    @property
    def work(self) -> float:
        """Seconds of all steps, if nothing fails and nothing is saved."""
        return self.steps * self.step

    @cached_property
    def every(self) -> int:
        """Steps between two saves with which the training takes least."""
        return min(self._candidates(), key=self.expected)

    def _candidates(self) -> Iterator[int]:
        """The whole steps around the best seconds between two saves, and those of nearly as many equal parts."""
        interval = best_interval(self.save, self.between)
        near = int(min(interval / self.step, self.steps)) if self.step else self.steps
        yield from (max(1, min(self.steps, steps)) for steps in (near, near + 1))
        parts = int(min(self.work / interval, self.steps)) if interval else self.steps
        for many in range(max(1, parts - NEAR), parts + NEAR + 1):
            yield max(1, ceil(self.steps / many))

    def expected(self, every: int) -> float:
        """Seconds of all of it in the mean, with a save behind so many steps and one at the end."""
        whole, rest = divmod(self.steps, every)
        try:
            return whole * self._until_saved(every) + (self._until_saved(rest) if rest else 0.0)
        except OverflowError:
            return inf

    def _until_saved(self, steps: int) -> float:
        long = steps * self.step + self.save
        if self.between == inf:
            return long
        return self.between * exp(self.back / self.between) * expm1(long / self.between)

    @property
    def seconds(self) -> float:
        return self.expected(self.every)

    @property
    def share(self) -> float:
        """The share of the time in which it gets on."""
        return self.work / self.seconds if self.seconds else 1.0

    @property
    def days(self) -> float:
        return self.seconds / DAY

    @property
    def money(self) -> float | None:
        return None if self.price is None else self.seconds / HOUR * self.devices * self.price

    def __str__(self) -> str:
        """One line, with what was assumed."""
        often = "none" if self.between == inf else f"one in {_long(self.between)}"
        if self.seconds == inf:
            return f"{often}, so that no save is ever reached; assumed {self.failures}"
        cost = "" if self.money is None else f", {self.money:,.0f}"
        return (
            f"{often}, a save of {_long(self.save)} every {_long(self.every * self.step)}, "
            f"{self.share:.1%} effective: {self.days:,.1f} days{cost}; assumed {self.failures}"
        )

    def dict(self) -> dict[str, float | int | None]:
        """All of it as numbers; None is what never ends."""
        found = {
            "seconds_between_failures": self.between,
            "seconds_of_a_save": self.save,
            "seconds_to_be_back": self.back,
            "steps_between_saves": self.every,
            "effective_share": self.share,
            "days": self.days,
            "money": self.money,
        }
        given = {name: getattr(self.failures, name) for name in ("rate", "storage", "restart")}
        return {name: None if value == inf else value for name, value in (found | given).items()}


def best_interval(save: float, between: float) -> float:
    """Seconds of work between two saves with which work that goes on and on takes least.

    They solve (1 - x) exp(x) = exp(-save / between) for x, the share of `between`; where saves take little beside that,
    this is Young's square root.

    >>> round(best_interval(1.0, 1e6)), round(sqrt(2 * 1.0 * 1e6))
    (1414, 1414)
    """
    if between == inf:
        return inf
    share = save / between
    low, high = 0.0, min(1.0, sqrt(2 * share))  # (1 - x) exp(x) <= 1 - x^2 / 2, so that Young's is never too short
    for _ in range(100):
        x = (low + high) / 2
        low, high = (x, high) if x < 1 and log1p(-x) + x > -share else (low, x)
    return (low + high) / 2 * between


def _long(seconds: float) -> str:
    """Seconds in the unit of people."""
    for unit, size in (("days", DAY), ("h", HOUR), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.3g} {unit}"
    return duration(seconds)
