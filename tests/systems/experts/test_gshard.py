"""GShard: two all_to_alls a layer each way, and what finds no room is left out; and what does when nothing may be."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from tests.ranks import Ranks

from .mixtures import EXPERTS, PLAN, TOKENS, WIDTH, Sparse, loss_fn, sent, tokens


def first(model: Sparse) -> Any:
    return model.layers[0]


def trained(model: Sparse, room: int, plan: str = PLAN) -> tuple[Any, list[tuple[str, int]]]:
    """One step against one device; what was left out, and the moves."""
    alone, x = copy.deepcopy(model), tokens()
    step: Any = flow.compile(model, loss_fn, plan=plan)
    with flow.record() as moves:
        loss, left_out = step(x.clone().requires_grad_(), room)
    want, missing = loss_fn(alone, x.requires_grad_(), room)
    want.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss.full_tensor(), want.detach(), rtol=1e-11, atol=1e-11)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        grad: Any = mine.grad
        torch.testing.assert_close(grad.full_tensor(), other.grad, rtol=1e-10, atol=1e-11)
    assert left_out.full_tensor() == missing
    return missing, sent(moves)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("room", [2, TOKENS])
def test_two_all_to_alls_forward_and_two_backward_a_layer(layers: int, room: int) -> None:
    _, moves = trained(Sparse(layers), room)
    buffers = EXPERTS * 8 * room * WIDTH * 8  # of all samples and experts, bytes
    assert [total for route, total in moves if route == "all_to_all"] == [buffers * 3 // 4] * (4 * layers)
    gathered = [total for route, total in moves if route == "all_gather"]
    assert gathered == [8 * TOKENS * WIDTH * 8 * 3]  # the gradient of x, for who gave it whole


@pytest.mark.sampled(1)
@pytest.mark.parametrize("room", [1, 2, 4])
def test_tokens_that_overflow_a_room_are_left_out_and_no_others(room: int) -> None:
    model, x = Sparse(), tokens()
    missing, _ = trained(model, room)
    alone = Sparse()
    best = first(alone).gate(x).argmax(-1)
    counts = torch.stack([row.bincount(minlength=EXPERTS) for row in best])
    assert missing == (counts - room).clamp(min=0).sum() > 0
    unchanged = (alone(x, room)[0] == x).all(-1)
    assert unchanged.sum() == missing


def run_again(x: Tensor) -> tuple[list[int], Any, Sparse]:
    """The rooms that were tried until no token was left out, and the model after the step."""
    model = Sparse(dropless=True)
    step: Any = flow.compile(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), plan=PLAN, skip_nonfinite=True)
    tried, room = [], 1
    while True:
        tried.append(room)
        loss, left_out = step(x, room)
        if not left_out.full_tensor():
            return tried, loss.full_tensor(), model
        assert loss.full_tensor().isnan()
        room *= 6


def dropless() -> None:
    """A step that would leave out a token is left out itself, on every rank, and run with more room."""
    x, alone = tokens(), Sparse()
    tried, loss, model = run_again(x)
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    want, missing = loss_fn(alone, x, TOKENS)
    want.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert tried == [1, 6]
    assert missing == 0
    torch.testing.assert_close(loss, want.detach(), rtol=1e-11, atol=1e-11)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        whole: Any = mine
        torch.testing.assert_close(whole.full_tensor(), other, rtol=1e-10, atol=1e-11)


def test_nothing_is_left_out_where_that_is_said() -> None:
    dropless()


def test_processes_agree_on_what_is_run_again(ranks4: Ranks) -> None:
    ranks4(dropless)


def test_a_busy_expert_has_copies_whose_gradients_are_summed() -> None:
    """7 experts in 8 slots: expert 2 has two, which share out its tokens, and so needs half the room."""
    slots = [0, 1, 2, 2, 3, 4, 5, 6]
    model = Sparse(slots=slots)
    plain = Sparse(slots=range(7))
    with torch.no_grad():
        for each in (model, plain):
            first(each).gate.bias[2] += 1.5
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
    x = tokens()
    (want, most), (found, _) = loss_fn(plain, x, TOKENS), loss_fn(model, x, TOKENS)
    torch.testing.assert_close(found, want)
    needs = [next(room for room in range(1, TOKENS + 1) if not loss_fn(each, x, room)[1]) for each in (plain, model)]
    assert most == 0
    assert needs[1] == -(-needs[0] // 2)
    plan = PLAN.replace("experts.*: expert=S(0)", "experts.{up,down}: expert=S(0)")
    missing, _ = trained(model, needs[1], plan)
    assert missing == 0


def test_experts_rest_on_the_ranks_of_the_data() -> None:
    model = Sparse()
    trained(model, 2)
    up = first(model).experts.up
    assert [len(piece) for piece in up.to_local()] == [EXPERTS // 4] * 4
