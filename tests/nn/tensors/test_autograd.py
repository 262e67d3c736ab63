"""Autograd on global tensors: hooks, modes, gradients of gradients and recomputation as on one tensor."""

# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.placement.errors import SbpError
from tests.nn.either import Maker, X, Y, differs
from tests.ranks import Ranks

LAWS: dict[str, Callable[[Maker], Any]] = {}


def law(function: Callable[[Maker], Any]) -> Callable[[Maker], Any]:
    LAWS[function.__name__.replace("_", " ")] = function
    return function


def weights(make: Maker) -> list[Tensor]:
    one, two = torch.linspace(-1, 1, 30, dtype=torch.float64), torch.linspace(0, 2, 10, dtype=torch.float64)
    return [make(one.reshape(6, 5).sin(), True), make(two.reshape(5, 2).cos(), True)]


def run(x: Tensor, w: list[Tensor]) -> Tensor:
    return torch.tanh(torch.tanh(x @ w[0]) @ w[1])


def grads(w: list[Tensor]) -> list[Any]:
    return [x.grad for x in w]


@law
def gradients_add_up_over_two_passes(make: Maker) -> Any:
    w = weights(make)
    run(make(X), w).sum().backward()
    run(make(X), w).pow(2).sum().backward()
    return grads(w)


@law
def a_kept_graph_runs_twice(make: Maker) -> Any:
    w = weights(make)
    loss = run(make(X), w).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(w)


@law
def a_graph_that_was_not_kept_runs_once(make: Maker) -> Any:
    loss = run(make(X), weights(make)).sum()
    loss.backward()
    loss.backward()


@law
def inputs_of_backward_are_the_only_ones_filled(make: Maker) -> Any:
    w = weights(make)
    run(make(X), w).sum().backward(inputs=[w[1]])
    return grads(w)


@law
def grad_calls_the_hooks_of_its_inputs(make: Maker) -> Any:
    w = weights(make)
    w[0].register_hook(lambda g: g * 2)
    y = run(make(X), w) * 1
    y.register_hook(lambda g: g * 3)
    z = y.pow(2).sum()
    z.backward(inputs=[y], retain_graph=True)
    return torch.autograd.grad(z, w, retain_graph=True), torch.autograd.grad(z, y), y.grad


@law
def a_retained_gradient_is_what_hooks_made_of_it(make: Maker) -> Any:
    seen = []
    for late in (False, True):
        y = run(make(X), weights(make)) * 1
        if late:
            y.retain_grad()
        y.register_hook(lambda g: g * 3)
        y.retain_grad()
        y.pow(2).sum().backward()
        seen += [y.grad, y.retains_grad]
    return seen


@law
def a_deviation_of_zero_has_no_slope(make: Maker) -> Any:
    x = make(X, True)
    flat = x * 0 + 1
    (flat.std(0).sum() + flat.std(1, unbiased=False).sum() + flat.std()).backward()
    return x.grad


@law
def a_cotangent_may_be_plain(make: Maker) -> Any:
    w = weights(make)
    run(make(X), w).backward(torch.ones(4, 2, dtype=torch.float64) * 2)
    return grads(w)


@law
def many_outputs_need_a_cotangent(make: Maker) -> Any:
    run(make(X), weights(make)).backward()


@law
def hooks_see_and_replace_gradients_until_removed(make: Maker) -> Any:
    w, seen = weights(make), []
    w[0].register_hook(lambda g: seen.append(g.sum().item()))
    handle = w[1].register_hook(lambda g: g * 2)
    run(make(X), w).sum().backward()
    handle.remove()
    run(make(X), w).sum().backward()
    return grads(w), seen


@law
def hooks_inside_replace_gradients(make: Maker) -> Any:
    w = weights(make)
    a = make(X) @ w[0]
    a.register_hook(lambda g: g * 3)
    b = torch.tanh(a) @ w[1]
    b.retain_grad()
    b.sum().backward()
    return grads(w), b.grad, b.retains_grad


@law
def hooks_after_accumulation_may_drop_the_gradient(make: Maker) -> Any:
    w, seen = weights(make), []

    def drop(x: Tensor) -> None:
        assert x.grad is not None
        seen.append(x.grad.sum().item())
        x.grad = None

    handle = w[0].register_post_accumulate_grad_hook(drop)
    run(make(X), w).sum().backward()
    dropped = w[0].grad is None
    handle.remove()
    run(make(X), w).sum().backward()
    return dropped, seen, grads(w)


