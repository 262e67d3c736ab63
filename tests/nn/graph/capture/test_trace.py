"""What a trace names, keeps and refuses: sources, losses, origins, constants, modes; modules stay as they were."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations
from torch.utils.checkpoint import checkpoint

import sbpflow as flow
from sbpflow.nn.graph.capture.trace import trace
from sbpflow.placement.errors import SbpError
from sbpflow.sbp.call import Ref, fill
from tests.nn.graph.interpret import interpret
from tests.nn.graph.same import Of, ops_of, same, step, traced

X = torch.linspace(-1, 1, 16).reshape(4, 4)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))

    def forward(self, batch: dict[str, Any], labels: Tensor) -> Any:
        logits = self.head(self.embed(batch["tokens"][0]) * self.scale)
        return F.cross_entropy(logits, labels) * batch["weight"]


BATCH = {"tokens": [torch.tensor([1, 2, 3])], "weight": 0.5}
LABELS = torch.tensor([2, 3, 4])


def test_sources_are_named_by_path_inputs_first_and_tied_parameters_once() -> None:
    logical = same(Tied(), BATCH, labels=LABELS)
    assert [(s.name, s.kind, s.requires_grad) for s in logical.sources] == [
        ("0.tokens.0", "input", False),
        ("labels", "input", False),
        ("scale", "buffer", False),
        ("embed.weight", "parameter", True),
    ]


def test_values_are_numbered_sources_first_then_in_the_order_they_are_made() -> None:
    logical = same(Tied(), BATCH, labels=LABELS)
    made = [n for op in logical.ops for n in op.numbers]
    assert made == list(range(len(logical.sources), len(logical.sources) + len(made)))


def test_modules_have_their_prefix() -> None:
    parts = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 2)}
    logical, constants = trace(lambda x: parts["second"](parts["first"](x)), (X,), {}, parts)
    assert [s.name for s in logical.sources[1:]] == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert [op.origin.module for op in logical.ops] == ["first", "second"]
    assert torch.equal(interpret(logical, constants, parts, X).result, parts["second"](parts["first"](X)))


def test_origins_tell_module_line_and_block() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2)))
    logical = same(model, X)
    assert [(op.origin.module, op.origin.block) for op in logical.ops] == [
        ("0", ""), ("1.0", "1"), ("1.1", "1"), ("2.0", "2"), ("2.1", "2"),
    ]  # fmt: skip
    assert all(op.origin.line.startswith(f"{step.__code__.co_filename}:") for op in logical.ops)


def test_losses_may_be_several_and_be_given_a_gradient() -> None:
    model = Of(lambda s, x: x @ s.w)

    def build(x: Tensor, g: Tensor) -> Any:
        y = model(x)
        y.backward(g)
        (y * y).sum().backward()
        return y

    logical, constants = trace(build, (X, X + 1), {}, {"": model})
    ran = interpret(logical, constants, {"": model}, X, X + 1)
    assert [loss.gradient for loss in logical.losses] == [1, None]
    y = model(X)
    y.backward(X + 1, retain_graph=True)
    (y * y).sum().backward()
    torch.testing.assert_close(ran.grads["w"], model.w.grad)


def test_the_modules_are_what_they_were_even_after_an_error() -> None:
    def body(s: Any, x: Tensor) -> Any:
        s.count, s.seen = s.count + 1, x
        s.history.append(x)
        s.register_forward_hook(lambda module, args, out: out)
        s.n += 1
        return x @ torch.zeros(3, 3)

    model: Any = Of(body, n=torch.tensor(0))
    model.count, model.history = 0, []
    before = dict(model.__dict__)
    held = [*model.parameters(), *model.buffers()]
    with pytest.raises(RuntimeError) as caught:
        traced(model, X)
    assert f"{__file__}:" in caught.value.__notes__[0]
    assert model.__dict__ == before
    assert all(x is y for x, y in zip([*model.parameters(), *model.buffers()], held, strict=True))
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert int(model.n) == 0
    assert model.history == []
    assert not model._forward_hooks


def test_models_on_meta_are_taken_for_such_of_the_device() -> None:
    with torch.device("meta"):
        model = Of(lambda s, x: (x.to(s.w.device) @ s.w, torch.ones(2, device=x.device)) if s.w.is_cpu else None)
        logical, _ = trace(model, (torch.empty(4, 4),), {}, {"": model})
    assert all(x.device.type == "cpu" for x in logical.fakes.values())
    assert ops_of(logical) == ["matmul", "ones"]


def test_global_tensors_are_taken_by_their_logical_shape() -> None:
    where = flow.placement("cpu", range(2))
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(flow.randn(3, 4, placement=where, sbp=flow.S(0)))
    logical, _ = traced(model, flow.tensor(X, placement=where, sbp=flow.S(0)))
    assert [tuple(s.fake.shape) for s in logical.sources] == [(4, 4), (3, 4), (3,)]
    assert logical.sources[1].requires_grad


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass
class Output:
    loss: Tensor
    parts: list[Any]


RESULTS: list[Callable[[Tensor], Any]] = [
    lambda y: y,
    lambda y: [y, (y + 1, {"a": y * 2, "b": 3}), None],
    lambda y: Pair(y, "text"),
    lambda y: Output(y, [y, Pair(y * 2, 1)]),
]


@pytest.mark.parametrize("shape", RESULTS, ids=["tensor", "nested", "named", "dataclass"])
def test_results_come_back_as_they_were_made(shape: Callable[[Tensor], Any]) -> None:
    model = Of(lambda s, x: shape(x @ s.w))
    logical, constants = traced(model, X)
    found, wanted = interpret(logical, constants, {"": model}, X).result, shape(X @ model.w)
    assert str(found) == str(wanted)
    assert type(found) is type(wanted)


def test_plain_results_keep_their_structure_in_the_graph() -> None:
    logical, _ = traced(Of(lambda s, x: {"y": [x @ s.w, 2]}), X)
    assert logical.result == {"y": [Ref(2), 2]}
    assert fill(logical.result, {2: X}) == {"y": [X, 2]}


# Constants


def test_literals_are_ops_or_constants() -> None:
    def body(s: Any, x: Tensor) -> Any:
        return (x @ s.w * torch.tensor(2.0) + torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.as_tensor([3, 3, 3, 3])).sum()

    logical = same(Of(body), X)
    assert ops_of(logical).count("full") == 2
    assert [s.name for s in logical.sources if s.kind == "constant"] == ["literal0"]


def test_plain_attributes_are_constants_read_anew() -> None:
    model: Any = Of(lambda s, x: (x @ s.w + s.shift + s.several[1]).sum())
    model.shift, model.several = torch.ones(4), [None, torch.randn(4)]
    logical = same(model, X)
    assert [s.name for s in logical.sources if s.kind == "constant"] == ["shift", "several.1"]
    _, constants = traced(model, X)
    model.shift = torch.zeros(4)
    assert torch.equal(constants["shift"](), torch.zeros(4))


# Modes


def test_autocast_stands_there_as_casts() -> None:
    def body(s: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.layer_norm(F.linear(x, s.w), (4,))
            h = F.dropout(torch.einsum("ij,jk->ik", F.linear(h, s.w), x), 0.5)
            h = F.scaled_dot_product_attention(h[None], h[None], h[None])
            return F.mse_loss(h[0], x)

    names = ops_of(same(Of(body), X))
    assert names.count("to.dtype") >= 3
    assert "dropout" in names
    assert "scaled_dot_product_attention" in names


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_seen_through(reentrant: bool) -> None:
    def body(s: Any, x: Tensor) -> Any:
        return checkpoint(lambda y: F.gelu(y @ s.w), x @ s.w, use_reentrant=reentrant).sum()

    assert ops_of(same(Of(body), X)) == ["matmul", "matmul", "gelu", "sum"]


def test_without_gradients_nothing_wants_one() -> None:
    model = Of(lambda s, x: x @ s.w)
    with torch.no_grad():
        logical, _ = traced(model, X)
    assert not any(op.grad for op in logical.ops)
    assert logical.wants_grad == {1}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compiled_modules_run_as_they_are_written() -> None:
    assert ops_of(traced(torch.compile(nn.Linear(4, 4)), X)[0]) == ["linear"]  # type: ignore[arg-type]


MODELS: list[tuple[nn.Module, tuple[Tensor, ...]]] = [
    (nn.LSTM(4, 6, 2), (torch.randn(5, 2, 4),)),
    (nn.GRUCell(4, 4), (X,)),
    (nn.MultiheadAttention(8, 2, batch_first=True), (torch.randn(2, 3, 8),) * 3),
    (nn.Transformer(8, 2, 2, 2, 16, batch_first=True), (torch.randn(2, 3, 8), torch.randn(2, 4, 8))),
    (parametrizations.weight_norm(nn.Linear(4, 4)), (X,)),
    (parametrizations.spectral_norm(nn.Linear(4, 4)), (X,)),
    (nn.ConvTranspose2d(3, 4, 3), (torch.randn(2, 3, 5, 5),)),
]


@pytest.mark.parametrize(("model", "args"), MODELS, ids=[type(m).__name__ for m, _ in MODELS])
def test_modules_of_torch(model: nn.Module, args: tuple[Tensor, ...]) -> None:
    same(model, *args)


# Optimizers


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_optimizers_called_inside_wait_for_the_graph(kind: Any) -> None:
    model = Of(lambda s, x: (x @ s.w).sum())
    optimizer = kind(model.parameters(), lr=0.1)
    model.w.grad = torch.ones(4, 4)
    before = model.w.detach().clone()

    def build(x: Tensor) -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = model(x)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss.detach()

    logical, _ = trace(build, (X,), {}, {"": model})
    assert len(logical.losses) == 1
    assert torch.equal(model.w, before)
    assert torch.equal(model.w.grad, torch.ones(4, 4))
    assert not optimizer.state
    optimizer.step()
    assert not torch.equal(model.w, before)


# What is refused

OUTSIDE = torch.ones(4)


def branch(s: Any, x: Tensor) -> Any:
    return x if (x @ s.w).sum() > 0 else -x


def clipped(s: Any, x: Tensor) -> Any:
    loss = (x @ s.w).sum()
    loss.backward()
    clip_grad_norm_(s.parameters(), 1.0)
    return x


def replaced(s: Any, x: Tensor) -> Any:
    s.state = s.state + x.sum()
    return (x @ s.w).sum() * s.state


REFUSED: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (branch, r"an if on a tensor \(or while"),
    (lambda s, x: x * x.sum().item(), "item"),
    (lambda s, x: x[: int(x.sum())], "item"),
    (lambda s, x: x.tolist(), "item"),
    (lambda s, x: x.numpy(), r"x\.numpy\(\)"),
    (lambda s, x: x.nonzero(), "nonzero"),
    (lambda s, x: x[x > 0], "index.Tensor"),
    (lambda s, x: torch.unique(x), "unique"),
    (lambda s, x: x + OUTSIDE, "register it as a buffer"),
    (lambda s, x: torch.autograd.grad((x @ s.w).sum(), s.w, is_grads_batched=True), "autograd.grad"),
    (lambda s, x: (x @ s.w).sum().backward(create_graph=True), "create_graph"),
    (clipped, "clip_grad_norm="),
    (replaced, "make it a buffer: register_buffer"),
    (lambda s, x: s.state.add_(1), "make it a buffer: register_buffer"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "told"), REFUSED, ids=[told.split()[0] for _, told in REFUSED])
def test_what_cannot_be_captured_is_refused_with_a_fix(body: Callable[[Any, Tensor], Any], told: str) -> None:
    model = Of(body)
    model.state = torch.zeros(())
    with pytest.raises(SbpError, match=told) as caught:
        traced(model, X)
    assert body is replaced or f"{__file__}:" in str(caught.value)


class Counted(nn.BatchNorm1d):
    """A norm of one's own that looks at its counter."""


