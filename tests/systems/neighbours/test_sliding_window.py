"""Sliding-window attention, as of Mistral and MegaScale: of a sequence in pieces neighbours send windows of keys."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import S

CONTEXT = flow.placement("cpu:[0-3] as (context=4)")
WINDOW, WIDTH, HEADS = 8, 16, 4


class Layer(nn.Module):
    """Attention to the last few tokens, with heads of keys shared by two, and a gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.query, self.keys = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        query = self.query(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = self.keys(y).unflatten(-1, (2, HEADS // 2, -1)).permute(2, 0, 3, 1, 4)
        behind = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        seen = (behind >= 0) & (behind < WINDOW)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        found: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return found


class Mistral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(20, WIDTH), nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found


def loss_fn(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("length", [64, 50], ids=["even", "uneven"])
def test_it_trains_as_on_one_device_and_sends_windows_alone(length: int) -> None:
    model = Mistral().double()
    alone = copy.deepcopy(model)
    flow.nn.to_global(model, CONTEXT)
    flow.nn.inside(model.layers, use="window", over="context")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, alone)]
    with flow.use_cluster("flat"):
        step = flow.compile(model, loss_fn, optimizers[0], placement=CONTEXT)
        for _ in range(3):
            words = torch.randint(20, (2, length))
            with flow.record() as moves:
                loss = step(flow.tensor(words, placement=CONTEXT, sbp=S(1)))
            optimizers[1].zero_grad()
            want = loss_fn(alone, words)
            want.backward()  # type: ignore[no-untyped-call]
            optimizers[1].step()
            torch.testing.assert_close(loss.full_tensor(), want.detach())
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        held: Any = mine
        torch.testing.assert_close(held.full_tensor(), other.detach())
    halos = [m.bytes for m in moves if "halo" in m.route]
    labels = 2 * 8  # a column of words, where these are rolled as they are split
    assert [n for n in halos if n != labels] == [(WINDOW - 1) * 2 * 2 * 4 * 8] * 8  # keys, values, and their gradients


@pytest.mark.parametrize("length", [64, 128, 256])
def test_what_is_sent_does_not_grow_with_the_sequence(length: int) -> None:
    model = flow.nn.inside(Layer(), use="window", over="context")
    flow.nn.to_global(model, CONTEXT)
    with flow.use_cluster("flat"), torch.no_grad():
        plan = flow.compile(model, placement=CONTEXT).plan_for(flow.ones(1, length, WIDTH, placement=CONTEXT, sbp=S(1)))
    halos = [line for line in plan.text().splitlines() if "halo over context" in line]
    assert len(halos) == 2
    assert all(f"{(WINDOW - 1) * 2 * 4 * 4} B a rank" in line for line in halos)
