"""Training on any layout goes as on one device: the same losses, and the same weights in the end."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sbpflow as flow
from sbpflow import B, S
from tests.nn.models import MODELS, ConvNet, Perceptron, Transformer, batches
from tests.ranks import Ranks

Spec: TypeAlias = Any  # a signature, a dict from patterns of names to signatures, or a function
Weights: TypeAlias = dict[str, Tensor]
Feed: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

LINE, GRID = "cpu:[0-3]", "cpu:[0-3] as (data=2, tensor=2)"
COLUMNS_ROWS = {"first.0.*": S(0), "first.2.weight": S(1), "last.0.*": S(0), "last.2.weight": S(1)}
MEGATRON = {
    "blocks.*.[qkv].*": S(0),  # columns of the maps in, so each rank has some of the heads
    "blocks.*.up.*": S(0),
    "blocks.*.out.weight": S(1),  # rows of the maps out
    "blocks.*.down.weight": S(1),
    "words.weight": S(0),
    "head.weight": S(0),  # the loss on split classes
}


def everything_cut(name: str, tensor: Tensor) -> Spec:
    return S(0) if tensor.ndim else B


def filters_cut(name: str, tensor: Tensor) -> Spec:
    """The first convolution makes half of the channels on each rank, the second takes half of them."""
    if name.startswith("first.") and tensor.ndim:
        return S(0)
    return S(1) if name == "second.0.weight" else B


def on(axis: str, specs: dict[str, Any]) -> Spec:
    return {name: {axis: sbp} for name, sbp in specs.items()}


@dataclass(frozen=True)
class Case:
    model: str
    placement: str
    weights: Spec
    batch: Spec
    rows: int = 8
    hidden: Spec | None = None  # how the transformer's stream between the blocks is to lie


CASES = {
    "data parallel, perceptron": Case("perceptron", LINE, B, S(0)),
    "data parallel, uneven": Case("perceptron", LINE, B, S(0), rows=7),
    "data parallel, fewer rows than ranks": Case("perceptron", LINE, B, S(0), rows=3),
    "data parallel, convnet": Case("convnet", LINE, B, S(0), rows=6),
    "data parallel, transformer": Case("transformer", LINE, B, S(0)),
    "tensor parallel, perceptron": Case("perceptron", "cpu:[0-2]", COLUMNS_ROWS, B),
    "tensor parallel, convnet": Case("convnet", "cpu:[0-1]", filters_cut, B, rows=4),
    "tensor parallel, transformer": Case("transformer", "cpu:[0-1]", MEGATRON, B, rows=3),
    "tensor parallel, heads do not divide": Case("transformer", "cpu:[0-2]", MEGATRON, B, rows=3),
    "sequence parallel": Case("transformer", "cpu:[0-1]", MEGATRON, B, rows=3, hidden=S(1)),
    "sequence parallel, uneven": Case("transformer", LINE, MEGATRON, B, rows=3, hidden=S(1)),
    "weights cut up, perceptron": Case("perceptron", LINE, everything_cut, S(0), rows=7),
    "weights cut up, convnet": Case("convnet", LINE, everything_cut, S(0), rows=6),
    "weights cut up, transformer": Case("transformer", LINE, everything_cut, S(0), rows=6),
    "data x tensor, perceptron": Case("perceptron", GRID, on("tensor", COLUMNS_ROWS), {"data": S(0)}, rows=7),
    "data x tensor, transformer": Case("transformer", GRID, on("tensor", MEGATRON), {"data": S(0)}, rows=5),
    "data x tensor, with sequences": Case(
        "transformer", GRID, on("tensor", MEGATRON), {"data": S(0)}, rows=5, hidden={"data": S(0), "tensor": S(1)}
    ),
}
REAL = [
    "data parallel, uneven",
    "data parallel, convnet",
    "weights cut up, transformer",
    "data x tensor, transformer",
    "data x tensor, with sequences",
]


class Move(nn.Module):
    """What passes is moved."""

    def __init__(self, **where: Any) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Any) -> Any:
        return x.to_global(**self.where)


def made(model: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]().to(dtype)


def spread(case: Case, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Feed]:
    """The model and its batches as the case lays them out."""
    p, model = flow.placement(case.placement), made(case.model, dtype)
    if case.hidden is not None:
        assert isinstance(model, Transformer)
        model.dropout = nn.Sequential(Move(sbp=case.hidden), model.dropout)  # type: ignore[assignment]

    def feed(x: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return flow.tensor(x, placement=p, sbp=case.batch), flow.tensor(wanted, placement=p, sbp=case.batch)

    return flow.nn.to_global(model, p, case.weights), feed


def as_it_is(x: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    return x, wanted


def train(
    model: nn.Module,
    data: Iterator[tuple[Tensor, Tensor]],
    feed: Feed = as_it_is,
    mixed: AbstractContextManager[Any] | None = None,
) -> list[float]:
    """An ordinary loop: AdamW, clipped gradients, a falling rate. The losses of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    losses = []
    torch.manual_seed(2)
    for batch in data:
        with mixed or nullcontext():
            loss = model(*feed(*batch))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        rate.step()
        losses.append(loss.item())
    return losses


