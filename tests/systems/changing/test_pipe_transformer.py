"""PipeTransformer: as layers freeze, the pipeline gets shorter and there are more copies of it, in one run."""

import copy

import pytest
import torch
from torch import nn, optim

import sbpflow as flow
from sbpflow.boxing.record import Moves
from tests.systems.changing.layered import Layered, batch, loss_fn

RANKS, BATCH = 4, 16


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def plan(stages: int) -> str:
    """A pipeline of so many stages, on all ranks."""
    shape = f"grid cpu:[0-{RANKS - 1}] as (pipe={stages}, data={RANKS // stages})\n"
    inputs = "input x <- data=S(0)\ninput y <- data=S(0)\n"
    return shape + f"pipe layers over pipe by 1f1b, {stages} micro-batches\n" + inputs


class Pair:
    """A model in a pipeline, and the same one that is trained on one device."""

    def __init__(self, stages: int) -> None:
        torch.manual_seed(0)
        self.alone = Layered(8, wide).double()
        self.model = copy.deepcopy(self.alone)
        self.adams = [optim.AdamW(each.parameters(), lr=1e-2) for each in (self.alone, self.model)]
        self.step = flow.compile(self.model, loss_fn, self.adams[1], plan=plan(stages))
        self.frozen = self.at = 0

    def freeze(self, layers: int) -> None:
        self.frozen = layers
        for model in (self.alone, self.model):
            model.layers[:layers].requires_grad_(False)

    def train(self, steps: int = 2) -> Moves:
        for _ in range(steps):
            x, y = batch(self.at, BATCH)
            self.at += 1
            self.adams[0].zero_grad()
            wanted = loss_fn(self.alone, x, y)
            wanted.backward()  # type: ignore[no-untyped-call]
            self.adams[0].step()
            with flow.record() as moves:
                found = self.step(x, y).item()
            assert found == pytest.approx(wanted.item(), abs=1e-12)
        return moves

    def stages(self) -> list[tuple[int, ...]]:
        """The ranks of the stages, in order."""
        return list(dict.fromkeys(layer[0].weight.placement.flat for layer in self.model.layers))  # type: ignore[index]

    def same(self) -> None:
        for one, other in zip(self.alone.parameters(), self.model.parameters(), strict=True):
            assert torch.allclose(one, other.detach().full_tensor(), atol=1e-12)  # type: ignore[attr-defined]


def test_the_pipeline_gets_shorter_and_copies_more() -> None:
    pair = Pair(4)
    pair.train()
    lengths = [4]
    for stages, frozen in ((2, 4), (1, 6)):
        pair.freeze(frozen)
        pair.step.move(plan=plan(stages))
        moves = pair.train()
        assert len(pair.stages()) == stages
        assert {len(ranks) for ranks in pair.stages()} == {RANKS // stages}
        assert not [move for move in moves if move.op.startswith("moved")]  # only the first step moves
        lengths.append(len(pair.stages()))
    assert lengths == [4, 2, 1]
    pair.same()


def summed(moves: Moves) -> int:
    """The bytes of gradients that ranks add up."""
    return sum(
        move.boxing.src.nbytes for move in moves if move.boxing.src.state.partial and move.boxing.src.numel > BATCH
    )


def test_frozen_layers_have_no_gradients_and_none_are_reduced() -> None:
    pair = Pair(2)
    before = summed(pair.train())
    pair.freeze(4)
    after = summed(pair.train())
    frozen = sum(value.nbytes for value in pair.model.layers[:4].parameters())
    assert before - after == frozen
    assert all(value.grad is None for value in pair.alone.layers[:4].parameters()) or pair.at == 4
    states = pair.adams[1].state
    held = [value for group in pair.adams[1].param_groups for value in group["params"]]
    assert [int(states[value]["step"]) for value in held] == [2] * 16 + [4] * 18
    pair.same()


def test_no_gradient_goes_to_frozen_stages_and_none_is_computed_there() -> None:
    pair = Pair(4)

    def hops() -> int:
        return sum(move.boxing.total for move in pair.train() if move.op == "hop")

    def backward() -> list[int]:
        """The chunks that have a backward."""
        pieces = pair.step.planned.plan.pieces
        assert pieces is not None
        return [name.chunk for name in pieces.first.variant.tasks.tasks if name.kind == "B"]

    one = hops() // 6  # there are three ways from stage to stage, forward and back
    assert sorted(backward()) == [0, 1, 2, 3]
    pair.freeze(4)
    assert hops() == one * (3 + 1)
    assert sorted(backward()) == [2, 3]
    pair.same()


def test_layers_that_thaw_are_trained_again() -> None:
    pair = Pair(4)
    pair.train()
    pair.freeze(4)
    pair.step.move(plan=plan(2))
    pair.train()
    for model in (pair.alone, pair.model):
        model.requires_grad_(True)
    pair.step.move(plan=plan(4))
    pair.train()
    assert len(pair.stages()) == 4
    pair.same()


def test_a_model_of_which_all_is_frozen_is_refused() -> None:
    pair = Pair(2)
    pair.train(1)
    pair.model.requires_grad_(False)
    with pytest.raises(flow.SbpError, match="depends on nothing that requires grad"):
        pair.step(*batch(0, BATCH))
