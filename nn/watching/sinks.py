"""Sinks of lines: a file of JSON lines, TensorBoard, Weights & Biases, or a function.

    "run.jsonl"               a line of JSON each, appended
    "tensorboard:runs/first"  a folder of torch.utils.tensorboard; or a SummaryWriter
    "wandb:project"           a run of that project, or of "wandb:team/project"; or a run that was begun
    print                     a function, called with each line

Each is checked where it is named, on all ranks, and opened for its first line, by the one that writes.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from ...placement.errors import MissingError, SbpError, did_you_mean
from .figures import Value

__all__ = ["FigureLine", "LineSink", "sinks_of"]

FigureLine: TypeAlias = Mapping[str, Value]


class LineSink(Protocol):
    """Takes the lines of a training."""

    def write(self, line: FigureLine) -> None: ...

    def end(self, error: str) -> None:
        """No more lines come; `error` says why, where a training ended by one."""
        ...


class JsonFile:
    """A file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None

    def write(self, line: FigureLine) -> None:
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("a", encoding="utf-8")
        print(json.dumps(line), file=self.file, flush=True)

    def end(self, error: str) -> None:
        if error:
            self.write({"error": error})
        if self.file is not None:
            self.file.close()
            self.file = None


class TensorBoardFolder:
    """Scalars of TensorBoard. A run that goes on hides what an earlier one wrote of later steps."""

    def __init__(self, folder: str, start: int, writer: Any = None) -> None:
        self.folder, self.start, self.writer, self.own = folder, start, writer, writer is None
        self.module = _imported("torch.utils.tensorboard", "tensorboard") if self.own else None

    def write(self, line: FigureLine) -> None:
        if self.writer is None:
            assert self.module is not None
            self.writer = self.module.SummaryWriter(self.folder, purge_step=self.start + 1 if self.start else None)
        at = line.get("step")
        for name, value in line.items():
            if name != "step" and not isinstance(value, str):
                self.writer.add_scalar(name, value, at)
        self.writer.flush()

    def end(self, error: str) -> None:
        if self.own and self.writer is not None:
            self.writer.close()
            self.writer = None


class WandbRun:
    """A run of Weights & Biases; without a network, WANDB_MODE=offline keeps it in a folder."""

    def __init__(self, project: str, run: Any = None) -> None:
        self.project, self.run, self.own = project, run, run is None
        self.module = _imported("wandb", "wandb") if self.own else None

    def write(self, line: FigureLine) -> None:
        if self.run is None:
            assert self.module is not None
            team, _, project = self.project.rpartition("/")
            self.run = self.module.init(project=project, entity=team or None)
        self.run.log({name: value for name, value in line.items() if name != "step"}, step=line["step"], commit=True)

    def end(self, error: str) -> None:
        if self.own and self.run is not None:
            self.run.finish(exit_code=int(bool(error)))
            self.run = None


class LineFunction:
    """A function of lines."""

    def __init__(self, function: Callable[[FigureLine], object]) -> None:
        self.function = function

    def write(self, line: FigureLine) -> None:
        self.function(line)

    def end(self, error: str) -> None:
        """It was told all."""


WORDS = ("tensorboard", "wandb")


def sinks_of(to: object, start: int) -> list[LineSink]:
    """The sinks that somebody named: one, or several."""
    several = isinstance(to, Iterable) and not isinstance(to, str | Path) and not hasattr(to, "log")
    return [_sink(each, start) for each in (to if several else [to])]  # type: ignore[attr-defined] # it is iterable


def _sink(to: object, start: int) -> LineSink:
    if isinstance(to, str) and ":" in to and Path(to).suffix != ".jsonl":
        word, _, rest = to.partition(":")
        if word in WORDS and rest:
            return TensorBoardFolder(rest, start) if word == "tensorboard" else WandbRun(rest)
        meant = did_you_mean(to, [f"{each}:{rest or 'NAME'}" for each in WORDS], "give one of those")
        raise SbpError(f"watch: no sink is called {to!r}{HINT}\n  {meant}")
    if isinstance(to, str | Path):
        if Path(to).suffix == ".jsonl":
            return JsonFile(Path(to))
        if to in WORDS:
            raise SbpError(f"watch: {to!r} lacks a name: write {to + ':NAME'!r}{HINT}")
        raise SbpError(f"watch: no sink is called {str(to)!r}{HINT}")
    if hasattr(to, "add_scalar"):
        return TensorBoardFolder("", start, to)
    if hasattr(to, "log") and hasattr(to, "finish"):
        return WandbRun("", to)
    if callable(to):
        return LineFunction(to)
    raise SbpError(f"watch: no sink is a {type(to).__name__}{HINT}")


HINT = (
    "\n  to= takes a file 'run.jsonl', 'tensorboard:FOLDER', 'wandb:PROJECT', a SummaryWriter, a run of wandb, or a"
    "\n  function of a line; several are a list"
)


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingError(
            f"watch: {package} is not installed ({error})\n  pip install 'sbpflow[train]', or name another sink"
        ) from None
