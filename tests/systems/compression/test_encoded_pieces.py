"""Encoded sums of which each rank has a piece: payloads of pieces go to who is to have them, and nothing is lost."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.boxing.exchange.execute import transport
from tests.ranks import Ranks
from tests.systems.compression.runs import DATA, batch, encoded_sums, exact_sum, net, sent_bytes, step_of, trained

E = flow.encoders
BOTH = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
BY_PIECES = [
    E.sign(), E.sign(rows=True), E.sign(twice=True), E.topk(fraction=0.1), E.int8(), E.int4(block=4),
    E.later(steps=2, of=E.int4()),
]  # fmt: skip
WHOLE = [E.low_rank(rank=1), E.momentum(steps=1, of=E.int8())]
SHAPES = [((33, 8), 0), ((33, 8), 1), ((8, 4, 4), 0), ((3, 5), 0), ((5,), 0), ((1, 6), 0), ((2, 3), 1)]


def plain_bytes(x: Any, to: Any, **how: Any) -> int:
    """The bytes that all ranks were made to send for a move."""
    before = transport().sent.bytes.total()
    x.to_global(sbp=to, **how)
    return transport().sent.bytes.total() - before


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
@pytest.mark.parametrize("encoder", BY_PIECES, ids=str)
def test_sent_and_kept_are_the_sum_of_all_addends(encoder: E.Encoder, shape: tuple[int, ...], dim: int) -> None:
    rounds = [[torch.randn(shape) for _ in DATA] for _ in range(4)]
    sent, kept = encoded_sums(rounds, encoder, S(dim))
    torch.testing.assert_close(sent + kept.sum(0), exact_sum(rounds), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(8, 25), (5, 3), (2,)], ids=str)
def test_the_largest_of_each_piece_and_the_rest_are_the_total_to_the_bit(shape: tuple[int, ...]) -> None:
    rounds = [[torch.randint(-99, 99, shape).float() for _ in DATA] for _ in range(5)]
    sent, kept = encoded_sums(rounds, E.topk(fraction=0.1), S(0))
    assert torch.equal(sent + kept.sum(0), exact_sum(rounds))


@pytest.mark.parametrize("encoder", [*BY_PIECES[:-1], E.topk(fraction=0.05, twice=True)], ids=str)
def test_the_bytes_are_those_of_a_reduce_scatter_of_payloads(encoder: E.Encoder) -> None:
    x: Any = flow.from_local([torch.randn(64, 16) for _ in DATA], placement=DATA, sbp=P)
    piece = sum(y.nbytes for y in encoder.encode(torch.randn(16, 16)))
    n = DATA.size
    assert plain_bytes(x, S(0)) == n * (n - 1) * 16 * 16 * 4
    assert plain_bytes(x, S(0), encoder=encoder) == n * (n - 1) * piece
    with flow.record() as moves:
        x.to_global(sbp=S(0), encoder=encoder)
    assert [(move.op, move.route) for move in moves] == [("encoded", "all_to_all")]


@pytest.mark.parametrize("encoder", WHOLE, ids=str)
def test_one_that_needs_the_whole_is_encoded_whole_and_cut(encoder: E.Encoder) -> None:
    rounds = [[torch.randn(33, 8) for _ in DATA] for _ in range(3)]
    cut, whole = (encoded_sums(rounds, encoder, to)[0] for to in (S(0), B))
    assert torch.equal(cut, whole)


@dataclass(frozen=True)
class MeanOfPairsEncoder(E.Encoder):
    """An encoder with a course of its own, which knows nothing of pieces."""

    def course(self, value: Tensor, kept: Any, ranks: int) -> Any:
        everybody = yield E.GatheredPayloads((value.bfloat16(),))
        return sum(payload[0].float() for payload in everybody), {}


def test_a_course_of_a_users_own_has_the_whole() -> None:
    x: Any = flow.from_local([torch.ones(6, 2) * i for i in range(4)], placement=DATA, sbp=P)
    pieces = x.to_global(sbp=S(0), encoder=MeanOfPairsEncoder()).to_local()
    assert [y.shape[0] for y in pieces] == [2, 2, 1, 1]
    assert all((y == 6).all() for y in pieces)


def test_before_it_begins_a_later_encoder_scatters_plain_sums() -> None:
    encoder, errors = E.later(steps=1, of=E.int8()), E.KeptErrors()
    addends = [torch.randn(6, 3) for _ in DATA]
    routes = []
    for _ in range(2):
        x = flow.from_local([a.clone() for a in addends], placement=DATA, sbp=P)
        with flow.record() as moves:
            come = x.to_global(sbp=S(0), encoder=encoder, kept=errors["w"])
        routes.append([move.route for move in moves if move.op == "encoded"])
        torch.testing.assert_close(come.full_tensor(), sum(addends, torch.zeros(6, 3)), rtol=0.05, atol=0.05)
    assert routes == [["reduce_scatter"], ["all_to_all"]]


LIES: list[tuple[Any, Any, str, int]] = [
    ((P, P), (S(0), S(1)), "exchange", 12), ((P, P), (S(0), S(0)), "exchange", 12),
    ((P, P), (S(0), B), "exchange", 24),  # two ranks have each half
    ((P, S(0)), (S(1), S(0)), "all_to_all", 4), ((P, S(1)), (S(0), S(1)), "all_to_all", 4),
    ((P, B), (S(0), S(0)), "all_to_all", 8), ((P, B), (S(1), B), "all_to_all", 8),
    ((S(0), P), (S(0), S(0)), "all_to_all", 4), ((P, S(0)), (S(0), S(0)), "all_to_all", 4),
    ((S(0), P), (B, S(1)), "all_to_all", 4), ((S(0), P), (B, S(0)), "all_gather", 8),
    ((S(0), P), (S(1), B), "all_gather", 8),
]  # fmt: skip


@pytest.mark.parametrize(("start", "to", "route", "quarters"), LIES, ids=str)
def test_grids_of_two_axes(start: Any, to: Any, route: str, quarters: int) -> None:
    """Pieces inside of pieces, other dims, moves of other axes behind: the value is that of a plain move. Bytes are
    counted in quarters of the tensor, of which each number has an index."""
    shards = []
    for rank, like in enumerate(flow.tensor(torch.zeros(8, 12), placement=BOTH, sbp=start).to_local()):
        at = [c for c, entry in zip(BOTH.coords(rank), start, strict=True) if entry is not B]
        seed = torch.Generator().manual_seed(sum(3**k * c for k, c in enumerate(at)))
        shards.append(torch.randn(like.shape, generator=seed))
    x: Any = flow.from_local(shards, placement=BOTH, sbp=start)
    with flow.record() as moves:
        come = x.to_global(sbp=to, encoder=E.topk(fraction=1.0))
    coded = [move for move in moves if move.op == "encoded" and move.boxing.src.dtype is torch.uint8]
    assert [(move.route, move.boxing.total) for move in coded] == [(route, quarters * 8 * 12 // 4 * 8)]
    torch.testing.assert_close(come.to_local(), x.to_global(sbp=to).to_local())


def test_a_share_that_was_kept_comes_with_a_sum_in_pieces() -> None:
    encoder, errors = E.int4(twice=True), E.KeptErrors()
    total, come = torch.zeros(9, 6), torch.zeros(9, 6)
    ends: list[Any] = [B, B, S(0), B, S(1), S(0)]
    for at, to in enumerate(ends):
        addends = [torch.randn(9, 6, generator=torch.Generator().manual_seed(10 * at + i)) for i in range(4)]
        x = flow.from_local(addends, placement=DATA, sbp=P)
        come = come + x.to_global(sbp=to, encoder=encoder, kept=errors["w"]).full_tensor()
        total = total + sum(addends)
    left = flow.nn.StepErrors(errors).error("w").full_tensor()
    torch.testing.assert_close(come + left, total, rtol=1e-4, atol=1e-4)


def zero2(encoder: E.Encoder | None, **how: Any) -> Any:
    model = net()
    flow.nn.shard(model, {"*": B})
    flow.nn.shard(model, {"*": {"data": S(0)}}, kind=("grads", "states"))
    return step_of(model, None if encoder is None else {"2.weight": encoder}, **how)


def test_zero2_sends_each_rank_the_payloads_of_its_piece() -> None:
    step = zero2(E.int8())
    step(*batch(0))
    with flow.record() as moves:
        counted = sent_bytes(step)
    (coded,) = [move for move in moves if move.op == "encoded"]
    assert (coded.route, coded.boxing.total) == ("all_to_all", 4 * 3 * (8 * 32 + 2 * 4))
    assert counted == sum(move.boxing.total for move in moves)
    told = [row for row in step.explain().moves if row.direction == "backward" and "all_to_all" in row.route]
    assert sum(row.total * row.count for row in told) == coded.boxing.total
    assert step.kept.error("2.weight").shape == (32, 32)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [{}, {"micro_batches": 4}, {"backend": "autograd"}, {"clip_grad_norm": 5.0}], ids=str)
def test_zero2_learns_as_float32_does(how: dict[str, Any]) -> None:
    plain, coded = (trained(zero2(by, **how), 40) for by in (None, E.int4()))
    assert sum(coded[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.05)


def test_a_share_of_a_sum_is_not_in_the_account_of_pieces() -> None:
    held = [zero2(by).plan_for(*batch(0)).planned.held() for by in (None, E.sign(), E.sign(twice=True))]
    assert [of[0].states - held[0][0].states for of in held] == [0, 32 * 32 * 4, 32 * 32 * 4]


def on_a_rank() -> tuple[list[float], int]:
    step = zero2(E.sign(rows=True))
    losses = trained(step, 3)
    return losses, sent_bytes(step, 3)


def moved_on_a_rank(shape: tuple[int, ...]) -> list[Tensor]:
    errors, found = E.KeptErrors(), []
    for at in range(3):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(at))
        x: Any = flow.tensor(whole, placement=DATA, sbp=P)
        found.append(x.to_global(sbp=S(0), encoder=E.later(steps=1, of=E.int4()), kept=errors["w"]).full_tensor())
    return found


def test_processes_compute_what_one_that_plays_all_ranks_does(ranks4: Ranks) -> None:
    losses, sent = on_a_rank()
    found = ranks4(on_a_rank)
    assert [theirs for theirs, _ in found] == [losses] * 4
    assert sum(each for _, each in found) == sent
    for shape in ((7, 3), (2, 5)):
        mine = moved_on_a_rank(shape)
        for theirs in ranks4(moved_on_a_rank, shape):
            torch.testing.assert_close(theirs, mine, rtol=0, atol=0)
