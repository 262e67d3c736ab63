"""Segments that do the same are traced once, whatever ranks and stages they are of."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.nn.graph.compiler import backends, compiled_segments
from sbpflow.nn.graph.compiler.backends import Compiled
from sbpflow.nn.graph.compiler.compiled_segments import CompiledSegments
from sbpflow.nn.graph.lower.localise import Local, same
from sbpflow.nn.graph.lower.segments import Segment
from sbpflow.sbp.call import Piece

WORDS, WIDTH = 24, 12


class Layer(nn.Module):
    """Attention with one head, and a mask that is made anew in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ask, self.give = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.ask(self.norm(x)).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        out: Tensor = x + self.give(F.scaled_dot_product_attention(q, k, v, mask))
        return out


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.Sequential(*(Layer() for _ in range(layers)))

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.words(words)))
        return out


def loss_fn(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Local]:
    """The segments that are traced from now on; nothing is known of earlier ones."""
    found: list[Local] = []
    compile_one: Callable[..., Compiled] = backends.compiled

    def counting(local: Local, *how: object) -> Compiled:
        found.append(local)
        return compile_one(local, *how)

    monkeypatch.setattr(compiled_segments, "compiled", counting)
    compiled_segments.compiled_once.cache_clear()
    return found


def traces(places: Sequence[flow.Placement], layers: int, traced: list[Local]) -> int:
    before = len(traced)
    model = Model(layers)
    flow.nn.pipeline(model.layers, places)
    step = flow.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=2)
    words = torch.randint(WORDS, (12, 4), generator=torch.Generator().manual_seed(0))
    expected = loss_fn(model, words).item()
    assert step(words).item() == pytest.approx(expected, rel=1e-5)
    return len(traced) - before


def test_more_equal_stages_of_one_rank_trace_nothing_more(traced: list[Local]) -> None:
    three = traces([flow.placement("cpu", [rank]) for rank in range(3)], 6, traced)
    assert three <= 3  # what is before the layers, a layer, and what is behind
    assert traces([flow.placement("cpu", [rank]) for rank in range(6)], 6, traced) == 0
    assert traces([flow.placement("cpu", [rank]) for rank in range(4)], 8, traced) == 0


def test_ranks_of_a_stage_that_do_the_same_are_traced_once(traced: list[Local]) -> None:
    """Two ranks that share a micro-batch of six: the mask was another function for each of them."""
    pair = traces([flow.placement("cpu", [0, 1]), flow.placement("cpu", [2, 3])], 4, traced)
    assert pair <= 5  # where each saw to its own, 8
    assert len({local.key for local in traced}) == pair


def test_stages_of_unequal_ranks_trace_each_kind_of_piece_once(traced: list[Local]) -> None:
    stages = [flow.placement("cpu", [0]), flow.placement("cpu", [1, 2]), flow.placement("cpu", [3, 4, 5])]
    assert traces(stages, 3, traced) <= 10  # 13
    grid = flow.placement("cpu", [[0, 1], [2, 3]]), flow.placement("cpu", [[4, 5, 6]])
    assert traces(grid, 4, traced) <= 8  # 16


def by_rank(piece: Piece) -> int:
    return piece.rank


def test_functions_of_users_are_told_apart_by_rank() -> None:
    """They may look at the rank; ours look at what the rank holds."""
    p = flow.placement("cpu", [0, 1])
    whole, split = flow.layout(p, flow.B, (4,)), flow.layout(p, flow.S(0), (4,))
    ours = type("ours", (), {"__module__": "sbpflow.x", "__call__": lambda self: 0})()
    for of, equal in ((whole, True), (split, False)):
        keys = [same(partial(ours, Piece(rank, (of,), (of,)))) for rank in (0, 1)]
        assert (keys[0] == keys[1]) is equal
    theirs = [same(partial(by_rank, Piece(rank, (whole,), (whole,)))) for rank in (0, 1)]
    assert theirs[0] != theirs[1]


def told_by_its_outputs(local: Local, *how: object) -> Compiled:
    return Compiled(lambda x: x, None, local.outputs, (), "code")


class Fleeting:
    """A localiser of ranks that hold unlike pieces, which keeps none of their segments."""

    graph = None

    def segment(self, segment: Segment, rank: int) -> Local:
        return Local((), (), tuple(range(rank)), (), ())


def test_ranks_that_do_not_do_the_same_have_a_segment_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their segments are known from a program before, so that nobody holds those made to ask for them.

    They were told apart by their addresses: the next rank's could lie where the last one's had lain, and the rank ran
    another rank's kernel. Of some hundred steps that were compiled one gave wrong values.
    """
    monkeypatch.setattr(compiled_segments, "compiled", told_by_its_outputs)
    compiled_segments.compiled_once.cache_clear()
    segment = Segment(flow.placement("cpu", range(64)), (), tuple(map(str, range(64))), ())
    for _ in range(2):
        made: Any = CompiledSegments(cast(Any, Fleeting()), [segment], "code")
        assert [len(made.at[0, rank].again) for rank in range(64)] == list(range(64))
    compiled_segments.compiled_once.cache_clear()
