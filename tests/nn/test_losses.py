"""Losses of split batches and classes: the mean is over the whole batch, and so is its gradient."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from tests.nn.either import Maker, X, differs
from tests.ranks import Ranks

LINE, GRID = "cpu:[0-3]", "cpu:[0-3] as (data=2, tensor=2)"
CLASSES = 6
ROWS = pytest.mark.parametrize("rows", [8, 5, 2], ids=["even", "uneven", "fewer than ranks"])


class Sample(NamedTuple):
    """What a loss is called with: the first gets a gradient, all have the batch as dim 0."""

    given: Tensor
    others: tuple[Tensor, ...]


def real(rows: int) -> Sample:
    return Sample(torch.randn(rows, CLASSES).double(), (torch.randn(rows, CLASSES).double(),))


def odds(rows: int) -> Sample:
    return Sample(torch.rand(rows, CLASSES).double(), (torch.rand(rows, CLASSES).double(),))


def logs(rows: int) -> Sample:
    return Sample(torch.randn(rows, CLASSES).double().log_softmax(1), odds(rows).others)


def signs(rows: int) -> Sample:
    return Sample(torch.randn(rows, CLASSES).double(), (torch.randn(rows, CLASSES).double().sign(),))


def labels(rows: int) -> Sample:
    """Labels of which one is to be ignored where it is asked for."""
    return Sample(torch.randn(rows, CLASSES).double(), ((torch.arange(rows) * 5 + 1) % CLASSES,))


def mixtures(rows: int) -> Sample:
    return Sample(torch.randn(rows, CLASSES).double(), (torch.rand(rows, CLASSES).double().softmax(1),))


def pixels(rows: int) -> Sample:
    return Sample(torch.randn(rows, CLASSES, 3).double(), (torch.randint(CLASSES, (rows, 3)),))


def triples(rows: int) -> Sample:
    anchor, near, far = torch.randn(3, rows, CLASSES).double().unbind()
    return Sample(anchor, (near, far))


def scales(rows: int) -> Sample:
    """Means, targets and variances."""
    return Sample(torch.randn(rows, CLASSES).double(), (torch.randn(rows, CLASSES).double(), odds(rows).given + 0.1))


def nll(given: Tensor, target: Tensor, **how: Any) -> Tensor:
    return F.nll_loss(given.log_softmax(1), target, **how)


WEIGHT = torch.arange(1.0, CLASSES + 1).double()
ELEMENTWISE: dict[str, tuple[Callable[..., Any], Callable[[int], Sample]]] = {
    "mse": (F.mse_loss, real),
    "mse, sum": (partial(F.mse_loss, reduction="sum"), real),
    "mse, none": (lambda x, y: F.mse_loss(x, y, reduction="none").mean(), real),
    "l1": (F.l1_loss, real),
    "smooth_l1": (partial(F.smooth_l1_loss, beta=0.5), real),
    "huber": (partial(F.huber_loss, delta=0.7), real),
    "bce": (F.binary_cross_entropy, odds),
    "bce, weights": (lambda x, y: F.binary_cross_entropy(x, y, weight=like(x, WEIGHT)), odds),
    "bce_with_logits": (F.binary_cross_entropy_with_logits, odds),
    "bce_with_logits, pos_weight": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=like(x, WEIGHT)),
        odds,
    ),
    "kl_div, batchmean": (partial(F.kl_div, reduction="batchmean"), logs),
    "kl_div, log_target": (lambda x, y: F.kl_div(x, y.log(), reduction="batchmean", log_target=True), logs),
    "soft_margin": (F.soft_margin_loss, signs),
    "hinge_embedding": (F.hinge_embedding_loss, signs),
    "poisson_nll": (F.poisson_nll_loss, odds),
    "gaussian_nll": (F.gaussian_nll_loss, scales),
    "weighted by hand": (lambda x, y: (like(x, WEIGHT) * (x - y) ** 2).sum() / (like(x, WEIGHT) + 0 * y).sum(), real),
    "triplet_margin": (F.triplet_margin_loss, triples),
}
CLASSWISE: dict[str, tuple[Callable[..., Any], Callable[[int], Sample]]] = {
    "nll": (nll, labels),
    "nll, weights": (lambda x, y: nll(x, y, weight=like(x, WEIGHT)), labels),
    "nll, ignore_index": (partial(nll, ignore_index=1), labels),
    "cross_entropy": (F.cross_entropy, labels),
    "cross_entropy, sum": (partial(F.cross_entropy, reduction="sum"), labels),
    "cross_entropy, none": (lambda x, y: F.cross_entropy(x, y, reduction="none").mean(), labels),
    "cross_entropy, weights": (lambda x, y: F.cross_entropy(x, y, like(x, WEIGHT)), labels),
    "cross_entropy, ignore_index": (partial(F.cross_entropy, ignore_index=1), labels),
    "cross_entropy, label_smoothing": (partial(F.cross_entropy, label_smoothing=0.1), labels),
    "cross_entropy, all of them": (
        lambda x, y: F.cross_entropy(x, y, like(x, WEIGHT), ignore_index=1, label_smoothing=0.1),
        labels,
    ),
    "cross_entropy, mixtures": (F.cross_entropy, mixtures),
    "cross_entropy, pixels": (partial(F.cross_entropy, ignore_index=2), pixels),
    "multi_margin": (F.multi_margin_loss, labels),
}
LOSSES = ELEMENTWISE | CLASSWISE


def like(x: Any, weight: Tensor) -> Any:
    """The weights where x is: every rank has them."""
    return flow.tensor(weight, placement=x.placement, sbp=B) if isinstance(x, flow.GlobalTensor) else weight


def both(name: str, rows: int) -> tuple[Callable[..., Any], Sample]:
    torch.manual_seed(rows)
    function, sample = LOSSES[name]
    return function, sample(rows)


def alone(name: str, rows: int) -> tuple[Tensor, Tensor]:
    function, (given, others) = both(name, rows)
    x = given.clone().requires_grad_()
    loss = function(x, *others)
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


def spread(name: str, rows: int, placement: str, given_sbp: Any, others_sbp: Any) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of its first argument, on a placement."""
    function, (given, others) = both(name, rows)
    p = flow.placement(placement)
    x = flow.tensor(given, placement=p, sbp=given_sbp).requires_grad_()
    loss = function(x, *(flow.tensor(other, placement=p, sbp=others_sbp) for other in others))
    loss.backward()
    return whole(loss), whole(x.grad)


