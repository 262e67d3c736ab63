"""Random numbers in graphs: of something with a gradient, drawn in place, by distributions; those of one device."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sbpflow as flow
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import GRID, LINE, WHERE, batch, net, same, same_model, sgd, whole

# Of logits that have a gradient: what makes others of them.
Noise = Callable[[Tensor], Tensor]
NOISES: dict[str, Noise] = {
    "randn_like": lambda h: h + torch.randn_like(h) * torch.rand_like(h),
    "bernoulli_": lambda h: h * h.new_empty(h.shape).bernoulli_(0.5),
    "bernoulli": lambda h: h * torch.bernoulli(h.sigmoid()),
    "exponential_": lambda h: h + torch.empty_like(h).exponential_(),
    "uniform_, normal_": lambda h: h + torch.zeros_like(h).uniform_(-1, 1) - torch.empty_like(h).normal_(),
    "over its own": lambda h: h + (h * 2).bernoulli_(0.5),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h) + F.gumbel_softmax(h, hard=True),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, True),
    "feature dropouts": lambda h: F.feature_alpha_dropout(F.dropout1d(h[:, None], 0.3), 0.3, True)[:, 0],
    "rrelu": lambda h: F.rrelu(h, 0.1, 0.3, True) + F.rrelu(h, 0.1, 0.3),
    "Normal": lambda h: D.Normal(h, F.softplus(h)).rsample(),
    "RelaxedBernoulli": lambda h: D.RelaxedBernoulli(torch.tensor(0.5).double(), logits=h).rsample(),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NOISES)
def test_noise_of_what_has_a_gradient(name: str) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(NOISES[name](model(x)), y)

    mine, one = net(), net()
    ones, mines = sgd(one), sgd(mine)
    step = flow.compile(mine, loss, mines, placement=GRID if len(name) % 2 else LINE)
    for at in range(2):
        torch.manual_seed(at)
        found = step(*batch(at=at))
        torch.manual_seed(at)
        wanted = loss(one, *batch(at=at))
        wanted.backward()  # type: ignore[no-untyped-call]
        ones.step()
        ones.zero_grad()
        same(found, wanted)
    same_model(mine, one)


# Checks of values, that cannot be made before there are any


def checked(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    torch._check_tensor_all(y >= 0)  # type: ignore[no-untyped-call]
    torch._check(len(x) == len(y), lambda: "rows")  # type: ignore[no-untyped-call]
    torch._assert(y.max() < 3, "more classes than there are")  # type: ignore[no-untyped-call]
    torch.ops.aten._assert_async((y >= 0).all())
    logits = model(x)
    scaled = D.Normal(logits, torch.ones_like(logits), validate_args=True).log_prob(x[:, :3])  # type: ignore[no-untyped-call]
    nll: Tensor = D.Categorical(logits=logits).log_prob(y)  # type: ignore[no-untyped-call]
    loss: Tensor = -nll.mean() - scaled.mean()
    return loss


@WHERE
def test_checks_of_arguments_ask_for_no_values(where: flow.Placement) -> None:
    mine, one = net(), copy.deepcopy(net())
    step = flow.compile(mine, checked, sgd(mine), placement=where)
    same(step(*batch()), checked(one, *batch()))


def test_a_check_that_fails_without_values_still_does() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        torch._check(len(x) == 7, lambda: "seven rows")  # type: ignore[no-untyped-call]
        return F.cross_entropy(model(x), y)

    with pytest.raises(RuntimeError, match="seven rows"):
        flow.compile(net(), loss, placement=LINE)(*batch())


def test_what_is_written_to_a_detached_alias_is_refused() -> None:
    """Autograd would go on as if nothing had happened; a graph would lose the gradient. Gamma does so."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        made = model(x).exp()
        made.detach().clamp_(min=0.5)
        return made.mean()  # type: ignore[no-any-return]

    with pytest.raises(SbpError, match=r"clamp_.* writes to a tensor .*(?s:.*)detached at .*test_random\.py:\d+"):
        flow.compile(net(), loss, placement=LINE)(*batch())


# What one device draws counts, also where nobody looks at it


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        return F.dropout(x)


