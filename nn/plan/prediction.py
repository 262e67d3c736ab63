"""Predictions: what a plan takes on a cluster that nobody has rented, in the figures by which one rents.

    fits, or what it lacks      seconds a step      words a second      share of the peak      days      money

Work is that of the model, as nn/explanations/model_work.py counts it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from ...boxing.figures import duration, volume
from ...boxing.graph.report.step_parts import bar, step_parts
from ...boxing.html import paragraph, table
from ...placement import Cluster, Jitter
from ...placement.errors import SbpError
from ...placement.hardware import GAPS
from ..explanations.jittered_step import JitteredStep, jittered
from ..explanations.model_work import Work, peak_seconds
from ..graph.step import Step
from .check import Checked, Loss, priced_by, room, samples_of, stepped, words_of
from .grids import grids_of
from .plan import Plan, as_plan
from .resting import RestingBytes
from .training import PUBLISHED, Failures, TrainingCost

__all__ = ["Prediction", "predict", "predicted"]

DAY = 86_400.0  # seconds
KINDS = ("parameters", "gradients", "states", "activations")


@dataclass(frozen=True, eq=False)
class Prediction:
    """A plan's step on a cluster: what was checked, on how many ranks, for how many samples and words of a batch.

    `work` is FLOPs of a step by the dtype in which they are computed.
    """

    checked: Checked
    ranks: int
    samples: int
    tokens: int
    work: Work
    resting: RestingBytes
    jittered: JitteredStep | None = None  # where devices compute unevenly
    unit: Literal["tokens", "samples"] = "tokens"  # what `tokens` counts: a batch of images has no words

    @property
    def fits(self) -> bool:
        return self.checked.fits

    @property
    def seconds(self) -> float:
        """Of a step; where devices compute unevenly those that are expected."""
        return self.jittered.expected if self.jittered else self.checked.seconds

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by what they are spent on, such as products, moves that nothing hides, or other stages."""
        found = step_parts(self.checked.report)
        return found | {"the slowest": self.jittered.waiting} if self.jittered and found else found

    @property
    def tokens_per_second(self) -> float:
        """Words of all ranks; samples, where a batch has no words."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def utilization(self) -> float:
        """The share of the devices' peak that the model's work takes (MFU)."""
        least = peak_seconds(self.work, self.checked.device)
        return least / self.ranks / self.seconds if self.seconds else 0.0

    def days(self, tokens: float) -> float:
        """Days for so many words, if nothing fails."""
        return tokens / self.tokens_per_second / DAY

    def money(self, tokens: float, price: float) -> float:
        """The cost of so many words at this price of a device's hour."""
        return self.days(tokens) * 24 * self.ranks * price

    def training(self, tokens: float, *, failures: Failures = PUBLISHED, price: float | None = None) -> TrainingCost:
        """A training of so many words on devices that fail: how often to save, its days and money, and the share of
        the time in which it gets on."""
        if not 0 < tokens < inf:
            raise SbpError(f"a training of {tokens:g} tokens\n  say of how many words, as in 15e12")
        steps = ceil(tokens / self.tokens)
        return TrainingCost(steps, self.seconds, self.ranks, self.resting.saved, failures, price=price)

    def lines(
        self, total: float | None = None, price: float | None = None, failures: Failures = PUBLISHED
    ) -> list[str]:
        """All of it as text; `total` is words of a whole training, `price` that of a device's hour."""
        device, report = self.checked.device, self.checked.report
        fits = f"fits: {room(device)}" if self.fits else f"does not fit: {room(device)}"
        made = [
            f"{self.ranks} x {device.name}, {fits}",
            f"  step     {duration(self.seconds)}, {self.tokens_per_second:,.0f} {self.unit}/s, "
            f"{self.tokens_per_second / self.ranks:,.0f} a device, {self.utilization:.1%} of the peak",
        ]
        made += [f"  {'parts' if not at else '':8} {line}" for at, line in enumerate(bar(self.parts))]
        made += [f"  jitter   {self.jittered}"] if self.jittered else []
        if report.memory:
            held = max(report.memory.ranks.values(), key=lambda one: one.total)
            kinds = ", ".join(f"{kind} {volume(getattr(held, kind))}" for kind in KINDS)
            gaps = "" if device.memory == inf else f", {volume(int(self.checked.taken(GAPS)))} with gaps"
            made.append(f"  memory   {volume(held.total)} on the fullest rank{gaps}: {kinds}")
        if total is not None:
            cost = "" if price is None else f", {self.money(total, price):,.0f} at {price:g} a device and hour"
            made.append(f"  training {total:.3g} tokens in {self.days(total):,.1f} days{cost}, if nothing fails")
            made.append(f"  failures {self.training(total, failures=failures, price=price)}")
        made.append(f"  assumed  {device.said}")
        return made

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        head, *_ = self.lines()
        whole = sum(self.parts.values()) or 1.0
        parts = [(part, duration(seconds), f"{seconds / whole:.1%}") for part, seconds in self.parts.items()]
        figures = [
            ("a step", duration(self.seconds)),
            (f"{self.unit} a second", f"{self.tokens_per_second:,.0f}"),
            ("of the peak", f"{self.utilization:.1%}"),
            ("on the fullest rank", volume(self.checked.memory)),
            ("assumed", self.checked.device.said),
        ]
        return paragraph(head, strong=True) + table(("", ""), figures) + table(("spent on", "", ""), parts, (1, 2))

    def dict(
        self, total: float | None = None, price: float | None = None, failures: Failures = PUBLISHED
    ) -> dict[str, Any]:
        """All of it in dicts, numbers and text."""
        made: dict[str, Any] = {
            "fits": self.fits,
            "ranks": self.ranks,
            "samples": self.samples,
            "tokens": self.tokens,
            "unit": self.unit,
            "seconds": self.seconds,
            "parts": self.parts,
            "tokens_per_second": self.tokens_per_second,
            "utilization": self.utilization,
            "memory": self.checked.memory,
            "assumed": self.checked.device.said,
        }
        if self.jittered:
            made["jitter"] = self.jittered.dict()
        if total is not None:
            made["days"] = self.days(total)
            made["money"] = None if price is None else self.money(total, price)
            made["failures"] = self.training(total, failures=failures, price=price).dict()
        return made


