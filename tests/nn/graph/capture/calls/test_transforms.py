"""Transforms of torch.func, forward-mode differentiation and `torch.autograd.grad` inside of a captured step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement.errors import SbpError
from tests.nn.graph.same import Of, ops_of, same, traced

# Forward-mode differentiation loads torch's own decompositions, by torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")

X = torch.randn(4, 4, dtype=torch.float64)


def net(s: Any, x: Tensor) -> Any:
    return torch.tanh(x @ s.w).softmax(-1) * x


def by_argument(s: Any, x: Tensor) -> Any:
    return grad(lambda x: net(s, x).square().sum())(x).sin().sum()


def by_weight(s: Any, x: Tensor) -> Any:
    made, value = grad_and_value(lambda w: (torch.tanh(x @ w) ** 3).sum())(s.w)
    return made.square().sum() + value


def pulled(s: Any, x: Tensor) -> Any:
    out, pull = vjp(  # type: ignore[misc]
        lambda x, w: torch.tanh(x @ w), x, s.w
    )
    dx, dw = pull(out.exp())
    return (out + dx).square().sum() + dw.sin().sum()


def pushed(s: Any, x: Tensor) -> Any:
    out, tangent = jvp(lambda x: net(s, x), (x,), (x.cos(),))  # type: ignore[misc]
    return (out * tangent).sum()


def per_sample(s: Any, x: Tensor) -> Any:
    norms = (
        vmap(grad(lambda w, row: (torch.tanh(row @ w) ** 2).sum()), in_dims=(None, 0))(s.w, x).flatten(1).norm(dim=1)
    )
    return norms.square().sum()


def jacobians(s: Any, x: Tensor) -> Any:
    return (vmap(jacrev(lambda row: net(s, row)))(x) - 2 * vmap(jacfwd(lambda row: net(s, row)))(x)).sin().sum()


def curved(s: Any, x: Tensor) -> Any:
    forward = vmap(hessian(lambda row: torch.tanh(row @ s.w).sum()))(x)
    return (forward + vmap(jacrev(jacrev(lambda row: net(s, row).sum())))(x)).sin().sum()


def ensemble(s: Any, x: Tensor) -> Any:
    return vmap(lambda w: torch.tanh(x @ w), out_dims=1)(torch.stack([s.w, s.w * 2, s.w.t()])).sin().sum()


def in_place(s: Any, x: Tensor) -> Any:
    def row(a: Tensor) -> Tensor:
        made: Tensor = a.clone() @ s.w
        made[0] = 1.0
        made += a
        return made.relu_()

    return vmap(row)(x).sin().sum()


def detached(s: Any, x: Tensor) -> Any:
    y = vmap(lambda a: (a @ s.w).detach() * a @ s.w)(x)
    with torch.no_grad():
        y = y + vmap(lambda a: a @ s.w)(x)
    return y.sin().sum()


def chunked(s: Any, x: Tensor) -> Any:
    return vmap(lambda a, b: torch.outer(a @ s.w, b).sum(0), in_dims=(1, 0), chunk_size=3)(x, x).sin().sum()


def attended(s: Any, x: Tensor) -> Any:
    i = torch.arange(4)
    mask = vmap(vmap(lambda q, k: (q >= k) & (q - k < 3), in_dims=(None, 0)), in_dims=(0, None))(i, i)
    return F.scaled_dot_product_attention((x @ s.w)[None], x[None], x[None], attn_mask=mask[None]).sin().sum()


def forward_mode(s: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        dual: Any = forward_ad
        out = dual.unpack_dual(torch.tanh(dual.make_dual(x, x.sin()) @ s.w))
        assert out.tangent is not None
        return (out.primal * out.tangent).sum()


def physics(s: Any, x: Tensor) -> Any:
    """A loss of first and second derivatives by a coordinate."""
    x = x.detach().requires_grad_()
    u = net(s, x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
    return (ddu[:, 0] + du[:, 1] - u[:, 0]).square().mean()


def penalty(s: Any, x: Tensor) -> Any:
    loss = net(s, x).square().mean()
    (of,) = torch.autograd.grad(loss, [s.w], create_graph=True)
    return loss + of.square().sum()


def by_the_weight(s: Any, x: Tensor) -> Any:
    y = x @ s.w
    (dw,) = torch.autograd.grad([y.sin(), y.sum()], [s.w], [x, torch.tensor(2.0)], retain_graph=True)
    (other,) = torch.autograd.grad(y.sum(), [s.w], retain_graph=True)
    return (y * dw).sum() + other.sum()


def jacobian(s: Any, x: Tensor) -> Any:
    of: Any = torch.autograd.functional.jacobian
    return of(lambda row: torch.tanh(row @ s.w), x[0], create_graph=True).sin().sum()


CASES = [
    by_argument, by_weight, pulled, pushed, per_sample, jacobians, curved, ensemble, in_place, detached, chunked,
    attended, forward_mode, physics, penalty, by_the_weight, jacobian,
]  # fmt: skip


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_a_step_with_derivatives_and_batches_is_that_of_torch(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    same(Of(function).double(), X, atol=1e-9)


def test_no_wrapper_is_left_in_the_graph_and_a_batched_product_is_one_op() -> None:
    logical = same(Of(lambda s, x: vmap(lambda a: a @ s.w)(x).sum()).double(), X)
    assert [op for op in ops_of(logical) if op in ("mm", "matmul", "mv", "bmm")] == ["mm"]
    assert len(logical.ops) < 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def test_derivatives_go_through_layers_that_were_not_traced() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            x = y = x.detach().requires_grad_()
            for layer in self.layers:
                y = layer(y)
            return torch.autograd.grad(y.sum(), x, create_graph=True)[0].square().sum() + y.sum()

    same(Deep().double(), X, atol=1e-9)


def test_an_ensemble_of_modules_by_functional_call() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.models = nn.ModuleList([Layer() for _ in range(3)])

        def forward(self, x: Tensor) -> Any:
            weights, buffers = stack_module_state([*self.models])

            def run(w: Any, b: Any) -> Any:
                return functional_call(self.models[0], (w, b), (x,))

            made: Any = vmap(run)
            return made({n: w * 1 for n, w in weights.items()}, buffers).square().sum() + self.models[1](x).sum()

    traced(Many().double(), X)


def dropped(s: Any, x: Tensor) -> Any:
    return torch.autograd.grad(F.dropout(x @ s.w).sum(), s.w, create_graph=True)[0].sum()


def one_of_another(s: Any, x: Tensor) -> Any:
    y = x @ s.w
    return torch.autograd.grad(y.sin().sum(), [s.w, y], create_graph=True)[0].sum()


def of_zeros(s: Any, x: Tensor) -> Any:
    return vmap(hessian(lambda row: net(s, row).sum()))(x).sum()


def normed(s: Any, x: Tensor) -> Any:
    return grad(lambda x: F.batch_norm(x, s.mean, s.var, training=True).sin().sum())(x @ s.w).sum()


REFUSED = [(dropped, "random"), (one_of_another, "each of them"), (of_zeros, "jacrev"), (normed, "statistics")]


@pytest.mark.parametrize(("function", "words"), REFUSED)
def test_a_derivative_that_could_be_wrong_is_refused_with_its_line(function: Callable[..., Any], words: str) -> None:
    model = Of(function, mean=torch.zeros(4), var=torch.ones(4)).double()
    with pytest.raises(SbpError, match=r"test_transforms\.py") as caught:
        traced(model, X)
    assert words in str(caught.value)


def unneeded(s: Any, x: Tensor) -> Any:
    return torch.autograd.grad((x @ s.w).sum(), [x.clone().requires_grad_()])[0].sum()


def test_an_input_that_nothing_depends_on_is_an_error_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match="allow_unused"):
        traced(Of(unneeded).double(), X)


@pytest.mark.parametrize("function", [per_sample, physics, curved], ids=lambda f: f.__name__)
def test_a_step_on_ranks_trains_as_one_device(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    p = flow.placement("cpu", range(2))
    one, other = Of(function).double(), Of(function).double()
    other.load_state_dict(one.state_dict())
    flow.nn.shard(other, {"w": S(1) if function is per_sample else B})
    adams = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    step = flow.compile(other, lambda model, x: model(x), adams[1], placement=p, inputs={"x": S(0)})
    for k in range(3):
        loss = one(X + k)
        adams[0].zero_grad()
        loss.backward()
        adams[0].step()
        torch.testing.assert_close(step(X + k).full_tensor(), loss.detach())
    made: Any = other.w
    torch.testing.assert_close(made.full_tensor().detach(), one.w.detach())