def held(model: nn.Module) -> Weights:
    """Every parameter and buffer, whole."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def whole(tensor: Any) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, flow.GlobalTensor) else tensor
    assert type(full) is Tensor
    return full.detach()


@cache
def alone(model: str, rows: int, dtype: torch.dtype = torch.float64) -> tuple[list[float], Weights]:
    """On one device, in plain torch."""
    plain = made(model, dtype)
    return train(plain, batches(model, rows, dtype)), held(plain)


def case_run(name: str, dtype: torch.dtype = torch.float64) -> tuple[list[float], Weights]:
    case = CASES[name]
    model, feed = spread(case, dtype)
    return train(model, batches(case.model, case.rows, dtype), feed), held(model)


def check(run: tuple[list[float], Weights], wanted: tuple[list[float], Weights], rel: float = 1e-9) -> None:
    """Sums are added in another order, so the last digits differ, and Adam's division makes more of that."""
    assert run[0] == pytest.approx(wanted[0], rel=rel)
    torch.testing.assert_close(run[1], wanted[1], rtol=rel * 100, atol=rel)


@pytest.mark.parametrize("model", MODELS)
def test_the_models_learn(model: str) -> None:
    losses = train(made(model, torch.float64), batches(model, 8, count=20))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_those_of_one_device(name: str) -> None:
    check(case_run(name), alone(CASES[name].model, CASES[name].rows))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REAL)
def test_losses_on_float32_are_those_of_one_device(name: str) -> None:
    losses, _ = case_run(name, torch.float32)
    wanted, _ = alone(CASES[name].model, CASES[name].rows, torch.float32)
    assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", REAL)
def test_real_ranks_see_the_same_losses_and_weights(name: str, ranks4: Ranks) -> None:
    for run in ranks4(case_run, name):
        check(run, alone(CASES[name].model, CASES[name].rows))


def pipelined(weights: Spec = B) -> tuple[list[float], Weights]:
    """The first half on ranks 0 and 1, the second on 2 and 3."""
    left, right = flow.placement("cpu:[0-1]"), flow.placement("cpu:[2-3]")
    model = made("perceptron", torch.float64)
    assert isinstance(model, Perceptron)
    flow.nn.to_global(model.first, left, weights)
    flow.nn.to_global(model.last, right, weights)
    model.between = Move(placement=right)

    def feed(x: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return flow.tensor(x, placement=left, sbp=S(0)), flow.tensor(wanted, placement=right, sbp=S(0))

    return train(model, batches("perceptron", 7), feed), held(model)


@pytest.mark.parametrize("weights", [B, S(0)], ids=["data", "cut"])
def test_two_stages_on_different_ranks_train_as_one_device(weights: Spec) -> None:
    check(pipelined(weights), alone("perceptron", 7))


def test_two_stages_on_real_ranks_train_as_one_device(ranks4: Ranks) -> None:
    for run in ranks4(pipelined):
        check(run, alone("perceptron", 7))


def test_sequence_parallel_replaces_all_reduces_of_activations() -> None:
    """What is between the blocks stays cut along the sequence, so sums go there by reduce-scatter."""
    model, feed = spread(CASES["sequence parallel"])
    with flow.record() as moves:
        model(*feed(*next(batches("transformer", 3))))
    activations = [move for move in moves if len(move.boxing.src.shape) == 3]
    assert any(move.route == "reduce_scatter" for move in activations)
    assert not any("all_reduce" in move.route for move in activations)


def test_data_parallel_sends_nothing_but_gradients() -> None:
    model, feed = spread(CASES["data parallel, perceptron"])
    x, wanted = feed(*next(batches("perceptron", 8)))
    with flow.record() as forward:
        loss = model(x, wanted)
    assert forward.bytes <= 8  # the loss itself, if anything
    with flow.record() as backward:
        loss.backward()
    sent = sum(move.boxing.src.numel for move in backward if move.bytes)
    assert sent <= 1 + sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["data parallel, transformer", "data x tensor, transformer"])
