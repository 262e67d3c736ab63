"""Trees of values as JSON beside tensors in files: states of optimizers, schedulers, loaders. No code is saved or run.

{"last_epoch": 3, "betas": (0.9, 0.95), "avg": tensor}
{"last_epoch": 3, "betas": {"$tuple": [0.9, 0.95]}, "avg": {"$tensor": "extra.ema.avg"}}
"""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...placement.errors import DtypeError, SbpError

__all__ = ["Json", "decoded", "encoded"]

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

LISTS: dict[str, tuple[type, Callable[[list[Any]], Any]]] = {
    "$tuple": (tuple, tuple),
    "$set": (set, set),
    "$frozenset": (frozenset, frozenset),
    "$deque": (deque, deque),
}
DICTS: dict[str, tuple[type, Callable[[list[Any]], Any]]] = {
    "$counter": (Counter, lambda pairs: Counter(dict(pairs))),
    "$ordered": (OrderedDict, OrderedDict),
    "$dict": (dict, dict),
}
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def encoded(value: Any, name: str, put: Callable[[str, Tensor], None]) -> Json:
    """A value without its tensors, which are `put` aside under names that begin with this one."""
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, Tensor | np.ndarray | np.generic | bytes | bytearray):
        return _of_numbers(value, name, put)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, complex):
        return {"$complex": [encoded(part, name, put) for part in (value.real, value.imag)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if type(value) is list or isinstance(value, torch.Size):
        return [encoded(part, f"{name}.{at}", put) for at, part in enumerate(value)]
    word = next((word for word, (kind, _) in LISTS.items() if type(value) is kind), None)
    if word is not None:
        return {word: [encoded(part, f"{name}.{at}", put) for at, part in enumerate(value)]}
    if isinstance(value, Mapping):
        return _of_dict(value, name, put)
    raise SbpError(
        f"flow.save: {name} is a {type(value).__name__}, which is neither numbers, text, nor a tree of them\n"
        "  no pickle is written, as reading one runs whatever code is in it\n"
        "  give it state_dict() and load_state_dict(), or leave it out"
    )


def _of_numbers(value: Any, name: str, put: Callable[[str, Tensor], None]) -> Json:
    if isinstance(value, Tensor):
        put(name, value)
        return {"$tensor": name}
    if isinstance(value, np.generic) and value.ndim == 0 and value.dtype.kind in "biuf":
        return {"$numpy": [value.dtype.str, encoded(value.item(), name, put)]}
    if isinstance(value, bytes | bytearray):
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        put(name, torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else empty)
        return {"$bytes": name}
    try:
        whole = np.array(value, order="C", copy=True)
        put(name, torch.from_numpy(whole))
    except TypeError as error:
        raise DtypeError(
            f"flow.save: {name} is a numpy array of {value.dtype}: {error}\n  make it one of numbers"
        ) from None
    return {"$array": name}


def _of_dict(value: Mapping[Any, Any], name: str, put: Callable[[str, Tensor], None]) -> Json:
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if type(value) in (dict, defaultdict) and plain:
        return {key: encoded(part, f"{name}.{key}", put) for key, part in value.items()}
    word = next((word for word, (kind, _) in DICTS.items() if type(value) is kind), "$dict")
    pairs = value.items()
    return {word: [[encoded(key, name, put), encoded(part, f"{name}.{key}", put)] for key, part in pairs]}


def decoded(tree: Json, take: Callable[[str], Tensor]) -> Any:
    """The value again, with tensors as they are taken by their names.

    >>> decoded(encoded({"a": (1, [2.5, None]), 3: float("inf")}, "x", print), print)
    {'a': (1, [2.5, None]), 3: inf}
    """
    if isinstance(tree, list):
        return [decoded(part, take) for part in tree]
    if not isinstance(tree, dict):
        return tree
    word, of = next(iter(tree.items()), ("", None))
    if not word.startswith("$"):
        return {key: decoded(part, take) for key, part in tree.items()}
    if isinstance(of, str):
        return _simple(word, of, take)
    if not isinstance(of, list) or (word not in LISTS and word not in DICTS and word not in ("$complex", "$numpy")):
        raise ValueError(f"{word} is no word of a tree, or not with {str(of)[:40]!r}")
    parts = [decoded(part, take) for part in of]
    if word == "$complex":
        return complex(*parts)
    if word == "$numpy":
        return np.dtype(parts[0]).type(parts[1])
    return (LISTS.get(word) or DICTS[word])[1](parts)


def _simple(word: str, of: str, take: Callable[[str], Tensor]) -> Any:
    if word == "$tensor":
        return take(of)
    if word == "$float":
        return float(of)
    if word == "$dtype":
        return DTYPES[of]
    if word == "$device":
        return torch.device(of)
    if word not in ("$bytes", "$array"):
        raise ValueError(f"{word} is no word of a tree, or not with {of[:40]!r}")
    numbers = take(of).numpy()
    return numbers.tobytes() if word == "$bytes" else numbers
