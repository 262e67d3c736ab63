"""Served files: parts of them to whoever has the key, of the folders that were named, and nothing else."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from sbpflow.nn.files import served


def answer(asked: bytes) -> Any:
    port = served.server().listener.server_address[1]
    with socket.create_connection(("127.0.0.1", port), 5) as there:
        there.sendall(asked + b"\n")
        return json.loads(there.makefile("rb").readline())


def test_only_what_is_given_out_to_who_has_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    served._close()  # that of a test before, which may listen to other hosts
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / "a file é.bin"
    file.write_bytes(bytes(range(16)))
    try:
        there, part = served.ServedFile(served.server().url(file)), torch.empty(4, dtype=torch.uint8)
        there.box(0, (16,), ((4, 8),), part)
        there.close()
        assert part.tolist() == [4, 5, 6, 7]
        assert served.server().listener.server_address[0] == "127.0.0.1"
        asked = {"path": str(file), "at": 0, "sizes": [16], "region": [[0, 4]], "width": 1}
        assert "another key" in answer(json.dumps({**asked, "key": "x"}).encode())["error"]
        for path in (tmp_path / "b", f"{file.parent}/../b"):
            of = {**asked, "path": str(path), "key": served.server().key}
            assert "is not given out" in answer(json.dumps(of).encode())["error"]
        assert "JSONDecodeError" in answer(b"x" * 2 * served.LONGEST)["error"]
    finally:
        served._close()
