"""Plain losses of what left a global tensor: gradients are those of one device, in one process and on ranks."""

# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S
from tests.ranks import Ranks

LINE, GRID = flow.placement("cpu", range(4)), flow.placement("cpu", [[0, 1], [2, 3]])
HALF = flow.placement("cpu", [1, 2])
LIES: tuple[tuple[flow.Placement, tuple[Any, ...], tuple[Any, ...]], ...] = (  # of the data, of the weights
    (LINE, (S(0),), (B,)),
    (LINE, (B,), (B,)),
    (LINE, (B,), (S(0),)),
    (LINE, (B,), (P,)),
    (GRID, (S(0), B), (B, S(0))),
    (GRID, (S(0), P), (B, B)),
    (GRID, (S(0), B), (P, B)),
    (HALF, (S(0),), (B,)),
)
DATA = torch.linspace(-1, 2, 30).reshape(5, 6)  # uneven: 5 rows over 4 ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def one_loss(y: Tensor) -> None:
    y.square().mean().backward()


def another_backward(y: Tensor) -> None:
    torch.autograd.backward(y.square().mean())


def several_losses(y: Tensor) -> None:
    torch.autograd.backward([y.square().sum(), y[0].exp()], [torch.tensor(0.5), torch.ones(3)])


def a_loss_in_pieces(y: Tensor) -> None:
    for loss in (y.square().mean(), y.exp().sum() + y.mean()):
        loss.backward(retain_graph=True)


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, flow.GlobalTensor) else x


LOSSES: tuple[Callable[[Tensor], None], ...] = (one_loss, another_backward, several_losses, a_loss_in_pieces)


def trained(at: int | None, losses: Callable[[Tensor], None]) -> list[Tensor]:
    """The gradients, and the weights after a step."""
    model, x = net(), DATA
    if at is not None:
        where, rows, lie = LIES[at]
        one = tuple(e if e in (B, P) else B for e in lie)
        flow.nn.to_global(model, where, lambda _, value: lie if value.ndim == 2 else one)
        x = flow.tensor(DATA, placement=where, sbp=rows)
    losses(whole(model(x)))
    grads = [w.grad for w in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    return [whole(g).detach() for g in grads] + [whole(w).detach() for w in model.parameters()]


def all_trained() -> list[list[Tensor]]:
    return [trained(at, losses) for at in range(len(LIES)) for losses in LOSSES]


def check(found: list[list[Tensor]]) -> None:
    wanted = [trained(None, losses) for losses in LOSSES] * len(LIES)
    for mine, one in zip(found, wanted, strict=True):
        assert all(torch.allclose(a, b, 1e-4, 1e-6) for a, b in zip(mine, one, strict=True))  # sums are reordered


def test_a_plain_loss_of_the_whole_value_reaches_every_leaf() -> None:
    check(all_trained())


@pytest.mark.sweep
def test_a_plain_loss_of_the_whole_value_reaches_every_leaf_on_ranks(ranks4: Ranks) -> None:
    for found in ranks4(all_trained):
        check(found)


def local_grads() -> list[Any]:
    """Each rank's loss is an addend of the whole one; data-parallel, and split by columns."""
    found = []
    for rows, lie in ((S(0), B), (B, S(0))):
        first: Any = flow.nn.to_global(net(), LINE, {"*weight": lie})[0]
        y = first(flow.tensor(DATA, placement=LINE, sbp=rows))
        shards = y.to_local() if isinstance(y.to_local(), list) else [y.to_local()]
        torch.autograd.backward([shard.square().sum() for shard in shards])
        found += [whole(w.grad) for w in (first.weight, first.bias)]
    return found


def check_local(found: list[Any]) -> None:
    first: Any = net()[0]
    first(DATA).square().sum().backward()
    for mine, w in zip(found, [first.weight, first.bias] * 2, strict=True):
        assert torch.allclose(mine, w.grad, 1e-4)


def test_plain_losses_of_the_shards_reach_weights_that_every_rank_holds() -> None:
    check_local(local_grads())


def test_plain_losses_of_the_shards_reach_weights_that_every_rank_holds_on_ranks(ranks4: Ranks) -> None:
    for found in ranks4(local_grads):
        check_local(found)


def test_a_plain_loss_calls_the_hooks_of_leaves_once_and_gathers_once() -> None:
    w = flow.tensor(DATA, placement=LINE, sbp=B, requires_grad=True)
    seen: list[Any] = []
    w.register_hook(lambda g: seen.append(whole(g)))
    w.register_post_accumulate_grad_hook(lambda x: seen.append(whole(x.grad)))
    y = w * flow.tensor(DATA, placement=LINE, sbp=S(0))
    with flow.record() as moves:
        (whole(y).sum() + whole(y.sum())).backward()
    assert len(seen) == 2
    assert all(torch.allclose(g, 2 * DATA) for g in seen)
    assert [move.op for move in moves].count("gradient") == 1


def test_a_backward_pass_that_failed_does_not_keep_the_next_from_its_end() -> None:
    w = flow.tensor(DATA, placement=LINE, sbp=B, requires_grad=True)

    def fail(x: Any) -> None:
        raise ValueError("not this time")

    handle = w.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="not this time"):
        whole(w).sum().backward()
    handle.remove()
    w.grad = None
    whole(w).sum().backward()
    assert torch.equal(whole(w.grad), torch.ones_like(DATA))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("sbp", [B, P, S(0), S(1)], ids=str)
