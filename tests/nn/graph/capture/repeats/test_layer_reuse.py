"""Layers traced once and used again give the very graph that tracing each gives; what differs is traced by itself."""

import copy
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sbpflow as flow
from sbpflow.nn.graph.capture.repeats.layer_reuse import Repeats
from sbpflow.sbp.logical import Logical
from tests.nn.graph.same import same, traced

X = torch.randn(4, 4)


def text(logical: Logical) -> list[str]:
    return [f"{op.op} {op.args} {op.kwargs} {op.numbers} {op.grad} {op.origin}" for op in logical.ops] + [
        f"{logical.result} {logical.losses} {logical.writes}",
        *(f"{n} {tuple(x.shape)} {x.dtype}" for n, x in sorted(logical.fakes.items())),
    ]


class Block(nn.Module):
    """A layer; `more` are settings that its function looks at."""

    def __init__(self, function: Callable[..., Any], **more: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.function = function
        self.__dict__.update(more)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module], run: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self.blocks, x)


def in_turn(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = block(x)
    return x.pow(2).sum()


def plain(s: Any, x: Tensor) -> Any:
    return x + F.dropout(F.gelu(s.inner(x)), 0.5)


def normed(s: Any, x: Tensor) -> Any:
    h = s.norm(s.inner(x))
    h[0] += 1
    return h.relu_() * torch.tensor([1.0, 2.0, 3.0, 4.0]) + s.shift


def paired(blocks: Any, x: Tensor) -> Any:
    seen = x
    for block in blocks:
        x, extra = block(x, mask=seen, pair=(x, 2))
        x = x.add_(extra["same"].sum())
    return x.sum()


def pairs(s: Any, x: Tensor, mask: Tensor, pair: Any) -> Any:
    y = s.inner(x * mask) + pair[0] * pair[1]
    return y.transpose(0, 1), {"same": mask, "kept": None}


@pytest.mark.parametrize(
    ("function", "run", "reused"),
    [(plain, in_turn, 2), (normed, in_turn, 2), (pairs, paired, 2)],
    ids=["plain", "writing", "structures"],
)
def test_a_layer_traced_once_stands_for_all(
    taken: list[Repeats], function: Callable[..., Any], run: Callable[..., Any], reused: int
) -> None:
    model = Stack([Block(function, shift=torch.randn(4)) for _ in range(4)], run)
    quick = same(model, X)
    assert taken[-1].taken == reused
    assert text(quick) == text(traced(model, X, reuse=False)[0])
    assert taken[-1].taken == 0


def test_one_more_layer_asks_the_fakes_for_what_it_returns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    plainly = FakeTensorMode.dispatch

    def dispatch(mode: FakeTensorMode, op: Any, *args: Any) -> Any:
        asked.append(op)
        return plainly(mode, op, *args)

    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatch)
    counts = []
    for layers in (4, 5, 9):
        asked.clear()
        traced(Stack([Block(plain) for _ in range(layers)], in_turn), X)
        counts.append(len(asked))
    assert counts[1] - counts[0] <= 4
    assert counts[2] - counts[0] == 5 * (counts[1] - counts[0])


def test_a_layer_that_is_called_twice_may_share_too(taken: list[Repeats]) -> None:
    model = Stack([Block(normed, shift=torch.ones(4)) for _ in range(2)], lambda blocks, x: in_turn([*blocks] * 2, x))
    logical = same(model, X)
    assert taken[-1].taken == 2
    assert text(logical) == text(traced(model, X, reuse=False)[0])


def test_layers_of_other_numbers_are_alike_where_none_is_read(taken: list[Repeats]) -> None:
    model = Stack([Block(plain, place=k) for k in range(4)], in_turn)
    quick = same(model, X)
    assert taken[-1].taken == 2
    assert text(quick) == text(traced(model, X, reuse=False)[0])


def test_layers_of_other_stages_are_alike(taken: list[Repeats]) -> None:
    """Where a module is changes no call in it: layers of a pipeline are captured once, as those of one place."""
    model = Stack([Block(plain) for _ in range(4)], in_turn)
    whole = flow.placement("cpu", [[0, 1], [2, 3]], ("pipe", "data"))
    flow.nn.pipeline(model.blocks, [whole.at(pipe=0), whole.at(pipe=1)], "1f1b")
    same(model, X)
    assert taken[-1].taken == 2


