"""Local calls of ranks that do the same are made once, however many there are."""

from collections.abc import Callable

import pytest
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


class Padded(nn.Module):
    """Writes results into a tensor that it makes, as attention with narrow values does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.out, self.how = nn.Linear(4, 3), nn.Linear(8, 2), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        shape = (len(x), 8)
        make: dict[str, Callable[[], torch.Tensor]] = {
            "new_empty": lambda: y.new_empty(shape),
            "new_full": lambda: y.new_full(shape, 0.5),
            "zeros": lambda: torch.zeros(shape, dtype=y.dtype, device=y.device),
            "empty": lambda: torch.empty(shape, dtype=y.dtype, device=y.device),
        }
        made = make[self.how]()
        made[:, 3:] = 0.25
        made[:, :3] = y
        found: torch.Tensor = self.out(made)
        return found


@pytest.mark.parametrize("samples", [2**16, 2**16 + 1])
@pytest.mark.parametrize("how", ["new_empty", "new_full", "zeros", "empty"])
def test_ranks_make_their_pieces_of_what_a_constant_fills(how: str, samples: int) -> None:
    torch.manual_seed(0)
    model, x = Padded(how), torch.randn(samples, 4)
    alone = model(x).square().sum()
    alone.backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    step = flow.compile(model, lambda m, x: m(x).square().sum(), plan="grid (data=4)\ninput x <- data=S(0)")
    torch.testing.assert_close(step(x).full_tensor(), alone, rtol=1e-4, atol=0)
    found = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, flow.GlobalTensor)]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0)
    graph = step.explain().graph
    localiser = Localiser(graph)
    runs = [stage for stage in segments(graph) if isinstance(stage, Segment)]
    filled = [
        local.makes[0].shape[:1]
        for run in runs
        for local in localiser.segment(run, 0).calls
        if any(word in str(local.function) for word in ("aten.new_", "aten.zeros", "aten.empty"))
        and local.makes[0].shape
    ]
    assert filled == [(-(-samples // 4),)]
