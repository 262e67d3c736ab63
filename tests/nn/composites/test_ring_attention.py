"""Ring attention computes what attention on one device does, gradients too, and sends keys and values round once."""

import copy
from itertools import product
from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow import S
from sbpflow.boxing.graph.text.parse import from_text
from sbpflow.nn.composites.ring_attention import STRIPES, _strips
from sbpflow.nn.graph.instructions.moves import MoveNow, StartMove
from sbpflow.nn.graph.run.program import Program
from sbpflow.placement import Placement
from sbpflow.placement.errors import SbpError
from sbpflow.sbp.state import spans
from tests.nn.graph.pipes import of, text, words_loss
from tests.ranks import Ranks

from .ring import F64, Attends, close, compared, line, numbers, weighed


def three(length: int, *, heads: int = 2, shared: int | None = None, keys: int | None = None) -> list[torch.Tensor]:
    shapes = [(2, heads, length, 4), *[(2, shared or heads, keys or length, 4)] * 2]
    return [numbers(*shape, seed=n) for n, shape in enumerate(shapes)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(
    ("ranks", "length"),
    [(1, 8), (2, 8), (4, 16), (8, 16), (4, 13), (4, 3), (2, 1), (4, 0)],
    ids=["one", "two", "four", "eight", "uneven", "shorter_than_ranks", "one_token", "empty"],
)
def test_the_ring_computes_what_one_device_does(ranks: int, length: int, causal: bool) -> None:
    close(compared(line(ranks), three(length), is_causal=causal))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(("ranks", "length"), [(2, 8), (4, 45), (4, 13), (4, 3)])
def test_stripes_compute_what_one_device_does(ranks: int, length: int, causal: bool) -> None:
    close(compared(line(ranks), three(length), use="striped", is_causal=causal))


def waited(stripes: int, ranks: int = 8, length: int = 512) -> float:
    """The weights computed while every turn waits for the rank that has most to do, beside those there are, shared."""
    factors = (-stripes, 0) if stripes > 1 else (0,)
    held = [[end for span in spans(length, factors, (rank,), (ranks,)) for end in span] for rank in range(ranks)]

    def work(rank: int, turn: int) -> int:
        strips = _strips(held[rank], held[(rank - turn) % ranks], True)
        return sum(len(range(*one.mine.indices(length))) * len(range(*one.theirs.indices(length))) for one in strips)

    most = sum(max(work(rank, turn) for rank in range(ranks)) for turn in range(ranks))
    return most * ranks / (length * (length + 1) / 2)


def test_stripes_share_out_what_the_mask_leaves() -> None:
    assert waited(1) > 1.9
    assert waited(STRIPES) < 1.25


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(("heads", "shared"), [(4, 2), (4, 1), (6, 2)])
def test_heads_of_keys_may_be_shared(heads: int, shared: int, causal: bool) -> None:
    close(compared(line(4), three(13, heads=heads, shared=shared), is_causal=causal, enable_gqa=True))


MASKS = {
    "rows and columns": (13, 13),
    "of each head": (2, 13, 13),
    "of each sample": (2, 1, 13, 13),
    "columns": (1, 13),
    "padding": (2, 1, 1, 13),
    "rows": (13, 1),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("shape", "kind"), list(product(MASKS, [torch.bool, F64])))
def test_masks_hide_and_shift(shape: str, kind: torch.dtype) -> None:
    mask = numbers(*MASKS[shape], seed=5)
    close(compared(line(4), three(13), mask > -0.5 if kind is torch.bool else mask))


def test_a_row_that_sees_nothing_is_zero_and_learns_nothing() -> None:
    hidden = torch.ones(13, 13, dtype=torch.bool)
    hidden[4:7] = False
    close(compared(line(4), three(13), hidden))


@pytest.mark.parametrize("keys", [6, 30])
def test_keys_may_be_of_another_sequence(keys: int) -> None:
    close(compared(line(4), three(13, keys=keys)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("shape", [(13, 4), (3, 13, 4)], ids=["no_batch", "heads_alone"])
def test_there_may_be_no_batch(shape: tuple[int, ...], causal: bool) -> None:
    close(compared(line(4), [numbers(*shape, seed=n) for n in range(3)], is_causal=causal, scale=0.7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers_are_added_up_in_single(dtype: torch.dtype) -> None:
    given = [x.to(dtype) for x in three(16)]
    close(compared(line(4), given, is_causal=True), 1e-4 if dtype is torch.float32 else 5e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("over", ["context", "tensor"])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (4, 1)])
def test_batch_and_heads_may_be_split_on_other_axes(heads: int, shared: int, over: str) -> None:
    where = flow.placement("cpu:[0-7] as (data=2, context=2, tensor=2)")
    other = "tensor" if over == "context" else "context"
    sbp = {"data": S(0), over: S(2), other: S(1) if shared > 1 else flow.B}
    given = three(9, heads=heads, shared=shared)
    close(compared(where, given, sbp=sbp, over=over, is_causal=True, enable_gqa=True))


def kinds(moves: Any) -> list[tuple[str, int]]:
    return [(move.boxing.route, move.boxing.total) for move in moves if move.boxing.total]


def sent(ranks: int, causal: bool) -> list[tuple[str, int]]:
    with flow.record() as moves:
        compared(line(ranks), three(16), is_causal=causal)
    return [(route, total) for route, total in kinds(moves) if route == "transfer"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_keys_and_values_go_round_once_and_back_with_their_gradients(ranks: int, causal: bool) -> None:
    """Forward (n - 1) / n of keys and values leave each rank, as in a gather; backward these and their gradients."""
    whole = 2 * 2 * 16 * 4 * 8  # bytes of the keys, and of the values
    assert sent(ranks, causal) == [("transfer", whole)] * (2 * (ranks - 1) * 3)


def test_dropout_inside_is_refused() -> None:
    with pytest.raises(SbpError, match=r"inside attention use ring: dropout_p=0.5 draws.*\n.*\n.*set dropout_p=0.0"):
        compared(line(2), three(8), dropout_p=0.5)


def test_batch_dims_that_are_repeated_are_refused() -> None:
    query, key, value = three(8)
    with pytest.raises(SbpError, match="other batch dims or heads"):
        compared(line(2), [query, key[:1], value[:1]])


def planned(ring: bool, learns: bool = False) -> Any:
    """A step of attention to all of a sequence, which an axis splits; with `learns` its inputs have gradients."""
    model = Attends(16, torch.float32)
    if ring:
        flow.nn.inside(model.attention, use="ring", over="context")
    zeros = torch.zeros(1, 2, 512, 16)
    given = [flow.tensor(zeros, placement=line(4), sbp=S(2)).requires_grad_(learns) for _ in range(3)]
    return flow.compile(model, weighed, placement=line(4)).plan_for(*given, zeros, None)


def test_no_rank_ever_has_all_keys_and_values() -> None:
    """Ranks that gather them have all at once, and keep them for the backward; the ring has two pieces of each."""
    ring, whole = (planned(each).explain().memory.ranks[0] for each in (True, False))
    piece = 2 * 512 * 16 * 4 / 4
    assert whole.activations - ring.activations > 3 * piece


@pytest.mark.parametrize(("learns", "turns"), [(False, 12), (True, 18)])
def test_what_goes_round_goes_beside_the_computing(learns: bool, turns: int) -> None:
    """Of gradients the last come home beside the first block."""
    order = Program(planned(True, learns).physical, overlap=True).schedule
    moves = [do for do in order.todo if isinstance(do, MoveNow | StartMove)]
    round_the_axis = [do.word for do in moves if order.transfers[do.number].plans[0].route == "transfer"]
    assert round_the_axis == ["start"] * turns


def test_the_graph_is_a_text_that_parses_back() -> None:
    graph = planned(True).physical
    assert from_text(planned(True).text()) == graph


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [{}, {"backend": "autograd"}, {"micro_batches": 2}], ids=str)
def test_a_transformer_trains_on_a_sequence_in_pieces(how: Any) -> None:
    model = of("gpt")
    alone = copy.deepcopy(model)
    flow.nn.inside(model, use="ring", over="context")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    step = flow.compile(model, words_loss, optimizers[0], placement=line(2), **how)
    for at in range(2):
        (words,) = text(at)
        loss = step(words if how else flow.tensor(words, placement=line(2), sbp=S(1)))
        want = words_loss(alone, words)
        want.backward()  # type: ignore[no-untyped-call]
        optimizers[1].step()
        optimizers[1].zero_grad()
        torch.testing.assert_close(loss.full_tensor(), want.detach(), rtol=1e-10, atol=1e-10)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        held: Any = mine
        torch.testing.assert_close(held.full_tensor(), other.detach(), rtol=1e-10, atol=1e-10)


def on_ranks(where: Placement) -> None:
    close(compared(where, three(13), is_causal=True))
    close(compared(where, three(8)))


def test_real_ranks_send_to_each_other(ranks4: Ranks) -> None:
    ranks4(on_ranks, line(4))
