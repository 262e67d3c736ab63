"""A backward in two halves makes what it makes whole: gradients of what came in first, then those of weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sbpflow.nn.graph.compiler.backends import Backend, compiled
from sbpflow.nn.graph.compiler.joint import trace
from sbpflow.nn.graph.compiler.split_backward import apart
from sbpflow.nn.graph.lower.localise import Local
from sbpflow.sbp.call import Ref

from ..graphs import F64, aten
from .test_backends import local

X, W, C = Ref(0), Ref(1), Ref(2)

# What a stage does, and which of its inputs are weights.
SEGMENTS: dict[str, tuple[Local, tuple[bool, ...]]] = {
    "linear": (local([(4, 3), (6, 3), (6,)], [(aten.linear.default, X, W, C)], [3]), (False, True, True)),
    "two linears": (
        local(
            [(4, 3), (6, 3), (5, 6)],
            [(aten.linear.default, X, W), (aten.gelu.default, Ref(3)), (aten.linear.default, Ref(4), C)],
            [5],
        ),
        (False, True, True),
    ),
    "norm": (local([(4, 6), (6,), (6,)], [(aten.layer_norm.default, X, [6], W, C)], [3]), (False, True, True)),
    "weights first": (local([(6, 3), (4, 3)], [(aten.linear.default, W, X)], [2]), (True, False)),
    "a weight twice": (
        local([(4, 4), (4, 4)], [(aten.linear.default, X, W), (aten.linear.default, Ref(2), W)], [3]),
        (False, True),
    ),
    "several come out": (
        local([(4, 4), (4, 4)], [(aten.linear.default, X, W), (aten.sin.default, Ref(2))], [2, 3]),
        (False, True),
    ),
    "a bias as it came": (local([(4, 4), (4, 4)], [(aten.add.Tensor, X, W)], [2]), (False, True)),
    "attention": (
        local(
            [(2, 2, 3, 4), (4, 4)],
            [(aten.linear.default, X, W), (aten.scaled_dot_product_attention.default, Ref(2), X, X)],
            [3],
        ),
        (False, True),
    ),
    "two come in": (
        local([(4, 3), (6, 3), (4, 6)], [(aten.linear.default, X, W), (aten.mul.Tensor, Ref(3), C)], [4]),
        (False, True, False),
    ),
}


def given(of: Local) -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(spec.shape, dtype=F64, generator=draw) for spec in of.inputs]
    return inputs, [torch.randn(of.makes[at].shape, dtype=F64, generator=draw) for at in of.returns]


def halves(of: Local, weights: tuple[bool, ...], backend: Backend) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients whole, and by halves, in the order of the inputs."""
    made = compiled(of, backend, weights)
    assert (made.backend, made.reason) == (backend, "")
    assert made.backward is not None
    assert made.apart is not None
    inputs, cotangents = given(of)
    with torch.no_grad():
        saved = made.forward(*inputs)[-1]
        parts = [[saved[n] for n in kept] for kept in made.apart.saved]
        taken = [[inputs[n] for n in numbers] for numbers in made.apart.again]
        *into, rest = made.apart.first(*parts[0], *taken[0], *cotangents)
        theirs = made.apart.second(*parts[1], *taken[1], *rest)
        saved = made.forward(*inputs)[-1]
        whole = made.backward(*saved, *(inputs[n] for n in made.again), *cotangents)
    first, second = iter(into), iter(theirs)
    return list(whole), [next(second if weight else first) for weight in weights]


@pytest.mark.parametrize("backend", ["code", "autograd"])
@pytest.mark.parametrize("name", SEGMENTS)
def test_halves_make_what_the_whole_makes(name: str, backend: Backend) -> None:
    whole, parts = halves(*SEGMENTS[name], backend)
    assert all(torch.equal(mine, one) for mine, one in zip(parts, whole, strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("name", SEGMENTS)
def test_halves_by_inductor(name: str) -> None:
    from torch._inductor import config

    with config.patch(compile_threads=1):  # else it leaves threads running
        whole, parts = halves(*SEGMENTS[name], "inductor")
    for mine, one in zip(parts, whole, strict=True):
        torch.testing.assert_close(mine, one)  # other kernels add in another order


def targets(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_products_with_weights_are_first_and_those_for_weights_second() -> None:
    """What takes long is done once: a product for the input's gradient, and one for the weight's."""
    of, weights = SEGMENTS["linear"]
    both = apart(trace(of), weights)
    assert [sum("mm" in name for name in targets(half)) for half in (both.first, both.second)] == [1, 1]


def test_nothing_is_computed_in_both_halves() -> None:
    of, weights = SEGMENTS["two linears"]
    made = trace(of)
    both = apart(made, weights)
    assert made.backward is not None
    views = ("getitem", "aten.t.", "aten.view", "aten.transpose", "aten.detach")
    whole, first, second = (
        [name for name in targets(graph) if not any(view in name for view in views)]
        for graph in (made.backward, both.first, both.second)
    )
    assert sorted(first + second) == sorted(whole)


def test_the_first_half_keeps_only_what_the_second_needs() -> None:
    of, weights = SEGMENTS["two linears"]
    both = apart(trace(of), weights)
    taken = len([node for node in both.second.graph.nodes if node.op == "placeholder"])
    used = {node for node in both.second.graph.nodes if node.op == "placeholder" and node.users}
    assert len(used) == taken


def test_a_gradient_that_both_halves_hold_is_not_the_weights_own() -> None:
    """The gradient of x + w is the same tensor for both, and so may not be added to in place."""
    of, weights = SEGMENTS["a bias as it came"]
    assert apart(trace(of), weights).owns == (False,)