def test_autocast_is_that_of_one_device(name: str) -> None:
    case = CASES[name]
    plain = made(case.model, torch.float32)
    mixed = partial(torch.autocast, "cpu", torch.bfloat16)
    wanted = train(plain, batches(case.model, case.rows, torch.float32), mixed=mixed())
    model, feed = spread(case, torch.float32)
    losses = train(model, batches(case.model, case.rows, torch.float32), feed, mixed())
    assert losses == pytest.approx(wanted, rel=2e-2)  # bfloat16 keeps 8 bits
    exact, _ = alone(case.model, case.rows, torch.float32)
    assert wanted != pytest.approx(exact, rel=1e-5)  # or nothing was cast


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["data parallel, transformer", "data x tensor, transformer"])
def test_recomputing_the_blocks_changes_nothing(name: str) -> None:
    """Dropout draws the same numbers when a block runs again."""
    case = CASES[name]
    model, feed = spread(case)
    assert isinstance(model, Transformer)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    check((train(model, batches(case.model, case.rows), feed), held(model)), alone(case.model, case.rows))


def tied() -> Transformer:
    torch.manual_seed(0)
    model = Transformer().double()
    model.head.weight = model.words.weight
    return model


def test_tied_weights_stay_tied() -> None:
    p = flow.placement("cpu:[0-1]")
    plain, model = tied(), tied()
    flow.nn.to_global(model, p, MEGATRON)
    wanted = train(plain, batches("transformer", 4, count=5))

    def feed(x: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        return flow.tensor(x, placement=p, sbp=B), flow.tensor(following, placement=p, sbp=B)

    losses = train(model, batches("transformer", 4, count=5), feed)
    assert losses == pytest.approx(wanted, rel=1e-9)
    assert model.head.weight is model.words.weight


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "SGD, momentum, decay": lambda weights: torch.optim.SGD(weights, 0.1, 0.9, weight_decay=0.1, nesterov=True),
    "Adam, amsgrad": lambda weights: torch.optim.Adam(weights, lr=1e-2, amsgrad=True),
    "AdamW, one by one": lambda weights: torch.optim.AdamW(weights, lr=1e-2, foreach=False),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=1e-2),
    "Adadelta": lambda weights: torch.optim.Adadelta(weights),
    "Adamax": lambda weights: torch.optim.Adamax(weights, lr=1e-2),
    "NAdam": lambda weights: torch.optim.NAdam(weights, lr=1e-2),
    "RAdam": lambda weights: torch.optim.RAdam(weights, lr=1e-2),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=1e-2, momentum=0.9, centered=True),
    "Rprop": lambda weights: torch.optim.Rprop(weights, lr=1e-2),
    "ASGD": lambda weights: torch.optim.ASGD(weights, lr=1e-2),
    "Adafactor": lambda weights: torch.optim.Adafactor(weights, lr=1e-2),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["data parallel, uneven", "weights cut up, perceptron"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_of_torch_steps_as_on_one_device(optimizer: str, name: str) -> None:
    case = CASES[name]
    (model, feed), plain = spread(case), made(case.model, torch.float64)
    for module, give in ((model, feed), (plain, as_it_is)):
        steps = OPTIMIZERS[optimizer](module.parameters())
        for batch in batches(case.model, case.rows, count=6):
            steps.zero_grad()
            module(*give(*batch)).backward()
            steps.step()
    for mine, wanted in zip(held(model).values(), held(plain).values(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-7, atol=1e-9)


def test_gradients_add_up_over_micro_batches() -> None:
    case = CASES["data x tensor, perceptron"]
    (model, feed), plain = spread(case), made(case.model, torch.float64)
    for batch in batches(case.model, case.rows, count=3):
        model(*feed(*batch)).backward()
        plain(*batch).backward()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), wanted.grad)


def test_frozen_weights_stay_and_get_no_gradient() -> None:
    model, feed = spread(CASES["weights cut up, perceptron"])
    assert isinstance(model, Perceptron)
    model.first.requires_grad_(False)
    before = held(model)
    train(model, batches("perceptron", 7, count=2), feed)
    assert all(parameter.grad is None for parameter in model.first.parameters())
    moved = {name for name, tensor in held(model).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.startswith("last")}


def test_evaluation_uses_what_batch_norm_has_learned() -> None:
    case = CASES["weights cut up, convnet"]
    (model, feed), plain = spread(case), made(case.model, torch.float64)
    assert isinstance(model, ConvNet)
    for module, give in ((model, feed), (plain, as_it_is)):
        train(module, batches(case.model, case.rows, count=2), give)
        module.eval()
    batch = next(batches(case.model, 5))
    with torch.no_grad():
        torch.testing.assert_close(whole(model(*feed(*batch))), plain(*batch))
