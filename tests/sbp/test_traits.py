"""Traits of ops: their rows are of ops that torch has, and say what torch does."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

import sbpflow.nn.graph.choose.decompose  # noqa: F401 - registers an op of our own
from sbpflow.sbp import traits as module
from sbpflow.sbp.traits import VIEWS, evaluations, named, traits

PLACES = {"view.dtype": (torch.int32,), "type_as": (torch.zeros(1),), "to": (torch.float32,), "_to_copy": ()}
PLACES |= {"expand": ([2, 3, 4],), "expand_as": (torch.zeros(2, 3, 4),), "broadcast_to": ([2, 3, 4],)}
X = torch.randn(2, 3, 4)


def overloads(name: str) -> dict[str, torch._ops.OpOverload]:
    library, _, op = name.rpartition("::")
    packet = getattr(getattr(torch.ops, library or "aten"), op.partition(".")[0])
    return {overload: getattr(packet, overload) for overload in packet.overloads()}


@pytest.mark.parametrize("name", [*module._rows, *module._functions])
def test_every_row_is_of_an_op(name: str) -> None:
    found = overloads(name.removesuffix("*"))
    assert found
    assert name.endswith("*") or (name.partition(".")[2] or "default") in found


def test_every_trait_is_told() -> None:
    told = set(re.findall(r"\w+", "\n".join(re.findall(r"(?:^|`)([a-z, ]+?)(?:  |`)", module.__doc__ or "", re.M))))
    assert {trait for said in module._rows.values() for trait in said} <= told


def test_an_overload_has_its_own_row_or_that_of_all() -> None:
    assert traits("split.Tensor") == traits("split") == {"cut", "pieces"}
    assert "regrouped" not in traits("view.dtype")
    assert "unread" in traits("bernoulli.p")
    assert "unread" not in traits("bernoulli")
    assert not traits("randint_like.Tensor")  # reads its bounds from one
    assert not traits("mm")


@pytest.mark.parametrize("name", named("random"))
def test_what_is_random_draws_by_a_generator(name: str) -> None:
    assert any(torch.Tag.nondeterministic_seeded in op.tags for op in overloads(name).values())


@pytest.mark.parametrize("name", [n for trait in ("same", "permuted", "spread") for n in named(trait)])
def test_what_shows_its_input_otherwise_has_all_its_values(name: str) -> None:
    square = X[0, :2, :2] if name in ("t", "matrix_H", "mT", "mH", "numpy_T", "adjoint") else X
    dims = {"transpose": (0, 1), "swapaxes": (0, 1), "swapdims": (0, 1), "permute": ([2, 0, 1],)}
    dims |= {"movedim": (0, 1), "moveaxis": (0, 1)}
    made = getattr(torch.ops.aten, name)(square, *dims.get(name, PLACES.get(name, ())))
    assert traits(name) & VIEWS
    assert torch.equal(made.flatten().sort().values, square.flatten().sort().values)


BY_NAME = [name.removesuffix("*") for name in module._functions]
SIMPLE = {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh"}
SIMPLE |= {"cosh", "tanh", "sigmoid", "erf", "erfc"}
COMPOSED = re.findall(
    r"\w+",
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data gelu gelu_backward elu elu_backward glu "
    "glu_backward silu silu_backward celu selu mish mish_backward softplus softplus_backward log_sigmoid_forward "
    "log_sigmoid_backward tanh_backward sigmoid_backward logsumexp logaddexp binary_cross_entropy "
    "binary_cross_entropy_with_logits",
)
MORE = {"logsumexp": ([-1],), "_softmax": (-1, False), "_log_softmax": (-1, False)}
MORE |= dict.fromkeys(("softmax.int", "log_softmax.int", "glu"), (-1,))
OTHERS = (*(name for name in COMPOSED if "backward" in name), "cross_entropy_loss", "logaddexp2")


def evaluated(graph: Any) -> int:
    """The functions that a graph evaluates for each element of values that are at least half as large as the input."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function" and node.meta["tensor_meta"].shape]
    names = [str(node.target).split(".")[1] for node in calls if node.meta["tensor_meta"].shape.numel() >= 12]
    return sum(name in SIMPLE for name in names)


@pytest.mark.parametrize("name", [n for n in BY_NAME if n not in OTHERS])
def test_as_many_functions_are_evaluated_as_ops_are_made_of_by_torch(name: str) -> None:
    """The simpler ops in which torch has written an op and its backward, where it has."""
    library: Any = get_decompositions([getattr(torch.ops.aten, each) for each in COMPOSED])
    x = torch.rand(4, 6) / 2 + 0.2
    packet, _, overload = name.partition(".")
    op: Any = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def forward(x: Tensor) -> Tensor:
        other = [2 * x] if name == "logaddexp" else [x.detach()] if "binary" in name else []
        made: Tensor = op(x, *other, *MORE.get(name, ()))
        return made

    def backward(x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        y = forward(x)
        return torch.autograd.grad(y, x, torch.ones_like(y))

    way, both = (evaluated(make_fx(function, library)(x)) for function in (forward, backward))
    assert (way, both - way) == evaluations(name)


def test_backwards_by_name_evaluate_what_those_of_their_forwards_do() -> None:
    assert evaluations("_log_softmax_backward_data") == (evaluations("log_softmax.int")[1], 0) == (1, 0)
    assert evaluations("gelu_backward") == (2, 0)
    for name in ("gelu", "silu", "elu", "glu", "mish", "softplus", "tanh", "sigmoid"):
        assert evaluations(f"{name}_backward") == (evaluations(name)[1], 0)
    assert evaluations("_softmax_backward_data") == (0, 0)  # products with the result
