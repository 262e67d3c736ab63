"""Manifests that are odd in one place: whatever it is, the good one beside it is found, and loading names the field."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow.nn.checkpoint.folders.manifest_fields import _is_whole, checked_fields
from sbpflow.nn.checkpoint.manifest import _sum
from sbpflow.placement.errors import FileError
from tests.nn.checkpoint.small import made, same, saved, snapshot

ODD: list[Any] = [
    None, True, -1, 0, 7, 2.5, 10**400, "", "x", "../x", [], [[]], [1, [2]], {}, {"$tensor": "nowhere"}, {"$x": [1]},
    {"$complex": ["a", 1]}, {"$numpy": ["q", "z"]}, {"$set": [[]]}, {"$dict": [1]}, {"a": {"$float": "x"}},
    float("nan"),
]  # fmt: skip
LOST = object()  # in the place of a key that is taken away


def paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of a tree."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, part in pairs:
        yield (*path, key)
        yield from paths(part, (*path, key))


def put(tree: Any, path: tuple[Any, ...], odd: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    if odd is LOST:
        del tree[path[-1]]
    else:
        tree[path[-1]] = odd


def written(path: Path, said: Any) -> None:
    """As somebody would write it who knows how checksums are made."""
    said = {**said, "sum": _sum(said)} if isinstance(said, dict) else said
    (path / "manifest.json").write_text(json.dumps(said))


def tried(folder: Path, path: Path) -> str:
    """The error of loading it, empty where it is loaded. Whichever comes, the newest of the folder is a good one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = flow.newest(folder)
    assert found is not None
    model, optimizer = made()
    before = snapshot(model, optimizer)
    try:
        flow.load(path, model, optimizer=optimizer, extra={"rate": 0.0, "mean": torch.zeros(3)})
    except flow.FileError as error:
        same(snapshot(model, optimizer), before)
        return str(error)
    return ""


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path, str]:
    """A good checkpoint, and a later one, whose manifest this is."""
    saved(tmp_path, 1)
    path = saved(tmp_path, 2, extra={"rate": 0.5, "mean": torch.ones(3)})
    return tmp_path, path, (path / "manifest.json").read_text()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 20))])
def test_an_odd_part_anywhere_is_an_error_with_its_name(two: tuple[Path, Path, str], seed: int) -> None:
    folder, path, text = two
    dice = Random(seed)
    ways = list(paths(json.loads(text)))
    top = [way for way in ways if len(way) == 1]
    for way in top + dice.sample([way for way in ways if way[0] not in ("sum",)], 40):
        said = json.loads(text)
        odd = dice.choice([LOST, *ODD])
        put(said, way, odd)
        written(path, said)
        told = tried(folder, path)
        assert not told or "manifest.json" in told or "is no whole checkpoint" in told or _names(told), (way, odd, told)


def _names(told: str) -> bool:
    """Of another model or optimizer, as far as loading can tell."""
    return any(word in told for word in ("flow.load: ", "has no ", "missing in the files"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000 + "]" * 100_000, "RecursionError"), ('{"a":' * 90_000 + "1" + "}" * 90_000, "RecursionError"),
        ("", "JSONDecodeError"), ("\0" * 9, "JSONDecodeError"), ("[]", "no sbpflow checkpoint"), ("7", "no sbpflow"),
        ('{"kind": "sbpflow checkpoint"}', "its version is None"), ("9" * 5000, "ValueError"),
        ('"\udcff"', "UnicodeDecode"),
    ],
    ids=["nested lists", "nested objects", "empty", "zeros", "a list", "a number", "no fields", "long", "no text"],
)  # fmt: skip
def test_a_text_that_is_no_manifest_is_passed_over(two: tuple[Path, Path, str], text: str, says: str) -> None:
    folder, path, _ = two
    (path / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.warns(RuntimeWarning, match=f"step-1 of step 1 is the newest that is(.|\n)*step-2: .*{says}"):
        found = flow.newest(folder)
    assert found is not None
    assert found.step == 1
    assert says in tried(folder, path)
    assert "load the one before" in tried(folder, path)


@pytest.mark.parametrize(
    ("way", "odd", "says"),
    [
        (("step",), "two", "its step is 'two', and is to be a whole number"),
        (("random",), [], "its random is a list of 0, and is to be a list of 1 or more"),
        (("saved_at",), 1e300, "its saved_at is 1e[+]300"),
        (("tensors", "model.scale", "dtype"), "F7", "its tensors.model.scale.dtype is 'F7', and is to be one of"),
        (("tied", "head.weight"), "nowhere", "its tied.head.weight is 'nowhere'"),
        (("optimizers", 0, "groups", 1, "options"), {"lr": {"$float": "x"}}, "its optimizers.0.groups.1.options"),
        (
            ("optimizers", 0, "groups", 1, "options", "lr"),
            "fast",
            "lr of the group of inner.bias is 'fast'|lr of the group of",
        ),
        (("files",), LOST, "it has no files"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_the_field_is_named(two: tuple[Path, Path, str], way: tuple[Any, ...], odd: Any, says: str) -> None:
    folder, path, text = two
    said = json.loads(text)
    put(said, way, odd)
    written(path, said)
    model, optimizer = made()
    with pytest.raises(FileError, match=says):
        flow.load(path, model, optimizer=optimizer)
    assert tried(folder, path)


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        ([((0, 2), (0, 3)), ((2, 4), (0, 3))], True),
        ([((0, 2), (0, 3)), ((2, 4), (0, 1)), ((2, 4), (1, 3))], True),
        ([((0, 2), (0, 3)), ((0, 2), (0, 3))], False),  # as many numbers as there are, and half of them twice
        ([((0, 3), (0, 3)), ((3, 4), (0, 2)), ((0, 1), (0, 1))], False),
        ([((0, 4), (0, 3)), ((1, 1), (0, 3))], True),
        ([((0, 4), (0, 4))], False),
        ([], False),
    ],
)
def test_pieces_lie_side_by_side_and_are_all_of_it(pieces: Any, whole: bool) -> None:
    assert _is_whole((4, 3), pieces) is whole


def test_fields_are_those_that_are_written(two: tuple[Path, Path, str]) -> None:
    checked_fields(json.loads(two[2]))
