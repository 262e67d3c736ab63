"""What cannot be compiled or run is an error that says what was found, where, and what to write instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import GRID, LINE, batch, loss_fn, net, same_model, sgd

HERE = r"test_bad_input\.py:\d+"


def refused(pattern: str, run: Callable[[], object], kind: type[Exception] = flow.SbpflowError) -> None:
    """The error fits the pattern and, of ours, has a fix."""
    with pytest.raises(kind, match=f"(?s){pattern}") as caught:
        run()
    assert not isinstance(caught.value, flow.SbpflowError) or "\n  " in str(caught.value)


class Train(flow.nn.Graph):
    """A step whose body is given."""

    def __init__(self, body: Callable[..., Any], **options: Any) -> None:
        super().__init__(**{"placement": LINE, **options})
        self.model: Any = net()
        self.body = body
        self.optimizer = sgd(self.model)

    def build(self, *args: Any) -> Any:
        return self.body(self, *args)


# What cannot be captured


def looks(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_fn(model, x, y)
    return loss * 2 if loss > 1 else loss


def asks(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return loss_fn(model, x, y) * loss_fn(model, x, y).item()


def picks(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    picked: Tensor = model(x)[y > 0]
    return picked.sum()


@pytest.mark.parametrize("body", [looks, asks, picks])
def test_what_depends_on_values(body: Any) -> None:
    model = net()
    step = flow.compile(model, body, sgd(model), placement=LINE)
    refused(
        rf"^capture: .* needs to know what a tensor holds\n  called at .*{HERE}.*torch.where", lambda: step(*batch())
    )
    same_model(model, net(), 0)


def test_an_op_without_a_fake() -> None:
    @torch.library.custom_op("sbpflow_tests::unknown", mutates_args=())
    def unknown(x: Tensor) -> Tensor:
        return x + 1

    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return unknown(x)  # type: ignore[no-any-return]

    with pytest.raises(Exception, match="register_fake") as caught:
        flow.compile(Calls(), placement=LINE)(batch()[0])
    assert "test_bad_input.py:" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_a_module_that_the_graph_does_not_have() -> None:
    model = net()

    class Outside(flow.nn.Graph):
        def build(self, x: Tensor) -> Any:
            return model(x)

    refused(r"^capture: met a tensor \(8, 4\) .* no input, parameter", lambda: Outside(placement=LINE)(batch()[0]))


def test_gradients_and_parameters_are_left_alone_in_build() -> None:
    def reads(graph: Train, x: Tensor, y: Tensor) -> Any:
        loss_fn(graph.model, x, y).backward()  # type: ignore[no-untyped-call]
        return graph.model[0].weight.grad

    def writes(graph: Train, x: Tensor, y: Tensor) -> Any:
        loss = loss_fn(graph.model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            graph.model[0].weight.mul_(0.5)
        return loss

    refused(rf"^capture: a gradient is read .* at .*{HERE}.*clip_grad_norm=", lambda: Train(reads)(*batch()))
    refused(rf"^capture: the parameter 0.weight is written to, at .*{HERE}", lambda: Train(writes)(*batch()))


def test_a_graph_inside_of_another() -> None:
    inner = flow.compile(net(), placement=LINE)
    refused(
        rf"^the graph Sequential is called at .*{HERE}, while another is captured",
        lambda: Train(lambda graph, x: inner(x))(batch()[0]),
    )


# Losses


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda model, x, y: 1.0, "float, which is no tensor"),
        (lambda model, x, y: None, "NoneType, which is no tensor"),
        (lambda model, x, y: (), "tuple, which is no tensor"),
        (lambda model, x, y: model(x), r"a tensor \(8, 3\) first"),
        (lambda model, x, y: x.sum(), "depends on nothing that requires grad"),
        (lambda model, x, y: model(x).sum().detach(), "depends on nothing that requires grad"),
    ],
    ids=["float", "none", "empty", "not scalar", "of the input", "detached"],
)
def test_what_is_no_loss(loss: Any, found: str) -> None:
    refused(
        rf"^the loss function returned .*{found}\n  it is to return the loss",
        lambda: flow.compile(net(), loss, placement=LINE)(*batch()),
    )


def test_a_build_that_trains_nothing_though_it_has_an_optimizer() -> None:
    graph = Train(lambda graph, x: graph.model(x))
    refused(
        r"^Train has an optimizer, and build\(...\) calls no backward\(\).*loss.backward\(\)", lambda: graph(batch()[0])
    )
    with torch.no_grad():
        assert graph(batch()[0]).shape == (8, 3)


def test_backward_where_there_are_no_gradients() -> None:
    def off(graph: Train, x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            loss = loss_fn(graph.model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]

    def on(graph: Train, x: Tensor, y: Tensor) -> Any:
        loss_fn(graph.model, x, y).backward()  # type: ignore[no-untyped-call]

    refused("does not require grad", lambda: Train(off)(*batch()), RuntimeError)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad") as caught:
        Train(on)(*batch())
    assert "Train was called under torch.no_grad()" in "".join(caught.value.__notes__)


def test_the_graph_steps_whatever_build_does_with_the_optimizer() -> None:
    def steps(graph: Train, x: Tensor, y: Tensor) -> Any:
        loss = loss_fn(graph.model, x, y)
        graph.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        graph.optimizer.step()
        return loss

    graph, one = Train(steps), net()
    ones = sgd(one)
    for at in range(2):
        graph(*batch(at=at))
        loss_fn(one, *batch(at=at)).backward()  # type: ignore[no-untyped-call]
        ones.step()
        ones.zero_grad()
    same_model(graph.model, one)


def test_arguments_with_a_history() -> None:
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    x, y = batch()
    refused(
        r"^the argument 0 \(8, 4\) was computed from something that requires grad.*detach",
        lambda: flow.compile(net(), loss_fn, placement=LINE)(x * weight, y),
    )


# Hints, placements, memory, optimizers


def hinted(patterns: Any, where: flow.Placement = GRID) -> Callable[[], object]:
    return lambda: flow.compile(flow.nn.shard(net(), patterns), loss_fn, placement=where)(*batch())


def test_hints_that_fit_nothing() -> None:
    refused("no parameter or module called '0.wieght'.*did you mean '0.weight'", hinted({"0.wieght": S(0)}))
    refused(r"^shard: S\(5\) of 0.weight \(8, 4\).*its dims are 0 to 1", hinted({"0.weight": S(5)}))
    refused("no axis 'tensr' in .*did you mean 'tensor'", hinted({"0.weight": {"tensr": S(0)}}))
    refused(r"^0.weight \(8, 4\) is to be \(S\(0\), B, B\) on .*2 axes", hinted({"0.weight": (S(0), B, B)}))


def test_a_hint_for_what_is_global_already() -> None:
    model = net()
    flow.compile(model, loss_fn, placement=LINE)(*batch())
    again = flow.compile(flow.nn.shard(model, {"0.weight": flow.P}), placement=LINE)
    refused(
        r"^0.weight \(8, 4\) is to be \(P,\), and is global already as .*flow.nn.to_global", lambda: again(batch()[0])
    )


def test_a_line_for_what_another_grid_has_put_elsewhere() -> None:
    """As in a notebook, where a plan is edited and run again on the same model."""
    model = net()
    flow.compile(model, loss_fn, plan="grid (data=4)")(*batch())
    again = flow.compile(model, loss_fn, plan="grid (data=2, tensor=2)\n0.weight: tensor=S(0)")
    refused(r"no axis 'tensor' in .*it lies there already: make the model anew, move it", lambda: again(*batch()))


def test_too_little_memory() -> None:
    model = net()
    step = flow.compile(model, loss_fn, sgd(model), placement=LINE, memory=100)
    refused(
        r"^no plan fits into 100 B a rank\n  the leanest plan found takes [\d.]+ KiB: activations .*more ranks",
        lambda: step(*batch()),
    )
    same_model(model, net(), 0)


def test_an_optimizer_of_another_model() -> None:
    refused(
        r"^SGD holds a parameter \(8, 4\) that no module of the graph has, at .*\n  make the optimizer of",
        lambda: flow.compile(net(), loss_fn, sgd(net()), placement=LINE)(*batch()),
    )


def test_no_placement() -> None:
    said = r"^the graph has no placement, and linear at .*alike.py:\d+ none either\n  give one: flow.compile"
    refused(said, lambda: flow.compile(net(), loss_fn)(*batch()))


def test_options_that_cannot_be() -> None:
    model: Any = net()
    options: dict[str, Any] = {
        "backend": ("inductr", "^backend='inductr'\n  there are 'auto'"),
        "memory": ("1 GB", "^memory='1 GB'\n  give it bytes a rank"),
        "clip_grad_norm": (-1.0, "^clip_grad_norm=-1.0\n  give it a norm"),
        "placement": ("cpu", "^placement='cpu'\n  make one, as in flow.placement"),
    }
    for name, (value, pattern) in options.items():
        refused(pattern, lambda name=name, value=value: flow.compile(model, loss_fn, **{name: value}))  # type: ignore[misc]
    compiling: Any = flow.compile
    refused("^compile of function\n  give it an nn.Module", lambda: compiling(loss_fn))
    refused(
        "^compile with str for an optimizer\n  give it one of torch.optim", lambda: compiling(model, loss_fn, "sgd")
    )
    refused("^compile has an optimizer and no loss", lambda: compiling(model, None, sgd(model)))


# Calls


def test_looking_before_the_first_call() -> None:
    step = flow.compile(net(), loss_fn, placement=LINE)
    for look in (step.explain, step.text, lambda: step.draw("x.svg"), lambda: step.physical):
        refused("^Sequential was not called yet.*\n  call it, or graph.plan", look)
    assert repr(step) == "Sequential: not called yet"


def test_arguments_that_may_change_unseen() -> None:
    forward = flow.compile(net(), placement=LINE)
    values: list[Any] = [{1}, bytearray(b"x"), batch()[0].numpy()]
    for value in values:
        with pytest.raises(SbpError, match=r"(?s)^a graph cannot take a (set|bytearray|ndarray) as an .*pass"):
            forward(value)


def test_tensors_without_values() -> None:
    forward = flow.compile(net(), placement=LINE)
    refused(r"^a step was given a tensor \(8, 4\) on meta.*graph.plan", lambda: forward(batch()[0].to("meta")))
    with torch.no_grad():
        assert forward(batch()[0]).shape == (8, 3)


def test_shapes_that_do_not_fit_are_torchs_errors_with_the_line() -> None:
    forward = flow.compile(net(), placement=LINE)
    with pytest.raises(RuntimeError) as caught:
        forward(torch.randn(8, 5, dtype=torch.float64))
    assert any("while a graph was captured: aten.linear" in note for note in caught.value.__notes__)


class Prepared(torch.optim.Optimizer):
    """A stand-in for an optimizer, which calls it now and then, as what `accelerate.prepare` returns."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


