"""Structures: one table of them, and all who look into structures find the same in them and put the same together."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import sbpflow as flow
from sbpflow.actors.runtime.card import Later
from sbpflow.boxing.exchange.value_message import packed as message
from sbpflow.boxing.exchange.value_message import unpacked as from_message
from sbpflow.nn.data.batches import values_by_path
from sbpflow.nn.eager.dispatch import collected
from sbpflow.nn.eager.recipe import each_rank
from sbpflow.nn.graph.capture.arguments import key_of, tensors_by_path
from sbpflow.nn.graph.capture.packed import padded
from sbpflow.placement.structure import ByIdentity, leaves, mapped, part_at, parts, replaced, walk


class Pair(NamedTuple):
    left: Any
    right: Any


class Row(list[Any]):
    """A list with a class of its own."""


@dataclass
class Open:
    x: Any
    rest: Any = 3


@dataclass(frozen=True)
class Frozen:
    x: Any
    rest: Any = field(default=3, compare=False)


@dataclass(frozen=True, slots=True)
class Slots:
    x: Any
    rest: Any = 3


def output(x: Tensor, y: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x, hidden_states=(y, x))


def encoding(x: Tensor, y: Tensor) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"ids": x, "mask": [y]})


Two = namedtuple("Two", "one other")  # as programs still write it
# Each of two tensors, and the paths of its leaves.
TABLE: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "list": (lambda x, y: [x, [y]], "0 1.0"),
    "a list's subclass": (lambda x, y: Row([x, y]), "0 1"),
    "tuple": (lambda x, y: (x, (y, "a")), "0 1.0"),
    "named tuple": (lambda x, y: Pair(x, {"k": y}), "0 1.k"),
    "namedtuple()": (lambda x, y: Two(x, y), "0 1"),
    "dict": (lambda x, y: {"a": x, 1: [y]}, "a 1.0"),
    "OrderedDict": (lambda x, y: OrderedDict(b=x, a=y), "b a"),
    "defaultdict": (lambda x, y: defaultdict(list, a=[x, y]), "a.0 a.1"),
    "UserDict": (lambda x, y: UserDict(a=x, b=(y,)), "a b.0"),
    "transformers' output": (output, "last_hidden_state hidden_states.0 hidden_states.1"),
    "transformers' encoding": (encoding, "ids mask.0"),
    "dataclass": (lambda x, y: Open(x, [y]), "x rest.0"),
    "frozen dataclass": (lambda x, y: Frozen((x, y)), "x.0 x.1"),
    "frozen dataclass with slots": (lambda x, y: Slots({"a": x}, Open(y)), "x.a rest.x"),
    "nested": (lambda x, y: [Open(OrderedDict(a=Pair(x, UserDict(b=Slots(y)))))], "0.x.a.0 0.x.a.1.b.x"),
    "empty ones": (lambda x, y: [(), {}, OrderedDict(), [[]], Pair((), x), y], "4.1 5"),
    "the same twice": (lambda x, y: {"a": x, "b": [x, y]}, "a b.0 b.1"),
}
READ_ONLY = {"read-only": (lambda x, y: MappingProxyType({"a": x, "b": y}), "a b")}  # which pickle does not take
ALL = [pytest.param(make, paths.split(), id=name) for name, (make, paths) in (TABLE | READ_ONLY).items()]
Make = Callable[[Tensor, Tensor], Any]


def made(make: Make) -> tuple[Any, list[Tensor]]:
    x, y = torch.arange(3.0), torch.ones(2)
    given = make(x, y)
    return given, [found for _, found in walk(given, Tensor)]


def same(one: Any, other: Any, image: Mapping[int, Any]) -> None:
    """The other is of the same classes, with the images of its tensors."""
    if isinstance(one, Tensor):
        assert torch.equal(image[id(one)], other)
        return
    assert type(one) is type(other)
    inside = parts(one)
    if inside is None:
        assert one == other
        return
    assert [key for key, _ in inside] == [key for key, _ in parts(other) or ()]
    for key, part in parts(one) or ():
        same(part, part_at(other, key), image)


def test_the_table_has_what_there_is() -> None:
    x, y = torch.ones(1), torch.ones(2)
    assert all(leaves(make(x, y), Tensor) for make, _ in TABLE.values())


@pytest.mark.parametrize(("make", "paths"), ALL)
def test_all_find_the_same(make: Make, paths: list[str]) -> None:
    given, found = made(make)
    assert [".".join(map(str, keys)) for keys, _ in walk(given, Tensor)] == paths
    assert list(map(id, leaves(given, Tensor))) == list(map(id, found))
    assert [path.removeprefix("0.") for path in tensors_by_path([given], {})] == paths
    assert [path for path, x in values_by_path(given).items() if isinstance(x, Tensor)] == paths
    streamed: list[int] = []
    stream = type("Stream", (), {"wait_event": lambda self, event: streamed.append(event)})()
    assert Later(given, 7).on(stream) is given
    assert streamed == [7]
    for keys, x in walk(given, Tensor):
        value = given
        for key in keys:
            value = part_at(value, key)
        assert value is x


@pytest.mark.parametrize(("make", "paths"), ALL)
def test_all_put_together_the_same(make: Make, paths: list[str]) -> None:
    given, found = made(make)
    image = {id(x): x + 1 for x in found}
    seen: list[str] = []

    def put(path: str, x: Tensor) -> Tensor:
        seen.append(path)
        return image[id(x)]

    same(given, replaced(given, put), image)
    assert seen == paths
    same(given, mapped(given, Tensor, lambda x: image[id(x)]), image)
    same(given, replaced(given, lambda _, x: image[id(x)] if isinstance(x, Tensor) else x, kind=None), image)
    same(given, padded(given), {id(x): x for x in found})


@pytest.mark.parametrize(("make", "paths"), [each for each in ALL if each.id != "read-only"])
def test_it_arrives_at_other_ranks_as_it_was(make: Make, paths: list[str]) -> None:
    given, found = made(make)
    same(given, from_message(*message(given)), {id(x): x for x in found})


@pytest.mark.parametrize(("make", "paths"), ALL)
def test_each_rank_of_an_eager_call_gets_its_shards_in_it(make: Make, paths: list[str]) -> None:
    p = flow.placement("cpu", range(2))
    x, y = (flow.tensor(torch.arange(n), placement=p, sbp=flow.S(0)) for n in (4, 6))
    given = make(x, y)
    tensors = collected((given,), {})
    assert len(tensors) == len(paths)
    for rank, (args, _) in enumerate(each_rank((given,), {}, [t._shards for t in tensors])):
        same(given, args[0], {id(t): t._shards[rank] for t in tensors})


@pytest.mark.parametrize(("make", "paths"), ALL)
def test_a_step_takes_and_returns_it(make: Make, paths: list[str]) -> None:
    model = nn.Linear(1, 1)
    graph = flow.compile(
        model,
        lambda m, given: mapped(given, Tensor, lambda x: x + 1),
        None,
        placement=flow.placement("cpu", range(1)),
    )
    given, found = made(make)
    with torch.no_grad():
        same(given, graph(given), {id(x): x + 1 for x in found})
    assert key_of((given,), {}) == key_of((made(make)[0],), {})


@pytest.mark.parametrize("make", [make for make, _ in TABLE.values()], ids=TABLE)
def test_a_model_may_keep_it(make: Make) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = made(make)[0]

        def forward(self, x: Tensor) -> Tensor:
            return sum((kept.sum() for kept in leaves(self.kept, Tensor)), x)

    model = Keeps()
    graph = flow.compile(model, lambda m, x: m(x), None, placement=flow.placement("cpu", range(1)))
    with torch.no_grad():
        assert torch.equal(graph(torch.zeros(2)).full_tensor(), model(torch.zeros(2)))


def test_what_has_nothing_replaced_in_it_stays_itself() -> None:
    inner = Frozen([torch.ones(1)])
    given = [inner, Open(3, [4])]
    made = replaced(given, lambda _, x: x, objects=True)
    assert made is not given
    assert made[0] is inner
    assert made[1] is given[1]


def test_an_object_is_copied_once_wherever_it_is_and_in_itself() -> None:
    class Node:
        def __init__(self) -> None:
            self.x, self.next = torch.ones(1), self

    node = Node()
    one, other = replaced([node, node], lambda path, x: path, objects=True)
    assert one is other is one.next
    assert (one.x, node.x) == ("0.x", torch.ones(1))
    assert leaves([node], Tensor) == []

    shared = Open([torch.ones(1)])
    first, second = replaced([shared, Open(shared)], lambda path, x: path)
    assert first is second.x
    assert first.x == ["0.x.0"]

    ring = Open(torch.ones(1))
    ring.rest = ring
    assert len(leaves(ring, Tensor)) == 1


def test_a_layout_in_a_call_is_a_value() -> None:
    of = flow.layout(flow.placement("cpu", range(2)), flow.S(0), (4,))
    assert leaves([of], (tuple, int)) == []
    assert mapped([of], int, str)[0] is of


def test_what_is_packed_stays_whole() -> None:
    held = PackedSequence(torch.ones(3), torch.tensor([2, 1]))
    assert leaves(Open(held), PackedSequence) == [held]
    assert type(mapped(held, Tensor, lambda x: x + 1)) is PackedSequence


def test_what_counts_by_identity_is_held_so_that_none_made_later_lies_where_it_was() -> None:
    assert len({id(Open(k)) for k in range(9)}) < len({ByIdentity(Open(k)) for k in range(9)}) == 9
