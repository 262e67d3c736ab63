"""Random numbers of micro-batches are those of one device: a draw belongs to samples, whatever runs them when."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sbpflow as flow
from sbpflow import S
from sbpflow.placement.errors import SbpError
from tests.ranks import Ranks

X = torch.linspace(-2, 2, 480, dtype=torch.float64).sin().view(10, 6, 8)
Y = torch.arange(60).view(10, 6) % 4


class Net(nn.Module):
    """Numbers of each kind: dropout, noise like an activation, one for each sample, and times that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.times = nn.Embedding(5, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.first(x).relu(), 0.3, self.training)
        h = h + self.second(h + 0.1 * torch.randn_like(h))
        keep = torch.rand(h.shape[0], 1, 1, dtype=h.dtype, device=h.device) < 0.8  # drop path
        h = h * keep + self.times(torch.randint(5, (h.shape[0], 1), device=h.device))
        torch.rand(3, device=h.device)  # which nobody needs
        made: Tensor = self.third(F.dropout(h, 0.2, self.training))
        return made


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


Run = tuple[list[float], float, list[Tensor]]  # losses, the number that is drawn behind them, weights


def trained(model: nn.Module, step: Callable[..., Any], optimizer: torch.optim.Optimizer | None = None) -> Run:
    torch.manual_seed(7)
    losses = []
    for _ in range(3):
        loss = step(X, Y)
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    behind = torch.rand(()).item()
    weights = [x.full_tensor() if isinstance(x, flow.GlobalTensor) else x for x in model.parameters()]
    return losses, behind, [x.detach() for x in weights]


