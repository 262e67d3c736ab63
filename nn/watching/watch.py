"""Watched steps: called like the step itself, and every so many calls a line says how the training goes.

    with flow.watch(step, to=["run.jsonl", "tensorboard:runs/a"], steps=500, every=10) as train:
        for batch in data:
            loss = train(*batch)

Nothing is read between two lines, so a card goes on without the host. With several processes all of them call, all
compare what they have seen at a line, and the first rank of the step writes.
"""

from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar
from weakref import WeakSet

from torch import Tensor

from ...placement.errors import SbpError
from ...placement.world import world
from ...sbp.call import tensors_in
from ..graph.graph import StepGraph
from ..graph.step import Step
from ..plan.check import samples_of, words_of
from .figures import Stretch, Value, caught_up, predicted, seen, speed
from .progress import Quiet, TrainingProgress, progress_of
from .sinks import LineSink, sinks_of

__all__ = ["WatchedStep", "watch"]

Args = ParamSpec("Args")
Result = TypeVar("Result")


class WatchedStep(Generic[Args, Result]):
    """A step that is watched; it counts its calls, and `line` is the last line."""

    def __init__(
        self,
        step: Callable[Args, Result],
        sinks: list[LineSink],
        *,
        steps: int | None,
        every: int,
        start: int,
        tokens: int | None,
        peak: float | None,
        progress: bool,
    ) -> None:
        assert isinstance(step, StepGraph)
        self.step: Callable[Args, Result] = step
        self.graph: StepGraph = step
        self.sinks, self.steps, self.every, self.at = sinks, steps, every, start
        self.start, self.tokens, self.peak, self.shown = start, tokens, peak, progress
        self.line: dict[str, Value] = {}
        self.progress: TrainingProgress = Quiet()
        self.closed = False
        self.plans = 0  # that ran so far
        self._known: WeakSet[Step] = WeakSet()  # a plan that was replaced is let go
        self._last: Step | None = None
        self._stretch = Stretch()
        self._unit = "tokens"
        self._loss: Tensor | None = None
        self._noted: dict[str, float | Tensor] = {}

    def __call__(self, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        if self.closed:
            raise SbpError(
                "this watch has ended\n  call the step inside of the block: with flow.watch(step) as train: ..."
            )
        begun = self._last is None
        result = self.step(*args, **kwargs)
        planned = self._last = self.graph.planned
        if planned not in self._known:
            self._known.add(planned)
            self.plans += 1
        self.at += 1
        batch = list(tensors_in([args, kwargs]))
        words = words_of(batch)
        self._unit = "tokens" if words or self.tokens else "samples"
        self._stretch.add(planned, self.tokens or words or samples_of(batch))
        self._loss = _loss(result) if planned.plan.trains else None
        if begun and self._writes and self.shown:
            self.progress = progress_of(self.steps, self.start)
        self.progress.step()
        if self.at % self.every == 0 or self.at == self.steps:
            self._report()
        elif begun:
            caught_up(planned)
            self._stretch = Stretch()  # to plan and to compile is no measure
        return result

    def note(self, **values: float | Tensor) -> None:
        """Put values into the next line, such as the loss of an evaluation; a tensor is read there, on all ranks."""
        for name, value in values.items():
            if name in OURS:
                raise SbpError(f"watch: note({name}=...), and lines have a {name} of the step\n  give it another name")
            one = isinstance(value, Tensor) and value.numel() == 1
            if not one and not (isinstance(value, int | float) and not isinstance(value, bool)):
                raise SbpError(
                    f"watch: note({name}=...) takes a number, and got {type(value).__name__}\n"
                    "  pass an int, a float, or a tensor with one element"
                )
            self._noted[name] = value

    def close(self) -> None:
        """Write what is left, and end all sinks that were opened here; a block does so when it ends."""
        if not self.closed:
            if self._stretch.many or self._noted:
                self._report()
            self._end("")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # other ranks may not come here, so that nothing is compared or read any more
            self._end(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    @property
    def _writes(self) -> bool:
        """Whether this process writes: the first rank that has a part of the step."""
        return self._last is not None and world().rank in (None, min(self._last.graph.ranks.flat))

    def _report(self) -> None:
        step, stretch = self._last, self._stretch
        if step is None:
            return
        if world().rank is None or world().rank in step.graph.ranks:
            line: dict[str, Value] = {"step": self.at, **self._read(step)}
            if stretch.many:
                caught_up(step)
                seconds = perf_counter() - stretch.start
                found = seen(step, stretch, seconds)
                if self._writes:
                    line |= speed(stretch, seconds, self._unit, self.peak) | found | predicted(step)
            if self._writes:
                self.line = line
                self.progress.line(line)
                for sink in self.sinks:
                    sink.write(line)
        self._noted = {}
        self._stretch = Stretch()

    def _read(self, step: Step) -> dict[str, Value]:
        """The numbers that lie on devices, which all ranks read."""
        options, found = step.plan.options, dict[str, Value]()
        if self._loss is not None:
            found["loss"] = float(self._loss.item())
        if options.clip_grad_norm is not None and step.optimizers:
            found["norm"] = float(self.graph.grad_norm)
        if step.optimizers:
            found["lr"] = float(step.optimizers[0].param_groups[0]["lr"])
        found |= {name: float(value) for name, value in self._noted.items()}
        if options.skip_nonfinite:
            found["skipped"] = self.graph.skipped.count
        if self.plans > 1:
            found["plans"] = self.plans
        return found

    def _end(self, error: str) -> None:
        self.closed = True
        self.progress.end()
        if self._writes:
            for sink in self.sinks:
                sink.end(error)


OURS = frozenset({
    "step", "loss", "norm", "lr", "skipped", "plans", "seconds", "tokens_per_second", "samples_per_second", "mfu",
    "flops_per_second", "gib", "exposed", "hidden", "bubble", "waits", "slowest", "predicted_seconds",
    "predicted_hidden", "predicted_exposed", "predicted_gib",
})  # fmt: skip


def watch(
    step: Callable[Args, Result],
    *,
    to: object = (),
    steps: int | None = None,
    every: int = 10,
    start: int = 0,
    tokens: int | None = None,
    peak: float | None = None,
    progress: bool = True,
) -> WatchedStep[Args, Result]:
    """A step to call in the place of `step`: every so many calls a line with loss, norm of gradients, learning rate,
    tokens and FLOPs a second, share of the peak (MFU), memory, and hidden and exposed moves, seen and predicted.

    `to` is where lines go: "run.jsonl", "tensorboard:FOLDER", "wandb:PROJECT", a function, or several. `steps` are
    those of the whole run, of which `start` were run before. A batch has as many tokens as its matrix of whole numbers,
    or as `tokens` says. `peak` is FLOP/s of one device, where its cluster does not know it.
    """
    if isinstance(step, WatchedStep):
        raise SbpError("watch of a watched step\n  watch it once: to=[...] takes several sinks")
    if not isinstance(step, StepGraph):
        raise SbpError(
            f"watch of {type(step).__name__}, which is no step\n"
            "  watch what compile returns: flow.watch(flow.compile(model, loss_fn, optimizer, plan=plan))"
        )
    for name, value, least in (("every", every, 1), ("start", start, 0), ("steps", steps, 1), ("tokens", tokens, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise SbpError(f"watch: {name}={value!r}\n  give a whole number from {least} on")
    if steps is not None and start > steps:
        raise SbpError(f"watch: start={start} of steps={steps}\n  steps are those of the whole run, also before start")
    if peak is not None and not peak > 0:
        raise SbpError(f"watch: peak={peak!r}\n  give the FLOP/s of one device, as in peak=989e12")
    sinks = sinks_of(to, start)
    how: dict[str, Any] = {"steps": steps, "every": every, "start": start, "tokens": tokens}
    return WatchedStep(step, sinks, peak=peak, progress=progress, **how)


def _loss(result: Any) -> Tensor | None:
    """The first number of a result."""
    return next((x for x in tensors_in(result) if x.numel() == 1 and x.is_floating_point()), None)
