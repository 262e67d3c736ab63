"""One safetensors file that several processes write together, so that none of them holds a whole model.

    header    names, types, shapes and where each tensor's bytes are      the first process
    bytes     of every tensor the boxes that a process has                each process, into the file's memory

The file is written aside and takes its name when all bytes are there. `safetensors.torch.save_file` and `save_model`,
and so `save_pretrained` of transformers, write global tensors this way.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ...placement import Placement
from ...placement.errors import FileError, SbpError
from ...placement.world import world
from ..tensors.agreement import told
from ..tensors.tensor import GlobalTensor, wrap
from .headers import NAMES
from .held import added_up, part_of, written_here

__all__ = ["install", "put_off", "ranks_that_write", "save_file", "stand_ins"]


def save_file(
    tensors: Mapping[str, Tensor], file: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write global and plain tensors into one file. Every process that holds a part of one calls it, with one disk;
    one that holds none may, and has nothing to do."""
    path = Path(os.fspath(file)).absolute()
    held = {name: _summed(name, x) for name, x in tensors.items()}
    everybody = ranks_that_write(held.values())
    if everybody is not None and world().rank not in everybody:
        return
    first = everybody is None or world().rank == everybody.flat[0]
    aside = path.with_name(path.name + ".part")
    header, places = _header(held, metadata)
    _together(everybody, path, lambda: _begin(aside, header, places) if first else None, crc32(header))
    _together(everybody, path, lambda: _fill(aside, header, places, held, plain=first))
    _together(everybody, path, lambda: os.replace(aside, path) if first else None)


def _summed(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_meta:
        raise SbpError(f"save_file: {name} is no dense tensor with values, but {type(x).__name__}")
    if x.dtype not in NAMES:
        raise SbpError(f"save_file: {name} is of {x.dtype}, which safetensors does not know")
    if isinstance(x, GlobalTensor) and x._layout.state.partial:
        there, shards = added_up(x, "save_file")
        return wrap(shards, there)
    return x.detach()


def ranks_that_write(held: Iterable[Tensor]) -> Placement | None:
    """All that hold a part of a global tensor, in a line; None where one process does all."""
    ranks = tuple(sorted({rank for x in held if isinstance(x, GlobalTensor) for rank in x.placement.flat}))
    return Placement("cpu", ranks, (len(ranks),), None) if ranks and world().rank is not None else None


def _header(held: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> tuple[bytes, dict[str, int]]:
    """The header, and where the bytes of each tensor begin in the file: wide numbers first, so that all are aligned."""
    said: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at, places = 0, {}
    for name, x in sorted(held.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        size = x.numel() * x.dtype.itemsize
        said[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + size]}
        places[name] = at
        at += size
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {**{name: at + 8 + len(text) for name, at in places.items()}, "": at}


def _begin(aside: Path, header: bytes, places: Mapping[str, int]) -> None:
    with open(aside, "wb") as file:
        file.write(header)
        file.truncate(len(header) + places[""])


def _fill(aside: Path, header: bytes, places: Mapping[str, int], held: Mapping[str, Tensor], *, plain: bool) -> None:
    if not aside.exists():
        raise FileError(
            f"save_file: {aside} is not there, though the first process made it\n"
            "  all processes write one file: give a folder that all hosts share"
        )
    memory: Any = torch.UntypedStorage.from_file(str(aside), True, len(header) + places[""])
    for name, x in held.items():
        there = torch.empty(0, dtype=x.dtype, device="cpu")
        there.set_(
            memory, places[name] // x.dtype.itemsize, tuple(x.shape), torch.empty(x.shape, device="meta").stride()
        )
        if not isinstance(x, GlobalTensor):
            if plain:
                there.copy_(x)
            continue
        for region in written_here(x._layout):
            there[tuple(slice(lo, hi) for lo, hi in region)].copy_(part_of(x._layout, x._shards, region))
    with open(aside, "rb+") as file:
        os.fsync(file.fileno())


def _together(everybody: Placement | None, path: Path, act: Callable[[], Any], alike: int = 0) -> None:
    """A step of all processes, to which all come with the same number; an error of one is an error of all."""
    error: Exception | None = None
    try:
        act()
    except Exception as caught:
        error = caught
    rows = told([int(error is not None), alike], everybody, "save_file") if everybody is not None else None
    if error is not None:
        raise error
    for rank, (failed, number) in zip(everybody.flat if everybody else (), rows or (), strict=False):
        if number != rows[0][1]:  # type: ignore[index]
            raise FileError(
                f"save_file: ranks {everybody.flat[0]} and {rank} are to write other tensors into {path}\n"  # type: ignore[union-attr]
                "  their names, shapes, dtypes or metadata differ\n  call it with the same on every rank"
            )
        if failed:
            raise FileError(
                f"save_file: rank {rank} could not write its part of {path}\n  its own error tells why\n"
                "  the file that was there before, if one was, is as it was"
            )


Asked = dict[str, tuple[dict[str, Tensor], Any]]  # what a file is to hold, and its metadata, by its path
_put_off: list[Asked] = []


@contextmanager
def put_off() -> Iterator[Asked]:
    """Have safetensors write no global tensors for now: what it was asked to, by file, for `save_file` later."""
    asked: Asked = {}
    _put_off.append(asked)
    try:
        yield asked
    finally:
        _put_off.remove(asked)


def stand_ins(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with small plain tensors in place of global ones, one for those that are tied. Whoever looks at
    addresses of elements would find others on every rank."""
    made: dict[int, Tensor] = {}
    return {
        name: made.setdefault(x.data_ptr(), torch.zeros(1, device="cpu")) if isinstance(x, GlobalTensor) else x
        for name, x in state.items()
    }


def install() -> None:
    """Have safetensors write global tensors, also where transformers was imported before."""
    if find_spec("safetensors") is None:
        return
    import safetensors.torch as theirs

    plain = theirs.save_file
    if getattr(plain, "_sbpflow", False):
        return

    @wraps(plain)
    def save(tensors: Any, filename: Any, metadata: Any = None) -> None:
        if not any(isinstance(x, GlobalTensor) for x in tensors.values()):
            plain(tensors, filename, metadata)
        elif _put_off:
            _put_off[-1][os.fspath(filename)] = dict(tensors), metadata
        else:
            save_file(tensors, filename, metadata)

    save._sbpflow = True  # type: ignore[attr-defined]
    theirs.save_file = save
    same_memory = theirs._remove_duplicate_names

    @wraps(same_memory)
    def duplicates(state: dict[str, Any], **kwargs: Any) -> Any:
        return same_memory(stand_ins(state), **kwargs)

    theirs._remove_duplicate_names = duplicates  # type: ignore[assignment]
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers."):
            for key, value in list(vars(module).items()):
                if value is plain:
                    setattr(module, key, save)