@law
def grad_of_leaves_and_of_what_is_inside(make: Maker) -> Any:
    w = weights(make)
    a = torch.tanh(make(X) @ w[0])
    return torch.autograd.grad((a @ w[1]).sum(), [a, *w]), grads(w)


@law
def grad_of_what_was_not_used_is_an_error(make: Maker) -> Any:
    w = weights(make)
    torch.autograd.grad((make(X) @ w[0]).sum(), w)


@law
def grad_of_what_was_not_used_may_be_none_or_zeros(make: Maker) -> Any:
    w = weights(make)
    ways: list[dict[str, Any]] = [{"allow_unused": True}, {"materialize_grads": True}]
    return [torch.autograd.grad((make(X) @ w[0]).sum(), w, **way) for way in ways]


@law
def grad_outputs_may_be_global_or_plain(make: Maker) -> Any:
    w, ones = weights(make), torch.ones(4, 2, dtype=torch.float64)
    return [torch.autograd.grad(run(make(X), w), w, given) for given in (make(ones), ones * 3)]


@law
def a_gradient_penalty(make: Maker) -> Any:
    w, x = weights(make), make(X, True)
    (slope,) = torch.autograd.grad(run(x, w).sum(), x, create_graph=True)
    ((slope.norm(dim=1) - 1) ** 2).mean().backward()
    return x.grad, grads(w)


@law
def gradients_of_gradients(make: Maker) -> Any:
    w, x = weights(make), make(X, True)
    first = torch.autograd.grad(run(x, w).sum(), [x, *w], create_graph=True)
    return first, torch.autograd.grad(sum((g * g).sum() for g in first), [x, *w])  # type: ignore[arg-type]


@law
def gradients_of_gradients_of_a_norm(make: Maker) -> Any:
    x, w = make(X, True), make(torch.linspace(1, 2, 6, dtype=torch.float64), True)
    first = torch.autograd.grad(F.layer_norm(x, (6,), w).pow(3).sum(), [x, w], create_graph=True)
    return torch.autograd.grad(sum((g * g).sum() for g in first), [x, w])  # type: ignore[arg-type]


@law
def third_derivatives(make: Maker) -> Any:
    x = make(X, True)
    y = x.tanh().sum()
    for _ in range(3):
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        y = g.sum()
    return g


@law
def jacobian(make: Maker) -> Any:
    return torch.autograd.functional.jacobian(lambda v: v.tanh() * v.sum(), make(X[0]))


@law
def hessian(make: Maker) -> Any:
    return torch.autograd.functional.hessian(lambda v: (v.tanh() * v).sum(), make(X[0]))


@law
def saved_tensors_may_be_packed(make: Maker) -> Any:
    x, packed = make(X, True), []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = (x.exp() * x).sum()
    y.backward()
    return bool(packed), x.grad


@law
def anomalies_are_found(make: Maker) -> Any:
    with torch.autograd.detect_anomaly():
        (make(-Y.abs() - 1, True).sqrt().sum() * 0).backward()


@law
def modes_decide_what_requires_grad(make: Maker) -> Any:
    x = make(X, True)
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = x * 3
    with torch.set_grad_enabled(False):
        c = x * 1
    return a, b, c


@law
def inference_mode_makes_tensors_that_can_be_read_outside(make: Maker) -> Any:
    with torch.inference_mode():
        x = make(X)
        y = x * 2
    w = make(Y, True)
    (w * y.clone()).sum().backward()
    return x + 1, x.is_inference(), y.is_inference(), w.grad


@law
def data_is_replaced_and_the_gradient_stays(make: Maker) -> Any:
    x = make(X, True)
    (x * x).sum().backward()
    x.data = x.data * 2
    (x * x).sum().backward()
    return x, x.grad, x.is_leaf


@law
def requires_grad_goes_off_and_on(make: Maker) -> Any:
    x = make(X, True)
    (x * x).sum().backward()
    x.requires_grad_(False)
    kept, off = x.grad, x * 2
    x.requires_grad = True
    (x * 2).sum().backward()
    return off, x.grad, kept is None


@law
def a_gradient_is_set_zeroed_and_deleted(make: Maker) -> Any:
    x = make(X, True)
    x.grad = make(Y)
    (x * x).sum().backward()
    one = x.grad.clone()
    x.grad.zero_()
    (x * x).sum().backward()
    two = x.grad.clone()
    del x.grad
    return one, two, x.grad


@law
def a_gradient_of_another_dtype_is_refused(make: Maker) -> Any:
    make(X, True).grad = make(Y.float())


@law
def numbers_that_are_counted_have_no_gradient(make: Maker) -> Any:
    make(torch.tensor([1, 2])).requires_grad_()


