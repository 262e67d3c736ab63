"""Meetings of all processes over their store: each says something to the first, which answers all with one verdict.

    process 0  <--said--  1, 2, 3        from any thread: no collective is used, which the main thread may be in
    process 0  --verdict-->  1, 2, 3     an error that one of them says is the verdict for all

Calls must be made in the same order in all processes, from any threads.
"""

import threading
import time
from collections.abc import Callable, Sequence

from ...placement.errors import FileError, TransportError
from ...placement.world import at_close, store, world

__all__ = ["Meeting"]

ASK = 0.002, 0.05  # seconds between two looks at the store, at first and later: a look that waits would block others
LEAVE = 5.0  # seconds in which all that are alive have heard
_count = 0
_lock = threading.Lock()


def _again() -> None:
    global _count
    _count = 0


class Meeting:
    """The meetings of one save or load, which is so called in errors. It is made in the main thread."""

    def __init__(self, asked: str) -> None:
        global _count
        here = world()
        self.asked, self.me, self.size = asked, here.rank or 0, here.size or 1
        self.limit = here.timeout
        with _lock:
            if not _count:
                at_close(_again)
            self.number = _count
            _count += 1
        self.store = store() if self.size > 1 else None
        self.round = 0

    def agree(
        self,
        said: str = "",
        error: Exception | None = None,
        decide: Callable[[Sequence[str]], str] | None = None,
    ) -> str:
        """The first process decides from all that is said, and all get that; an error of one of them is one of all.

        `decide` is called in the first process, with what each said in their order.
        """
        prefix = f"meeting/{self.number}/{self.round}"
        self.round += 1
        if self.store is None:
            if error is not None:
                raise error
            return decide([said]) if decide is not None else ""
        if error is None:
            self.store.set(f"{prefix}/said/{self.me}", "=" + said)
        else:
            self.store.set(f"{prefix}/said/{self.me}", "!" + str(error))
        if self.me == 0:
            self._decide(prefix, error, decide)
        verdict = self._wait(f"{prefix}/verdict", "rank 0")
        self.store.add(f"{prefix}/heard", 1)
        if error is not None:
            raise error
        if verdict[:1] == "!":
            raise FileError(f"{self.asked}: another rank has failed\n  {verdict[1:]}")
        return verdict[1:]

    def end(self) -> None:
        """The first process may have the store, and stays until the others have heard its last verdict."""
        if self.store is None or self.me != 0 or not self.round:
            return
        end, key = time.monotonic() + LEAVE, f"meeting/{self.number}/{self.round - 1}/heard"
        while self.store.add(key, 0) < self.size and time.monotonic() < end:
            time.sleep(ASK[0])

    def _decide(self, prefix: str, error: Exception | None, decide: Callable[[Sequence[str]], str] | None) -> None:
        assert self.store is not None
        verdict = "!"
        try:
            said = [self._wait(f"{prefix}/said/{rank}", f"rank {rank}") for rank in range(self.size)]
            failed = next((rank for rank, text in enumerate(said) if text[:1] == "!"), None)
            if failed is not None:
                verdict = f"!rank {failed}: {said[failed][1:]}"
            else:
                verdict = "=" + (decide([text[1:] for text in said]) if decide is not None else "")
        except Exception as failure:
            verdict = f"!rank 0: {failure}"
            if error is None:
                raise
        finally:
            for rank in range(self.size):
                self.store.delete_key(f"{prefix}/said/{rank}")
            self.store.set(f"{prefix}/verdict", verdict)

    def _wait(self, key: str, who: str) -> str:
        assert self.store is not None
        end, pause = time.monotonic() + self.limit, ASK[0]
        while not self.store.check([key]):
            if time.monotonic() > end:
                raise TransportError(
                    f"{self.asked}: {who} did not come within {self.limit:g} s (flow.init(timeout=) sets this)\n"
                    "  every process calls it, in the same order; or it has ended, or writes for so long"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, ASK[1])
        return self.store.get(key).decode()
