"""Fields of a manifest: what each has to be. Whatever is odd in one is an error that names it, before anybody reads it.

step                      a whole number
tensors.model.0.weight    shape, dtype, and pieces that are, side by side, all of it
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...files.headers import DTYPES
from ...files.values import Region
from ..trees import decoded

__all__ = ["checked_fields"]

Check = Callable[[str, Any], None]
AXES = 12  # along which pieces of one tensor are cut at most: a save cuts along as many as its layout has
ODD = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, RecursionError)


def checked_fields(said: Any) -> None:
    """Raise a ValueError that names a field, unless all are as `flow.save` writes them."""
    if not isinstance(said, dict):
        raise ValueError(f"it is a {type(said).__name__}, and no object of fields")
    for name, check in FIELDS.items():
        if name in said:
            check(name, said[name])
        elif name not in MAY_LACK:
            raise ValueError(f"it has no {name}")
    _files(said["files"], said["tensors"])
    for name, first in said["tied"].items():
        if f"model.{first}" not in said["tensors"]:
            raise _wanted(f"tied.{name}", first, "the name of a parameter that it has")
    _trees(said)


def _wanted(name: str, value: Any, what: str) -> ValueError:
    return ValueError(f"its {name} is {_short(value)}, and is to be {what}")


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:60]


def _whole(least: int | None = None) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not int or (least is not None and value < least):
            raise _wanted(name, value, "a whole number" + ("" if least is None else f" from {least}"))

    return check


def _number(name: str, value: Any) -> None:
    if type(value) not in (int, float):
        raise _wanted(name, value, "a number")


def _text(name: str, value: Any) -> None:
    if type(value) is not str:
        raise _wanted(name, value, "a text")


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _any(name: str, value: Any) -> None:
    """A tree, which is looked at when all tensors are known."""


def _list(check: Check, least: int = 0) -> Check:
    def all_of(name: str, value: Any) -> None:
        if type(value) is not list or len(value) < least:
            raise _wanted(name, value, "a list" + (f" of {least} or more" if least else ""))
        for at, one in enumerate(value):
            check(f"{name}.{at}", one)

    return all_of


def _row(*checks: Check) -> Check:
    def all_of(name: str, value: Any) -> None:
        if type(value) is not list or len(value) != len(checks):
            raise _wanted(name, value, f"a list of {len(checks)}")
        for at, (check, one) in enumerate(zip(checks, value, strict=True)):
            check(f"{name}.{at}", one)

    return all_of


def _names(check: Check) -> Check:
    def all_of(name: str, value: Any) -> None:
        if type(value) is not dict:
            raise _wanted(name, value, "an object")
        for key, one in value.items():
            check(f"{name}.{key}", one)

    return all_of


def _object(**checks: Check) -> Check:
    def all_of(name: str, value: Any) -> None:
        if type(value) is not dict:
            raise _wanted(name, value, "an object")
        for key, check in checks.items():
            if key not in value and key != "copies":
                raise ValueError(f"its {name} has no {key}")
            if key in value:
                check(f"{name}.{key}", value[key])

    return all_of


def _dtype(name: str, value: Any) -> None:
    if type(value) is not str or value not in DTYPES:
        raise _wanted(name, value, f"one of {', '.join(DTYPES)}")


def _sum(name: str, value: Any) -> None:
    if type(value) is not str or len(value) != 16 or set(value) - set("0123456789abcdef"):
        raise _wanted(name, value, "16 digits")


def _tensor(name: str, value: Any) -> None:
    _object(
        shape=_list(_whole(0)),
        dtype=_dtype,
        pieces=_list(_row(_text, _whole(0), _list(_row(_whole(0), _whole(0))), _sum)),
        copies=_list(_row(_whole(0), _text, _whole(0))),
    )(name, value)
    shape = tuple(value["shape"])
    if not _is_whole(shape, [tuple((lo, hi) for lo, hi in region) for _, _, region, _ in value["pieces"]]):
        called = name.removeprefix("tensors.")
        raise ValueError(f"the pieces of {called} {shape} are not all of it, each element once")
    for at, (number, *_) in enumerate(value.get("copies", ())):
        if number >= len(value["pieces"]):
            raise _wanted(f"{name}.copies.{at}.0", number, f"one of {len(value['pieces'])} pieces")


def _is_whole(shape: tuple[int, ...], pieces: list[Region]) -> bool:
    """Whether boxes lie side by side, and together are all of a shape.

    A box is the sum of its corners, each with a sign, and so are all together that of the whole: what two corners
    share is cancelled, and nothing else.
    """
    if not pieces or any(len(piece) != len(shape) for piece in pieces):
        return False
    if any(not lo <= hi <= size for piece in pieces for (lo, hi), size in zip(piece, shape, strict=True)):
        return False
    if not prod(shape):
        return True
    cut = [d for d, size in enumerate(shape) if any(piece[d] != (0, size) for piece in pieces)]
    if len(cut) > AXES:
        return False
    left: Counter[tuple[int, ...]] = Counter()
    for sign, boxes in ((1, pieces), (-1, [tuple((0, size) for size in shape)])):
        for box in boxes:
            for corner in product(*(((lo, 1), (hi, -1)) for lo, hi in (box[d] for d in cut))):
                left[tuple(at for at, _ in corner)] += sign * prod(way for _, way in corner)
    return not any(left.values())


def _files(files: Mapping[str, int], tensors: Mapping[str, Any]) -> None:
    """Files lie in the folder itself, and all that tensors are in are told of."""
    held = [(of[0], name) for name, said in tensors.items() for of in said["pieces"]]
    held += [(of[1], name) for name, said in tensors.items() for of in said.get("copies", ())]
    outside = next((file for file in (*files, *(file for file, _ in held)) if not _is_inside(file)), None)
    if outside is None:
        outside = next((file for file, _ in held if file not in files), None)
    if outside is not None:
        raise ValueError(f"it names {outside[:100]}, which is no file of its own")


def _is_inside(file: str) -> bool:
    return Path(file).name == file and file not in ("", "..") and "\0" not in file


def _trees(said: Mapping[str, Any]) -> None:
    """Trees are such as are decoded, of tensors that there are."""
    dtypes = {name: DTYPES[of["dtype"]] for name, of in said["tensors"].items()}

    def take(name: str) -> torch.Tensor:
        return torch.empty(0, dtype=dtypes[name], device="cpu")

    for field, tree, kind in _all_trees(said):
        try:
            found = decoded(tree, take)
        except ODD as error:
            raise ValueError(f"its {field} cannot be read: {type(error).__name__}: {error}") from None
        if not isinstance(found, kind):
            raise _wanted(field, tree, f"a {kind.__name__}")


def _all_trees(said: Mapping[str, Any]) -> Iterable[tuple[str, Any, type]]:
    for field in ("modules", "extra"):
        yield from ((f"{field}.{name}", tree, object) for name, tree in said[field].items())
    yield from ((f"states.{name}", tree, dict) for name, tree in said["states"].items())
    yield from ((f"random.{at}", tree, dict) for at, tree in enumerate(said["random"]))
    for at, each in enumerate(said["optimizers"]):
        yield f"optimizers.{at}.others", each["others"], dict
        yield from ((f"optimizers.{at}.groups.{n}.options", g["options"], dict) for n, g in enumerate(each["groups"]))


GROUP = _object(names=_list(_text), options=_names(_any))
OPTIMIZER = {"class": _text, "groups": _list(GROUP), "others": _any}
OPTIMIZER["scale"] = _or_none(_object(value=_number, good=_whole(0)))
MAY_LACK = {"sbpflow", "hosts"}
FIELDS: Mapping[str, Check] = {
    "sbpflow": _text,
    "step": _whole(),
    "plan": _or_none(_text),
    "tied": _names(_text),
    "modules": _names(_any),
    "optimizers": _list(_object(**OPTIMIZER)),
    "extra": _names(_any),
    "processes": _whole(1),
    "states": _names(_any),
    "random": _list(_any, least=1),
    "hosts": _list(_whole(0)),
    "saved_at": _whole(),
    "files": _names(_whole(0)),
    "tensors": _names(_tensor),
}