UNUSED: dict[str, Callable[[Tensor], Any]] = {
    "dropout": F.dropout,
    "of what is transposed": lambda x: (F.dropout(x.T), torch.randn_like(x.T)),
    "in a checkpoint": lambda x: checkpoint(F.dropout, x, use_reentrant=False),
    "under no_grad": without_gradients,
    "other dropouts": lambda x: (F.alpha_dropout(x, 0.3, True), F.dropout1d(x[:, None]), F.rrelu(x, training=True)),
    "in place": lambda x: (x.clone().normal_(), x.new_empty(20).bernoulli_(0.3), torch.zeros_like(x).exponential_()),
    "of values": lambda x: (torch.bernoulli(x.sigmoid()), torch.poisson(20 * x.exp()), torch.normal(x, 1.0)),
    "multinomial": lambda x: torch.multinomial(x.exp(), 2),
    "factories": lambda x: (torch.rand(3), torch.randn(20), torch.randperm(7)),
    "attention": lambda x: F.scaled_dot_product_attention(*(x[None, None],) * 3, dropout_p=0.3),
    "none at all": lambda x: (F.dropout(x, 1.0), F.dropout(x, 0.0), F.dropout(x[:0])),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", UNUSED)
def test_numbers_that_nobody_uses_are_drawn_all_the_same(name: str) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        UNUSED[name](x @ x.T @ x)
        return F.dropout(w, 0.3)

    given = torch.linspace(-1, 1, 24).reshape(6, 4), torch.ones(6, 4)
    drawn_alike(body, GRID if len(name) % 2 else LINE, *given)


def test_what_is_drawn_for_nobody_is_not_computed() -> None:
    def body(model: nn.Module, x: Tensor) -> Tensor:
        F.scaled_dot_product_attention(*(model(x)[None, None],) * 3, dropout_p=0.3)
        return x * 2

    step = flow.compile(net(torch.float32), body, placement=LINE)
    with torch.no_grad():
        step(torch.ones(6, 4))
    names = [op.name for op in step.planned.plan.decided.logical.ops]
    assert sorted(names) == ["bernoulli.p", "empty_strided", "mul.Tensor"]


# Numbers come in the order of one device's memory


LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": F.dropout,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "randn_like": lambda x: torch.randn_like(x) + x,
    "channels last": lambda x: torch.randn_like(x.reshape(1, 2, 3, 4), memory_format=torch.channels_last),
    "exponential_": lambda x: x.clone().exponential_(),
    "normal_": lambda x: torch.zeros_like(x).normal_(1, 2),
    "normal_ of a view": lambda x: x.repeat(2, 2)[:, ::2].normal_() * 1,
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "rrelu": lambda x: F.rrelu(x.contiguous().T, training=True),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LAID)
def test_numbers_come_in_the_order_of_memory(name: str) -> None:
    """Of an argument, plain or global, that does not lie row by row, and of what is made of it."""
    x = torch.linspace(-1, 1, 24).reshape(6, 4).T
    split = flow.tensor(x, placement=LINE, sbp=flow.S(0))
    drawn_alike(LAID[name], LINE, x)
    drawn_alike(LAID[name], LINE, split, one=x)


def test_an_argument_that_lies_otherwise_is_another_one() -> None:
    class Dropped(flow.nn.Graph):
        def build(self, x: Tensor) -> Tensor:
            return F.dropout(x)

    x, graph = torch.ones(6, 6), Dropped(placement=LINE)
    for given in (x, x.T.clone().T, x[:, :1].expand(6, 6), x):
        torch.manual_seed(1)
        found = graph(given)
        torch.manual_seed(1)
        same(found, F.dropout(given))


def drawn_alike(body: Callable[..., Tensor], where: flow.Placement, *given: Tensor, one: Tensor | None = None) -> None:
    """A graph draws what torch draws, and leaves the generator where torch does; eager calls on global tensors too."""

    class Drawing(flow.nn.Graph):
        def build(self, *given: Tensor) -> Tensor:
            return body(*given)

    def drawn(by: Callable[..., Any], *given: Tensor) -> Tensor:
        torch.manual_seed(1)
        return torch.cat([whole(by(*given)).flatten(), torch.rand(3)])

    wanted = drawn(body, *(given if one is None else (one,)))
    same(drawn(Drawing(placement=where), *given), wanted, 1e-6)
    if one is not None:
        same(drawn(body, *given), wanted, 1e-6)
