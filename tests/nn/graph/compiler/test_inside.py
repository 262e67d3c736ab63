"""Bytes inside a segment: what cannot be traced is counted for more than it takes, and said."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B
from sbpflow.boxing.graph.measures import Held
from sbpflow.boxing.graph.physical import Op, Physical, Value, Var
from sbpflow.boxing.graph.report.facts import MemoryReport
from sbpflow.boxing.graph.report.report import Report
from sbpflow.nn.graph.compiler import compiled_segments, inside, joint
from sbpflow.nn.graph.compiler.backends import compiled
from sbpflow.nn.graph.compiler.inside import estimated
from sbpflow.nn.graph.compiler.joint import Traced, trace
from sbpflow.nn.graph.lower.localise import Local, Localiser
from sbpflow.nn.graph.lower.segments import Segment
from sbpflow.nn.graph.run.program import Program
from sbpflow.sbp.call import Ref

from ..graphs import LINE, Build, aten, attention, total
from ..memory.test_liveness import Live
from .test_backends import local


@torch.library.custom_op("sbpflow_test::by_value", mutates_args=())
def by_value(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() else x.clone()


by_value.register_autograd(lambda ctx, grad: grad * 2)


def deep(layers: int) -> Physical:
    """Layers with a wide inside and an op that has no fake, in one segment."""
    b = Build(LINE)
    x = b.input("x", (32, 16), B)
    for n in range(layers):
        up, down = b.source(f"up{n}", (64, 16), B), b.source(f"down{n}", (16, 64), B)
        h = b.op(aten.gelu.default, b.op(aten.linear.default, x, up, out=B), out=B)
        y = Value(f"y{n}", b.values[h.name].layout, grad=True)
        b.steps.append(Op(torch.ops.sbpflow_test.by_value.default, (h,), {}, (y,)))
        b.values[y.name] = y
        x = b.op(aten.linear.default, b.op(aten.softmax.int, Var(y.name), -1, out=B), down, out=B)
    return b.graph(total(b, x, B))


@pytest.mark.parametrize("layers", [1, 4])
def test_a_segment_that_cannot_be_traced_is_not_undercounted(layers: int) -> None:
    program = Program(deep(layers))
    (segment,) = program.stages
    assert isinstance(segment, Segment)
    of = Localiser(program.graph).segment(segment, 0)
    inputs = [spec.empty().fill_(0.1) for spec in of.inputs]
    made, live = compiled(of, "code"), Live()
    assert made.backend == "autograd"
    assert made.backward is not None
    live.known.update(x.untyped_storage()._cdata for x in inputs)
    with live, torch.no_grad():
        *_, saved = made.forward(*inputs)
        made.backward(*saved, torch.ones((), dtype=torch.float64))
    found = live.peak + sum(x.nbytes for x in inputs)
    memory = program.memory()[0]
    assert (
        found <= memory.total <= 2.5 * found
    )  # each call of the op may keep and take as much again as goes in and out
    (reason,) = memory.estimates
    assert reason.startswith("by_value.default: RuntimeError: There was no fake impl")


def test_an_op_that_writes_to_its_input_is_counted() -> None:
    made = estimated(local([(4,)], [(torch.relu_, Ref(0))], [1], wants=[]), "why")
    assert made.forward >= 4 * 8
    assert (made.kept, made.backward) == (0, 0)
    assert made.reason == "relu_: an input is written to"


def test_a_mistake_of_ours_is_an_error_and_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> Any:
        raise RuntimeError("our own")

    forget()
    monkeypatch.setattr(joint, "_needed", wrong)
    with pytest.raises(RuntimeError, match="our own"):
        Program(deep(1), backend="autograd").memory()
    monkeypatch.setattr(inside, "inside_of", wrong)
    with pytest.raises(RuntimeError, match="our own"):
        estimated(local([(4,)], [(aten.sin.default, Ref(0))], [1]), "why")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Local]:
    """The segments that are traced from now on; nothing is known of earlier ones."""
    found: list[Local] = []

    def counting(local: Local, *how: Any) -> Traced:
        found.append(local)
        return trace(local, *how)

    monkeypatch.setattr(joint, "trace", counting)
    forget()
    return found


ACCOUNTS: dict[str, Callable[[Program], Any]] = {
    "looked at": Program.memory,
    "compiled": Program.prepare,
}


@pytest.mark.parametrize("first", ACCOUNTS)
@pytest.mark.parametrize("graph", [attention, lambda: deep(2)], ids=["traceable", "not traceable"])
def test_a_segment_is_traced_once_for_its_memory_and_to_run(
    traced: list[Local], first: str, graph: Callable[[], Physical]
) -> None:
    """A second explain() took as long as the first, and a step that was looked at as long to compile as one anew."""
    step = Program(graph(), backend="code")
    for account in (ACCOUNTS[first], *ACCOUNTS.values()):
        account(step)
    assert Program(graph(), backend="code").memory() == step.memory()
    assert len({local.key for local in traced}) == len(traced) > 0


@pytest.mark.parametrize(
    "options", [{}, {"micro_batches": 2, "schedule": "1f1b"}, {"micro_batches": 2, "schedule": "zb_h1"}]
)
@pytest.mark.parametrize("memory", [None, 1e9])
def test_plan_explain_and_the_first_step_trace_each_segment_once(
    traced: list[Local], options: dict[str, Any], memory: float | None
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    flow.nn.place(model[:2], flow.placement("cpu", [0, 1]))
    flow.nn.place(model[2:], flow.placement("cpu", [2, 3]) if options else flow.placement("cpu", [0, 1]))
    step = flow.compile(
        model,
        lambda of, x: of(x).square().mean(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        memory=memory,
        **options,
    )
    x = torch.randn(8, 8)
    step.plan_for(x)
    step.explain()
    looked = len(traced)
    step(x)
    step.explain()
    assert len({local.key for local in traced}) == len(traced) == looked > 0


def forget() -> None:
    for known in (joint._traced, inside.insides, compiled_segments.compiled_once):
        known.cache_clear()


def test_a_report_says_what_is_an_estimate() -> None:
    held = {0: Held(1, 2, 3, 4, 10)}
    sure, unsure = (Report(deep(1), memory=MemoryReport(held, None, of)) for of in ((), ("f: no fake", "g: no fake")))
    said = "memory of 2 segments is an estimate: f: no fake"
    for text in (str, Report.full, Report.html):
        assert said in text(unsure)
        assert "an estimate" not in text(sure)
    assert unsure.dict()["memory"]["estimates"] == ["f: no fake", "g: no fake"]
