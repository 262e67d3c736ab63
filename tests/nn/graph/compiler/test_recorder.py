"""Graphs recorded on fakes: the calls that torch's make_fx finds, with the arguments that it finds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from sbpflow.nn.graph.compiler.recorder import Recording, record

TABLE = torch.arange(6.0).reshape(2, 3)
with FakeTensorMode():
    STRANGE = torch.empty(4, 6)
aten = torch.ops.aten
Function = Callable[[list[Tensor], list[Tensor]], list[Tensor]]


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.mul(cotangents[0], x / 2)


def with_gradients(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    def both(values: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            x, w = (each.detach().requires_grad_() for each in values)
            y = function(x, w)
            found = torch.autograd.grad((y * cotangents[0]).sum(), (x, w), allow_unused=True)
        return [y, *(each for each in found if each is not None)]

    return both


def in_inference_mode(x: Tensor, w: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.matmul(x, w.t()).reshape(-1)


def under_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, w).float() + F.linear(x, w).float()


def parts(x: Tensor, w: Tensor) -> Tensor:
    first, *others = x.chunk(2, 1)
    return torch.cat([first * 2, *others, w.unbind(0)[0][None].expand(4, 6)], 1)


def normed(x: Tensor, w: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True) + F.layer_norm(x, (6,), weight=w[0])


def convolved(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x[None], w[:, :4, None].contiguous())


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, w: F.gelu(x @ w.t()),
    "parts": parts,
    "norms, without statistics": normed,
    "one of three gradients is none": convolved,
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None]),
    "an index with gaps": lambda x, w: x.index_put((torch.tensor([0, 1]),), w[:2]),
    "a constant": lambda x, w: x * torch.tensor(3.0),
    "a tensor from outside": lambda x, w: x[:2, :3] * TABLE + w[:2, :3],
    "a constant that is read": lambda x, w: x * torch.tensor(3.0).item() + w.sum(),
    "random numbers": lambda x, w: F.dropout(x, 0.5) + torch.rand_like(x),
    "autograd's function": lambda x, w: Halved.apply(x) + w[:4],  # type: ignore[no-untyped-call]
    "detached": lambda x, w: x.detach() * w[:4],
    "inference mode": in_inference_mode,
    "autocast": under_autocast,
    "written in place": lambda x, w: (x * 2).add_(1).mul_(w[:4]),
    "complex": lambda x, w: torch.fft.rfft(x).abs() + w[:4, :4],
    "a loss": lambda x, w: F.cross_entropy(x, torch.tensor([0, 1, 2, 3])) + F.mse_loss(x, w[:4]),
}


def without(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    def plain(values: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [function(values[0], values[1])]

    return plain


def given(fakes: FakeTensorMode | None = None) -> tuple[list[Tensor], list[Tensor]]:
    with fakes or FakeTensorMode(allow_non_fake_inputs=True):
        return [torch.empty(4, 6), torch.empty(5, 6)], [torch.empty(1)]


def recorded(function: Function, decompositions: Any = None) -> Recording:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    return record(function, given(fakes), fakes, decompositions)


def read(graph: fx.Graph) -> list[Any]:
    """Its calls, with numbers for nodes. A constant, which make_fx fetches anew for each call, is read where it is, and
    so is what is but detached, as factories' results are where fakes are made of all that is new."""
    said: dict[fx.Node, Any] = {}
    lines: list[Any] = []
    for node in graph.nodes:
        value = node.meta.get("val")
        looks = (tuple(value.shape), value.dtype, value.stride()) if isinstance(value, Tensor) else None
        if node.op == "get_attr":
            said[node] = f"constant {looks}"
        elif node.target in (aten.detach.default, aten.alias.default):  # torch 2.15 has the latter for both
            said[node] = said[node.args[0]]
        else:
            said[node] = f"%{len(lines)}"
            given = fx.map_arg((node.args, node.kwargs), said.__getitem__)
            lines.append((node.op, node.target if node.op == "call_function" else None, given, looks))
    return lines


@pytest.mark.sampled(20)
@pytest.mark.parametrize("grads", [True, False])
@pytest.mark.parametrize("name", [*FUNCTIONS])
def test_the_graph_is_that_of_make_fx(name: str, grads: bool) -> None:
    function = with_gradients(FUNCTIONS[name]) if grads and name != "inference mode" else without(FUNCTIONS[name])
    mine, theirs = recorded(function), make_fx(function)(*given()).graph
    assert read(mine.graph) == read(theirs)
    for node in mine.graph.nodes:
        if node.op == "get_attr":
            assert not isinstance(mine.constants[node.target], FakeTensor)


def test_factories_make_nothing_of_a_value() -> None:
    """make_fx ran them: a mask as large as the model's longest sequence was made to be thrown away."""
    graph = recorded(without(lambda x, w: x + torch.arange(6.0) + torch.zeros(4, 6))).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        aten.arange.default,
        aten.detach.default,
        aten.add.Tensor,
        aten.zeros.default,
        aten.detach.default,
        aten.add.Tensor,
    ]
    assert all(isinstance(node.meta["val"], FakeTensor) for node in graph.nodes if node.op == "call_function")


def test_a_number_that_was_said_is_known_and_one_of_a_tensor_from_outside_is_not() -> None:
    """Such a tensor may hold another one in the next step."""
    graph = recorded(without(lambda x, w: x * torch.tensor(3.0).item())).graph
    assert any(3.0 in node.args for node in graph.nodes)
    with pytest.raises(RuntimeError):
        recorded(without(lambda x, w: x * TABLE.sum().item()))
    with pytest.raises(RuntimeError):
        recorded(without(lambda x, w: x * TABLE[0, 1].item()))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x * x.sum().item(),
        lambda x, w: x if x.sum() > 0 else w,
        lambda x, w: x[x > 0],
        lambda x, w: x + STRANGE,
    ],
    ids=["a number", "a question", "rows that are counted", "a tensor without values from elsewhere"],
)
def test_what_has_no_form_without_values_is_refused(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError):
        recorded(without(function))


def test_a_decomposition_takes_the_place_of_its_op_and_is_decomposed_itself() -> None:
    table = {
        aten.silu.default: lambda x: x * torch.sigmoid(x),
        aten.sigmoid.default: lambda x: 1 / (1 + torch.exp(-x)),
        aten.exp.default: lambda x: NotImplemented,
    }
    graph = recorded(without(lambda x, w: F.silu(x)), table).graph
    ops = [node.target for node in graph.nodes if node.op == "call_function"]
    assert ops == [aten.neg.default, aten.exp.default, aten.add.Tensor, *ops[3:-1], aten.mul.Tensor]
    assert not {aten.silu.default, aten.sigmoid.default} & {*ops}
