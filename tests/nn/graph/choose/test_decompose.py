"""Ops taken apart: every value is made once, and what picks from each row is a gather."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sbpflow.nn.graph.choose import decompose
from sbpflow.nn.graph.choose.decompose import expand
from sbpflow.sbp.call import fill
from sbpflow.sbp.logical import Logical
from tests.nn.graph.interpret import interpret
from tests.nn.graph.same import Of, ops_of, traced

N = torch.arange(4)
PICKED: dict[str, Callable[[Of, Tensor, Tensor], Tensor]] = {
    "of each row one": lambda m, x, i: (x @ m.w)[torch.arange(len(x)), i],
    "counted from the end": lambda m, x, i: (x @ m.w)[torch.arange(len(x)), -i - 1],
    "several": lambda m, x, i: (x @ m.w)[torch.arange(len(x))[:, None], torch.stack([i, -i], 1)],
    "the same of all": lambda m, x, i: (x @ m.w)[torch.arange(len(x)).unsqueeze(-1), i[:3]],
    "of each row a row": lambda m, x, i: (x @ m.w).view(4, 2, 2)[torch.arange(len(x)), i % 2],
    "of another kind": lambda m, x, i: (x @ m.w)[torch.arange(len(x)).to(torch.int32).long(), i],
}
OTHERS: dict[str, Callable[[Of, Tensor, Tensor], Tensor]] = {
    "the first of several": lambda m, x, i: (x @ m.w)[torch.arange(3), i[:3]],
    "not in order": lambda m, x, i: (x @ m.w)[torch.arange(len(x)).flip(0), i],
    "by the second dim": lambda m, x, i: (x @ m.w).view(4, 2, 2)[:, torch.arange(2), i[:2] % 2],
    "of all": lambda m, x, i: (x @ m.w)[torch.arange(len(x))[None], i[:, None]],
    "a number in each row": lambda m, x, i: (x @ m.w)[(torch.arange(4) * 1).view(2, 2)[:, 0], i[:2]],
}


def taken_apart(function: Callable[[Of, Tensor, Tensor], Tensor]) -> Logical:
    """The graph of a function taken apart, which does what the function does."""
    model, (x, i) = Of(function), (torch.randn(4, 4), torch.tensor([1, 0, 3, 2]))
    logical, constants = traced(model, x, i)
    apart = expand(logical, lambda op: 2)
    torch.testing.assert_close(interpret(apart, constants, {"": model}, x, i).result, model(x, i))
    return apart


@pytest.mark.parametrize("name", PICKED)
def test_what_picks_from_each_row_gathers(name: str) -> None:
    assert not {"index.Tensor"} & set(ops_of(taken_apart(PICKED[name])))


@pytest.mark.parametrize("name", OTHERS)
def test_what_picks_otherwise_stays(name: str) -> None:
    assert {"index.Tensor"} <= set(ops_of(taken_apart(OTHERS[name])))


def test_calls_that_are_alike_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    whole = decompose.opened

    def counted(*args: Any) -> Logical:
        seen.append(len(seen))
        return whole(*args)

    monkeypatch.setattr(decompose, "opened", counted)

    def four(m: Of, x: Tensor, i: Tensor) -> Tensor:
        y = F.dropout(F.dropout(x @ m.w, 1.0), 1.0)
        return F.dropout(F.dropout(y[:2], 1.0), 1.0)  # of another shape

    apart = taken_apart(four)
    assert len(seen) == 2
    numbers = [n for op in apart.ops for n in op.numbers]
    assert len(numbers) == len(set(numbers))


def test_every_value_is_made_once() -> None:
    """An op of a formula that returns what it was given, as x.to(x.dtype), was one that made its own input."""
    logical = taken_apart(
        lambda m, x, i: F.cross_entropy((x @ m.w).to(torch.float32), i) + F.dropout(x @ m.w, 0.0).sum()
    )
    numbers = [n for op in logical.ops for n in op.numbers]
    assert len(numbers) == len(set(numbers))
    assert all(n not in op.inputs for op in logical.ops for n in op.numbers)
    assert fill(logical.result, {n: n for n in numbers}) is not None
