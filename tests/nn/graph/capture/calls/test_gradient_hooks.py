"""Hooks on gradients in captured steps: those that a forward puts on activations, and those of parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from sbpflow.placement.errors import SbpError
from sbpflow.sbp import SbpLike

LINE = flow.placement("cpu", range(2))
X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers; `hook` is put on what is between them, and `seen` is what it was called with."""

    def __init__(self, hook: Callable[[Any, Tensor], Any] | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.outer = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
        self.hook, self.seen = hook, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        y: Any = self.inner(x)
        hook = self.hook
        if hook is not None and y.requires_grad:
            y.register_hook(lambda g: hook(self, g))
        out: Tensor = self.outer(y.tanh() + y.sin())
        return out.square().sum()


def doubled(net: Any, g: Tensor) -> Tensor:
    return g * 2 + g.sum()  # of the whole gradient, which no rank has alone


def noted(net: Any, g: Tensor) -> None:
    net.seen.append(float(g.norm()))


def steps(net: nn.Module, step: Callable[[], Any], between: Callable[[nn.Module, int], None]) -> list[float]:
    losses = []
    for k in range(6):
        between(net, k)
        losses.append(float(step()))
    return losses


def both(hook: Any, between: Callable[[Any, int], None], sbp: SbpLike | None = None) -> tuple[Any, Any]:
    """A net trained by torch, and one trained by a graph, with their losses."""
    one, other = Net(hook), Net(hook)
    if sbp is not None:
        flow.nn.shard(other, {"inner.weight": sbp})
    sgds = [torch.optim.SGD(net.parameters(), lr=0.02) for net in (one, other)]
    graph = flow.compile(other, lambda net, x: net(x), sgds[1], placement=LINE, inputs={"x": S(0)})

    def plain() -> Tensor:
        loss: Tensor = one(X)
        sgds[0].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        sgds[0].step()
        return loss.detach()

    wanted = steps(one, plain, between)
    torch.testing.assert_close(steps(other, lambda: graph(X), between), wanted)
    held: Any = other.state_dict()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(held[name].full_tensor(), value)
    return one, other


@pytest.mark.parametrize("sbp", [None, S(0), S(1)], ids=str)
@pytest.mark.parametrize("hook", [doubled, noted])
def test_a_hook_on_an_activation_is_called_once_a_step_with_the_whole_gradient(hook: Any, sbp: SbpLike | None) -> None:
    one, other = both(hook, lambda net, k: None, sbp)
    assert len(other.seen) == len(one.seen)
    torch.testing.assert_close(other.seen, one.seen)


def changing(net: Any, k: int) -> None:
    """Hooks of parameters that come and go after the first step."""
    if k == 1:
        net.first = net.inner.weight.register_hook(lambda g: g * 2)
    if k == 2:
        net.second = net.outer.bias.register_hook(lambda g: net.seen.append(float(g.sum())))
    if k == 3:
        net.first.remove()
    if k == 4:
        net.second.remove()
        net.third = net.inner.weight.register_post_accumulate_grad_hook(lambda w: halve(w))
    if k == 5:
        net.third.remove()


def halve(w: Tensor) -> None:
    assert w.grad is not None
    w.grad.mul_(0.5)


@pytest.mark.parametrize("sbp", [None, S(1)], ids=str)
def test_hooks_of_parameters_may_come_and_go(sbp: SbpLike | None) -> None:
    one, other = both(None, changing, sbp)
    assert len(one.seen) == 2
    torch.testing.assert_close(other.seen, one.seen)


def used_before(net: Any, x: Tensor) -> Any:
    y: Any = net.inner(x)
    z = y.sin()
    y.register_hook(lambda g: g * 2)
    return (y + z).sum()


def of_a_view(net: Any, x: Tensor) -> Any:
    y: Any = net.inner(x).t()
    y.register_hook(lambda g: g * 2)
    return y.sum()


def of_a_parameter(net: Any, x: Tensor) -> Any:
    net.inner.weight.register_hook(lambda g: g * 2)
    return net.inner(x).sum()


def removed(net: Any, x: Tensor) -> Any:
    y: Any = net.inner(x)
    y.register_hook(lambda g: g * 2).remove()
    return y.sum()


def after(net: Any, x: Tensor) -> Any:
    net.inner.weight.register_post_accumulate_grad_hook(lambda w: None)
    return net.inner(x).sum()


REFUSED = [
    (used_before, "right after it is made"), (of_a_view, r"clone\(\)"), (of_a_parameter, "outside of the step"),
    (removed, "leave both out"), (after, "outside of the step"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "words"), REFUSED)
def test_a_hook_that_could_act_otherwise_is_refused_with_its_line(function: Any, words: str) -> None:
    net = Net(None)
    step = flow.compile(net, function, torch.optim.SGD(net.parameters()), placement=LINE)
    with pytest.raises(SbpError, match=rf"(?s)test_gradient_hooks\.py.*{words}"):
        step(X)


def test_a_hook_on_a_copy_of_a_view() -> None:
    def loss(net: Any, x: Tensor) -> Any:
        y: Any = net.inner(x).t().clone()
        y.register_hook(lambda g: g * 2)
        return y.square().sum()

    one, other = Net(None), Net(None)
    flow.compile(other, loss, placement=LINE)(X)
    loss(one, X).backward()
    found: Any = other.inner.weight.grad
    torch.testing.assert_close(found.full_tensor(), one.inner.weight.grad)
