"""Local calls of ranks that do the same are made once, however many there are."""

import torch
from torch import nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.nn.graph.lower.localise import Localiser
from sbpflow.nn.graph.lower.segments import Segment, segments


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(24, 8), nn.Linear(8, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.up(self.table(words)).reshape(-1, 8), words.flatten() % 8)


def test_ranks_share_segments_but_where_their_places_differ() -> None:
    """Of 64 ranks those of 4 places look up other words, whichever samples they have; all else is one segment."""
    plan = flow.Plan.read("grid cuda (data=16, tensor=4)\ntable.weight: tensor=S(0)\ninput words <- data=S(0)\nhold **")
    model = Words().to("meta")
    checked = plan.check(
        model,
        torch.empty(32, 5, dtype=torch.long, device="meta"),
        loss_fn=lambda m, words: m(words),
        cluster="a100x8*8",
    )
    graph = checked.report.graph
    localiser = Localiser(graph)
    found = []
    for stage in segments(graph):
        if isinstance(stage, Segment):
            locals = [localiser.segment(stage, rank) for rank in stage.placement.flat]
            found.append((len({*map(id, locals)}), len({*locals})))
    assert sorted(found) == [(1, 1), (64, 1), (64, 4)]  # the loss picks by place, too, and finds all there