def test_an_optimizer_that_holds_another() -> None:
    model = net()
    step = Train(lambda self, *batch: loss_fn(self.model, *batch))
    step.optimizer = Prepared(step.optimizer)
    held = Prepared(sgd(model))
    said = r"holds SGD\n  have it step,.*leave_gradients=True.*optimizer\.optimizer"
    refused(f"^compile: .*Prepared is no optimizer itself, it {said}", lambda: flow.compile(model, loss_fn, held))
    refused(f"^Train: .*Prepared is no optimizer itself, it {said}", lambda: step(*batch()))
    flow.compile(model, loss_fn, held.optimizer, placement=LINE)(*batch())
    same_model(model, net(), 1)
    step_of_it = flow.compile(model, loss_fn, held, placement=LINE, leave_gradients=True)
    step_of_it(*batch())
    held.optimizer.step()
    same_model(model, net(), 2)


def test_a_graph_without_build_or_init() -> None:
    class Nothing(flow.nn.Graph):
        def __init__(self) -> None:
            self.model = net()

    refused("^Graph has no build", lambda: flow.nn.Graph(placement=LINE)(1), NotImplementedError)
    refused(r"^Nothing was not initialised\n  call super\(\).__init__\(\)", lambda: Nothing()(1))


def test_modules_without_shapes() -> None:
    refused(
        "^capture: weight has no shape yet\n  run the model once",
        lambda: flow.compile(nn.LazyLinear(3), placement=LINE)(batch()[0]),
    )


def test_after_an_error_the_graph_can_be_called_again() -> None:
    model = net()
    fails = [True]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        return 1.0 if fails.pop() else F.cross_entropy(model(x), y)

    fails[:] = [False, True]
    step = flow.compile(model, loss, sgd(model), placement=LINE)
    with pytest.raises(SbpError):
        step(*batch())
    assert step(*batch()).ndim == 0
