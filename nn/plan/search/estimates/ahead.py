"""Answers that are made ahead: a second process makes those that are likely to be asked for next.

It is a fork, which knows all that the first process knew, so that nothing but keys and answers is sent. Answers are the
same whoever makes them, and where the second process is lost, or stuck, the first makes them all.
"""

import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar
from warnings import catch_warnings, simplefilter

import torch

from .....placement.device import usable_cores

__all__ = ["CAN_FORK", "Ahead", "processes_here"]

CAN_FORK = sys.platform == "linux"
PATIENCE = 10.0  # times as long as this process took for an answer, and seconds at least, that the other may take
Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")


def processes_here() -> int:
    """Two where a process can fork and has two cores, else one."""
    return 2 if CAN_FORK and usable_cores() > 1 else 1


class Ahead(Generic[Key, Answer]):
    """The answers of `make` to keys, made once for each; with two `processes` the second works ahead."""

    def __init__(self, make: Callable[[Key], Answer], *, processes: int) -> None:
        self.make, self.forks = make, processes > 1 and not current_process().daemon  # such a one may have no others
        self.known: dict[Key, Answer] = {}
        self.left: list[Key] = []  # likely, and begun by nobody
        self.there: Key | None = None  # what the other process is at
        self.process: BaseProcess | None = None
        self.wire: Connection | None = None
        self.longest = 1.0

    def expect(self, keys: Iterable[Key]) -> None:
        """These are likely to be asked for next, and those before no longer. This process begins with the first of
        them, and the other one with the last. Without another one nothing is looked at."""
        if not self.forks:
            return
        self.hear()
        self.left = [key for key in dict.fromkeys(keys) if key not in self.known and key != self.there]
        if self.process is None and len(self.left) > 1:
            self.fork()
        self.send()

    def of(self, key: Key) -> Answer:
        """The answer. While the other process is at it, this one makes the next that is likely."""
        while True:
            self.hear()
            if key in self.known:
                return self.known[key]
            if key != self.there:
                self.add(key)
            elif self.left:
                self.add(self.left[0])
            else:
                self.wait()

    def add(self, key: Key) -> None:
        """Make an answer here."""
        if key in self.left:
            self.left.remove(key)
            self.send()
        start = time.monotonic()
        self.known[key] = self.make(key)
        self.longest = max(self.longest, time.monotonic() - start)

    def fork(self) -> None:
        """Start the other process, if the machine has room for it."""
        context = get_context("fork")
        here, there = context.Pipe()
        process = context.Process(target=self.work, args=(there, here), daemon=True)
        try:
            with catch_warnings():
                simplefilter("ignore", DeprecationWarning)  # that other threads do not go along: none of them is needed
                process.start()
            self.process, self.wire = process, here
        except OSError:
            self.forks = False
            here.close()
        there.close()

    def work(self, wire: Connection, other: Connection) -> None:
        """In the other process: make the last of what is left, again and again, until the first process is gone."""
        other.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # who interrupts the search means the first process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)  # threads of a pool have not come along
        left: list[Key] = []
        begun = set[Key]()  # the first process may not have heard of it yet
        with suppress(Exception):  # of an answer: the first process makes it then, and tells what is wrong
            while True:
                while not left or wire.poll():
                    left = [key for key in wire.recv() if key not in begun]
                begun.add(key := left.pop())
                wire.send((key,))
                wire.send((key, self.make(key)))

    def send(self) -> None:
        """Tell the other process what is left."""
        if self.wire is not None:
            try:
                self.wire.send(self.left)
            except OSError:
                self.close()

    def hear(self) -> None:
        """Take what the other process has said by now."""
        try:
            while self.wire is not None and self.wire.poll():
                key, *answer = self.wire.recv()
                self.there = None if answer else key
                if answer:
                    self.known.setdefault(key, *answer)
                elif key in self.left:
                    self.left.remove(key)
        except (EOFError, OSError):
            self.close()

    def wait(self) -> None:
        """Until the other process says something; one that takes far too long is stuck, and is done without."""
        if self.wire is None or not self.wire.poll(PATIENCE * self.longest):
            self.close()

    def close(self) -> None:
        """End the other process, and have none from here on."""
        if self.process is not None and self.wire is not None:
            self.process.kill()
            self.process.join()
            self.wire.close()
        self.forks, self.there, self.wire = False, None, None
