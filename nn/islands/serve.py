"""An island from its start to its end, and the file by which clients find it."""

import json
import os
import secrets
import signal
import socket
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import NamedTuple

from ...boxing.exchange.execute import transport
from ...placement.errors import FileError, PlacementError, TransportError
from ...placement.world import close, init, store
from .messages import Hello, MessageLine
from .scheduler import IslandScheduler
from .worker import IslandWorker

__all__ = ["ISLAND_FILE", "IslandAddress", "serve", "working"]

ISLAND_FILE = "island.json"
working = threading.local()  # `here` is true on a thread that is the worker of an island
START = "torchrun --nproc-per-node N -m sbpflow island --file"


class IslandAddress(NamedTuple):
    """The address of an island, and its key. The file that has it may be read by its owner alone."""

    host: str
    port: int
    key: str

    @staticmethod
    def read(path: Path) -> "IslandAddress":
        try:
            return IslandAddress(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise FileError(f"{path} is not there, by which an island is found\n  start one: {START} {path}") from None
        except (OSError, ValueError, TypeError) as error:
            raise FileError(
                f"{path} is no file by which an island is found: {error}\n  start one: {START} {path}"
            ) from None

    def write(self, path: Path) -> None:
        aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(self._asdict(), file)
        aside.replace(path)

    def connected(self) -> MessageLine:
        """A line to the scheduler, which has seen that both ends have the key."""
        try:
            return MessageLine(Client((self.host, self.port), "AF_INET", authkey=bytes.fromhex(self.key)))
        except AuthenticationError:
            raise TransportError(
                f"the island at {self.host}:{self.port} has another key\n"
                "  take the file that it wrote when it started, and not one of an island before it"
            ) from None
        except (OSError, EOFError) as error:
            raise TransportError(
                f"no island answers at {self.host}:{self.port}: {error}\n"
                f"  it has ended; start one: {START} {ISLAND_FILE}"
            ) from None

    @property
    def answers(self) -> bool:
        """Whether somebody listens there."""
        with suppress(OSError), socket.create_connection((self.host, self.port), timeout=1):
            return True
        return False


def serve(address: str = "localhost:0", file: str | Path = ISLAND_FILE, *, timeout: float | None = None) -> None:
    """Be a rank of an island until a client ends it, or Ctrl-C. All ranks call it.

    The first rank listens at `host:port`, a free port if it is 0; clients on other machines need a host that they
    reach. It writes `file`, with which `flow.island(file)` finds it. Who can read that file can run any code here, and
    what goes over the wire is not encrypted. `timeout` is that of `flow.init`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PlacementError(f"island: address {address!r}\n  write host:port, as in localhost:0 for any free port")
    here, path = init(timeout=timeout), Path(file)
    transport()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: how torchrun ends its workers
    scheduler = None
    try:
        working.here = True
        with suppress(KeyboardInterrupt):
            if here.rank in (0, None):
                found, scheduler = _started(host, int(port), path, here.size or 1)
            else:
                found = IslandAddress(**json.loads(store().get("island")))
            line = found.connected()
            line.put(Hello(here.rank or 0))
            if scheduler is not None:
                scheduler.complete.wait()
                found.write(path)
                print(f"island of {here.size or 1} ranks at {found.host}:{found.port}, key in {path}", flush=True)
            IslandWorker(line).serve()
    except EOFError:
        raise TransportError("another rank of the island has ended\n  start the island anew") from None
    finally:
        working.here = False
        if scheduler is not None:
            with suppress(FileError):
                if IslandAddress.read(path) == found:
                    path.unlink()
            scheduler.close()
        close()


def _started(host: str, port: int, path: Path, ranks: int) -> tuple[IslandAddress, IslandScheduler]:
    """The scheduler, and where it is."""
    if path.exists() and IslandAddress.read(path).answers:
        raise FileError(f"{path} is of an island that runs\n  give this one another: --file PATH")
    key = secrets.token_bytes(32)
    try:
        scheduler = IslandScheduler(host, port, key, ranks)
    except OSError as error:
        raise TransportError(
            f"island: cannot listen at {host}:{port}: {error}\n  take another address, as localhost:0"
        ) from None
    found = IslandAddress(host, scheduler.address[1], key.hex())
    if ranks > 1:
        store().set("island", json.dumps(found._asdict()))
    return found, scheduler