def test_what_a_plain_loss_left_can_be_differentiated(sbp: Any) -> None:
    w = flow.tensor(DATA, placement=LINE, sbp=sbp, requires_grad=True)
    whole(w).pow(3).sum().backward(create_graph=True)
    whole(w.grad).square().sum().backward(inputs=[w])
    assert torch.allclose(whole(w.grad).detach(), 3 * DATA.square() + 36 * DATA.pow(3), 1e-4)


@pytest.mark.parametrize("sbp", [B, P, S(0), S(1)], ids=str)
def test_the_inputs_of_a_plain_backward_are_the_only_ones_filled(sbp: Any) -> None:
    w, v = (flow.tensor(DATA, placement=LINE, sbp=sbp, requires_grad=True) for _ in range(2))
    plain = torch.ones((), requires_grad=True)
    (whole(w * v).sum() * plain).backward(inputs=[w])
    assert torch.allclose(whole(w.grad), DATA)
    assert v.grad is None
    assert plain.grad is None


def pieces(sbp: Any) -> list[Any]:
    """Gradients of the pieces that ranks passed, one a rank."""
    made = [torch.full((2, 3), float(r + 1), requires_grad=True) for r in flow.boxing.owned(LINE)]
    x = flow.from_local(made, placement=LINE, sbp=sbp)
    (x.full_tensor() * torch.arange(float(x.shape[1]))).sum().backward()
    return [w.grad for w in made]


@pytest.mark.parametrize("sbp", [B, P, S(0), S(1)], ids=str)
def test_one_process_gives_every_rank_s_piece_the_gradient_that_ranks_get(ranks4: Ranks, sbp: Any) -> None:
    apart = [g for found in ranks4(pieces, sbp) for g in found]
    assert all(torch.equal(a, b) for a, b in zip(pieces(sbp), apart, strict=True))


def written() -> list[Tensor]:
    """Writing to the whole value, twice taken, leaves the tensor and the other as they are."""
    found = []
    for sbp in (B, P, S(0)):
        x = flow.tensor(DATA, placement=LINE, sbp=sbp, requires_grad=True)
        for y in (x, x * 1, x.detach()):
            a, b = whole(y), whole(y)
            a.mul_(2)
            found += [whole(y.detach()), b.detach(), a.detach() / 2]
    return found


def test_the_whole_value_is_the_user_s_own(ranks4: Ranks) -> None:
    for found in (written(), *ranks4(written)):
        assert all(torch.allclose(value, DATA) for value in found)
