"""Pipelines over played cards learn what the host learns, under every schedule there is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.actors.schedules.published import PUBLISHED

from .host import as_on_host, batch, cross_entropy, net, steps, whole

USUAL = ["1f1b", "zb_v"]
WHOLE = [name for name, schedule in PUBLISHED.items() if not schedule.slices]
# Where a test of all runs by default, these do; the others do with the sweep.
EVERY = [*USUAL, *(pytest.param(name, marks=pytest.mark.sweep) for name in WHOLE if name not in USUAL)]


def layers_of(schedule: str, stages: int) -> int:
    return stages if PUBLISHED[schedule].v == 1 and PUBLISHED[schedule].way == "loop" else 2 * stages


def trained(
    schedule: str, kind: str, stages: list[list[int]], parts: int = 4, rows: int | None = None, **options: Any
) -> list[Tensor]:
    model = net(layers_of(schedule, len(stages)))
    places = [flow.placement(kind, ranks) for ranks in stages]
    flow.nn.pipeline(model.layers, places, schedule)
    last = model.layers[-1].__dict__
    flow.nn.place(model.head, last["_sbpflow_place"], chunk=last["_sbpflow_chunk"])
    adam = torch.optim.AdamW(model.parameters(), 0.01)
    step = flow.compile(model, cross_entropy, adam, micro_batches=parts, schedule=schedule, **options)
    found = steps(model, step, kind, rows=rows or (10 if PUBLISHED[schedule].synchronous else 8))
    if PUBLISHED[schedule].synchronous:
        with torch.no_grad():
            found.append(step(*batch(9, kind)).full_tensor())
    return found


@pytest.mark.parametrize("schedule", EVERY)
def test_two_stages_learn_under_every_schedule(schedule: str) -> None:
    as_on_host(lambda kind: trained(schedule, kind, [[0], [1]]))


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", [name for name in WHOLE if name != "2bw"])
def test_four_stages_learn_under_every_schedule(schedule: str) -> None:
    as_on_host(lambda kind: trained(schedule, kind, [[0], [1], [2], [3]]))


@pytest.mark.sweep
def test_four_stages_learn_by_two_versions_of_their_weights() -> None:
    """Two versions take as many micro-batches as there are updates of three."""
    as_on_host(lambda kind: trained("2bw", kind, [[0], [1], [2], [3]], parts=6, rows=12))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.words(words)
        for layer in self.layers:
            query, key, value = layer(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + seen.transpose(1, 2).flatten(2)
        made: Tensor = self.head(x).flatten(0, 1)
        return made


def following(model: nn.Module, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words), nn.functional.pad(words[:, 1:], (0, 1), value=-100).flatten())


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_stages_learn_from_slices_of_sequences(stages: int) -> None:
    def program(kind: str) -> list[Tensor]:
        torch.manual_seed(3)
        with torch.device("cpu"):
            model = Reader().double()
        flow.nn.pipeline(model.layers, [flow.placement(kind, [rank]) for rank in range(stages)])
        sgd = torch.optim.SGD(model.parameters(), 0.1)  # Adam would make large what rounding leaves of a key's bias
        step = flow.compile(model, following, sgd, micro_batches=2, slices=3)
        drawn = torch.Generator().manual_seed(1)
        text = [torch.randint(11, (4, 6), generator=drawn, device="cpu").to(kind) for _ in range(3)]
        return [*(step(each).full_tensor() for each in text), *whole(model)]

    as_on_host(program)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", WHOLE)
def test_stages_of_two_cards_learn_under_every_schedule(schedule: str) -> None:
    as_on_host(lambda kind: trained(schedule, kind, [[0, 1], [2, 3]]))


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
@pytest.mark.parametrize("more", [{"clip_grad_norm": 0.5}, {"post_validation": True}, {"backend": "autograd"}], ids=str)
def test_stages_learn_with_what_goes_between_them(schedule: str, more: dict[str, Any]) -> None:
    as_on_host(lambda kind: trained(schedule, kind, [[0], [1]], **more))


def test_a_pipeline_gives_back_gradients_of_nothing_but_weights() -> None:
    def program(kind: str) -> list[Tensor]:
        model = net(2)
        flow.nn.pipeline(model.layers, [flow.placement(kind, [rank]) for rank in (0, 1)], "1f1b")
        flow.nn.place(model.head, flow.placement(kind, [1]))
        step = flow.compile(model, cross_entropy, micro_batches=2, schedule="1f1b")
        losses = [step(*batch(at, kind)).full_tensor() for at in range(2)]
        return [*losses, *whole(model)]

    as_on_host(program)
