"""Values that every process passes as one are compared: a batch that differs between ranks trains on without a word."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.nn.tensors import agreement
from tests.ranks import Fresh, Ranks

LINE = flow.placement("cpu", range(4))


def me() -> int:
    return flow.boxing.owned(LINE)[0]


def loads(differs: str, at: int, steps: int, check: bool = True) -> tuple[int, str]:
    """Takes a batch a step, from step `at` on another one on rank 2; how many steps went well, and the error."""
    flow.init(check=check)
    agreement._calls.clear()  # as in a program that begins
    well = 0
    try:
        for step in range(steps):
            torch.manual_seed(step)
            odd = me() == 2 and step >= at
            if odd and differs == "seed":
                torch.manual_seed(1000 + step)
            batch = torch.randn(8 + (odd and differs == "size"), 3)
            if odd and differs == "one number":
                batch[3, 1] += 1e-3
            if odd and differs == "dtype":
                batch = batch.double()
            flow.tensor(batch, placement=LINE, sbp=B if odd and differs == "signature" else S(0))
            well += 1
    except flow.SbpflowError as error:
        return well, str(error)
    finally:
        flow.init(check=True)
    return well, ""


@pytest.mark.parametrize("differs", ["seed", "one number", "size", "dtype", "signature"])
def test_a_batch_that_differs_on_one_rank_is_an_error_at_once_on_all(ranks4: Ranks, differs: str) -> None:
    for well, text in ranks4(loads, differs, 0, 3):
        assert well == 0
        assert "test_agreement.py:" in text.splitlines()[0]
        assert "ranks 0 and 2 passed different values" in text
        assert "flow.from_local(share" in text


def test_a_batch_that_differs_later_is_seen_now_and_then(ranks4: Ranks) -> None:
    for well, text in ranks4(loads, "seed", agreement.FIRST, 2 * agreement.EVERY):
        assert agreement.FIRST < well < agreement.EVERY + agreement.FIRST
        assert "ranks 0 and 2 passed different values" in text


def test_the_comparison_may_be_left_out(ranks4: Ranks) -> None:
    assert ranks4(loads, "seed", 0, 5, False) == [(5, "")] * 4


def moves_made(steps: int) -> int:
    x = torch.ones(8, 3)
    with flow.record() as moves:
        for _ in range(steps):
            flow.tensor(x, placement=LINE, sbp=S(0))
    return sum(move.op == "same values" for move in moves)


def test_three_comparisons_and_then_one_in_sixty_four(ranks4: Ranks) -> None:
    """Each is one all_gather of a number a rank."""
    assert ranks4(moves_made, 2 * agreement.EVERY) == [agreement.FIRST + 2] * 4
    assert moves_made(3) == 0  # in one process there is nobody to differ from


def trains(odd: int, micro_batches: int, late: int = 0) -> tuple[int, str]:
    agreement._calls.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    if micro_batches > 1:
        flow.nn.pipeline(model, [flow.placement("cpu", [0, 1]), flow.placement("cpu", [2, 3])])
    more = {"micro_batches": micro_batches} if micro_batches > 1 else {"placement": LINE}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y)

    step = flow.compile(model, loss, optimizer, **more)
    well = 0
    try:
        for at in range(2):
            loader = torch.Generator().manual_seed(at + 100 * (me() == odd and at >= late))
            step(torch.randn(8, 3, generator=loader), torch.zeros(8, 2))
            well += 1
    except flow.SbpflowError as error:
        return well, str(error)
    return well, ""


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("late", [0, 1])
def test_a_step_given_another_batch_on_one_rank_is_an_error_that_names_the_argument(
    ranks4: Ranks, micro_batches: int, late: int
) -> None:
    assert ranks4(trains, -1, micro_batches) == [(2, "")] * 4
    for well, text in ranks4(trains, 3, micro_batches, late):
        assert well == late
        assert "ranks 0 and 3 passed different values" in text.splitlines()[0]
        assert text.splitlines()[0].endswith("in 0")


FACTORIES: dict[str, Callable[[bool], object]] = {
    "signature": lambda odd: flow.zeros(8, placement=LINE, sbp=B if odd else S(0)),
    "shape": lambda odd: flow.ones(8 + odd, placement=LINE, sbp=B),
    "number": lambda odd: flow.full((8,), 1.0 + odd, placement=LINE, sbp=S(0)),
    "dtype": lambda odd: flow.empty(8, placement=LINE, sbp=S(0), dtype=torch.float64 if odd else None),
    "bound": lambda odd: flow.arange(8 + odd, placement=LINE, sbp=B),
    "addends": lambda odd: flow.zeros(8, placement=LINE, sbp=B if odd else P),
    "seed": lambda odd: flow.rand(8, placement=LINE, sbp=S(0), seed=1 + odd),
    "generator": lambda odd: flow.randperm(8, placement=LINE, sbp=B, generator=torch.Generator().manual_seed(int(odd))),
    "like": lambda odd: flow.full_like(torch.ones(4), 2.0 + odd, placement=LINE, sbp=B),
}


def makes(name: str, check: bool) -> str:
    flow.init(check=check)
    agreement._calls.clear()
    torch.manual_seed(0)
    try:
        for differs in (False, me() == 2):
            FACTORIES[name](differs)
    except flow.SbpflowError as error:
        return str(error)
    finally:
        flow.init(check=True)
    return ""


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_called_otherwise_on_one_rank_is_an_error_that_names_line_and_rank(ranks4: Ranks, name: str) -> None:
    for text in ranks4(makes, name, True):
        assert "test_agreement.py:" in text.splitlines()[0]
        assert "ranks 0 and 2 called it with" in text.splitlines()[0]
    assert ranks4(makes, name, False) == [""] * 4


def made(steps: int) -> int:
    with flow.record() as moves:
        for _ in range(steps):
            flow.zeros(8, placement=LINE, sbp=S(0))
    return sum(move.op == "same factory" for move in moves)


def test_a_factory_is_compared_three_times_a_line_and_then_once_in_sixty_four(ranks4: Ranks) -> None:
    assert ranks4(made, 2 * agreement.EVERY) == [agreement.FIRST + 2] * 4


OPERANDS: dict[str, Callable[[Any, bool], Any]] = {
    "shape": lambda x, odd: x[:, :2] if odd else x * 1,
    "dtype": lambda x, odd: x.double() if odd else x * 1,
    "dims": lambda x, odd: x[None] if odd else x * 1,
}


def operates(name: str) -> str:
    flow.init(timeout=60)
    try:
        x = OPERANDS[name](flow.ones(8, 3, placement=LINE, sbp=B), me() == 2)
        (x + 1).to_global(sbp=S(0)).full_tensor()
    except flow.SbpflowError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_that_differ_without_a_move_are_an_error_at_the_next_op_that_sends(fresh: Fresh, name: str) -> None:
    texts = [end.answer.value for end in fresh(4, operates, name) if end.answer]
    assert len(texts) == 4
    assert all("test_agreement.py:" in text and "ranks" in text and "2" in text.splitlines()[0] for text in texts)


def threaded() -> int:
    """On another thread, whose calls may come in any order, nothing is compared."""
    import threading

    with flow.record() as moves:
        thread = threading.Thread(target=lambda: flow.tensor(torch.full((2,), float(me())), placement=LINE, sbp=B))
        thread.start()
        thread.join()
    return len([move for move in moves if move.op == "same values"])


def test_a_thread_that_prefetches_compares_nothing(fresh: Fresh) -> None:
    assert [end.answer and end.answer.value for end in fresh(4, threaded)] == [0] * 4


def reseeded(kind: str) -> str:
    """Rank 2 changes its seed after the first draws, the others do not; then they draw and look at what they have."""
    flow.init(timeout=60)
    torch.manual_seed(0)
    x = flow.rand(8, placement=LINE, sbp=S(0))
    if me() == 2:
        torch.manual_seed(5)
    try:
        y = flow.rand(8, placement=LINE, sbp=S(0)) if kind == "rand" else torch.dropout(x, 0.5, True)
        assert isinstance(y, flow.GlobalTensor)
        y.full_tensor()
    except flow.SbpflowError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["rand", "dropout"])
def test_a_rank_that_is_seeded_otherwise_after_the_first_draws_is_named_with_the_cause(fresh: Fresh, kind: str) -> None:
    texts = [end.answer.value for end in fresh(4, reseeded, kind) if end.answer]
    assert len(texts) == 4
    assert "only rank 2 compared seeds" in texts[2]
    assert "torch.manual_seed was called there alone, or with another number" in texts[2]
    assert sum("only rank 2 compared seeds" in text for text in texts) >= 2
    assert all("different moves" in text or "gave up" in text for text in texts)