def test_a_norm_that_looks_at_its_counter_says_so() -> None:
    with pytest.raises(SbpError, match=r"an if on a tensor|x\.item\(\)"):
        traced(nn.Sequential(Counted(4, momentum=None)), X)


def test_an_argument_called_like_a_parameter_is_refused() -> None:
    with pytest.raises(SbpError, match="are both called w"):
        traced(Of(lambda s, w: w @ s.w), w=X)


def test_modules_without_shapes_or_python_are_refused() -> None:
    with pytest.raises(SbpError, match="weight has no shape yet"):
        traced(nn.LazyLinear(4), X)


class Converting(nn.Module):
    """Says in each forward of which type a layer is to be, as Switch Transformers' router does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.inner = dtype, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Any:
        self.inner = self.inner.to(self.dtype)
        return self.inner(x)


def test_a_layer_that_is_of_its_type_already_is_converted_to_it() -> None:
    model = Converting(torch.float32)
    one = copy.deepcopy(model)
    torch.testing.assert_close(flow.compile(model, placement=flow.placement("cpu", range(2)))(X).full_tensor(), one(X))


def test_a_layer_is_not_converted_to_another_type_within_a_step() -> None:
    model = Converting(torch.float64)
    with pytest.raises(SbpError, match=r"Sequential is converted at .*: its 0.weight is torch.float32 .*\n.*\n.*cast"):
        traced(model, X)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
