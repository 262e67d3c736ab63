"""A worker: one rank of an island. It runs programs in the order in which they come, and keeps their results.

A program that fails on one rank leaves the others in the midst of an exchange; they are told by the ledger, as of any
rank that gives up. Ranks that failed no longer agree on turns, so that after it all leave the world and join anew.
"""

import gc
import pickle
import random
import traceback
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from ...boxing.exchange.dist import Dist
from ...boxing.exchange.execute import transport
from ...placement.errors import SbpError, TransportError
from ...placement.world import close, init, world
from ..checkpoint.random_state import random_state, restore
from .messages import (
    ClientCame,
    ClientCode,
    ClientGone,
    IslandEnds,
    MessageLine,
    ProgramEnded,
    ProgramFailure,
    ProgramSent,
    ResultFreed,
    Settled,
)
from .pickles import ClientModules, Unpacker, packed_whole

__all__ = ["IslandWorker"]


class _Guest:
    """A client on this rank: its results by number, its modules, and its state of what a process has one of."""

    def __init__(self, code: ClientCode) -> None:
        self.results: dict[int, Any] = {}
        self.modules = ClientModules(code)
        self.state: tuple[Any, ...] | None = None
        self.seed = code.seed


class IslandWorker:
    """The loop of a rank. Random numbers, grad mode and the default dtype are each client's own."""

    def __init__(self, line: MessageLine) -> None:
        self._line = line
        self._later: deque[Any] = deque()
        self._guests: dict[int, _Guest] = {}
        self._inside: _Guest | None = None
        self._first = _state()
        self._rank = world().rank or 0

    def serve(self) -> None:
        """Run programs until the island ends."""
        while True:
            match self._later.popleft() if self._later else self._line.take():
                case ClientCame(client, code):
                    self._guests[client] = _Guest(code)
                case ClientGone(client):
                    self._leave(self._guests.pop(client))
                case ResultFreed(client, number):
                    self._guests[client].results.pop(number, None)
                case ProgramSent() as program:
                    self._run(program)
                case IslandEnds():
                    return

    def _leave(self, guest: _Guest) -> None:
        guest.results.clear()
        if self._inside is guest:
            self._inside = None
        gc.collect()  # graphs and models hold each other

    def _run(self, program: ProgramSent) -> None:
        guest = self._guests[program.client]
        results = guest.results
        self._enter(guest)
        value: Any = None
        sent: bytes | None = None
        before = next((results[n] for n in program.takes if isinstance(results[n], ProgramFailure)), None)
        failure: ProgramFailure | None = before
        if before is None:
            try:
                value, sent = _ran(guest, program)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                failure = _failure(error, self._rank, program.name)
                wire = transport()
                if isinstance(wire, Dist):
                    wire.ledger.fail(f"{program.name} raised {failure.said}")
        self._line.put(ProgramEnded(program.number, failure, sent if self._rank == 0 else None))
        settled = self._settled()
        results[program.number] = value if settled.failure is None else settled.failure
        if settled.failure is not None and before is None:
            if not settled.alike:  # what it wrote to may differ between ranks by now
                results.update(dict.fromkeys(program.takes, settled.failure))
            _join_anew()

    def _settled(self) -> Settled:
        """How the program ended on all ranks; what comes before that is for later."""
        while not isinstance(message := self._line.take(), Settled):
            self._later.append(message)
        return message

    def _enter(self, guest: _Guest) -> None:
        if self._inside is guest:
            return
        if self._inside is not None:
            self._inside.state = _state()
        _set_state(guest.state or self._first)
        if guest.state is None:
            random.seed(guest.seed)
            np.random.seed(guest.seed)
        self._inside = guest


def _ran(guest: _Guest, program: ProgramSent) -> tuple[Any, bytes | None]:
    """The value of a program, and its bytes if it is to come home."""
    if program.file is not None:
        guest.modules.check(*program.file)
    function, arguments, named = Unpacker(program.pickled, guest.modules.named, guest.results.__getitem__).load()
    value = function(*arguments, **named)
    if not program.home:
        return value, None
    try:
        return None, packed_whole(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise SbpError(
            f"a {type(value).__name__} cannot come home: {error}\n"
            "  pass its handle to a function that returns what is wanted of it, as tensors and numbers"
        ) from error


def _failure(error: BaseException, rank: int, program: str) -> ProgramFailure:
    said = f"{type(error).__name__}: {error}"
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:  # these lines say nothing to a user
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    bare: bytes | None = None
    with suppress(Exception):
        pickled = pickle.dumps(error)
        bare = pickled if str(pickle.loads(pickled)) == str(error) else None
    return ProgramFailure(rank, said, text, bare, isinstance(error, TransportError), program)


def _join_anew() -> None:
    gc.collect()  # an error and its frames may hold each other, and results
    here = world()
    if here.rank is None:
        return
    options: dict[str, Any] = {"timeout": here.timeout, "native": here.native, "check": here.check}
    close()
    init(**options)
    transport()  # all meet here, whatever comes next


def _state() -> tuple[Any, ...]:
    return random_state(), torch.is_grad_enabled(), torch.get_default_dtype()


def _set_state(state: tuple[Any, ...]) -> None:
    drawn, grad, dtype = state
    restore(drawn)
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)
