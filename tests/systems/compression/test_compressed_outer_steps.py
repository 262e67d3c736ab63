"""Outer steps in fewer bytes: groups that trained apart send how far they came, as DiLoCo's do, with error feedback."""

import copy
from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow import B, S
from tests.systems.compression.runs import batch, loss_fn, net

GRID = flow.placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))
GROUPS = [GRID.at(data=i) for i in range(2)]


class Apart:
    """Two groups with models of their own, and an outer model in pieces; they meet by an encoder, or plainly."""

    def __init__(self, encoder: flow.encoders.Encoder | None) -> None:
        whole = net()
        self.encoder, self.errors = encoder, flow.encoders.KeptErrors()
        self.models = [flow.nn.to_global(copy.deepcopy(whole), group) for group in GROUPS]
        self.model = flow.nn.to_global(whole, GRID, lambda name, x: {"data": S(0), "tensor": B})
        self.steps = [
            flow.compile(m, loss_fn, torch.optim.SGD(m.parameters(), lr=0.05), placement=group)
            for m, group in zip(self.models, GROUPS, strict=True)
        ]
        self.outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.6, nesterov=True)
        self.begun = [[p.detach().clone() for p in m.parameters()] for m in self.models]

    def train(self, seed: int) -> float:
        losses = [step(*batch(2 * seed + i)).full_tensor().item() for i, step in enumerate(self.steps)]
        return sum(losses) / len(losses)

    def meet(self) -> int:
        """The outer step; the bytes that all ranks send for the mean of how far the groups came."""
        sent = 0
        with torch.no_grad():
            for at, (name, x) in enumerate(self.model.named_parameters()):
                came = [(old[at] - [*m.parameters()][at]) / 2 for old, m in zip(self.begun, self.models, strict=True)]
                with flow.record() as moves:
                    far = flow.addends(came, GRID, "data")
                    how: Any = {} if self.encoder is None else {"encoder": self.encoder, "kept": self.errors[name]}
                    x.grad = far.to_global(sbp=x.sbp, **how)  # type: ignore[attr-defined]
                sent += sum(move.boxing.total for move in moves)
        self.outer.step()
        self.outer.zero_grad()
        for m in self.models:
            flow.refit(self.model, m)
        self.begun = [[p.detach().clone() for p in m.parameters()] for m in self.models]
        return sent


def ran(encoder: flow.encoders.Encoder | None) -> tuple[float, int]:
    apart, losses, sent = Apart(encoder), [], 0
    for at in range(64):
        losses.append(apart.train(at))
        if at % 4 == 3:
            sent = apart.meet()
    return sum(losses[-16:]) / 16, sent


@pytest.mark.sweep
def test_outer_steps_in_fewer_bytes_come_as_far() -> None:
    plain, bytes_plain = ran(None)
    for encoder, fewer in (
        (flow.encoders.int8(), 1.5),
        (flow.encoders.sign(rows=True), 2),
        (flow.encoders.topk(fraction=0.1), 2),
    ):
        loss, sent = ran(encoder)
        assert loss == pytest.approx(plain, rel=0.15), encoder
        assert sent * fewer < bytes_plain, encoder


def test_groups_have_the_same_weights_after_they_met() -> None:
    apart = Apart(flow.encoders.sign())
    apart.train(0)
    apart.meet()
    for x, *others in zip(*(m.parameters() for m in apart.models), strict=True):
        assert all(torch.equal(x.full_tensor(), y.full_tensor()) for y in others)
