"""Bytes that are read from safetensors files, counted where they are asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import safetensors
import torch

__all__ = ["Bytes", "bytes_read"]


class Bytes:
    """How many so far, and of how many regions."""

    def __init__(self) -> None:
        self.total = 0
        self.regions: list[tuple[str, int]] = []

    def add(self, name: str, part: torch.Tensor) -> torch.Tensor:
        self.total += part.nbytes
        self.regions.append((name, part.nbytes))
        return part


class Slices:
    def __init__(self, inner: Any, name: str, seen: Bytes) -> None:
        self.inner, self.name, self.seen = inner, name, seen

    def __getitem__(self, region: Any) -> torch.Tensor:
        return self.seen.add(self.name, self.inner[region])

    def __getattr__(self, name: str) -> Any:  # get_shape and get_dtype, which are of the header
        return getattr(self.inner, name)


class Handle:
    def __init__(self, inner: Any, seen: Bytes) -> None:
        self.inner, self.seen = inner, seen

    def __enter__(self) -> "Handle":
        self.inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self.inner.keys())

    def get_slice(self, name: str) -> Slices:
        return Slices(self.inner.get_slice(name), name, self.seen)


@contextmanager
def bytes_read() -> Iterator[Bytes]:
    """Inside, all that is read is counted; files are opened in no other way than this one."""
    seen, real = Bytes(), safetensors.safe_open
    safetensors.safe_open = lambda *args, **kwargs: Handle(real(*args, **kwargs), seen)  # type: ignore[assignment, misc]
    try:
        yield seen
    finally:
        safetensors.safe_open = real  # type: ignore[misc]
