"""Tensors that a forward keeps as plain attributes: refused if the next call would find them, told if they grow old."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import sbpflow as flow

P = flow.placement("cpu", range(2))


class Kept(nn.Module):
    """A layer with a forward of its own."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(4, 4), forward
        self.cache: Tensor | None = None
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def trained(model: nn.Module, times: int = 2) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = flow.compile(model, lambda m, x: m(x).square().mean(), optimizer, placement=P)
    return [step(torch.ones(2, 4)).full_tensor() for _ in range(times)]


def counts_up(m: Any, x: Tensor) -> Tensor:
    m.before = getattr(m, "before", x) + 1
    return m.layer(m.before)  # type: ignore[no-any-return]


def of_the_first_batch(m: Any, x: Tensor) -> Tensor:
    if m.cache is None:
        m.cache = x.mean()
    return m.layer(x - m.cache)  # type: ignore[no-any-return]


def drawn_once(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "mask"):
        m.mask = torch.rand(4)
    return m.layer(x * m.mask)  # type: ignore[no-any-return]


def looked_for_in_the_dict(m: Any, x: Tensor) -> Tensor:
    if "first" not in vars(m):
        m.first = x.mean()
    return m.layer(x - m.first)  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [counts_up, of_the_first_batch, drawn_once, looked_for_in_the_dict])
def test_one_that_the_next_call_would_find_is_an_error_with_the_line(forward: Any) -> None:
    with pytest.raises(
        flow.SbpError, match=r"is asked for before there is a tensor.*test_kept_tensors.py:\d+\n.*\n.*buffer"
    ):
        trained(Kept(forward))


def its_own_mask(m: Any, x: Tensor) -> Tensor:
    if m.cache is None:
        m.cache = torch.arange(4.0)
    return m.layer(x * m.cache)  # type: ignore[no-any-return]


def shown_only(m: Any, x: Tensor) -> Tensor:
    m.seen = m.layer(x)
    return m.seen.relu()  # type: ignore[no-any-return]


def shown_beside_a_buffer(m: Any, x: Tensor) -> Tensor:
    m.cache = x.mean()
    m.count = m.count + 1
    return m.layer(x)  # type: ignore[no-any-return]


def set_anew_before_it_is_read(m: Any, x: Tensor) -> Tensor:
    m.cache = None
    if m.cache is None:
        m.cache = x.mean()
    return m.layer(x - m.cache)  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [its_own_mask, shown_only, shown_beside_a_buffer, set_anew_before_it_is_read])
def test_one_that_is_the_same_at_each_call_or_only_shown_is_fine(forward: Any) -> None:
    torch.manual_seed(0)
    model, alone = Kept(forward), Kept(forward)
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for loss in trained(model):
        want = alone(torch.ones(2, 4)).square().mean()
        optimizer.zero_grad()
        want.backward()
        optimizer.step()
        torch.testing.assert_close(loss, want.detach())
    assert model.cache is None
    assert not hasattr(model, "seen")


def test_one_that_was_there_grows_old_and_is_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    prune.l1_unstructured(model[0], "weight", amount=4)  # type: ignore[no-untyped-call]
    with pytest.warns(
        UserWarning, match=r"0\.weight: plain attributes that a forward sets, made at .*\n.*with pruning"
    ):
        trained(model)
    model(torch.ones(2, 4))
    layer: Any = model[0]
    assert torch.equal(layer.weight.full_tensor(), (layer.weight_orig * layer.weight_mask).full_tensor())
