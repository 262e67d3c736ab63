"""The baseline beside every table: one share of peak, fitted to the table itself, and the bubble of its schedule."""

from collections.abc import Sequence
from statistics import median

from .setting import Published, Run

__all__ = ["baselines"]

PEAK = {"a100": 312e12, "h100": 989.4e12, "v100": 125e12}


def baselines(rows: Sequence[Published]) -> list[float]:
    """The seconds of each row if all reached one share of the peak: that which the median row did."""
    ideal = [_ideal(row) for row in rows]
    share = median(at / row.seconds for at, row in zip(ideal, rows, strict=True))
    return [at / share for at in ideal]


def _ideal(row: Published) -> float:
    run = row.run
    peak = PEAK[run.hardware.split()[0]] * (2 if run.dtype == "fp8" else 1)
    forwards = 4 if run.again == "full" else 3  # with the backward, which is two
    work = forwards * row.architecture.flops * run.batch / (run.gpus * peak)
    return work * (1 + _bubble(run))


def _bubble(run: Run) -> float:
    """Idle time over working time; where the weights' gradients wait, they fill two thirds of it."""
    waits = (run.pipe - 1) / (run.chunks * run.micro_batches)
    return waits / 3 if run.schedule.startswith("zb") else waits
