"""Values on their way to other ranks are told in words, and nothing that came is run as code."""

import json
import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sbpflow.boxing.exchange.value_message import packed, unpacked
from sbpflow.placement.errors import ScheduleError

ROOT = Path(__file__).resolve().parents[3]
PLAIN: list[Any] = [
    b"", b"\0\xff",
    None, True, 0, -7, 2**63 - 1, 2**63, -(2**200), 0.1, -0.0, 1e-320, 5e300, float("inf"), "", "Grüße\0\ud800",
    1 - 2j, range(1, 9, 2), slice(None, 3), torch.bfloat16, torch.device("cuda", 3), torch.channels_last, torch.strided,
    torch.Size((2, 3)), {1, 2}, frozenset("a"), {(1, "a"): [None]}, {None: {True: 1}}, [], (), {}, ["tensor", 0, [2]],
]  # fmt: skip


class Colour(Enum):
    RED = "r"


@dataclass
class Counted:
    """A class that would do something if it were called, set or read back by pickle's ways."""

    x: Any
    made = 0

    def __post_init__(self) -> None:
        type(self).made += 1

    def __setattr__(self, name: str, value: Any) -> None:
        type(self).made += 1
        object.__setattr__(self, name, value)

    def __setstate__(self, state: Any) -> None:
        type(self).made += 1

    def __reduce__(self) -> Any:
        raise AssertionError("nobody asks how it is pickled")


class Closes(list[int]):
    def __del__(self) -> None:
        pass


class Plain:
    x = 1


def arrived(value: Any) -> Any:
    return unpacked(*packed(value))


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_a_plain_value_arrives_as_it_was(value: Any) -> None:
    found = arrived(value)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_a_nan_an_enum_and_a_counter_arrive() -> None:
    nan, colour, counter = arrived((math.nan, Colour.RED, Counter("aab")))
    assert math.isnan(nan)
    assert colour is Colour.RED
    assert (type(counter), counter) == (Counter, Counter("aab"))


def test_a_default_dict_makes_what_it_made() -> None:
    found = arrived(defaultdict(list, a=[1]))
    assert found == {"a": [1]}
    assert found["new"] == []


def test_views_of_a_tensor_arrive_as_what_they_show() -> None:
    x = torch.randn(4, 6, dtype=torch.complex64)
    for view in (x.T, x[1:3, ::2], x.conj(), x.imag, x[0].expand(3, 6), torch.tensor(True)):
        assert torch.equal(arrived(view), view)


def test_no_code_of_a_class_is_run() -> None:
    sent = Counted([torch.ones(2)])
    before = Counted.made
    assert torch.equal(arrived(sent).x[0], torch.ones(2))
    assert Counted.made == before


def a_local_class() -> Any:
    @dataclass
    class Local:
        x: int = 1

    return Local()


def in_itself() -> Any:
    chain: list[Any] = [1]
    chain.append(chain)
    return chain


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a plain object": (Plain, r"a Plain cannot .*(.|\n)*in lists, dicts, named tuples or a dataclass"),
    "a function": (lambda: arrived, "a function cannot"),
    "a class": (lambda: Plain, "a type cannot"),
    "a module": (lambda: nn.Linear(1, 1), "a Linear cannot"),
    "one with a finalizer": (Closes, "a Closes cannot"),
    "a deque": (deque, "a deque cannot"),
    "a local class": (a_local_class, r"define the class at the top of a module"),
    "in itself": (in_itself, "a list that is in itself"),
    "an array": (lambda: np.ones(2), r"give torch.from_numpy\(x\)"),
    "a number of NumPy": (lambda: np.float32(1), r"give x.item\(\)"),
    "a factory": (lambda: defaultdict(lambda: 1), r"give dict\(x\)"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "give plain tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_holds_more_than_values_is_refused(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(ScheduleError, match=said):
        packed({"x": [make()]})


def message(value: Any, *classes: tuple[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
    text = json.dumps({"value": value, "classes": classes}).encode()
    return torch.tensor([len(text), 0]), torch.frombuffer(bytearray(text), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("value", "of", "said"),
    [
        (["object", 0, {}], ("this.was.never", "Imported"), r"import this\.was\.never on every rank"),
        (["object", 0, {"x": 1}], ("os", "system"), "nothing here has imported it"),
        (["object", 0, {}], ("subprocess", "Popen"), "no class that holds values"),
        (["object", 0, {}], (__name__, "Plain"), "no class that holds values"),
        (["_class__"], (__name__, "Counted"), "nothing that is sent"),
    ],
)
def test_a_message_that_nobody_sent_makes_nothing(value: Any, of: tuple[str, str], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        unpacked(*message(value, of))


def test_nothing_else_in_the_package_reads_a_pickle() -> None:
    """Programs of islands are code, which a client sends with the island's key; nothing else may be."""
    rooms = [path for room in ("placement", "sbp", "boxing", "actors", "nn") for path in (ROOT / room).rglob("*.py")]
    reads = re.compile(r"pickle\.loads?\(|Unpickler|torch\.load\(|(gather|broadcast|scatter|recv)_object|marshal\.")
    found = {str(path.relative_to(ROOT)) for path in rooms if reads.search(path.read_text())}
    assert {name for name in found if not name.startswith("nn/islands/")} == set()
