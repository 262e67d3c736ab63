"""A capture leaves the model, what lies beside it and the modes of the process as they were, whatever ends it."""

import copy
import random
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import sbpflow as flow

HERE = flow.placement("cpu", range(2))
X = torch.linspace(-1, 1, 12).reshape(3, 4)
TOP: dict[str, Any] = {}


class Frozen(OrderedDict[str, Any]):
    """A config that refuses to be changed, as those of diffusers are."""

    def refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("frozen")

    update = pop = setdefault = clear = refuse

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self:
            self.refuse()
        super().__setitem__(name, value)


@dataclass(frozen=True)
class Settings:
    tables: dict[int, Any]


class Helper:
    def __init__(self) -> None:
        self.table = torch.ones(4)

    @lru_cache(maxsize=8)  # noqa: B019
    def ramp(self, size: int) -> Tensor:
        return torch.arange(1.0, size + 1)


class Model(nn.Module):
    seen: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor
        self.config, self.settings, self.helper = Frozen(width=4), Settings({}), Helper()
        self.calls: list[Any] = []
        self.names, self.fail = {"a"}, -1

    def at(self, place: int) -> None:
        if place == self.fail:
            raise (KeyboardInterrupt() if place % 2 else RuntimeError("of the user"))

    def forward(self, x: Tensor) -> Tensor:
        self.at(0)
        random.random()
        self.calls.append(x)
        self.settings.tables[len(x)] = x + 1
        self.at(1)
        self.names.add("b")
        self.helper.table = x.sum(0)
        TOP["kept"] = {"x": [x * 2]}
        Model.seen = [x]
        self.at(2)
        with torch.autocast("cpu", torch.bfloat16):
            self.at(3)
        with torch.no_grad():
            self.count += 1
            self.at(4)
        self.first.weight = self.first._parameters.pop("weight")  # type: ignore[assignment]
        y = self.first(x) * self.helper.ramp(4)
        self.at(5)
        out: Tensor = self.last(y)
        return out


def fakes_in(model: Model) -> list[Any]:
    held = [*model.parameters(), *model.buffers(), model.helper.table, model.helper.ramp(4), *Model.seen, *model.calls]
    return [x for x in [*held, *model.settings.tables.values()] if isinstance(x, FakeTensor)]


def state(model: Model) -> tuple[Any, ...]:
    modes = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), random.getstate()
    own = [list(map(id, module.__dict__.values())) for module in model.modules()]
    held = dict(model.config), list(model.calls), set(model.names), dict(model.settings.tables), id(model.helper.table)
    tensors = [id(x) for x in (*model.parameters(), *model.buffers())]
    return modes, own, held, tensors, dict(TOP), list(Model.seen), list(model.first._parameters)


@pytest.mark.filterwarnings("ignore:capture. random numbers")
@pytest.mark.parametrize("place", range(-1, 6))
def test_a_capture_changes_nothing_wherever_it_ends(place: int) -> None:
    model = Model()
    step = flow.compile(model, placement=HERE)
    model.fail = place
    before = state(model)
    if place < 0:
        torch.testing.assert_close(step(X).full_tensor(), copy.deepcopy(model)(X))
        TOP.clear()
        Model.seen = []
        random.setstate(before[0][3])
    else:
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            step(X)
        assert state(model) == before
    assert not fakes_in(model)


class Counting(torch.overrides.TorchFunctionMode):
    """Ends a program at its nth call of torch."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 5, 8])
def test_a_capture_changes_nothing_at_whichever_call_it_ends(calls: int) -> None:
    model = Model()

    def program(model: Model, x: Tensor) -> Tensor:
        with Counting(calls):
            out: Tensor = model(x)
            return out

    before = state(model)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        flow.compile(model, program, placement=HERE)(X)
    assert state(model) == before
    assert not fakes_in(model)


@pytest.mark.filterwarnings("ignore:capture. random numbers")
def test_what_a_function_kept_before_is_a_constant() -> None:
    model = Model()
    kept = model.helper.ramp(4)
    one = copy.deepcopy(model)
    torch.testing.assert_close(flow.compile(model, placement=HERE)(X).full_tensor(), one(X))
    assert model.helper.ramp(4) is kept


class Slotted:
    __slots__ = ("seen",)
    seen: Tensor


def empty_cell() -> tuple[Any, Any]:
    """Functions that put a value in a cell that is empty, and look whether there is one."""
    seen: Tensor

    def put(value: Tensor) -> None:
        nonlocal seen
        seen = value

    def look() -> Any:
        return put.__closure__[0].cell_contents  # type: ignore[index]

    return put, look


def slots() -> tuple[Any, Any]:
    held = Slotted()
    return (lambda value: setattr(held, "seen", value)), lambda: held.seen


@pytest.mark.parametrize("made", [empty_cell, slots], ids=lambda made: made.__name__)
def test_where_nothing_was_kept_nothing_is_kept_of_a_capture(made: Any) -> None:
    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.put, self.look = made()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            self.put(x)
            return (x * self.weight).sum()

    model = Keeper()
    flow.compile(model, lambda model, x: model(x), None, placement=HERE).plan_for(X)
    with pytest.raises((ValueError, AttributeError)):
        model.look()
