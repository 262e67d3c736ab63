"""Schedules, as users have them: a definition that shows what it would do."""

from collections.abc import Sequence
from os import PathLike

from ...placement.errors import ScheduleError
from .definition import Definition
from .delays import Delays, delays
from .pipeline import Costs
from .preview import Preview, preview

__all__ = ["Schedule"]


class Schedule(Definition):
    """A schedule. Marks are formulas of p, s, m, v, c and n; `table` is an order for each device instead.

    >>> from .definition import Shape
    >>> Schedule("mine", act="p-s+1").marks(Shape(p=4, m=8), chunk=0).act
    5
    >>> Schedule("pair", table=("F0 F1 B0 B1", "F0 B0 F1 B1")).marks(Shape(p=2, m=2), chunk=0).act
    2
    """

    def show(
        self,
        p: int = 0,
        m: int = 0,
        path: None = None,
        *,
        v: int = 0,
        n: int = 1,
        costs: Costs | Sequence[Costs] | None = None,
        devices: Sequence[int] = (),
    ) -> Preview:
        """The preview of p devices and m micro-batches: print it, or draw(path) it. `devices` has that of each chunk,
        where some share one, such as (0, 1, 0, 1) of an encoder and a decoder: p is their number then.
        """
        given: tuple[object, ...] = path, p, m
        sizes = ", ".join(str(size) for size in (p, m) if isinstance(size, int) and size) or "p, m"
        for one in given:
            if isinstance(one, str | PathLike):
                raise ScheduleError(
                    f"show({sizes}) gives the preview, and writes nothing\n"
                    f"  .show({sizes}).draw({str(one)!r}) writes its picture, svg or png"
                )
        if devices:
            self._check_devices(p, devices)
            p = len(devices)
        return preview(self, self.shape(p, m, v=v, n=n), costs, devices=devices)

    def _check_devices(self, p: int, devices: Sequence[int]) -> None:
        known = set(devices)
        if not self.linear:
            raise ScheduleError(
                f"{self.name} says itself on which devices its chunks are\n  leave devices= out, or take '1f1b'"
            )
        if p not in (0, len(devices)) or known != set(range(len(known))):
            raise ScheduleError(
                f"show(p={p}, devices={tuple(devices)})\n  give the device of each chunk, from 0 on, and leave p out"
            )

    def delays(self, p: int = 0, m: int = 0, *, v: int = 0) -> Delays:
        """The updates by which weights are late, in a step of p devices and m micro-batches, under a schedule without a
        flush.

        >>> Schedule("late", act="p-s", low_b="p-s-1", versions="1", unpinned="newest").delays(3, 8).chunks
        {0: 2, 1: 1, 2: 0}
        """
        return delays(self, self.shape(p, m, v=v))
