"""A save that is under way: at most one at a time, in a thread of its own where it is asynchronous."""

import atexit
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["Saving", "finished"]


class Saving:
    """A save of one checkpoint. Where it goes on, `wait()` waits for its end, and raises what went wrong."""

    def __init__(self, path: Path, work: Callable[[], None], *, asynchronous: bool) -> None:
        self.path, self._told = path, False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if asynchronous:
            self._thread = threading.Thread(target=self._run, args=(work,), name=f"flow.save {path.name}")
            self._thread.start()  # no daemon: the process ends when it is written
        else:
            self._told = True
            work()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether nothing is written any more."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it is written, or raise why it is not."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._told = True
            raise self._error

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "written" if self.done else "being written"
        return f"save to {self.path}: {state}"


_last: Saving | None = None


def finished(then: Callable[[], Saving] | None = None) -> Saving | None:
    """Wait for the save before, raise its error if nobody has heard of it, and begin another."""
    global _last
    before, _last = _last, None
    if before is not None and not before._told:
        before.wait()
    if then is not None:
        _last = then()
    return _last


def _at_exit() -> None:
    finished()


atexit.register(_at_exit)