def whole(tensor: Any) -> Tensor:
    assert isinstance(tensor, flow.GlobalTensor)
    full = tensor.full_tensor()
    assert type(full) is Tensor
    return full.detach()


def check(run: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """To rounding: sums are added in another order."""
    for mine, value in zip(run, wanted, strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-12, atol=1e-14)


@pytest.mark.sampled(34)
@ROWS
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_a_split_batch_is_that_of_one_device(name: str, rows: int) -> None:
    check(spread(name, rows, LINE, S(0), S(0)), alone(name, rows))


@pytest.mark.sampled(20)
@ROWS
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_loss_of_split_features_is_that_of_one_device(name: str, rows: int) -> None:
    check(spread(name, rows, LINE, S(1), S(1)), alone(name, rows))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_on_a_grid_is_that_of_one_device(name: str) -> None:
    check(spread(name, 5, GRID, (S(0), S(1)), {"data": S(0)}), alone(name, 5))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_what_every_rank_has_is_that_of_one_device(name: str) -> None:
    check(spread(name, 5, LINE, B, S(0)), alone(name, 5))


@pytest.mark.sampled(16)
@ROWS
@pytest.mark.parametrize("name", CLASSWISE)
def test_a_loss_of_split_classes_is_that_of_one_device(name: str, rows: int) -> None:
    check(spread(name, rows, LINE, S(1), B), alone(name, rows))


@pytest.mark.parametrize(
    "name",
    [
        "cross_entropy",
        "cross_entropy, weights",
        "cross_entropy, ignore_index",
        "cross_entropy, label_smoothing",
        "cross_entropy, all of them",
    ],
)
def test_cross_entropy_of_split_classes_never_gathers_them(name: str) -> None:
    """A number or a few for each row are sent, forward and backward, however many classes there are."""
    rows = 64
    with flow.record() as moves:
        function, (given, others) = both(name, rows)
        p = flow.placement(LINE)
        x = flow.tensor(given, placement=p, sbp=S(1)).requires_grad_()
        function(x, *(flow.tensor(other, placement=p, sbp=B) for other in others)).backward()
    sent = [move for move in moves if move.bytes and not move.op.startswith(("gather", "full_tensor"))]
    assert sent
    assert all(move.boxing.src.numel <= rows for move in sent), moves


def test_every_ignored_row_makes_no_number_as_on_one_device() -> None:
    p = flow.placement(LINE)
    logits, target = torch.randn(5, CLASSES), torch.full((5,), -100)
    loss = F.cross_entropy(flow.tensor(logits, placement=p, sbp=S(0)), flow.tensor(target, placement=p, sbp=S(0)))
    assert whole(loss).isnan()
    assert F.cross_entropy(logits, target).isnan()


def test_rows_that_are_ignored_count_nowhere() -> None:
    """All rows of one rank are ignored, so its share of the mean is nothing, not a number that is not one."""
    p = flow.placement("cpu:[0-1]")
    logits, target = torch.randn(4, CLASSES).double(), torch.tensor([-100, -100, 3, 1])
    x = flow.tensor(logits, placement=p, sbp=S(0)).requires_grad_()
    criterion = nn.CrossEntropyLoss()
    loss = criterion(x, flow.tensor(target, placement=p, sbp=S(0)))
    loss.backward()
    plain = logits.clone().requires_grad_()
    wanted = criterion(plain, target)
    wanted.backward()
    assert plain.grad is not None
    check((whole(loss), whole(x.grad)), (wanted.detach(), plain.grad))


def test_loss_modules_are_the_same_functions() -> None:
    p = flow.placement(LINE)
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    split = [flow.tensor(value, placement=p, sbp=S(0)) for value in (x, y)]
    for module in (nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss()):
        torch.testing.assert_close(whole(module(*split)), module(x, y))


def on_ranks(part: int) -> list[tuple[Tensor, Tensor]]:
    return [spread(name, 5, LINE, S(0), S(0)) for name in [*LOSSES][part::3]] + [
        spread(name, 5, LINE, S(1), B) for name in [*CLASSWISE][part::3]
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(3))
def test_real_ranks_get_the_same_losses(ranks4: Ranks, part: int) -> None:
    wanted = [alone(name, 5) for name in ([*LOSSES][part::3] + [*CLASSWISE][part::3])]
    for run in ranks4(on_ranks, part):
        for mine, value in zip(run, wanted, strict=True):
            check(mine, value)


IN_HALF = "F.cross_entropy(h,i) | F.nll_loss(h,i) | F.mse_loss(h,h*2) | h.prod() | F.cross_entropy(h,i,reduction='sum')"


@pytest.mark.parametrize("said", [e.strip() for e in IN_HALF.split("|")])
def test_autocast_runs_losses_of_half_precision_in_single(said: str) -> None:
    def cast(make: Maker) -> Any:
        h = make(X.bfloat16(), True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = eval(said, {"h": h, "i": torch.tensor([1, 0, 2, 3]), "F": F})
        out.backward()
        return out, h.grad is not None and h.grad.dtype

    assert not differs(cast)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "said", ["x.amax()", "x.amin(0)", "x.logsumexp(0)", "x.log_softmax(0)", "x.max(0)[0]", "x.softmax(0)"]
)
@pytest.mark.parametrize(("shape", "dim"), [((7, 2), 1), ((2, 7), 0), ((0, 3), 0), ((3, 1), 1)], ids=str)
def test_maxima_of_pieces_without_elements(said: str, shape: tuple[int, ...], dim: int) -> None:
    def law(make: Maker) -> Tensor:
        x = torch.linspace(-1, 1, 14, dtype=torch.float64)[: math.prod(shape)].reshape(shape).sin()
        if make.name is not None:
            x = flow.tensor(x, placement=flow.placement("cpu", range(4)), sbp=S(dim))
        made: Tensor = eval(said, {"x": x.reshape(-1)})  # of the ranks that had no column
        return made

    assert not differs(law)
