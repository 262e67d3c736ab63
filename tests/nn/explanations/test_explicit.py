"""Inside flow.explicit() nothing moves by itself; the error shows what met, where it was made, and a fix that works."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S

F = nn.functional
LINE = flow.placement("cpu", range(2))
GRID = flow.placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))


def laid(shape: tuple[int, ...], sbp: Any, p: flow.Placement = LINE) -> flow.GlobalTensor:
    return flow.ones(*shape, placement=p, sbp=B).to_global(sbp=sbp)


def lie(x: Any) -> Any:
    return x.sbp


def refused(func: Callable[..., Any], *args: Any) -> str:
    with flow.record() as moves, flow.explicit(), pytest.raises(flow.SbpflowError) as error:
        func(*args)
    assert list(moves) == []
    return str(error.value)


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "relu": (torch.relu, (laid((8, 4), P),)),
    "matmul": (torch.matmul, (laid((8, 4), S(0)), laid((4, 6), S(0)))),
    "add": (torch.add, (laid((8, 4), S(0)), laid((8, 4), S(1)))),
    "operator": (lambda x, y: x * y, (laid((8, 4), P), laid((8, 4), P))),
    "softmax": (torch.softmax, (laid((8, 4), S(1)), -1)),
    "gathered": (torch.linalg.svd, (laid((8, 4), S(1)),)),
    "list": (torch.cat, ([laid((8, 4), S(0)), laid((8, 4), S(1))],)),
    "two axes": (torch.matmul, (laid((8, 4), (S(0), B), GRID), laid((4, 6), (S(1), S(0)), GRID))),
}


@pytest.mark.parametrize("name", CALLS)
def test_following_the_error_helps_at_the_price_that_it_says(name: str) -> None:
    func, args = CALLS[name]
    lines = refused(func, *args).splitlines()
    flat: list[Any] = list(args[0]) if isinstance(args[0], list) else [a for a in args if isinstance(a, Tensor)]
    shown = [line for line in lines if "float32" in line]
    assert len(shown) == len(flat)
    names = [line.split()[0] if "input " not in line else " ".join(line.split()[:2]) for line in shown]
    fixes = re.findall(r"try (.+)\.to_global\(sbp=(.+?)\): .* of (\d+) bytes a rank", "\n".join(lines))
    assert fixes
    with flow.record() as moves, flow.explicit():
        for which, sbp, price in fixes:
            at = names.index(which)
            before = moves.bytes
            flat[at] = flat[at].to_global(sbp=eval(sbp, {"S": S, "B": B, "P": P}))
            assert moves.bytes - before == int(price)
        after = moves.bytes
        func(flat) if isinstance(args[0], list) else func(*flat, *[a for a in args if not isinstance(a, Tensor)])
        assert moves.bytes == after


def test_the_error_names_the_op_and_where_its_tensors_were_made() -> None:
    x = flow.ones(8, 4, placement=LINE, sbp=S(0))
    w = flow.ones(4, 6, placement=LINE, sbp=S(0))
    said = refused(torch.matmul, x, w).splitlines()
    assert said[0] == "matmul would move a tensor, inside flow.explicit()"
    here = Path(__file__).name
    assert re.fullmatch(rf"  self   \(8, 4\)  float32  \(S\(0\),\) on cpu:\[0-1\]   made at .*{here}:\d+", said[1])
    assert re.fullmatch(rf"  other  \(4, 6\)  float32  \(S\(0\),\) on cpu:\[0-1\]   made at .*{here}:\d+", said[2])
    assert said[3] == "  try self.to_global(sbp=(S(1),)): all_to_all of 32 bytes a rank"


def test_the_gradients_price_is_told_too() -> None:
    x = flow.ones(8000, 4, placement=LINE, sbp=S(0)).requires_grad_()
    w = flow.ones(4, 6, placement=LINE, sbp=S(0)).requires_grad_()
    said = refused(torch.matmul, x, w).splitlines()[-1]
    assert said == (
        "  try other.to_global(sbp=(B,), grad_sbp=(P,)): all_gather of 48 bytes a rank, and 48 for its gradient"
    )
    with flow.explicit():
        y = x @ w.to_global(sbp=(B,), grad_sbp=(P,))
    assert lie(y) == (S(0),)


def test_a_function_of_several_calls_says_which_would_move() -> None:
    said = refused(F.cross_entropy, laid((4, 6), S(1)), flow.tensor([0, 5, 2, 3], placement=LINE, sbp=B))
    assert "made of several calls" in said


def test_what_needs_no_move_goes_on() -> None:
    with flow.record() as moves, flow.explicit():
        y = laid((8, 4), S(0)) @ flow.ones(4, 6, placement=LINE, sbp=B)
        z = y + flow.ones(8, 6, placement=LINE, sbp=B)  # a slice of what is there
    assert (lie(z), moves.bytes) == ((S(0),), 0)


def test_explicit_moves_are_free_to_go_and_outside_everything_is() -> None:
    x = laid((8, 4), P)
    with flow.explicit():
        assert x.to_global(sbp=S(0)).full_tensor().sum() == 32
    assert lie(torch.relu(x)) == (S(0),)


def test_it_may_be_nested() -> None:
    with flow.explicit():
        with flow.explicit():
            pass
        with pytest.raises(flow.SbpflowError):
            torch.relu(laid((8, 4), P))