def by_place(s: Any, x: Tensor) -> Any:
    return s.inner(x) * s.place


def by_vars(s: Any, x: Tensor) -> Any:
    return s.inner(x) * vars(s)["place"]


def by_copy(s: Any, x: Tensor) -> Any:
    return s.inner(x) * copy.copy(s).place


def by_name(s: Any, x: Tensor) -> Any:
    return s.inner(x) * operator.attrgetter("place")(s)


def sets(s: Any, x: Tensor) -> Any:
    s.place = 7
    return s.inner(x)


class Doubled(Block):
    """Its `scale` is twice its place, which nobody is seen to read."""

    def __getattribute__(self, name: str) -> Any:
        if name == "scale":
            return 2 * object.__getattribute__(self, "place")
        return object.__getattribute__(self, name)


def test_a_layer_that_reads_in_its_own_way_is_traced_by_itself(taken: list[Repeats]) -> None:
    model = Stack([Doubled(lambda s, x: s.inner(x) * s.scale, place=k) for k in range(3)], in_turn)
    quick, _ = traced(model, X)
    assert taken[-1].taken == 0
    assert text(quick) == text(traced(model, X, reuse=False)[0])


class Pair(nn.Module):
    """Two blocks of which one reads its number; the pair itself has none."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Block(by_place, place=place), Block(by_place, place=place)])

    def forward(self, x: Tensor) -> Any:
        return self.parts[1](self.parts[0](x))


def test_a_number_that_a_part_taken_over_would_read_counts_for_what_is_around(taken: list[Repeats]) -> None:
    model = Stack([Pair(k) for k in (2, 2, 3, 3)], in_turn)
    quick = same(model, X)
    assert taken[-1].taken > 0
    assert text(quick) == text(traced(model, X, reuse=False)[0])
    assert [op.args[1] for op in quick.ops if op.op is torch.ops.aten.mul.Tensor] == [2, 2, 2, 2, 3, 3, 3, 3]


OUTSIDE: list[Any] = []


def with_list(blocks: Any, x: Tensor) -> Any:
    kept: list[Tensor] = []
    for block in blocks:
        x = block(x, kept)
    return x.sum() + torch.stack(kept).sum()


def keeps(s: Any, x: Tensor, kept: list[Tensor]) -> Any:
    kept.append(s.inner(x))
    return kept[-1] * 2


def writes(s: Any, x: Tensor) -> Any:
    x[0] = 0.0
    return s.inner(x.clone())


def over(blocks: Any, x: Tensor) -> Any:
    """Each layer writes to its input, which is read again."""
    total = x
    for block in blocks:
        h = x.clone()
        total = total + block(h) + h
    return total.sum()


def counts(s: Any, x: Tensor) -> Any:
    s.count = s.count + 1
    return s.inner(x) * s.count


def by_chance(s: Any, x: Tensor) -> Any:
    return s.inner(x) if random.random() < 2 else x


def closes(blocks: Any, x: Tensor) -> Any:
    y = x * 2
    for k, block in enumerate(blocks):
        block.__dict__["function"] = _adding
        OUTSIDE[:] = [y * k]
        x = block(x)
    return x.sum()


def _adding(s: Any, x: Tensor) -> Any:
    return s.inner(x) + OUTSIDE[0]


def a_view(s: Any, x: Tensor) -> Any:
    s.inner(x)
    return x[:2].repeat(2, 1), x.t()


def viewing(blocks: Any, x: Tensor) -> Any:
    x = x.clone()
    for block in blocks:
        y, t = block(x)
        t.add_(1)
        x = x + y
    return x.sum()


def lossy(s: Any, x: Tensor) -> Any:
    s.inner(x).sum().backward()
    return x


def hands_each_a_function(blocks: Any, x: Tensor) -> Any:
    for k, block in enumerate(blocks):
        x = block(x, lambda y, k=k: y * (k + 1))  # gone before the next is made, which lies where this one did
    return x.sum()


class Times:
    def __init__(self, by: int) -> None:
        self.by = by

    def of(self, y: Tensor) -> Tensor:
        return y * self.by


def hands_each_a_method(blocks: Any, x: Tensor) -> Any:
    for k, block in enumerate(blocks):
        x = block(x, Times(k + 1).of)
    return x.sum()


def hands_all_a_function(blocks: Any, x: Tensor) -> Any:
    k = 0

    def turn(y: Tensor) -> Tensor:
        return y * (k + 1)

    for k, block in enumerate(blocks):  # noqa: B007  # the function reads it
        x = block(x, turn)
    return x.sum()


def hands_all_a_method(blocks: Any, x: Tensor) -> Any:
    times = Times(1)
    turn = times.of
    for k, block in enumerate(blocks):
        times.by = k + 1
        x = block(x, turn)
    return x.sum()


def sets_each_a_function(blocks: Any, x: Tensor) -> Any:
    for k, block in enumerate(blocks):
        block.turn = lambda y, k=k: y * (k + 1)
        x = block(x, None)
        block.turn = None
    return x.sum()


def turned(s: Any, x: Tensor, turn: Any) -> Any:
    return (turn or s.turn)(s.inner(x))


class Counter:
    def __init__(self) -> None:
        self.at = 0


def shared(s: Any, x: Tensor) -> Any:
    s.counter.at += 1
    return s.inner(x) * s.counter.at


APART: list[tuple[Callable[..., Any], Callable[..., Any], Callable[[int], dict[str, Any]]]] = [
    (by_place, in_turn, lambda k: {"place": k}),
    (by_place, in_turn, lambda k: {"place": float(k) if k else k}),
    (by_vars, in_turn, lambda k: {"place": k}),
    (by_copy, in_turn, lambda k: {"place": k}),
    (by_name, in_turn, lambda k: {"place": k}),
    (sets, in_turn, lambda k: {"place": k}),
    (keeps, with_list, lambda k: {}),
    (writes, over, lambda k: {}),
    (counts, in_turn, lambda k: {"count": 0}),
    (by_chance, in_turn, lambda k: {}),
    (plain, closes, lambda k: {}),
    (turned, hands_each_a_function, lambda k: {}),
    (turned, hands_each_a_method, lambda k: {}),
    (turned, hands_all_a_function, lambda k: {}),
    (turned, hands_all_a_method, lambda k: {}),
    (turned, sets_each_a_function, lambda k: {"turn": None}),
    (a_view, viewing, lambda k: {}),
    (lossy, in_turn, lambda k: {}),
]


@pytest.mark.filterwarnings("ignore:capture. random numbers")
@pytest.mark.parametrize(
    ("function", "run", "more"), APART, ids=[f"{f.__name__}-{k}" for k, (f, *_) in enumerate(APART)]
)
def test_layers_that_differ_or_do_more_are_traced_each(
    taken: list[Repeats], function: Callable[..., Any], run: Callable[..., Any], more: Callable[[int], dict[str, Any]]
) -> None:
    model = Stack([Block(function, **more(k)) for k in range(3)], run)
    quick, _ = traced(model, X)
    assert taken[-1].taken == 0
    assert text(quick) == text(traced(model, X, reuse=False)[0])


def test_an_object_that_layers_share_and_change_keeps_them_apart(taken: list[Repeats]) -> None:
    counter = Counter()
    model = Stack([Block(shared, counter=counter) for _ in range(3)], in_turn)
    logical, _ = traced(model, X)
    assert taken[-1].taken == 0
    assert [op.args[1] for op in logical.ops if op.op is torch.ops.aten.mul.Tensor] == [1, 2, 3]


CHANGES: dict[str, Callable[[Block], Any]] = {
    "frozen": lambda block: block.inner.weight.requires_grad_(False),
    "eval": lambda block: block.eval(),
    "dtype": lambda block: setattr(block.norm, "running_mean", torch.zeros(4, dtype=torch.float64)),
    "hook": lambda block: block.register_forward_hook(lambda module, args, out: out * 2),
    "momentum": lambda block: setattr(block.norm, "momentum", 0.3),
    "tied": lambda block: setattr(block.norm, "bias", block.inner.bias),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_layer_that_is_unlike_the_others_is_traced_by_itself(taken: list[Repeats], change: str) -> None:
    model = Stack([Block(_normal) for _ in range(5)], in_turn)
    CHANGES[change](model.blocks[2])  # type: ignore[arg-type]
    logical, _ = traced(model, X)
    assert taken[-1].taken == 2  # the first one's input needs no gradient
    assert text(logical) == text(traced(model, X, reuse=False)[0])


def _normal(s: Any, x: Tensor) -> Any:
    return s.inner(s.norm(x))
