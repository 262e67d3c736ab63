"""The rule book against torch's own database of ops: every signature that it lists holds on real calls.

A sample of an op is run, the ATen calls it makes are recorded as a program would record them (ops without a rule that
torch composes of others are taken apart), and each call is run whole and on the shards of 2 and 3 simulated ranks.
"""

import random
import sys
import unittest
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode

from sbpflow.sbp import B, P, S, Sbp, registry
from sbpflow.sbp.book.pointwise import cast, pointwise
from sbpflow.sbp.call import Call, Match, Way, tensors_in
from sbpflow.sbp.check import check_rule, expand_line
from sbpflow.sbp.rule import BookLine
from sbpflow.sbp.state import State, state_of
from sbpflow.sbp.trial import Trial

F64 = torch.float64
OPS, SAMPLES = 15, 3  # of the database, in the test that always runs


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


torch.manual_seed(1)  # not 0, with which each test begins: the checker draws addends, which must not be these numbers
X, Y, ROW, CUBE, IMAGE = randn(4, 6), randn(4, 6), randn(6), randn(4, 3, 6), randn(4, 3, 6, 7)
SPD = X @ X.T + 4 * torch.eye(4, dtype=F64)
COMPLETE: list[tuple[Any, ...]] = [
    ("add.Tensor", X, ROW), ("sub.Tensor", X, Y), ("mul.Tensor", X, ROW), ("div.Tensor", X, Y),
    ("div.Tensor_mode", X, Y, {"rounding_mode": None}), ("mul.Scalar", X, 3), ("add.Scalar", X, 3),
    ("sin", X), ("clone", X), ("neg", X),
    ("addcmul", X, Y, Y + 1), ("addcdiv", X, Y, Y + 3), ("lerp.Scalar", X, Y, 0.3), ("where.self", X > 0, X, Y),
    ("masked_fill.Scalar", X, X > 0, 0), ("masked_fill.Scalar", X, X > 0, 2), ("to.dtype", X, torch.complex128),
    ("mm", X, Y.T), ("bmm", CUBE, CUBE.mT), ("matmul", CUBE, randn(6, 5)), ("matmul", CUBE, ROW), ("matmul", ROW, ROW),
    ("linear", CUBE, randn(5, 6), randn(5)), ("linear", X, Y), ("addmm", randn(4), X, Y.T), ("mv", X, ROW),
    ("baddbmm", randn(4, 3, 3), CUBE, CUBE.mT), ("addbmm", randn(3, 3), CUBE, CUBE.mT), ("outer", ROW, X[0]),
    ("dot", ROW, X[0]), ("bilinear", X, Y, randn(3, 6, 6), randn(3)), ("einsum", "ab,cb->ca", [X, Y]),
    ("einsum", "...a,a", [CUBE, ROW]), ("einsum", "aa->a", [SPD]), ("tensordot", CUBE, randn(6, 4), [2, 0], [0, 1]),
    ("sum", X), ("sum.dim_IntList", CUBE, [0, -1], True), ("mean", X), ("mean.dim", CUBE, [1]),
    ("amax", CUBE, [1]), ("amin", X), ("max", X), ("logsumexp", X, [0]), ("argmax", X, 1), ("var.correction", X, [1]),
    ("linalg_vector_norm", X, 1, [0]), ("linalg_vector_norm", X, float("inf"), [0]), ("linalg_vector_norm", X, 2, [0]),
    ("cumsum", X, 0), ("cumprod", X, 0), ("sort", X, 0), ("topk", X, 2, 1), ("softmax.int", X, 1),
    ("_softmax", X, 0, 0), ("layer_norm", CUBE, [3, 6]), ("rms_norm", CUBE, [6]),
    ("glu", CUBE, 2), ("renorm", CUBE, 2, 1, 0.1),
    ("constant_pad_nd", CUBE, [1, 0, 0, 0]), ("avg_pool2d", IMAGE, [3, 3], [1, 1]),
    ("upsample_bilinear2d", IMAGE, [4, 5], False), ("adaptive_avg_pool2d", IMAGE, [4, 4]),
    ("max_pool2d_with_indices", IMAGE, [3, 3], [1, 1]),
    ("grid_sampler_2d", IMAGE, torch.tanh(randn(4, 5, 3, 2)), 0, 0, False),
    ("linalg_inv", randn(3, 4, 4)), ("linalg_solve", randn(3, 4, 4), randn(3, 4, 5)), ("linalg_solve", SPD, X),
    ("cholesky_solve", X, SPD), ("linalg_cross", CUBE, CUBE + 1, {"dim": 1}), ("cdist", X, randn(5, 6)),
    ("_fft_r2c", X, [1], 0, True), ("_fft_c2c", X + 1j, [0], 0, True),
]  # fmt: skip


@pytest.mark.parametrize("call", COMPLETE, ids=[f"{i}_{call[0]}" for i, call in enumerate(COMPLETE)])
def test_what_the_book_lists_holds_and_nothing_else_does(call: tuple[Any, ...]) -> None:
    kwargs = call[-1] if isinstance(call[-1], dict) else {}
    report = check_rule(call[0], *(call[1:-1] if kwargs else call[1:]), **kwargs)
    assert not report.wrong
    assert not report.missing


