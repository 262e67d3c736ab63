"""A client of an island: it sends programs to ranks that are not its own, and holds handles of their results."""

import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

from ...boxing.record import user_line
from ...placement.errors import SbpError, TransportError
from .messages import Hello, IslandEnds, MessageLine, ProgramEnded, ProgramFailure, ProgramSent, ResultFreed, Welcome
from .pickles import Unpacker, code_here, file_of, main_here, packed_program
from .serve import ISLAND_FILE, IslandAddress, working

__all__ = ["Island", "RemoteResult", "island"]

Result = TypeVar("Result")


class RemoteResult(Generic[Result]):
    """A handle of a program's result, which lies on the ranks of an island as long as there is the handle.

    It may be an argument of the island's next programs, without coming home.
    """

    def __init__(self, island: "Island", number: int, name: str, ended: Future[ProgramEnded]) -> None:
        self._island, self._number, self._name, self._ended = island, number, name, ended
        weakref.finalize(self, island._line.put, ResultFreed(island._client, number)).atexit = False

    @property
    def done(self) -> bool:
        """Whether the program has ended, well or not."""
        return self._ended.done()

    def result(self) -> Result:
        """The value as it is behind all programs that were sent before, of rank 0, and global tensors whole.

        An error of the program is raised here, or of one that it took a result of.
        """
        ended = self._island._sent(_itself, (self,), {}, home=True)._ended.result()
        self._island._raise(ended.failure)
        assert ended.value is not None
        value: Result = Unpacker(ended.value, main_here).load()
        return value

    def __repr__(self) -> str:
        return f"{self._name}: {'done' if self.done else 'under way'}"

    def __reduce__(self) -> NoReturn:
        raise SbpError(
            f"a handle is for its own client and island: {self._name}\n"
            "  it can be an argument of island.run, of the same island; elsewhere pass handle.result()"
        )


