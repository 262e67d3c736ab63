"""Real ranks for tests: processes that meet over Gloo and run functions of the test modules.

    def rows() -> torch.Tensor: ...            a function of a test module, run on every rank

    ranks4(rows)                               four ranks that stay for the session; a call costs milliseconds
    fresh(2, rows)                             two new ones for one test, which may die and be killed

To start a process and load torch takes seconds. So one process, the nursery, loads it once, and what ranks load on the
way, and forks the ranks.
"""

import atexit
import faulthandler
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from random import SystemRandom
from typing import Any, NoReturn, TypeVar

import pytest

__all__ = ["Ended", "Fresh", "Nursery", "Ranks", "RanksFailed", "fresh", "nursery", "ranks4", "ranks8"]

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
LEAVE = 20.0  # seconds in which a rank that has nothing left to do must end by itself


class RanksFailed(AssertionError):
    """A call on which some rank failed or ran out of time; the text tells how it went on each."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a function returned on a rank or, where it raised, the error with its traceback."""

    value: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank that is no more. `code` is its exit status, negative for a signal; None if it was killed by the limit."""

    answer: Answer | None
    code: int | None
    stderr: str


class Rank:
    """A process and the pipe to it."""

    def __init__(self, nursery: "Nursery", environment: dict[str, str]) -> None:
        self.nursery = nursery
        self.log = tempfile.TemporaryFile("w+b", buffering=0)  # noqa: SIM115 closed by `end`
        self.pipe, theirs = Pipe()
        self.pid = nursery.fork(environment, (theirs.fileno(), self.log.fileno()))
        theirs.close()
        self.code: int | None = None
        self.gone = False  # whether it closed the pipe
        self.read = 0
        self.tail = ""

    def ended(self) -> bool:
        if self.code is None:
            self.code = self.nursery.ask("reap", self.pid)
        return self.code is not None

    def stopped(self) -> bool:
        """Whether it is suspended by a signal."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False

    def give(self, function: Callable[..., object], *args: object, freed: bool = False) -> None:
        with suppress(BrokenPipeError):  # it died since; reading will tell
            self.pipe.send_bytes(pickle.dumps((function, args, freed)))

    def take(self) -> Answer | None:
        """What it sends; None if it died before."""
        try:
            answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.gone = True
            return None
        assert isinstance(answer, Answer)
        return answer

    def said(self) -> str:
        """What it wrote to stderr and stdout since the last look."""
        if self.log.closed:
            return self.tail
        size = os.fstat(self.log.fileno()).st_size
        text = os.pread(self.log.fileno(), size - self.read, self.read).decode(errors="replace")
        self.read = size
        return text

    def end(self) -> int | None:
        """Its exit status once it has ended by itself; None where it is stuck or stopped, and so killed."""
        deadline = time.monotonic() + (LEAVE if self.pipe.closed or self.gone else 0)
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.002)
        code = self.code
        self.pipe.close()
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            while not self.ended():
                time.sleep(0.002)
        self.tail = self.said()
        self.log.close()
        return code

    def where(self) -> str:
        """What it said, and what it is doing now, as a Python traceback."""
        if not self.stopped() and not self.ended():
            os.kill(self.pid, signal.SIGUSR1)  # `serve` asked for a traceback on it
            time.sleep(0.3)
        return self.said()


class Nursery:
    """The process that forks ranks. It has loaded torch and done nothing with it, so it has but one thread."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        self.orders = Connection(os.dup(self.control.fileno()))
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}
        code = f"from tests.ranks import nurse; nurse({theirs.fileno()})"
        # In a session of its own, so that an interrupt from the keyboard reaches pytest only.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()

    def ask(self, order: str, detail: object) -> int | None:
        self.orders.send((order, detail))
        reply = self.orders.recv()
        assert reply is None or isinstance(reply, int)
        return reply

    def fork(self, environment: dict[str, str], files: Sequence[int]) -> int:
        self.orders.send(("fork", environment))
        socket.send_fds(self.control, [b"."], files)
        pid = self.orders.recv()
        assert isinstance(pid, int)
        return pid

    def world(self, size: int, extra: Callable[[int], dict[str, str]] = lambda rank: {}) -> list[Rank]:
        """New ranks that find each other as those of torchrun do."""
        common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [Rank(self, common | {"RANK": str(r), "LOCAL_RANK": str(r)} | extra(r)) for r in range(size)]

    def close(self) -> None:
        self.orders.close()
        self.control.close()
        self.process.wait(LEAVE)


def free_port() -> int:
    """A port nobody listens at, below those that the system hands out, of which Gloo takes many."""
    while True:
        port = SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def nurse(control: int) -> None:
    """The nursery's life; a forked child leaves it here too, and so ends as any Python program does."""
    import torch._dynamo  # the first step of an optimizer loads it
    import torch.distributed
    import torch.fx.experimental.symbolic_shapes  # noqa: F401 the first segment that is traced

    import sbpflow  # noqa: F401

    with suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its modules warn of each other
        from transformers import LlamaForCausalLM  # noqa: F401

    gc.set_threshold(100_000, 50, 100)  # as in tests/conftest.py
    gc.freeze()  # else a rank that ends copies all pages that hold objects: 0.8 s rather than 0.2
    line, orders = socket.socket(fileno=control), Connection(os.dup(control))
    while True:
        try:
            order, detail = orders.recv()
        except EOFError:
            return
        if order == "reap":
            done, status = os.waitpid(detail, os.WNOHANG)
            orders.send(os.waitstatus_to_exitcode(status) if done else None)
            continue
        _, (pipe, log), _, _ = socket.recv_fds(line, 1, 2)
        pid = os.fork()
        if not pid:
            line.close()
            orders.close()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.environ.update(detail)
            return serve(Connection(pipe))
        os.close(pipe)
        os.close(log)
        orders.send(pid)


