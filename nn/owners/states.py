"""States of owners as all processes know them: which there are, of which shapes and dtypes; and those that are numbers.

Only an owner's step makes them. The others are told behind each step, in one small exchange as long as nothing is new,
so that `state_dict` has the same on every process.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeAlias
from zlib import crc32

import torch
from torch import Tensor

from ...placement import Placement
from ...placement.errors import SbpError
from ..tensors.agreement import told

__all__ = ["Described", "described", "heard"]

Described: TypeAlias = dict[
    int, list[list[Any]]
]  # of tensors by their numbers: name, shape and dtype, or name and value

PLAIN = (int, float, bool, str, type(None))


def described(states: Mapping[int, Mapping[Any, Any]]) -> Described:
    """The states of what this process owns, in words."""
    found: Described = {}
    for number, state in states.items():
        found[number] = []
        for name, part in state.items():
            if isinstance(part, Tensor):
                found[number].append([name, list(part.shape), str(part.dtype).removeprefix("torch.")])
            elif isinstance(part, PLAIN) and isinstance(name, int | str):
                found[number].append([name, part])
            else:
                raise SbpError(
                    f"the optimizer keeps {name!r} of type {type(part).__name__} for a parameter that one rank owns,"
                    " and others could not be told of it\n  keep tensors, numbers and texts in optimizer.state"
                )
    return found


def heard(
    mine: Described, where: Placement, known: dict[Placement, list[list[int]]], *, as_told: bool
) -> Described | None:
    """The words of all ranks of a placement. None if all said the same last and each of them still has that
    (`as_told`), or if there is nobody else."""
    text = json.dumps(sorted(mine.items())).encode()
    heads = told([crc32(text), len(text), as_told], where, "states of optimizers")
    if heads is None or (known.get(where) == heads and all(same for *_, same in heads)):
        return None
    known[where] = heads
    longest = max(length for _, length, _ in heads)
    padded = text.ljust(-(-longest // 8) * 8)
    rows = told(
        [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)],
        where,
        "states of optimizers",
    )
    found: Described = {}
    for row in rows or ():
        found.update(json.loads(b"".join(word.to_bytes(8, "little") for word in row)))
    return found


def dtype_of(name: str) -> torch.dtype:
    made = getattr(torch, name)
    assert isinstance(made, torch.dtype)
    return made
