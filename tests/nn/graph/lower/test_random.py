"""Random numbers in graphs: of something with a gradient, drawn in place, by distributions; those of one device."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import GRID, LINE, WHERE, batch, net, same, same_model, sgd

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
