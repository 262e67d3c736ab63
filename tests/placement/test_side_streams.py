"""Moves beside the work of a card, where there is none: one side stream, in the order in which streams must wait."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sbpflow.boxing import box_async
from sbpflow.placement import device as devices
from sbpflow.placement import placement
from sbpflow.placement.device import side_stream
from sbpflow.sbp import B, S, layout
from tests.gpu.streams import Card


class OnCard(Tensor):
    """A tensor of the host that says it is on a card, and which streams it was lent to."""

    lent: tuple[str, ...] = ()

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def detach(self) -> "OnCard":
        return self

    def record_stream(self, stream: Any) -> None:
        self.lent = (*self.lent, stream.name)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    monkeypatch.setattr(devices, "_side", {})
    return Card(monkeypatch)


def test_moves_beside_make_one_stream_and_wait_for_what_was_there(card: Card) -> None:
    rows = layout(placement("cpu", range(2)), S(0), (4,))
    before = card.count
    for turn in range(3):
        shards = [torch.arange(2.0).as_subclass(OnCard) for _ in range(2)]
        pending = box_async(shards, rows, rows.to(B))
        assert card.log == ["stream 2 waits for the default stream"]
        assert [shard.lent for shard in shards] == [("stream 2",)] * 2
        first, second = pending.wait()
        assert card.log == ["stream 2 waits for the default stream", "the default stream waits for stream 2"]
        assert card.count == before + 1, turn
        assert first.tolist() == second.tolist() == [0.0, 1.0, 0.0, 1.0]
        card.log.clear()


def test_each_device_and_use_has_a_stream(card: Card) -> None:
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    made = [side_stream(device, use) for device in (first, second) for use in ("moves", "register 1")]
    assert len(set(map(id, made))) == 4
    assert side_stream(torch.device("cuda", 1), "moves") is made[2]
