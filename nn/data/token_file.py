"""A dataset of tokens in a file: stretches of one long text, memory-mapped, so that only what is asked for is read.

corpus.bin     the tokens, each a number of two or four bytes, little-endian
corpus.json    {"dtype": "uint16", "tokens": 123456, ...}, beside it; what else it says is kept in `facts`
"""

import json
import os
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import Dataset

from ...placement.errors import FileError, SbpError

__all__ = ["TokenFile"]

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4"), "int32": np.dtype("<i4")}


class TokenFile(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of `length` tokens and the same ones token on: what is read, and what is to follow.

    `share` keeps a part of the file, such as (0.0, 0.9) to train on and (0.9, 1.0) to evaluate. Of a sample any part
    can be had alone, by `part`, as ranks want it that split sequences.
    """

    def __init__(
        self, path: str | PathLike[str], length: int, *, share: tuple[float, float] = (0.0, 1.0), facts: Any = None
    ) -> None:
        self.path, self.length, self.share = Path(path), length, share
        self.facts: dict[str, Any] = _facts(self.path) if facts is None else facts
        if type(length) is not int or length < 1 or not 0 <= share[0] < share[1] <= 1:
            raise SbpError(
                f"TokenFile(length={length!r}, share={share!r})\n"
                "  give it tokens a sample, from 1, and a share between 0.0 and 1.0, as in (0.0, 0.9)"
            )
        many = int(self.facts["tokens"])
        self.first, self.last = (int(many * end) for end in share)
        if len(self) < 1:
            raise SbpError(
                f"{self.path}: {self.last - self.first} tokens are no sample of {length} and the one that follows\n"
                f"  give it a length below {self.last - self.first}"
            )

    def __len__(self) -> int:
        return max(self.last - self.first - 1, 0) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.part(index, 0, self.length)

    def part(self, index: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Tokens lo to hi of a sample, and those that follow each."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.path}")
        start = self.first + index * self.length
        tokens = torch.from_numpy(self._mapped()[start + lo : start + hi + 1].astype(np.int64))
        return tokens[:-1], tokens[1:]

    def _mapped(self) -> Any:
        """The file in memory; each process opens it by itself."""
        if "_tokens" not in vars(self):
            self._tokens = np.memmap(self.path, DTYPES[self.facts["dtype"]], mode="r")
        return self._tokens

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tokens"}

    @classmethod
    def write(cls, path: str | PathLike[str], tokens: ArrayLike, length: int, **facts: Any) -> Self:
        """Write tokens, and beside them what is known of them; returns the dataset of them."""
        path, held = Path(path), np.asarray(tokens)
        if not (held.ndim == 1 and len(held) and np.issubdtype(held.dtype, np.integer) and held.min() >= 0):
            raise SbpError(f"TokenFile.write({path}): give it whole numbers from 0, in one row")
        dtype = "uint16" if held.max() < 1 << 16 else "uint32"
        path.parent.mkdir(parents=True, exist_ok=True)
        said = json.dumps({"dtype": dtype, "tokens": len(held), **facts}, indent=1)
        # Aside first: who has the old file mapped keeps it, and nobody sees half a new one.
        for name, content in ((path, held.astype(DTYPES[dtype]).tobytes()), (path.with_suffix(".json"), said.encode())):
            aside = name.with_name(f"{name.name}.{os.getpid()}")
            aside.write_bytes(content)
            os.replace(aside, name)
        return cls(path, length)


def _facts(path: Path) -> dict[str, Any]:
    """The facts that lie beside the tokens, if they fit the file."""
    beside = path.with_suffix(".json")
    try:
        facts: dict[str, Any] = json.loads(beside.read_text())
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise FileError(
            f"{path}: {error}\n  tokens lie in a .bin file with a .json beside it, as examples/tokens.py makes them"
        ) from None
    if facts.get("dtype") not in DTYPES or facts.get("tokens", -1) * DTYPES[facts["dtype"]].itemsize != size:
        raise FileError(
            f"{path} has {size} bytes, and {beside.name} says {facts.get('tokens')} tokens of {facts.get('dtype')}\n"
            f"  both come from one run; make them again. Types may be {', '.join(DTYPES)}"
        )
    return facts
