"""Meetings of all processes over their store: each says something to the first, which answers all with one verdict.

    process 0  <--said--  1, 2, 3        from any thread: no collective is used, which the main thread may be in
    process 0  --verdict-->  1, 2, 3     an error that one of them says is the verdict for all

Calls must be made in the same order in all processes, from any threads. Who waits for another process looks whether it
still runs, or is heard if it is on another host; and where the store is gone, all end at once.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from ...boxing.exchange.execute import watch_so_far
from ...boxing.exchange.store_wait import await_key
from ...placement.errors import FileError, SbpflowError, TransportError
from ...placement.network.this_host import runs, this_host
from ...placement.world import at_close, store, world

__all__ = ["Meeting"]

ASK = 0.002  # seconds between two looks at the store
LEAVE = 5.0  # seconds in which all that are alive have heard
FAILED, GONE = "!~"  # before what is said of an error: one in what is saved, or of ranks that are not there any more
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
        self.store = store() if self.size > 1 else None
        with _lock:
            first, self.number = not _count, _count
            _count += 1
        if first:
            at_close(_again)
        if first and self.store is not None:
            with self._reachable():
                self.store.set(f"meeting/process/{self.me}", f"{os.getpid()} {this_host()}")
        self.round = 0

    def agree(
        self,
        said: str = "",
        error: Exception | None = None,
        decide: Callable[[Sequence[str]], str] | None = None,
    ) -> str:
        """The first process's verdict on all that is said. All get it, and an error of one of them is one of all.

        `decide` is called in the first process, with what each said in their order.
        """
        prefix = f"meeting/{self.number}/{self.round}"
        self.round += 1
        if self.store is None:
            if error is not None:
                raise error
            return decide([said]) if decide is not None else ""
        with self._reachable():
            self.store.set(f"{prefix}/said/{self.me}", "=" + said if error is None else _failed(error))
            if self.me == 0:
                self._decide(prefix, error, decide)
            verdict = self._wait(f"{prefix}/verdict", 0)
            self.store.add(f"{prefix}/heard", 1)
        if error is not None:
            raise error
        if verdict[:1] != "=":
            kind = TransportError if verdict[:1] == GONE else FileError
            raise kind(f"{self.asked}: another rank has failed\n  {verdict[1:]}")
        return verdict[1:]

    def together(self, work: Callable[[], str | None], decide: Callable[[Sequence[str]], str] | None = None) -> str:
        """Do something, and hear that all have, with what the first process decides from what it gave each."""
        said, error = "", None
        try:
            said = work() or ""
        except Exception as failure:
            error = failure
        return self.agree(said, error, decide)

    def end(self) -> None:
        """The first process may have the store, and stays until the others have heard its last verdict."""
        if self.store is None or self.me != 0 or not self.round:
            return
        end, key = time.monotonic() + LEAVE, f"meeting/{self.number}/{self.round - 1}/heard"
        with suppress(RuntimeError):  # the store is gone, and nobody can be waited for
            while self.store.add(key, 0) < self.size and time.monotonic() < end:
                time.sleep(ASK)

    def _decide(self, prefix: str, error: Exception | None, decide: Callable[[Sequence[str]], str] | None) -> None:
        assert self.store is not None
        verdict = GONE
        try:
            said = [self._wait(f"{prefix}/said/{rank}", rank) for rank in range(self.size)]
            failed = next((rank for rank, text in enumerate(said) if text[:1] != "="), None)
            if failed is not None:
                verdict = f"{said[failed][0]}rank {failed}: {said[failed][1:]}"
            else:
                verdict = "=" + (decide([text[1:] for text in said]) if decide is not None else "")
        except Exception as failure:
            verdict = _failed(failure, "rank 0: ")
            if error is None:
                raise
        finally:
            for rank in range(self.size):
                self.store.delete_key(f"{prefix}/said/{rank}")
            self.store.set(f"{prefix}/verdict", verdict)

    def _wait(self, key: str, rank: int) -> str:
        """The words of a rank, which it has said or will have within the limit."""
        assert self.store is not None

        def gone() -> str | None:
            said = f"rank {rank} has ended" if self._ended(rank) else None if watch is None else watch.ledger.gone(rank)
            return None if said is None else f"{self.asked}: {said}, and the others wait for it\n  {_ANEW}"

        watch = watch_so_far()
        found = await_key(self.store, key, self.limit, gone)
        if found is None:
            raise TransportError(
                f"{self.asked}: rank {rank} did not come within {self.limit:g} s (flow.init(timeout=) sets this)\n"
                "  every process calls it, in the same order; or it has ended, or writes for so long"
            )
        return found

    def _ended(self, rank: int) -> bool:
        """Whether the process of a rank of this host does not run any more."""
        assert self.store is not None
        key = f"meeting/process/{rank}"
        if not self.store.check([key]):
            return False
        pid, host = self.store.get(key).decode().split(" ", 1)
        return host == this_host() and not runs(int(pid))

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Around calls of the store: where nobody answers, say who has ended."""
        watch = watch_so_far()
        guard = watch.store if watch is not None else None
        try:
            with guard or nullcontext():
                yield
        except RuntimeError as error:
            if isinstance(error, SbpflowError):
                raise
            said = (guard and guard.lost()) or str(error).partition("\n")[0].rpartition("] ")[2]
            raise TransportError(
                f"{self.asked}: rank {self.me} lost the store at which all {self.size} ranks meet\n"
                f"  rank 0, which has it where torchrun does not, has ended or cannot be reached: {said}\n  {_ANEW}"
            ) from error


def _failed(error: Exception, who: str = "") -> str:
    return f"{GONE if isinstance(error, TransportError) else FAILED}{who}{error}"


_ANEW = "start all processes anew, as torchrun --max-restarts does; flow.newest(folder) names what is whole"
