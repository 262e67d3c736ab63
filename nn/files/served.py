"""Files served to other hosts: a process reads parts of tensors in files that another process has, over a socket.

    //10.0.0.3:40123/ram/run/step-10/00003-000.safetensors      a file of that process, under its path there

A process answers from threads of its own, so that nobody has to call anything at the same time; it gives out what lies
in folders that it was told to, to whoever knows the key that the processes of a run share by their store. As with the
messages of training, nothing is encrypted: it belongs into a network of one's own.
"""

import hmac
import json
import secrets
import socket
import socketserver
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...placement.errors import TransportError
from ...placement.network.interface import family_of, run_address
from ...placement.world import at_close, store, world
from .pieces import sizes_of
from .raw import RawFile, counted, memory_of
from .values import Region

__all__ = ["REMOTE", "ServedFile", "Server", "opened_piece", "server"]

REMOTE = "//"
LONGEST = 1 << 16  # bytes of a line that asks: whoever has no key is not to fill the memory
WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Server:
    """The files that this process gives out."""

    def __init__(self, key: str) -> None:
        self.key, self.folders = key, set[str]()
        self.listener = _Listener(self)
        threading.Thread(target=self.listener.serve_forever, name="sbpflow-files", daemon=True).start()

    def url(self, path: Path) -> str:
        """The name of a file here for others; its folder is given out."""
        self.folders.add(str(path.parent))
        return f"{REMOTE}{self.listener.server_address[0]!s}:{self.listener.server_address[1]}{path}"

    def close(self) -> None:
        self.listener.shutdown()
        self.listener.server_close()


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close = True, False

    def __init__(self, server: Server) -> None:
        self.gives = server
        address = run_address()
        self.address_family = family_of(address)
        super().__init__((address, 0), _Answer)


class _Answer(socketserver.StreamRequestHandler):
    """One connection: a line asks for a box of a file, a line says how many bytes come, and they do."""

    server: _Listener

    def handle(self) -> None:
        while line := self.rfile.readline(LONGEST):
            try:
                data = self._box(json.loads(line))
            except Exception as error:
                self.wfile.write(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
                continue
            self.wfile.write(json.dumps({"bytes": len(data)}).encode() + b"\n")
            self.wfile.write(data)
            counted(sent=len(data))

    def _box(self, asked: dict[str, Any]) -> memoryview:
        path = asked["path"]
        if not hmac.compare_digest(asked["key"], self.server.gives.key):
            raise PermissionError("it has another key")
        if str(Path(path).parent) not in self.server.gives.folders or ".." in Path(path).parts:
            raise PermissionError(f"{path} is not given out")
        region = tuple((lo, hi) for lo, hi in asked["region"])
        out = torch.empty(sizes_of(region), dtype=WIDTHS[asked["width"]], device="cpu")
        file = RawFile(path)
        try:
            file.box(asked["at"], asked["sizes"], region, out)
        finally:
            file.close()
        return memory_of(out)


class ServedFile:
    """A file of another process, that is read as one of this host is."""

    def __init__(self, url: str) -> None:
        where, _, path = url.removeprefix(REMOTE).partition("/")
        host, _, port = where.rpartition(":")
        self.url, self.path = url, f"/{path}"
        try:
            self.socket = socket.create_connection((host, int(port)), world().timeout)
        except OSError as error:
            raise self._gone(error) from error
        self.answers = self.socket.makefile("rb")

    def close(self) -> None:
        self.answers.close()
        self.socket.close()

    def box(self, at: int, sizes: Sequence[int], region: Region, out: Tensor) -> None:
        """The elements in a region of a tensor of these sizes that begins at an offset, into memory without gaps."""
        if not out.numel():
            return
        asked = {"key": server().key, "path": self.path, "at": at, "sizes": list(sizes), "region": region}
        try:
            self.socket.sendall(json.dumps(asked | {"width": out.dtype.itemsize}).encode() + b"\n")
            said = json.loads(self.answers.readline() or '{"error": "the connection was closed"}')
            memory, done = memory_of(out), 0
            while "error" not in said and done < len(memory):
                got = self.answers.readinto(memory[done:])
                if not got:
                    said = {"error": "the connection was closed"}
                done += got
        except OSError as error:
            raise self._gone(error) from error
        if "error" in said:
            raise self._gone(said["error"])
        counted(received=len(memory))

    def _gone(self, why: object) -> TransportError:
        return TransportError(
            f"{self.url} cannot be read from the process that has it\n"
            f"  {why}\n  start all processes anew; flow.newest(folder, neighbours=1) finds what is on other hosts"
        )


def opened_piece(file: str) -> RawFile | ServedFile:
    """A file of this host, or of another."""
    return ServedFile(file) if file.startswith(REMOTE) else RawFile(file)


_server: Server | None = None
_lock = threading.Lock()


def server() -> Server:
    """That of this process, which runs from the first use on until the world is left."""
    global _server
    with _lock:
        if _server is None:
            key = secrets.token_hex(16)
            if world().size:
                key = store().compare_set("files/key", "", key).decode()
            _server = Server(key)
            at_close(_close)
        return _server


def _close() -> None:
    global _server
    if _server is not None:
        _server.close()
    _server = None
