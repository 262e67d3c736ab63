"""Progress of a training: a bar where somebody looks at a terminal, lines of text elsewhere."""

import sys
from importlib import import_module
from typing import Any, Protocol

from ...boxing.figures import duration
from .sinks import FigureLine

__all__ = ["TrainingProgress", "Quiet", "progress_of", "words"]


class TrainingProgress(Protocol):
    """Shows how far a training is."""

    def step(self) -> None:
        """One more step was run."""
        ...

    def line(self, line: FigureLine) -> None: ...

    def end(self) -> None: ...


class Quiet:
    """Shows nothing, as on ranks that do not write."""

    def step(self) -> None:
        """Not shown."""

    def line(self, line: FigureLine) -> None:
        """Not shown."""

    def end(self) -> None:
        """There is nothing to clear away."""


class TextLines(Quiet):
    """A line of text for each line."""

    def __init__(self, steps: int | None) -> None:
        self.steps = steps

    def line(self, line: FigureLine) -> None:
        of = f"/{self.steps}" if self.steps else ""
        print(f"step {line['step']}{of}  {words(line)}", flush=True)


class ProgressBar:
    """A bar of tqdm, with the figures of the last line behind it."""

    def __init__(self, tqdm: Any, steps: int | None, start: int) -> None:
        self.bar = tqdm(total=steps, initial=start, unit="step", file=sys.stderr, dynamic_ncols=True)

    def step(self) -> None:
        self.bar.update()

    def line(self, line: FigureLine) -> None:
        self.bar.set_postfix_str(words(line))

    def end(self) -> None:
        self.bar.close()


def progress_of(steps: int | None, start: int) -> TrainingProgress:
    """A bar, if stderr is a terminal and tqdm is installed; else lines."""
    if sys.stderr.isatty():
        try:
            return ProgressBar(import_module("tqdm").tqdm, steps, start)
        except ImportError:  # an extra, and lines say the same
            pass
    return TextLines(steps)


def words(line: FigureLine) -> str:
    """The figures of a line as one reads them.

    >>> words({"step": 10, "loss": 3.21456, "tokens_per_second": 12345.6, "mfu": 0.4123, "gib": 1.5, "exposed": 0.0021})
    'loss 3.2146  12,346 tokens/s  mfu 41.2%  1.50 GiB  exposed 2.1 ms'
    """
    return "  ".join(filter(None, (_word(name, value) for name, value in line.items() if name != "step")))


def _word(name: str, value: float | int | str) -> str:
    if name.startswith("predicted") or name in ("seconds", "flops_per_second", "slowest"):
        return ""  # in files only
    if isinstance(value, str):
        return f"{name} {value}"
    if name.endswith("_per_second"):
        return f"{value:,.0f} {name.removesuffix('_per_second')}/s"
    if name in ("mfu", "bubble", "waits"):
        return f"{name} {value:.1%}"
    if name in ("exposed", "hidden"):
        return f"{name} {duration(value)}"
    if name == "gib":
        return f"{value:.2f} GiB"
    return f"{name} {value:.4f}" if name == "loss" else f"{name} {value:.4g}"