class Island:
    """Ranks that run programs for several clients. Made by `flow.island`."""

    def __init__(self, line: MessageLine, where: str, share: float, most: int) -> None:
        self._line, self._where, self._most = line, where, most
        line.put(Hello(None, share, code_here()))
        try:
            welcome: Welcome = line.take()
        except EOFError:
            raise TransportError(f"the island at {where} ends\n  start another") from None
        self._client, self.ranks = welcome
        self._pending: dict[int, Future[ProgramEnded]] = {}
        self._failures: dict[str, ProgramFailure] = {}  # by the program that raised, those that nobody was told of
        self._told = set[str]()
        self._count, self._gone = 0, ""
        self._changed = threading.Condition()
        self._listener = threading.Thread(target=self._listen, name="sbpflow island client", daemon=True)
        self._listener.start()

    def run(self, function: Callable[..., Result], /, *arguments: object, **named: object) -> RemoteResult[Result]:
        """Enqueue a program, which each rank of the island runs, and return at once with a handle of its result.

        `function` is one that workers can import, or one of this script's file, a class or a method: with handles for
        objects, `island.run(Trainer.step, trainer, x)`. It waits only while `most` programs have not ended.
        """
        if not callable(function):
            raise SbpError(
                f"island.run({type(function).__name__}): that is no function\n  give it one, then its arguments"
            )
        return self._sent(function, arguments, named)

    def _sent(
        self, function: Callable[..., Any], arguments: tuple[object, ...], named: dict[str, object], home: bool = False
    ) -> RemoteResult[Any]:
        name = str(getattr(function, "__qualname__", type(function).__name__)) if not home else "a result"
        pickled, takes = self._packed(name, (function, arguments, named))
        with self._changed:
            self._changed.wait_for(lambda: len(self._pending) < self._most or bool(self._gone))
            self._refuse_gone()
            number, self._count = self._count, self._count + 1
            name = f"{name}, sent as {number} at {user_line()}"
            made = self._pending[number] = Future()
            self._line.put(ProgramSent(self._client, number, name, pickled, takes, file_of(function), home))
        return RemoteResult(self, number, name, made)

    def _packed(self, name: str, program: tuple[Any, ...]) -> tuple[bytes, tuple[int, ...]]:
        """The bytes of a program, and the numbers of results that it takes."""
        takes = dict[int, None]()

        def number(x: object) -> int | None:
            if not isinstance(x, RemoteResult):
                return None
            if x._island is not self:
                raise SbpError(
                    f"a handle of another island, or of another connection: {x._name}\n"
                    "  its result lies there: pass handle.result(), or run the program there"
                )
            takes[x._number] = None
            return x._number

        try:
            return packed_program(program, number), tuple(takes)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SbpError(
                f"island.run({name}): it cannot be sent: {error}\n"
                "  the function must stand at the top of a file, and arguments be what pickle takes; what it cannot, "
                "such as a compiled step, is made by a program and passed by its handle"
            ) from error

    def wait(self) -> None:
        """Wait for all programs that were sent; an error that nobody was told of is raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending or bool(self._gone))
            failure = next(iter(self._failures.values()), None)
        self._raise(failure)

    def close(self) -> None:
        """Hang up. Programs that have not begun are dropped, and results on the island are freed."""
        with self._changed:
            self._gone = (
                self._gone or f"this connection to the island at {self._where} was closed\n  make another: flow.island"
            )
            self._changed.notify_all()
        self._line.close()
        self._line.flush()
        self._listener.join(5)

    def end(self) -> None:
        """End the island for all of its clients, once the programs that lie at the ranks have ended."""
        with self._changed:
            self._refuse_gone()
        self._line.put(IslandEnds())
        self._listener.join()
        self.close()

    def _raise(self, failure: ProgramFailure | None) -> None:
        if failure is None:
            return
        with self._changed:
            self._told.add(failure.program)
            self._failures.pop(failure.program, None)
        error: object = None
        if failure.error is not None:
            with suppress(Exception):  # of a class that is not to be had here: the text has all
                error = Unpacker(failure.error, main_here).load()
        if not isinstance(error, Exception):
            error = TransportError(failure.said)
        error.add_note(f"on rank {failure.rank} of the island, in {failure.program}:\n{failure.text}")
        try:
            raise error
        finally:
            del error  # its frames hold handles, and this one would hold it

    def _refuse_gone(self) -> None:
        if self._gone:
            raise TransportError(self._gone)

    def _listen(self) -> None:
        try:
            while True:
                ended: ProgramEnded = self._line.take()
                with self._changed:
                    self._settle(ended)
        except EOFError:
            with self._changed:
                self._gone = self._gone or f"the island at {self._where} has ended\n  start it anew, and the client too"
                lost = ProgramFailure(0, self._gone, "it had not ended by then", None, True, "a program")
                for number in [*self._pending]:
                    self._settle(ProgramEnded(number, lost, None))
                self._changed.notify_all()

    def _settle(self, ended: ProgramEnded) -> None:
        failure = ended.failure
        if failure is not None and failure.program not in self._told:
            self._failures.setdefault(failure.program, failure)
        self._pending.pop(ended.number).set_result(ended)
        self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self.close()


def island(file: str | Path = ISLAND_FILE, *, share: float = 1.0, most: int = 8) -> Island:
    """A connection to an island, by the file that it wrote: `island.run(function, ...)` runs there, on all ranks.

    Of programs that wait, each client's go in its own order, and clients by turns, one with `share=2` twice as often as
    one with 1. At most `most` programs of this client are under way; one more waits. As a block,
    `with flow.island(file) as island:`, it waits for all at its end.
    """
    if getattr(working, "here", False):
        raise SbpError(
            "flow.island is called by a worker of an island: workers load the file of a client's script\n"
            '  write what is for the client alone under: if __name__ == "__main__":'
        )
    if type(most) is not int or most < 1 or not 0 < share < float("inf"):
        raise SbpError(f"flow.island: share={share!r}, most={most!r}\n  give a share above 0, and from 1 program on")
    found = IslandAddress.read(Path(file))
    return Island(found.connected(), f"{found.host}:{found.port}", share, most)


def _itself(value: object) -> object:
    return value