@pytest.mark.parametrize("name", LAWS)
def test_autograd_is_that_of_one_tensor(name: str) -> None:
    assert not differs(LAWS[name])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_with_dropout_drops_the_same(reentrant: bool) -> None:
    def recompute(make: Maker) -> Any:
        w, x = weights(make), make(X, True)
        y = checkpoint(lambda a: F.dropout(torch.tanh(a @ w[0]), 0.4) @ w[1], x, use_reentrant=reentrant)
        y.pow(2).sum().backward()
        return y, x.grad, grads(w)

    assert not differs(recompute)


@pytest.mark.parametrize("deep", [1, 2])
@pytest.mark.parametrize(("outer", "inner"), [(False, False), (False, True), (True, False), (True, True)])
def test_recomputing_inside_of_recomputing_is_that_of_one_tensor(outer: bool, inner: bool, deep: int) -> None:
    """The inner one's arguments were saved as shells: 12 tensors saved in forward, none in recomputation."""

    def recompute(make: Maker) -> Any:
        w, x = weights(make), make(X, True)

        def step(a: Tensor, left: int = deep) -> Any:
            if left == 0:
                return F.dropout(torch.tanh(a @ w[0]), 0.4) @ w[1]
            return checkpoint(step, a * 2, left - 1, use_reentrant=inner).sin()

        y = checkpoint(step, x, use_reentrant=outer)
        y.pow(2).sum().backward()
        return y, x.grad, grads(w)

    assert not differs(recompute)


CAST = """
x@y.T | x+1 | F.linear(x,y) | F.softmax(x@y.T,-1) | F.layer_norm(x,(6,)) | x.sum() | (x@y.T).exp()
torch.cat([x,x@y.T],1)
x.bfloat16()+x | torch.bmm(x[None],y.T[None]) | F.gelu(x@y.T) | (x@y.T).norm() | F.mse_loss(x@y.T,x@y.T)
""".replace("\n", "|")