def fresh(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def alone(kind: type[nn.Module] = Net, loss: Any = loss_fn) -> Run:
    model = fresh(kind)
    return trained(model, lambda x, y: loss(model, x, y), sgd(model))


def same(mine: Run, other: Run) -> None:
    assert mine[0] == pytest.approx(other[0], rel=1e-12)
    assert mine[1] == other[1]
    for a, b in zip(mine[2], other[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def staged(model: Any, stages: int) -> None:
    places = [flow.placement("cpu", [rank]) for rank in range(stages)]
    for at, part in enumerate((model.first, model.second, model.third)):
        flow.nn.place(part, places[min(at, stages - 1)])
    flow.nn.place(model.times, places[min(1, stages - 1)])


@pytest.mark.parametrize("many", [2, 3, 10])
def test_on_one_stage(many: int) -> None:
    model = fresh()
    step = flow.compile(model, loss_fn, sgd(model), placement=flow.placement("cpu", range(2)), micro_batches=many)
    same(trained(model, step), alone())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1", "chimera", "eager_1f1b"])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("many", [4, 5])
def test_under_a_schedule(schedule: str, stages: int, many: int) -> None:
    if schedule == "chimera" and (many % 2 or stages % 2):
        many, stages = 4, 2
    model = fresh()
    staged(model, stages)
    same(trained(model, flow.compile(model, loss_fn, sgd(model), micro_batches=many, schedule=schedule)), alone())


def processes(many: int) -> Run:
    model = fresh()
    staged(model, 2)
    return trained(model, flow.compile(model, loss_fn, sgd(model), micro_batches=many))


def test_in_processes_of_which_one_has_no_stage(ranks4: Ranks) -> None:
    wanted = alone()
    for losses, behind, _ in ranks4(processes, 3):
        assert losses == pytest.approx(wanted[0], rel=1e-12)
        assert behind == wanted[1]


@pytest.mark.parametrize("lines", ["**: data=S(0)", "first: data=S(0)", "recompute *", "states **: data=S(0)"])
def test_under_a_plan(lines: str) -> None:
    model = fresh()
    plan = f"grid (data=2)\ninput x <- data=S(0)\ninput y <- data=S(0)\n3 micro-batches\n{lines}"
    same(trained(model, flow.compile(model, loss_fn, sgd(model), plan=plan)), alone())


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return made


def test_what_is_run_again_has_the_same_numbers() -> None:
    model = fresh(Checkpointed)
    step = flow.compile(model, loss_fn, sgd(model), placement=flow.placement("cpu", [0]), micro_batches=3)
    same(trained(model, step), alone(Checkpointed))


class Images(nn.Module):
    """Dropout of images whose channels lie last in memory, and of their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.unsqueeze(1).contiguous(memory_format=torch.channels_last))
        made: Tensor = self.second(F.dropout2d(F.dropout(h, 0.3), 0.2)).mean((2, 3))
        return made


def of_images(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y[:, 0])


def test_in_the_order_of_memory() -> None:
    model = fresh(Images)
    step = flow.compile(model, of_images, sgd(model), placement=flow.placement("cpu", [0]), micro_batches=3)
    same(trained(model, step), alone(Images, of_images))


def test_slices_of_sequences_have_their_tokens_numbers() -> None:
    model = fresh()
    step = flow.compile(model, loss_fn, sgd(model), placement=flow.placement("cpu", [0]), micro_batches=2, slices=3)
    same(trained(model, step), alone())


def test_numbers_may_be_results() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            noise = torch.randn_like(x)
            return x + noise, noise

    step = flow.compile(Noise(), lambda m, x: m(x), None, placement=flow.placement("cpu", [0]), micro_batches=3)
    torch.manual_seed(3)
    with torch.no_grad():
        made, noise = step(X)
    torch.manual_seed(3)
    wanted = torch.randn_like(X)
    assert torch.equal(noise.full_tensor(), wanted)
    assert torch.equal(made.full_tensor(), X + wanted)


def test_nothing_is_drawn_where_the_model_does_not() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5)).double().eval()
    step = flow.compile(model, loss_fn, placement=flow.placement("cpu", [0]), micro_batches=2)
    before = torch.get_rng_state()
    step(X, Y)
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_that_depend_on_values_are_refused() -> None:
    """How many are drawn for a sample may depend on the values of those before it."""

    class Chances(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.second(self.first(x))
            made: Tensor = self.third(h * torch.bernoulli(torch.sigmoid(h.detach())))
            return made

    model = fresh(Chances)
    step = flow.compile(model, loss_fn, sgd(model), placement=flow.placement("cpu", [0]), micro_batches=2)
    with pytest.raises(SbpError, match=r"bernoulli at .*test_draws.py:\d+ needs more than one micro-batch"):
        step(X, Y)


def test_numbers_by_the_values_of_a_weight_are_the_same_for_all_micro_batches() -> None:
    class Connect(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            kept = torch.bernoulli(torch.sigmoid(self.weight.detach()))
            return F.linear(x, self.weight * kept, self.bias)

    model = Connect(8, 64, bias=False).double()
    step = flow.compile(model, lambda m, x: m(x), None, placement=flow.placement("cpu", [0]), micro_batches=5)
    with torch.no_grad():
        made = [step(torch.ones_like(X)).full_tensor() for _ in range(2)]
    assert torch.equal(made[0], made[0][:1].expand_as(made[0]))
    assert not torch.equal(*made)


def test_numbers_of_each_micro_batch_are_not_held_and_do_not_depend_on_the_schedule() -> None:
    runs = []
    for schedule in ("1f1b", "gpipe"):
        for draws in ("micro_batch", "batch"):
            model = fresh()
            staged(model, 2)
            options: Any = {"schedule": schedule, "draws": draws}
            step = flow.compile(model, loss_fn, sgd(model), micro_batches=5, **options)
            runs.append(trained(model, step))
    same(runs[0], runs[2])
    same(runs[1], runs[3])
    assert runs[0][0] != pytest.approx(runs[1][0], rel=1e-6)


def test_the_account_of_memory_has_what_is_held() -> None:
    def bytes_of(draws: Any) -> int:
        model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 4)).double()
        how: Any = {"placement": flow.placement("cpu", [0]), "micro_batches": 5, "draws": draws}
        return int(flow.compile(model, loss_fn, **how).plan_for(X, Y).planned.memory()[0].activations)

    assert bytes_of("batch") - bytes_of("micro_batch") == X[..., 0].numel() * 64  # a byte each


def test_whose_numbers_is_said_of_micro_batches_alone() -> None:
    with pytest.raises(SbpError, match="there are 'batch', 'micro_batch'"):
        flow.compile(fresh(), loss_fn, micro_batches=2, draws="each")  # type: ignore[call-overload]
    with pytest.raises(SbpError, match=r"micro-batches draw is said of a step that has none\n  say micro_batches="):
        flow.compile(fresh(), loss_fn, draws="micro_batch")


def test_the_numbers_of_a_weight_that_is_cut_are_those_of_the_whole() -> None:
    model = fresh()
    flow.nn.shard(model, {"first.weight": S(0)})
    step = flow.compile(model, loss_fn, sgd(model), placement=flow.placement("cpu", range(2)), micro_batches=2)
    same(trained(model, step), alone())