@pytest.mark.parametrize("state", [B, P, S(0), S(1)], ids=str)
def test_a_tensor_made_after_another_needs_nothing_of_it(state: Sbp) -> None:
    lies = state_of((state,), 2, (2,))
    like = registry.find(Call(torch.ops.aten.ones_like.default, (X,), {}, (X,), (lies,), (2,)))
    new = registry.find(Call(torch.ops.aten.new_zeros.default, (X, [3]), {}, (ROW,), (lies,), (2,)))
    assert like == [Way((lies,), (State(lies.dims),))]
    assert new == [Way((lies,), (State(((),)),))]


@pytest.fixture(scope="module")
def database() -> list[Any]:
    if find_spec("expecttest") is None:  # of which the database's module needs only the name
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    database: list[Any] = op_db
    return [op for op in database if F64 in op.supported_dtypes("cpu") and "jiterator" not in op.name]


@pytest.mark.filterwarnings("ignore")
def test_a_sample_of_calls_runs_split_as_whole(database: list[Any]) -> None:
    assert not wrong_calls(random.Random(0).sample(database, OPS), SAMPLES)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_every_call_runs_split_as_whole(database: list[Any]) -> None:
    assert wrong_calls(database, 8) == []


def test_every_line_can_be_read() -> None:
    lines = [rule for rule in registry.known().values() if isinstance(rule, BookLine)]
    assert len(lines) > 200
    assert all(line.rule for line in lines)


def test_the_book_lets_most_of_torch_split(database: list[Any]) -> None:
    """The rest is random, depends on values, or has a rule in words only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ops = random.Random(1).sample(database, 20)
        whole = [op.name for op in ops if all(answered(call) for sample in drawn(op, 1) for call in calls(op, sample))]
    assert len(whole) >= 0.8 * len(ops)


def wrong_calls(ops: list[Any], count: int) -> list[str]:
    seen: set[str] = set()
    found = []
    for op in ops:
        for sample in drawn(op, count):
            for call in calls(op, sample):
                text = f"{call.name} {[(t.shape, t.dtype) for t in call.inputs]} {call.args} {call.kwargs}"
                if text not in seen:
                    seen.add(text)
                    found += [f"{call.name}: {trouble}" for trouble in differences(call)]
    return found


def drawn(op: Any, count: int) -> list[Any]:
    samples = list(op.sample_inputs("cpu", F64, requires_grad=False))
    return random.Random(op.name).sample(samples, min(count, len(samples)))


def calls(op: Any, sample: Any) -> list[Call]:
    """The calls with tensors that running a sample makes."""
    record = Record()
    with enable_python_dispatcher(), record:
        op.op(sample.input, *sample.args, **sample.kwargs)
    return [call for call in record.calls if call.inputs]


def answered(call: Call) -> bool:
    return registry.find(call) is not None


def differences(call: Call) -> Iterator[str]:
    """Where a line of the book, or the shared rule of pointwise ops, is wrong of a call."""
    rule = registry.rule_for(call.op, call.name)
    if not isinstance(rule, BookLine) and rule not in (pointwise, cast):
        return  # rules that are functions have tests of their own
    match = registry.find(call)
    if not isinstance(match, Match):
        return
    floating = [t.dtype for t in (*call.inputs, *call.outputs) if t.is_floating_point() or t.is_complex()]
    mixed = len({torch.finfo(dtype).eps for dtype in floating}) > 1
    with nullcontext() if learns(call) else torch.no_grad():
        for ranks in (2, 3):
            trial = Trial(call.op, call.args, call.kwargs, (ranks,))
            for way in expand_line(match, call.op, ranks, call.inputs):
                if mixed and any(state.partial for state in way.inputs):
                    continue  # addends of less precision than the result add up with less
                if trouble := trial.differs(way):
                    yield f"{way.inputs} -> {way.outputs} on {ranks} ranks: {trouble}"


def learns(call: Call) -> bool:
    """Whether the op has gradients here; some have none at all, or none of such values."""
    try:
        Trial(call.op, call.args, call.kwargs, (2,))
    except RuntimeError:
        return False
    return True


class Record(SchemaCheckMode):
    """Sees each op before autograd does and takes apart what has no rule and is made of other ops."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, _dispatch_key=torch._C.DispatchKey.PreDispatch)  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = Call(op, args, kwargs, ()).name
        made = torch._C._dispatch_has_kernel_for_dispatch_key
        if registry.rule_for(op, name) is None and made(op.name(), "CompositeImplicitAutograd"):
            with self:
                return op.decompose(*args, **kwargs)
        before = copied(args), {p.name: copied(kwargs[p.name]) for p in op._schema.arguments if p.name in kwargs}
        result = op(*args, **kwargs)
        self.calls.append(Call(op, *before, tuple(tensors_in(copied(result)))))
        return result


def copied(value: Any) -> Any:
    """An argument as it is now, since ops may write to it later."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(copied, value)) if isinstance(value, list | tuple) else value
