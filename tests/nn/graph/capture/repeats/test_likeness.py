"""Numbers that are changed between the calls of repeated layers keep them apart, wherever the layers read them."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow

KNOWN = {"by": 1.0}
BY = 1.0
DEFAULT = [1.0]


class Held:
    """An object of which a layer reads a number: an attribute, in a dict, or in a list."""

    def __init__(self) -> None:
        self.by, self.table, self.listed = 1.0, {"by": 1.0}, [1.0]

    def ask(self) -> float:
        return self.by


class Rope(Held, nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        Held.__init__(self)


class Slotted:
    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by = 1.0


class Layer(nn.Module):
    shared = 1.0

    def __init__(self, kept: list[Held]) -> None:
        super().__init__()
        self.linear, self.kept, self.config = nn.Linear(4, 4), kept, kept[0]

    def forward(self, x: Tensor, by: Callable[..., float], given: Any) -> Tensor:
        out: Tensor = self.linear(x) * by(self, given) + x
        return out


def sets_global(net: "Net", value: float) -> None:
    global BY
    BY = value
    KNOWN["by"] = value


def defaults(by: list[float] = DEFAULT) -> float:
    return by[0]


def on(held: Any, value: float) -> None:
    held.by = value
    if isinstance(held, Held):
        held.table["by"] = held.listed[0] = value


class Way(NamedTuple):
    """How a number is changed before a layer, how layers read it, and what they are handed for that."""

    put: Callable[["Net", float], object]
    read: Callable[[Layer, Any], float]
    gives: Callable[["Net"], Any] = lambda net: None


def holder(name: str, read: Callable[[Any], float]) -> Way:
    """Layers are handed what a model holds under this name."""
    return Way(
        lambda net, value: on(getattr(net, name), value), lambda s, held: read(held), lambda net: getattr(net, name)
    )


WAYS = {
    "module, attribute": holder("rope", lambda held: held.by),
    "module, dict": holder("rope", lambda held: held.table["by"]),
    "module, list": holder("rope", lambda held: held.listed[0]),
    "object, attribute": holder("held", lambda held: held.by),
    "object, dict": holder("held", lambda held: held.table["by"]),
    "slots": holder("slotted", lambda held: held.by),
    "method": Way(lambda net, value: on(net.rope, value), lambda s, ask: ask(), lambda net: net.rope_asks),
    "defaults": Way(lambda net, value: DEFAULT.__setitem__(0, value), lambda s, f: f(), lambda net: defaults),
    "config": Way(lambda net, value: on(net.kept[0], value), lambda s, _: s.config.by),
    "a list": Way(lambda net, value: on(net.kept[0], value), lambda s, _: s.kept[0].by),
    "class": Way(lambda net, value: setattr(Layer, "shared", value), lambda s, _: type(s).shared),
    "global": Way(sets_global, lambda s, _: BY),
    "global dict": Way(sets_global, lambda s, _: KNOWN["by"]),
    "iterator": Way(lambda net, value: None, lambda s, numbers: next(numbers), lambda net: net.numbers),
}


class Net(nn.Module):
    numbers: Iterator[float]
    kept: list[Held]
    rope: Rope
    rope_asks: Callable[[], float]

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.kept = WAYS[way], [Held()]
        self.layers = nn.ModuleList(Layer(self.kept) for _ in range(4))
        self.rope, self.held, self.slotted = Rope(), Held(), Slotted()
        self.rope_asks = self.rope.ask

    def forward(self, x: Tensor) -> Tensor:
        put, read, gives = self.way
        self.numbers = iter([0.0, 1.0, 2.0, 3.0])
        for number, layer in enumerate(self.layers):
            put(self, float(number))
            x = layer(x, read, gives(self))
        return x


@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_changes_between_layers_is_each_layers_own(way: str) -> None:
    one, many, x = Net(way), Net(way), torch.randn(8, 4)
    step = flow.compile(many, lambda net, x: net(x).sum(), placement=flow.placement("cpu", [0, 1]))
    wanted = one(x).sum().item()
    for _ in range(2):
        assert math.isclose(step(x).item(), wanted, rel_tol=1e-5)
