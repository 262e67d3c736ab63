"""Launches: programs handed over to run one behind the other, while who hands them over goes on.

    caller       launch 0  launch 1  launch 2 .....  reads a loss: waits for what it needs
    dispatcher             | step 0 | step 1 | step 2 |

One thread a process runs them, in the order of the calls. This is the same in every process that runs one script, so
programs that share ranks have one order on all of them, and none waits for another in a circle; a process that has no
rank of a program goes on to the next. What the programs change is theirs until they are done: whoever reads or writes
shards of a global tensor meanwhile waits.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from ...boxing.record import user_line
from ...placement.errors import SbpError
from ..tensors.agreement import in_order
from ..tensors.moves import version
from ..tensors.tensor import GlobalTensor

__all__ = ["Launch", "LaunchEvent", "Launched", "ahead", "landed"]

Args = ParamSpec("Args")
Result = TypeVar("Result")
_open: "list[Launch]" = []


class LaunchEvent(NamedTuple):
    """A moment of a program that was launched, in the order in which they came."""

    what: Literal["launched", "began", "ended", "failed", "left out"]
    number: int
    name: str


class Launched(Generic[Result]):
    """The result of a program that may still run; who asks for it waits."""

    def __init__(self, launch: "Launch", number: int, name: str, line: str) -> None:
        self.number, self.name, self.line = number, name, line
        self._launch, self._done = launch, threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self.told = False  # whether somebody got the error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def value(self) -> Result:
        """The result; the error of the program is raised here."""
        self._launch.refuse_inside()
        self._done.wait()
        if self._error is not None:
            self.told = True
            raise self._error
        result: Result = self._value
        return result

    def item(self) -> Any:
        """The number that it is."""
        made: Any = self.value()
        return made.item()

    def __float__(self) -> float:
        return float(self.item())

    def __repr__(self) -> str:
        return f"{self.name}, launched as {self.number} at {self.line}: {'done' if self.done else 'under way'}"

    def _end(self, value: Any, error: BaseException | None) -> None:
        self._value, self._error = value, error
        self._done.set()


class _Task(NamedTuple):
    """A program with its arguments, and how things stood for who launched it."""

    made: Launched[Any]
    program: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    versions: list[tuple[Tensor, int]]  # of arguments that are not copied
    seen: Hashable  # what the program watches, where nothing else that was launched could change it


class Launch:
    """Runs what it is called with, in the order of the calls, in a thread of its own.

    At most `most` programs are launched and not done; one more waits for the first. `events` has what came when. As it
    ends it waits for all, and raises an error that nobody was told of.
    """

    def __init__(self, most: int) -> None:
        if type(most) is not int or most < 1:
            raise SbpError(f"flow.ahead: most={most!r}\n  give how many programs may be launched and not done, from 1")
        self.most, self.events = most, list[LaunchEvent]()
        self._left: deque[_Task] = deque()
        self._under_way = 0
        self._changed = threading.Condition()
        self._closed = False
        self._failed: Launched[Any] | None = None
        self._count = self._strange = 0  # launched so far, and programs under way that may change what others watch
        self._programs: dict[int, Any] = {}  # that have run, and what they watched when the last program ended
        self._after: dict[int, Hashable] = {}
        self._line = user_line()
        self._users: set[int | None] = set()  # threads that wait for what they launched
        self._thread = threading.Thread(target=self._run, name="sbpflow launches", daemon=True)

    def __call__(self, program: Callable[Args, Result], /, *args: Args.args, **kwargs: Args.kwargs) -> Launched[Result]:
        """Have a program run behind those launched before; its arguments are as they are now.

        Results of launched programs may be arguments: they are waited for. Plain tensors are copied. Any function may
        be launched, such as a scheduler's step; what changes while one that is no step is under way is taken for its.
        """
        self.refuse_inside()
        if not callable(program):
            raise SbpError(
                f"launch({type(program).__name__}): that is no program\n  give it a compiled step, and its arguments"
            )
        if self._closed or self not in _open:
            raise SbpError("this launch has ended\n  launch inside the block: with flow.ahead() as launch: ...")
        with self._changed:
            self._changed.wait_for(lambda: self._under_way < self.most or self._failed is not None)
            self._refuse_after_failure()
            name = getattr(program, "launch_name", None) or getattr(program, "__name__", type(program).__name__)
            made: Launched[Result] = Launched(self, self._count, str(name), user_line())
            self._count += 1
            watch = getattr(program, "watched", None)
            seen = self._seen(watch) if watch is not None and not self._strange else None
            versions: list[tuple[Tensor, int]] = []
            taken = tuple([_taken(each, versions) for each in args])
            named = {key: _taken(each, versions) for key, each in kwargs.items()}
            self._left.append(_Task(made, program, taken, named, torch.is_grad_enabled(), versions, seen))
            self._under_way += 1
            self._strange += watch is None
            self.events.append(LaunchEvent("launched", made.number, made.name))
            self._changed.notify_all()
        ready = getattr(program, "is_global", None)
        if ready is not None and not ready():  # its first run puts other tensors in the place of those that there are
            made._done.wait()
        return made

    def _seen(self, watch: Callable[[], Hashable]) -> Hashable:
        """All that a program goes by now, for which nobody is waited for."""
        me = threading.get_ident()
        self._users.discard(me)
        try:
            return watch()
        finally:
            self._users.add(me)

    def wait(self) -> None:
        """Wait for all that was launched; an error that nobody was told of is raised."""
        self.refuse_inside()
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
        if self._failed is not None and not self._failed.told:
            self._failed.value()

    @property
    def inside(self) -> bool:
        """Whether this is called by a program that was launched."""
        return threading.current_thread() is self._thread

    def refuse_inside(self) -> None:
        """A program that is launched cannot wait for what is launched behind it."""
        if self.inside:
            raise SbpError(
                "a launched program launches, or waits for one\n  do that outside: results may be arguments of the next"
            )

    def _refuse_after_failure(self) -> None:
        if self._failed is not None:
            self._failed.told = True
            raise SbpError(
                f"{self._failed.name}, launched as {self._failed.number} at {self._failed.line}, has failed, and "
                f"nothing is launched behind it\n  {self._failed._error}"
            ) from self._failed._error

    # Of the thread that runs them

    def _run(self) -> None:
        in_order.add(threading.get_ident())
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._left) or self._closed)
                    if not self._left:
                        return
                    task = self._left.popleft()
                self._do(task)
                with self._changed:
                    self._under_way -= 1
                    self._strange -= not hasattr(task.program, "watched")
                    self._changed.notify_all()
        finally:
            in_order.discard(threading.get_ident())

    def _do(self, task: _Task) -> None:
        made = task.made
        if self._failed is not None:
            first = self._failed
            self._note("left out", made)
            made._end(None, SbpError(
                f"{made.name}, launched as {made.number} at {made.line}, was not run\n"
                f"  {first.name}, launched as {first.number} at {first.line}, had failed before it: {first._error}"
            ))  # fmt: skip
            return
        self._note("began", made)
        try:
            self._check(task)
            with torch.set_grad_enabled(task.grad):
                args = [_value(each) for each in task.args]
                value = task.program(*args, **{key: _value(each) for key, each in task.kwargs.items()})
        except BaseException as error:
            error.add_note(f"in {made.name}, launched as {made.number} at {made.line}")
            self._failed = made
            self._note("failed", made)
            made._end(None, error)
            return
        if hasattr(task.program, "watched"):
            self._programs[id(task.program)] = task.program
        self._after = {key: program.watched() for key, program in self._programs.items()}
        self._note("ended", made)
        made._end(value, None)

    def _check(self, task: _Task) -> None:
        """Refuse to compute with what has been changed since the launch, by who did not wait."""
        if any(version(value) != count for value, count in task.versions):
            raise SbpError(
                f"an argument of {task.made.name} was written to after the launch\n"
                "  pass a copy, x.clone(), or launch what writes to it too"
            )
        watch = getattr(task.program, "watched", None)
        if watch is None:
            return
        before = task.seen if task.seen is not None else self._after.get(id(task.program))
        if before is not None and watch() != before:
            raise SbpError(
                f"{task.made.name} was launched, and then a rate of its optimizers, or which modules and parameters "
                "train, was changed\n"
                "  launch what changes it, as in launch(scheduler.step), or wait before: launch.wait()"
            )

    def _note(self, what: Literal["began", "ended", "failed", "left out"], made: Launched[Any]) -> None:
        self.events.append(LaunchEvent(what, made.number, made.name))

    # The block

    def __enter__(self) -> Self:
        if _open:
            raise SbpError(
                f"flow.ahead at {self._line}: another is open, made at {_open[0]._line}\n"
                "  use that one: its order is the same on all ranks, and that of two would not be"
            )
        _open.append(self)
        self._users = {threading.main_thread().ident, threading.get_ident()}
        GlobalTensor._shards = _Guarded()  # type: ignore[assignment]
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            if error is not None and self._failed is None:  # what has not begun is not wanted any more
                for task in self._left:
                    self._note("left out", task.made)
                    task.made._end(None, SbpError(f"{task.made.name} was not run: the block has ended by an error"))
                self._under_way -= len(self._left)
                self._left.clear()
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        _open.remove(self)
        del GlobalTensor._shards
        if error is None and self._failed is not None and not self._failed.told:
            self._failed.value()


class _Guarded:
    """Shards of global tensors while programs are under way: who reads or writes them waits, but for the programs."""

    def __get__(self, x: Any, of: Any = None) -> Any:
        if x is None:
            raise AttributeError("_shards")
        landed()
        try:
            return x.__dict__["_shards"]
        except KeyError:
            raise AttributeError("_shards") from None

    def __set__(self, x: Any, value: Any) -> None:
        x.__dict__["_shards"] = value


def landed() -> None:
    """Wait for programs that are under way, where this is the thread of who launched them."""
    if _open and _open[0]._under_way and threading.get_ident() in _open[0]._users:
        _open[0].wait()


def ahead(most: int = 8) -> Launch:
    """A block in which steps are launched ahead: `with flow.ahead() as launch: loss = launch(step, x, y)`.

    It returns at once, and steps run in the order of the calls, which is the same on all ranks. `loss.value()` waits
    for its step, and raises its error; so does reading a weight, or calling a step, for all. At most `most` are under
    way at a time.
    """
    return Launch(most)


def _taken(x: Any, versions: list[tuple[Tensor, int]]) -> Any:
    """An argument as it is now."""
    if isinstance(x, Tensor):
        if type(x) is GlobalTensor:
            versions.extend((shard, version(shard)) for shard in x.__dict__["_shards"] if not shard.is_inference())
            return x
        if not x.requires_grad and x.layout is torch.strided and not x.is_meta:
            return x.detach().clone()
        if not x.is_inference():
            versions.append((x, version(x)))
        return x
    if type(x) in (list, tuple):
        return type(x)([_taken(each, versions) for each in x])
    return {key: _taken(each, versions) for key, each in x.items()} if type(x) is dict else x


def _value(x: Any) -> Any:
    """An argument with the results of what was launched before."""
    if isinstance(x, Launched):
        if not x.done:
            raise SbpError(f"{x.name} is an argument, and is launched behind\n  launch it first")
        if x._error is not None:
            raise x._error
        return x._value
    if type(x) in (list, tuple):
        return type(x)([_value(each) for each in x])
    return {key: _value(each) for key, each in x.items()} if type(x) is dict else x
