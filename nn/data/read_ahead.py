"""Reading ahead: a thread that reads the next items of an iterator while the program works on one.

It reads at most so many items ahead, hands an error on as it was raised, and ends with whoever reads from it, or with
the program: a loop that is left under way is closed by Python when modules are torn down already, and needs none then.
"""

import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import Any, Generic, TypeVar
from weakref import finalize

__all__ = ["ReadAhead"]

T = TypeVar("T")
LEAVE = 5.0  # seconds that a program which ends waits for what is being read
WAIT = 0.05  # seconds after which a reader that waits for room looks whether anybody still wants more


class ReadAhead(Generic[T]):
    """The items of an iterator, of which a thread reads `many` ahead, at least one. Close it where it is left early."""

    def __init__(self, items: Iterator[T], many: int, name: str) -> None:
        self.queue: Queue[tuple[T | None, BaseException | None]] = Queue(many)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(items,), name=name, daemon=True)
        self.at_exit = finalize(self, _end, self.queue, self.stop, self.thread, LEAVE)
        self.thread.start()

    def _read(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                if not self._put((item, None)):
                    return
            self._put((None, None))
        except BaseException as error:  # raised again where the program reads
            self._put((None, error))
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def _put(self, entry: tuple[T | None, BaseException | None]) -> bool:
        while not self.stop.is_set():
            with suppress(Full):
                self.queue.put(entry, timeout=WAIT)
                return True
        return False

    def __iter__(self) -> Iterator[T]:
        try:
            while True:
                item, error = self.queue.get()
                if error is not None:
                    raise error
                if item is None:
                    return
                yield item
        finally:
            self.close()

    def close(self) -> None:
        """End the thread, when what it is reading is read."""
        if self.at_exit.detach() is not None:
            _end(self.queue, self.stop, self.thread, None)


def _end(queue: "Queue[Any]", stop: threading.Event, thread: threading.Thread, limit: float | None) -> None:
    stop.set()
    with suppress(Empty):
        while True:
            queue.get_nowait()
    if thread is not threading.current_thread():
        thread.join(limit)