@pytest.mark.parametrize("said", [e.strip() for e in CAST.split("|") if e.strip()])
def test_autocast_gives_the_dtypes_of_one_tensor(said: str) -> None:
    def cast(make: Maker) -> Any:
        x, y = make(X.float(), True), make(Y.float(), True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = eval(said, {"x": x, "y": y, "F": F, "torch": torch})
        out.float().sum().backward()
        assert x.grad is not None
        return str(out.dtype), str(x.grad.dtype), tuple(out.shape)

    assert not differs(cast)


@pytest.mark.parametrize("sbp", [(S(0), S(0)), (P, S(1)), (S(1), P), (B, S(0)), (S(0), B)], ids=str)
def test_axes_of_one_rank_lose_no_gradient(sbp: Any) -> None:
    x = flow.tensor(X, placement=flow.placement("cpu", [[0, 1]]), sbp=sbp, requires_grad=True)
    (x.sort(0)[0] * x.cumsum(1) @ x.to_global(sbp=B).T).sum().backward()
    plain = X.clone().requires_grad_()
    (plain.sort(0)[0] * plain.cumsum(1) @ plain.T).sum().backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.allclose(x.grad.full_tensor(), plain.grad)


def test_a_hook_that_would_not_hear_all_of_a_gradient_is_refused() -> None:
    y = Maker("S(0)")(X, True) * 1
    z = y.exp()
    y.register_hook(lambda g: g * 2)
    with pytest.raises(SbpError, match="right after x is made"):
        (z + y).sum().backward()


@pytest.mark.parametrize("sbp", [B, P, S(0), S(1)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_on_a_part_of_what_was_written_to_since_does_not_crash(ranks: int, sbp: Any) -> None:
    x = flow.tensor(X, placement=flow.placement("cpu", range(ranks)), sbp=sbp, requires_grad=True)
    y = x * 1
    part = y[0]
    y.mul_(2)
    part.register_hook(lambda g: g * 3)  # of one tensor this takes the process down, as of torch 2.13
    part.sum().backward()
    assert x.grad is not None
    assert x.grad.full_tensor().sum() == x.grad.full_tensor()[0].sum() == 6 * X.shape[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_that_was_refused_once_is_refused_again(ranks: int) -> None:
    x = flow.tensor(X, placement=flow.placement("cpu", range(ranks)), sbp=S(0), requires_grad=True)
    y = x * 1
    part = y.unbind(1)[0]
    y.mul_(2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="function that returns multiple views"):
            part.register_hook(lambda g: g * 2)


def moved() -> tuple[flow.GlobalTensor, flow.GlobalTensor]:
    x = flow.tensor(X, placement=flow.placement("cpu", [0, 1]), sbp=S(1), requires_grad=True)
    return x, x.to_global(sbp=B)


def test_a_gradient_that_was_asked_for_after_a_move_adds_up_and_hears_what_came_before() -> None:
    _, y = moved()
    loss = y.square().sum()
    y.retain_grad()
    y.retain_grad()
    for _ in range(2):
        (loss + y.sum()).backward(retain_graph=True)
    assert y.grad is not None
    assert torch.allclose(y.grad.full_tensor(), 2 * (2 * X + 1))


def test_what_was_moved_may_be_written_to_after_its_gradient_was_asked_for() -> None:
    x, y = moved()
    y.retain_grad()
    y.mul_(2)  # torch's own request has it fail with INTERNAL ASSERT FAILED
    y.sum().backward(retain_graph=True)
    assert x.grad is not None
    assert torch.equal(x.grad.full_tensor(), torch.full_like(X, 2))
    with pytest.raises(SbpError, match="after the last write"):
        y.grad  # noqa: B018
    y.retain_grad()
    y.sum().backward()
    assert y.grad is not None
    assert torch.equal(y.grad.full_tensor(), torch.ones_like(X))


class Cube(torch.autograd.Function):
    """x ** 3 times a number, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.k = k
        return x**3 * k

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 3 * x * x * g * ctx.k, None


def cubed(make: Maker) -> Any:
    x = make(X, True)
    y: Any = Cube.apply(x, 2)
    (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    return y, g, torch.autograd.grad((g * g).sum(), x)


def test_a_function_without_a_rule_is_gathered_and_right() -> None:
    with flow.record() as moves:
        assert not differs(cubed)
    assert moves.bytes


def test_a_plain_parameter_of_a_global_tensor_is_a_parameter() -> None:
    def parameter(make: Maker) -> Any:
        p = nn.Parameter(make(X))
        (p * p).sum().backward()
        return isinstance(p, nn.Parameter), p.is_leaf, p, p.grad

    assert not differs(parameter)


def from_a_maximum() -> tuple[Tensor, Tensor]:
    """Backward from a root of which every rank has another maximum, by a gradient that lies as its dual."""
    p = flow.placement("cpu", range(4))
    x = flow.tensor(torch.arange(24.0).reshape(8, 3).sin(), placement=p, sbp=S(0), requires_grad=True)
    y = x.amax(0)
    assert isinstance(y, flow.GlobalTensor)
    assert y.sbp == (P("max"),)
    g = flow.tensor(torch.tensor([1.0, 2.0, 3.0]), placement=p, sbp=B).to_global(sbp=P)
    y.backward(g)
    assert isinstance(x.grad, flow.GlobalTensor)
    plain = torch.arange(24.0).reshape(8, 3).sin().requires_grad_()
    plain.amax(0).backward(torch.tensor([1.0, 2.0, 3.0]))
    assert plain.grad is not None
    return x.grad.full_tensor(), plain.grad


def test_backward_from_a_maximum_over_ranks_reaches_its_holders_only(ranks4: Ranks) -> None:
    for mine, plain in [*ranks4(from_a_maximum), from_a_maximum()]:
        assert torch.equal(mine, plain)


class Clipped(torch.autograd.Function):
    """Nothing, but for the gradient, which is kept within 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-1, 1)


@pytest.mark.parametrize("ruled", [False, True], ids=["gathered", "by a rule"])
def test_a_function_that_clips_gradients_clips_the_sum_not_each_ranks_addend(ruled: bool) -> None:
    kind = type("Clipped2", (Clipped,), {"__qualname__": f"Clipped{ruled}"})
    if ruled:
        flow.rule(kind, "n -> n")
    p = flow.placement("cpu", range(2))
    w = flow.ones(3, placement=p, sbp=B).requires_grad_()
    x = flow.tensor([[0.5, 9.0, -3.0], [0.25, -9.0, 2.5]], placement=p, sbp=S(0))
    (x * kind.apply(w)).sum().backward()  # type: ignore[attr-defined]
    assert w.grad is not None
    assert torch.equal(w.grad.full_tensor(), torch.tensor([0.75, 0.0, -0.5]))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_the_gradient_of_a_sum_of_complex_pairs_where_a_rank_holds_nothing(rows: int) -> None:
    """An expanded gradient without elements stays as it is, and was refused as "last dimension with stride 1"."""
    x = flow.tensor(torch.ones(rows, 3), placement=flow.placement("cpu", range(3)), sbp=S(0)).requires_grad_()
    torch.view_as_real(torch.complex(x, x)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.full_tensor(), torch.full((rows, 3), 2.0))
