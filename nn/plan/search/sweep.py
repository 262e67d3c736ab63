"""Sweeps: the same batch on twice as many cards, and twice these; what each count of them gives for its money."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from ....boxing.figures import duration
from ....boxing.graph.report.lines import table
from ....placement.errors import SbpError, SbpflowError
from ..prediction import Prediction
from ..training import PUBLISHED, Failures
from .fewest import NothingFits

__all__ = ["Attempted", "Sweep", "SweepRow", "ends_of", "swept"]


Attempted: TypeAlias = tuple[Prediction, str, str]  # with the plan's name and text


@dataclass(frozen=True, eq=False)
class SweepRow:
    """So many cards with their prediction, and the plan and its name; without one `said` is why there is none."""

    cards: int
    prediction: Prediction | None
    said: str
    fits: bool | None  # None: not known
    plan: str = ""


@dataclass(frozen=True, eq=False)
class Sweep:
    """The rows of a sweep over cards of a kind, all of them unless somebody stopped it."""

    kind: str
    rows: tuple[SweepRow, ...]
    stopped: bool

    @property
    def unit(self) -> str:
        """Words, or samples where the batch has none."""
        return next((row.prediction.unit for row in self.rows if row.prediction), "tokens")

    def lines(
        self, total: float | None = None, price: float | None = None, failures: Failures = PUBLISHED
    ) -> Iterator[str]:
        """A table, and what was assumed; days and money are those of a training that fails."""
        head = [
            self.kind,
            "step",
            f"{self.unit}/s",
            "of peak",
            *(["days"] if total else []),
            *(["money"] if total and price is not None else []),
        ]
        rows = []
        for row in self.rows:
            known, cells = row.prediction, ["-"] * (len(head) - 1)
            if known is not None:
                cells = [duration(known.seconds), f"{known.tokens_per_second:,.0f}", f"{known.utilization:.1%}"]
                of = known.training(total, failures=failures, price=price) if total else None
                cells += [f"{of.days:,.1f}"] if of else []
                cells += [f"{of.money or 0.0:,.0f}"] if of and price is not None else []
            fits = "?" if row.fits is None else "yes" if row.fits else "no"
            rows.append((str(row.cards), *cells, fits, row.said))
        yield from table((*head, "fits", "plan"), rows, "r" * len(head))
        known = next((row.prediction for row in self.rows if row.prediction), None)
        if known is not None:
            words = f", {known.tokens:,} tokens" if self.unit == "tokens" else ""
            yield f"a batch of {known.samples:,} samples{words}, on all of them"
            yield f"assumed {known.checked.device.said}"
        if total:
            yield f"{total:.3g} tokens, {failures}"
        if self.stopped:
            yield "stopped before its end"

    def dict(self, *money: Any) -> dict[str, Any]:
        """All of it in dicts, numbers and text."""
        rows = [
            {"cards": row.cards, "fits": row.fits, "said": row.said}
            | ({} if row.prediction is None else {"prediction": row.prediction.dict(*money), "plan": row.plan})
            for row in self.rows
        ]
        return {"kind": self.kind, "stopped": self.stopped, "rows": rows}


def swept(
    kind: str, counts: Iterable[int], attempt: Callable[[int], Attempted], told: Callable[[str], object]
) -> Sweep:
    """The prediction of each count, of which `told` hears; what is interrupted has the rows so far."""
    rows, stopped = list[SweepRow](), False
    try:
        for count in counts:
            told(f"{count} x {kind}")
            try:
                found, name, plan = attempt(count)
                rows.append(SweepRow(count, found, name, found.fits, plan))
            except SbpflowError as error:
                fits = False if isinstance(error, NothingFits) else None
                rows.append(SweepRow(count, None, str(error).partition("\n")[0], fits))
    except KeyboardInterrupt:
        stopped = True
    return Sweep(kind, tuple(rows), stopped)


def ends_of(said: str) -> tuple[int, int]:
    """The first and the last count of `8..1024`.

    >>> ends_of("8..1024")
    (8, 1024)
    """
    first, _, last = said.partition("..")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
        raise SbpError(
            f"--sweep {said} is not understood\n"
            "  write the fewest and the most cards, which are doubled between: --sweep 8..1024"
        )
    return int(first), int(last)
