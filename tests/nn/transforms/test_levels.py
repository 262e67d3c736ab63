"""Transforms of torch.func, and forward-mode differentiation, of global tensors: values and gradients of one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.placement.errors import SbpError
from sbpflow.sbp import SbpLike
from sbpflow.sbp.call import tensors_in
from tests.ranks import Ranks

# Forward-mode differentiation loads torch's own decompositions, by torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")

LINE = flow.placement("cpu", range(4))
X, W = torch.randn(5, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)


def net(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).softmax(-1)


def per_sample(w: Tensor, x: Tensor) -> Any:
    return vmap(grad(lambda w, row: (torch.tanh(row @ w) ** 2).sum()), in_dims=(None, 0))(w, x)


def by_both(w: Tensor, x: Tensor) -> Any:
    return grad_and_value(lambda w, x: net(x, w).square().sum(), argnums=(0, 1))(w, x)


def pulled(w: Tensor, x: Tensor) -> Any:
    out, pull = vjp(net, x, w)  # type: ignore[misc]
    return out, pull(out.exp())


def pushed(w: Tensor, x: Tensor) -> Any:
    return jvp(lambda w, x: net(x, w), (w, x), (w.cos(), x.sin()))


def of_rows(w: Tensor, x: Tensor) -> Any:
    return vmap(jacrev(lambda row: net(row, w)))(x), vmap(jacfwd(lambda row: net(row, w)))(x)


def curved(w: Tensor, x: Tensor) -> Any:
    return hessian(lambda w: (torch.tanh(x @ w) ** 3).sum())(w)


def curved_along(w: Tensor, x: Tensor) -> Any:
    slope = grad(lambda w: (torch.tanh(x @ w) ** 3).sum())
    return jvp(slope, (w,), (w.cos(),)), vjp(slope, w)[1](w.cos())


def nested(w: Tensor, x: Tensor) -> Any:
    return vmap(vmap(lambda a, b: a * b + a.sin(), in_dims=(None, 0)), in_dims=(0, None), out_dims=1)(x[:, 0], w[:, 1])


def in_place(w: Tensor, x: Tensor) -> Any:
    def row(a: Tensor) -> Tensor:
        made: Tensor = a.clone() @ w
        made[0] = 1.0
        made += a[:3]
        return made.relu_()

    return vmap(row)(x)


def stopped(w: Tensor, x: Tensor) -> Any:
    def outer(x: Tensor) -> Tensor:
        with torch.no_grad():
            z = w * 2  # no gradient by x; by w there is one, from outside
        return (x @ z).sin().sum()

    return grad(outer)(x), vmap(lambda a: (a @ w).detach() * (a @ w))(x)


def chunked(w: Tensor, x: Tensor) -> Any:
    return vmap(lambda a, b: torch.outer(a @ w, b).sum(0), chunk_size=2)(x, x)


def forward_mode(w: Tensor, x: Tensor) -> Any:
    with forward_ad.dual_level():
        dual: Any = forward_ad
        return tuple(dual.unpack_dual(torch.tanh(dual.make_dual(x, x.sin()) @ w)))


def from_elsewhere(w: Tensor, x: Tensor) -> Any:
    return vmap(lambda i: w[i] * 2)(torch.arange(3)), vmap(lambda row: row[torch.tensor([2, 0])].cumsum(0))(x)


def losses(w: Tensor, x: Tensor) -> Any:
    return vmap(grad(lambda w, row: F.cross_entropy(row @ w, torch.tensor(1))), in_dims=(None, 0))(w, x)


def batched(w: Tensor, x: Tensor) -> Any:
    y, several = torch.tanh(x @ w), torch.stack([torch.ones(3), torch.arange(3)]).double()[:, None] * x[:, :1]
    return torch.autograd.grad(y, w, several, create_graph=True, is_grads_batched=True)


class Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 2 * ctx.saved_tensors[0]


def own_backward(w: Tensor, x: Tensor) -> Any:
    square: Any = Square.apply
    rows = vmap(grad(lambda row: square(row @ w).pow(2).sum()))(x)
    return rows, grad(lambda x: square(square(w)).sum() * square(x).sum())(x)


CASES = [
    per_sample, by_both, pulled, pushed, of_rows, curved, curved_along, nested, in_place, stopped, chunked,
    forward_mode, from_elsewhere, losses, batched, own_backward,
]  # fmt: skip
LAYOUTS: list[tuple[SbpLike, SbpLike]] = [(S(0), B), (S(1), S(0)), (B, S(1)), (P, P)]


def laid(whole: Tensor, sbp: SbpLike) -> Any:
    made = flow.tensor(whole, placement=LINE, sbp=B if sbp is P else sbp)
    return made.to_global(sbp=sbp).detach().requires_grad_()


def same(function: Callable[..., Any], x: Tensor, over: tuple[SbpLike, SbpLike]) -> None:
    plain = W.clone().requires_grad_(), x.clone().requires_grad_()
    spread = laid(W, over[1]), laid(x, over[0])
    wanted: Any
    found: Any
    wanted, found = (tensors_in(function(*each)) for each in (plain, spread))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-9, atol=1e-9)
        assert isinstance(a, flow.GlobalTensor)
        assert a.requires_grad == b.requires_grad
    for each in (found, wanted):
        sum(y.square().sum() for y in each if y.requires_grad).backward()
    for a, b in zip(spread, plain, strict=True):
        torch.testing.assert_close(None if a.grad is None else a.grad.full_tensor(), b.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("over", LAYOUTS, ids=str)
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_a_transform_and_its_gradients_are_those_of_one_device(
    function: Callable[..., Any], over: tuple[SbpLike, SbpLike]
) -> None:
    same(function, X, over)


@pytest.mark.parametrize("function", [per_sample, of_rows, curved_along], ids=lambda f: f.__name__)
def test_ranks_without_rows(function: Callable[..., Any]) -> None:
    same(function, X[:1], (S(0), S(1)))


def test_gradients_of_samples_stay_where_the_samples_are() -> None:
    w, x = laid(W, B), laid(X, S(0))
    with flow.record() as moves:
        made = per_sample(w, x)
    assert made.sbp == (S(0),)
    assert not list(moves)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def model_and_rows() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    plain = mlp()
    spread = mlp()
    spread.load_state_dict(plain.state_dict())
    return plain, spread, torch.randn(6, 4, dtype=torch.float64)


def of_model(model: nn.Module, x: Any) -> dict[str, Any]:
    def loss(weights: Any, row: Tensor) -> Tensor:
        return functional_call(model, weights, (row,)).square().sum()  # type: ignore[no-any-return]

    weights = {name: w.detach() for name, w in model.named_parameters()}
    tangents = {name: w.cos() for name, w in weights.items()}

    def out(weights: Any) -> Any:
        return functional_call(model, weights, (x,))

    ahead: Any = jvp(out, (weights,), (tangents,))[1]
    slope: Any = grad(loss)
    curve: Any = jvp(lambda w: slope(w, x), (weights,), (tangents,))[1]
    each = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    return {"ahead": ahead, **curve, **{f"each {name}": g for name, g in each.items()}}


def on_ranks() -> dict[str, Tensor]:
    """Of real ranks: weights split, rows split."""
    _, spread, rows = model_and_rows()
    flow.nn.shard(spread, {"*.weight": S(0)})
    model = flow.nn.to_global(spread, placement=LINE)
    made = of_model(model, flow.tensor(rows, placement=LINE, sbp=S(0)))
    assert all(g.sbp == (S(0),) for name, g in made.items() if name.startswith("each"))
    return {name: g.full_tensor() for name, g in made.items()}


def check(found: dict[str, Tensor]) -> None:
    plain, _, rows = model_and_rows()
    for name, wanted in of_model(plain, rows).items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-9, atol=1e-9)


def test_a_model_by_functional_call() -> None:
    check(on_ranks())


def test_a_model_on_real_ranks(ranks4: Ranks) -> None:
    for found in ranks4(on_ranks):
        check(found)


def test_an_ensemble_of_models() -> None:
    plain, _, rows = model_and_rows()
    models = [flow.nn.to_global(mlp(), placement=LINE) for _ in range(2)]
    for model in models:
        model.load_state_dict(plain.state_dict())
    weights, _ = stack_module_state(models)
    made: Any = vmap(lambda w: functional_call(models[0], w, (flow.tensor(rows, placement=LINE, sbp=S(0)),)))(weights)
    torch.testing.assert_close(made.full_tensor(), torch.stack([plain(rows)] * 2))


def test_random_numbers_are_drawn_as_vmap_says() -> None:
    x = laid(torch.ones(8, 50), S(0))
    alike: Any = vmap(lambda a: F.dropout(torch.ones_like(a)), randomness="same")(x)
    unlike: Any = vmap(F.dropout, randomness="different")(x)
    same_ones, others = alike.full_tensor(), unlike.full_tensor()
    assert torch.equal(same_ones, same_ones[:1].expand(8, 50))
    assert not torch.equal(others[0], others[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(F.dropout)(x)


def written(x: Tensor) -> Tensor:
    plain = torch.zeros(3, dtype=x.dtype)
    plain[0] = x.sum()
    return plain.sum()


def test_what_is_written_to_is_made_of_a_global_tensor() -> None:
    x = laid(X, S(0))
    with pytest.raises(SbpError, match=r"(?s)test_levels\.py.*new_zeros"):
        grad(written)(x)

    def fixed(x: Tensor) -> Tensor:
        made = x.new_zeros(3)
        made[0] = x.sum()
        return made.sum()

    assert torch.equal(grad(fixed)(x).full_tensor(), torch.ones_like(X))


JACOBIAN: Any = torch.autograd.functional.jacobian
REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: linearize(torch.tanh, x), "torch.func.jvp"),
    (lambda x: functionalize(torch.tanh)(x), r"test_levels\.py"),
    (
        lambda x: JACOBIAN(torch.tanh, x, vectorize=True, strategy="forward-mode"),
        "torch.func.jacfwd",
    ),
    (lambda x: vmap(lambda a: flow.tensor(a, placement=LINE, sbp=B))(torch.ones(2, 2)), "before"),
]


@pytest.mark.parametrize(("function", "words"), REFUSED)
def test_what_is_not_for_global_tensors_says_so(function: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(SbpError, match=words):
        function(laid(X, S(0)))


def test_a_tensor_that_outlives_its_level_is_global_again() -> None:
    x, w = laid(X, S(0)), laid(W, B)
    dual: Any = forward_ad
    with dual.dual_level():
        y = torch.tanh(dual.make_dual(x, x) @ w)
        assert repr(y).startswith("tensor(")
    for made in (y * w.sum(), w.sum() * y, y + 1):
        assert isinstance(made, flow.GlobalTensor)


def test_nothing_is_asked_of_global_tensors_once_levels_are_closed() -> None:
    before = vars(flow.GlobalTensor)["__torch_function__"]
    with pytest.raises(ZeroDivisionError):
        grad(lambda x: x.sum() / 0 + 1 / 0)(laid(X, S(0)))
    with pytest.raises(ZeroDivisionError):
        vmap(lambda x: 1 / 0)(X)
    assert vars(flow.GlobalTensor)["__torch_function__"] is before