def predict(
    model: nn.Module,
    batch: Any,
    plan: Plan | str | Path,
    *,
    cluster: Cluster | str | Path | None = None,
    loss_fn: Loss | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ranks: int | None = None,
    jitter: Jitter | None = None,
) -> Prediction:
    """The prediction of a plan; nothing runs, and all may be on meta. `jitter` says how unevenly the devices compute;
    else their cluster does.

    >>> import torch, sbpflow as flow
    >>> with torch.device("meta"):
    ...     model, x = nn.Linear(4096, 4096, bias=False), torch.empty(8192, 4096)
    >>> found = flow.predict(model, x, "grid cuda (data=8)", cluster="h100x8")
    >>> found.fits, found.samples, sum(found.work.values()) == 2 * 2 * 8192 * 4096**2
    (True, 8192, True)
    """
    text = as_plan(plan)
    assert text is not None
    with priced_by(cluster):
        step, checked = stepped(text, model, batch, loss_fn=loss_fn, optimizer=optimizer, ranks=ranks)
        return predicted(step, checked, batch, grids_of(text, ranks, model).whole.size, jitter)


def predicted(step: Step, checked: Checked, batch: Any, ranks: int, jitter: Jitter | None = None) -> Prediction:
    """The prediction of a step that was checked, under a jitter, or that of its device."""
    uneven = checked.device.jitter if jitter is None else jitter
    words, samples = words_of(batch), samples_of(batch)
    work, rest = checked.report.work, RestingBytes.of(step)
    found = jittered(step, checked.report, uneven) if uneven else None
    return Prediction(checked, ranks, samples, words or samples, work, rest, found, "tokens" if words else "samples")
