"""Ops that need the whole batch run once, behind all forwards; values, gradients and results are of one device."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.placement.errors import SbpError
from tests.libraries import library
from tests.nn.graph.alike import GRID, LINE, batch, loss_fn, net, same, same_model, sgd, trains_alike
from tests.ranks import Ranks

STAGES = [flow.placement("cpu", [0, 1]), flow.placement("cpu", [2, 3])]


def balanced(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss with a product of two means over samples, as those that balance experts."""
    z = model(x)
    chosen = F.one_hot(z.argmax(-1), 3).to(z.dtype).mean(0)
    loss: Tensor = F.cross_entropy(z, y) + 0.3 * (chosen * z.softmax(-1).mean(0)).sum()
    return loss


def contrasted(model: Any, x: Tensor, y: Tensor) -> Any:
    """A loss that compares samples, and has a weight of its own."""
    a, b = F.normalize(model[2](model[0](x)), dim=-1), F.normalize(model(x), dim=-1)
    return F.cross_entropy(a @ b.T * model.scale.exp(), torch.arange(len(x)))


@flow.nn.eager
def picked(z: Tensor, y: Tensor) -> Tensor:
    keep = (y > 0).nonzero()[:, 0]
    return F.cross_entropy(z[keep], y[keep])


def looking(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss that runs eagerly."""
    return picked(model(x), y)


LOSSES = {"balanced": balanced, "contrasted": contrasted, "eager": looking}


def scaled() -> Any:
    model = net()
    model.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    return model


def staged() -> Any:
    model = scaled()
    flow.nn.place(model[0], STAGES[0])
    flow.nn.place(model[2], STAGES[1])
    return model


@pytest.mark.sampled(4)
@pytest.mark.parametrize("many", [2, 3], ids=["even", "uneven"])
@pytest.mark.parametrize("schedule", ["gpipe", "gpipe_lifo"])
@pytest.mark.parametrize("where", [LINE, GRID, None], ids=["line", "grid", "stages"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_the_whole_batch_trains(loss: str, where: flow.Placement | None, schedule: str, many: int) -> None:
    model = scaled() if where else staged()
    trains_alike(model, where, loss=LOSSES[loss], micro_batches=many, schedule=schedule, steps=2)  # type: ignore[arg-type]


def in_processes(loss: str) -> None:
    trains_alike(staged(), None, loss=LOSSES[loss], micro_batches=2, schedule="gpipe", steps=2)  # type: ignore[arg-type]


def test_in_processes_too(ranks4: Ranks) -> None:
    ranks4(in_processes, "balanced")


@pytest.mark.sweep
@pytest.mark.parametrize("loss", ["contrasted", "eager"])
def test_in_processes_every_loss_does(ranks4: Ranks, loss: str) -> None:
    ranks4(in_processes, loss, timeout=120.0)


def all_of_it(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss = balanced(model, x, y)
    return loss, model(x), {"twice": loss * 2}


def test_results_are_put_together_with_those_of_micro_batches() -> None:
    model = staged()
    one = copy.deepcopy(model)
    step = flow.compile(model, all_of_it, sgd(model), micro_batches=3, schedule="gpipe")
    x, y = batch()
    mine, wanted = step(x, y), all_of_it(one, x, y)
    same(mine[0], wanted[0])
    same(mine[1], wanted[1])
    same(mine[2]["twice"], wanted[2]["twice"])
    told = next(line for line in str(step.explain()).splitlines() if "on the whole batch" in line)
    assert re.search(r"eager   \d+ ops from .*test_late_graph.py:\d+ on run once, on the whole batch", told)


class Tied(nn.Module):
    """A result of the first stage, and a weight of it, are used at once where samples are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = (h - h.mean(0)) @ self.first.weight
        found: Tensor = self.last(h)
        return found


@pytest.mark.parametrize("trains", [True, False])
def test_what_another_stage_makes_is_handed_over(trains: bool) -> None:
    torch.manual_seed(1)
    model = Tied()
    one = copy.deepcopy(model)
    flow.nn.place(model.first, STAGES[0])
    flow.nn.place(model.last, STAGES[1])
    inputs = [torch.randn(5, 6, dtype=torch.float64) for _ in range(2)]
    mine = flow.compile(model, lambda m, x: m(x).square().mean(), sgd(model), micro_batches=2, schedule="gpipe")
    plain = sgd(one)
    with torch.set_grad_enabled(trains):
        for x in inputs:
            loss = one(x).square().mean()
            same(mine(x), loss)
            if trains:
                plain.zero_grad()
                loss.backward()
                plain.step()
    for name, weight in one.state_dict().items():
        same(model.state_dict()[name], weight)


def test_without_gradients_no_schedule_is_asked_for() -> None:
    model = staged()
    one = copy.deepcopy(model)
    with torch.no_grad():
        step = flow.compile(model, all_of_it, micro_batches=2)
        x, y = batch()
        same(step(x, y)[0], all_of_it(one, x, y)[0])


def test_the_account_of_memory_has_it() -> None:
    """It is more than that of the loss alone, by what is put together."""
    held = []
    for loss in (loss_fn, contrasted):
        model = scaled()
        step = flow.compile(model, loss, sgd(model), placement=LINE, micro_batches=2, schedule="gpipe")
        step(*batch())
        memory = step.explain().memory
        assert memory is not None
        held.append(max(of.total for of in memory.ranks.values()))
    assert held[1] >= held[0] + 8 * 8 * 8


def test_under_other_schedules_the_error_says_which_would_do() -> None:
    with pytest.raises(SbpError, match=r"mul.Tensor at .* needs more than one(.*\n)*.*schedule gpipe"):
        trains_alike(scaled(), LINE, loss=balanced, micro_batches=2)
    with pytest.raises(SbpError, match=r"the eager part picked, .* needs more than one(.*\n)*.*schedule gpipe"):
        trains_alike(scaled(), LINE, loss=looking, micro_batches=2)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)))
        return out


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_buffers_of_the_whole_batch_are_refused(schedule: str) -> None:
    with pytest.raises(SbpError, match=r"needs more than one micro-batch at once") as told:
        trains_alike(Normed().double(), LINE, micro_batches=2, schedule=schedule)
    assert "schedule gpipe" not in str(told.value)


def test_draws_behind_all_forwards_are_refused() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = model(x).softmax(-1).mean(0)
        return F.dropout(z * z, 0.5).sum()

    with pytest.raises(SbpError, match=r"needs more than one micro-batch at once"):
        trains_alike(scaled(), LINE, loss=loss, micro_batches=2, schedule="gpipe")


# Models of transformers


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Olmoe", "Qwen2Moe"])
def test_losses_that_balance_experts_train_in_stages(name: str) -> None:
    transformers = library("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, output_router_logits=True, router_aux_loss_coef=0.5, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    one = copy.deepcopy(model)
    flow.nn.pipeline(list(model.model.layers), STAGES)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        found: Tensor = model(input_ids=ids, labels=ids).loss
        return found

    step = flow.compile(model, loss, sgd(model), micro_batches=2, schedule="gpipe")
    ones = sgd(one)
    for at in range(2):
        ids = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(at))
        wanted = loss(one, ids)
        same(step(ids), wanted, 1e-5)
        wanted.backward()  # type: ignore[no-untyped-call]
        ones.step()
        ones.zero_grad()
    same_model(model, one, 1e-5)
