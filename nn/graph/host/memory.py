"""Memory of the host: pinned, where a card copies to it and from it, or files that are mapped.

A tensor in a mapped file is read and written like any other; the system brings its pages in and writes them back. Files
lie in a folder that is removed with what uses it, or at the end of the process: one beneath SBPFLOW_OFFLOAD, if the
environment says so, else beneath that for temporary files.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ....boxing.figures import volume
from ....boxing.graph.physical import Physical
from ....placement.errors import SbpError

__all__ = ["ROOT", "Folder", "empty", "to_disk"]

ROOT = "SBPFLOW_OFFLOAD"  # in the environment


def to_disk(graph: Physical) -> bool:
    """Whether anything of a graph is offloaded to files."""
    saved = (step.origin.offload for step in graph.steps)
    return any(s.offload == "disk" for s in graph.sources) or any(of is not None and of.to == "disk" for of in saved)


def empty(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """A tensor in the host's memory, in the order of its dims."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)


class Folder:
    """A folder of mapped files, removed with this."""

    def __init__(self, name: str) -> None:
        root = os.environ.get(ROOT)
        try:
            if root:
                os.makedirs(root, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f"sbpflow-{_plain(name)}-", dir=root))
        except OSError as error:
            raise _refused(f"no folder can be made in {root or tempfile.gettempdir()}", error) from error
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def check(self, needed: int) -> None:
        """Refuse where so many bytes do not fit."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise SbpError(
                f"offload to disk: {volume(needed)} are needed, and {volume(free)} are free in {self.path.parent}\n"
                f"  name a folder with more room in the environment ({ROOT}=...), or offload less"
            )

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in a file of this name, whose room is taken at once.

        So a full disk is an error here, and does not end the process when a page is written."""
        numel, path = prod(shape), self.path / _plain(name)
        if not numel:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        try:
            path.unlink(missing_ok=True)  # a process that has the old one mapped keeps it
            with path.open("xb") as file:
                size = numel * dtype.itemsize
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise _refused(f"{path} of {volume(numel * dtype.itemsize)} cannot be written", error) from error
        return torch.from_file(str(path), shared=True, size=numel, dtype=dtype).view(tuple(shape))


def _plain(name: str) -> str:
    return name.replace(os.sep, "_")


def _refused(what: str, error: OSError) -> SbpError:
    return SbpError(
        f"offload to disk: {what}\n  found {error.strerror}\n"
        f"  name a folder that can be written, with room, in the environment ({ROOT}=...)"
    )