def serve(pipe: Connection) -> None:
    """A rank's life: run what comes, answer, and end with the pipe, or with the error that a function raised."""
    faulthandler.register(signal.SIGUSR1)
    freed = True
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return None if freed else leave(0)
        try:
            function, args, freed = pickle.loads(task)
            answer = pickle.dumps(Answer(function(*args)))
        except BaseException:
            pipe.send_bytes(pickle.dumps(Answer(error=traceback.format_exc())))
            sys.exit(1) if freed else leave(1)
        pipe.send_bytes(answer)


def leave(code: int) -> NoReturn:
    """End as Python does but for what it does last, to free all that is loaded: that takes 0.4 s of a processor."""
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join() -> None:
    import sbpflow as flow

    flow.init(timeout=30)


class Ranks:
    """Ranks that stay. After a call that failed they are ended, and the next call has new ones."""

    def __init__(self, nursery: Nursery, size: int) -> None:
        self.nursery, self.size = nursery, size
        self.members: list[Rank] = []

    def __call__(self, function: Callable[..., T], *args: object, timeout: float = 60.0) -> list[T]:
        """What the function returned on each rank."""
        if not self.members:
            self.members = self.nursery.world(self.size)
            self(join)
        try:
            answers = call(self.members, function, args, timeout, freed=1)
        except BaseException:  # from the keyboard: they are still at it, and their answers would be taken for others
            end(self.members, [None] * self.size)
            self.members = []
            raise
        if any(answer is None or answer.error for answer in answers):
            self.fail(function, answers, timeout)
        return [answer.value for answer in answers if answer is not None]

    def fail(self, function: Callable[..., object], answers: list[Answer | None], timeout: float) -> NoReturn:
        members, self.members = self.members, []
        lines = [f"{function.__name__} failed on {self.size} ranks (limit {timeout:g} s)"]
        for rank, (member, answer) in enumerate(zip(members, answers, strict=True)):
            if answer is not None:
                state = answer.error or "returned"
                alike = [r for r, other in enumerate(answers[:rank]) if other == answer]
                state = f"as rank {alike[0]}" if alike else state
            else:
                state = "died" if member.gone else f"still running\n{member.where()}"
            lines += [f"-- rank {rank}: {state}", member.said()]
        end(members, answers)
        raise RanksFailed("\n".join(lines))

    def close(self) -> None:
        """End them; each must leave by itself and in peace, and the first frees all that it has, as it was told to."""
        members, self.members = self.members, []
        codes = end(members, [Answer()] * len(members))
        assert not any(code != 0 for code in codes), f"exit statuses {codes}" + "".join(m.said() for m in members)


class Fresh:
    """New ranks for one call, all ended when it returns."""

    def __init__(self, nursery: Nursery) -> None:
        self.nursery = nursery

    def __call__(
        self,
        size: int,
        function: Callable[..., object],
        *args: object,
        timeout: float = 30.0,
        environment: Callable[[int], dict[str, str]] = lambda rank: {},
        freed: bool = False,
    ) -> list[Ended]:
        """How it ended on each rank. Ranks that do not answer by the limit, or are stopped, are killed.

        With `freed` they free all that they have before they end, as any Python program does.
        """
        members = self.nursery.world(size, environment)
        try:
            answers = call(members, function, args, timeout, size if freed else 0)
        except BaseException:
            end(members, [None] * size)
            raise
        stuck = [m.where() if answer is None and not m.gone else "" for m, answer in zip(members, answers, strict=True)]
        codes = end(members, answers)
        said = [before + member.said() for member, before in zip(members, stuck, strict=True)]
        return [Ended(*each) for each in zip(answers, codes, said, strict=True)]


def end(members: Sequence[Rank], answers: Sequence[Answer | None]) -> list[int | None]:
    """Let go those that answered, kill those that did not; the exit statuses."""
    for member, answer in zip(members, answers, strict=True):
        if answer is not None:
            member.pipe.close()
    return [member.end() for member in members]


def call(
    members: Sequence[Rank], function: Callable[..., object], args: tuple[object, ...], timeout: float, freed: int
) -> list[Answer | None]:
    """Everybody's answer; None of those that died, are stopped, or had none by the limit.

    So many of them free all that they have before they end.
    """
    for rank, member in enumerate(members):
        member.give(function, *args, freed=rank < freed)
    answers: list[Answer | None] = [None] * len(members)
    missing = {member.pipe: rank for rank, member in enumerate(members)}
    deadline = time.monotonic() + timeout
    idle = 0
    while missing and time.monotonic() < deadline:
        ready = wait(list(missing), min(0.2, max(0.0, deadline - time.monotonic())))
        idle = idle + 1 if not ready and all(members[rank].stopped() for rank in missing.values()) else 0
        if idle > 4:
            break  # nobody is left who could wake them
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = missing.pop(pipe)
            answers[rank] = members[rank].take()
    return answers


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    home = Nursery()
    yield home
    home.close()


@pytest.fixture(scope="session")
def ranks4(nursery: Nursery) -> Iterator[Ranks]:
    ranks = Ranks(nursery, 4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def ranks8(nursery: Nursery) -> Iterator[Ranks]:
    ranks = Ranks(nursery, 8)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def fresh(nursery: Nursery) -> Fresh:
    return Fresh(nursery)
