"""Experts of a model that nobody changed send tokens, or are left out where they find no room, as on one device."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from tests.nn.mixtures.layers import F64, WIDTH, Mixtures, StackedMixture, tokens
from tests.nn.mixtures.left_out import limited
from tests.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")
PLAN = """
grid (expert=4)
input x <- expert=S(0)
layers.*.experts.**: expert=S(0)
inside **.experts use {use} over expert
expect 2 all_to_all over expert a layer forward
"""
SHARED = "layers.*.experts.norm.weight: expert=B\n"
FOLDED = """
grid (data=4, expert=4 folds data)
input x <- data=S(0)
layers.*.experts.**: expert=S(0)
states **: data=S(0)
inside **.experts use {use} over expert
expect 2 all_to_all over expert a layer forward
expect 2 all_to_all over expert a layer backward
"""
PIPED = """
grid (pipe=2, expert=2)
input x <- expert=S(0)
layers.*.experts.**: expert=S(0)
inside **.experts use {use} over expert
pipe layers over pipe by 1f1b, 2 micro-batches
"""


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


def trained(model: Any, plan: str, alone: nn.Module, rows: int = 8, steps: int = 2) -> list[int]:
    """The bytes of all_to_alls of some steps, whose losses and weights are held to those of one device."""
    one, other = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, alone))
    step = flow.compile(model, squares, one, plan=plan)
    with flow.record() as moves:
        losses = [step(tokens(rows)) for _ in range(steps)]
    for loss in losses:
        want = squares(alone, tokens(rows))
        other.zero_grad()
        want.backward()  # type: ignore[no-untyped-call]
        other.step()
        torch.testing.assert_close(loss.full_tensor(), want.detach(), rtol=1e-11, atol=1e-11)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-10, atol=1e-11)
    return [move.boxing.total for move in moves if move.route == "all_to_all"]


@pytest.mark.parametrize("use", ["dropless", "capacity(1.25)"])
@pytest.mark.parametrize("kind", ["looped", "sorted", "gathered"])
@pytest.mark.sampled(1)
def test_experts_of_any_form_train_as_on_one_device(kind: str, use: str) -> None:
    model = Mixtures(kind)
    alone = copy.deepcopy(model)
    left = limited(alone, 8, 1.25, 4) if "capacity" in use else [1]
    sent = trained(model, PLAN.format(use=use) + SHARED * (kind == "sorted"), alone)
    assert len(sent) == 2 * 2 * (2 + 2)  # steps, layers, directions
    assert all(left)


@pytest.mark.parametrize(
    ("count", "rows", "choices", "favourite"),
    [(6, 5, 2, None), (3, 1, 2, 0), (2, 3, 2, None), (8, 8, 1, 7)],
    ids=["uneven", "fewer experts than ranks", "fewer of both", "all choose one"],
)
@pytest.mark.parametrize("use", ["dropless", "capacity(0.5)"])
@pytest.mark.sampled(1)
def test_experts_and_tokens_need_not_divide(use: str, count: int, rows: int, choices: int, favourite: Any) -> None:
    model = Mixtures(count=count, choices=choices, favourite=favourite)
    alone = copy.deepcopy(model)
    if "capacity" in use:
        limited(alone, count, 0.5, 4)
    trained(model, PLAN.format(use=use), alone, rows)


@pytest.mark.parametrize("use", ["dropless", "capacity(1.25)"])
@pytest.mark.sampled(1)
def test_states_rest_in_pieces_beside_experts_on_a_folded_axis(use: str) -> None:
    model: Any = Mixtures()
    alone = copy.deepcopy(model)
    if "capacity" in use:
        limited(alone, 8, 1.25, 4)
    trained(model, FOLDED.format(use=use), alone)
    assert [len(held) for held in model.layers[0].experts.down.to_local()] == [2] * 4


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.sampled(1)
def test_stages_send_the_tokens_of_each_micro_batch(rows: int) -> None:
    model = Mixtures()
    trained(model, PIPED.format(use="dropless"), copy.deepcopy(model), rows)


def test_rooms_send_as_many_bytes_as_were_predicted_whoever_chooses_whom() -> None:
    for favourite in (None, 0):
        model = Mixtures(layers=1, favourite=favourite)
        step = flow.compile(model, squares, plan=PLAN.format(use="capacity(1.25)").rpartition("expect")[0])
        room = math.ceil(1.25 * 8 * 2 / 8)  # each rank has 8 tokens of two choices
        with flow.record() as moves:
            step(tokens())
        sent = [move.boxing.total for move in moves if move.route == "all_to_all"]
        assert sent == [8 * 4 * room * WIDTH * 8 * 3 // 4] * 4
        assert f"{sent[0] / 4 / 1024:g} KiB" in str(step.explain().full())


def stacked(**said: Any) -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH, dtype=F64), "layer": StackedMixture(**said)})


def through(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.layer(model.first(x)).square().mean()
    return out


STACKED = """
grid (expert=4)
input x <- expert=S(0)
layer.experts.**: expert=S(0)
inside layer.experts use {use} over expert
"""


@pytest.mark.parametrize("rows", [8, 7])
def test_of_rows_for_every_expert_those_are_sent_that_are_not_zero(rows: int) -> None:
    model = stacked()
    alone, x = copy.deepcopy(model), tokens(rows)
    step = flow.compile(model, through, plan=STACKED.format(use="dropless"))
    with flow.record() as moves:
        loss = step(x)
    want = through(alone, x)
    want.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss.full_tensor(), want.detach(), rtol=1e-11, atol=1e-11)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-10, atol=1e-11)
    if rows % 4 == 0:
        rank = alone.layer.gate(alone.first(x).flatten(0, 1)).argmax(-1) // 2
        away = int((rank != torch.arange(len(rank)) * 4 // len(rank)).sum())
        sent = {move.boxing.total for move in moves if move.route == "all_to_all"}
        assert sent == {away * WIDTH * 8 + 8 * len(rank) * 3 // 4}  # and a mark for each row that might


def test_rows_that_do_not_stay_zero_are_captured_as_they_are_written() -> None:
    with pytest.raises(flow.SbpError, match="no layer of experts"):
        flow.compile(stacked(biased=True), through, plan=STACKED.format(use="dropless"))(tokens())


def test_a_choice_that_finds_no_room_is_left_out_on_one_rank_too() -> None:
    model = Mixtures(layers=1)
    alone = copy.deepcopy(model)
    left = limited(alone, 8, 0.5, 1)
    trained(model, PLAN.format(use="capacity(0.5)").rpartition("expect")[0].replace("=4", "=1"), alone)
    assert left[0] > 8


def processes(use: str) -> list[int]:
    model = Mixtures(favourite=0)
    alone = copy.deepcopy(model)
    if "capacity" in use:
        limited(alone, 8, 1.25, 4)
    return trained(model, PLAN.format(use=use), alone)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("use", ["dropless", "capacity(1.25)"])
def test_processes_do_the_same(ranks4: Ranks, use: str) -> None:
    each, alone = ranks4(processes, use), processes(use)
    if use == "dropless":  # a process knows of the rows that it sends itself
        assert list(map(sum, zip(*each, strict=True))) == alone
    else:  # and rooms are a plain move, which all know whole
        assert each == [alone] * 4


class Whole(nn.Module):
    """Experts whose sum is divided by how many there are here."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH, dtype=F64))

    def forward(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        made = (x[:, None, None] @ self.up[chosen]).squeeze(2)
        return (made * share[..., None]).sum(1) / len(self.up)


class Dropping(Whole):
    def forward(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x, chosen, share) * len(self.up), 0.1)


class Counting(Whole):
    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(4, dtype=F64))

    def forward(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        self.load += chosen.flatten().bincount(minlength=len(self.load))
        return super().forward(x, chosen, share) * len(self.up)


class Cubed(Whole):
    def forward(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        made = ((x[:, None] * share[..., None])[:, :, None] @ self.up[chosen]).squeeze(2)
        return made.pow(3).sum(1)


def one_layer(experts: nn.Module, use: str) -> Any:
    model = Mixtures(layers=1, count=4)
    model.layers[0].experts = experts
    plan = PLAN.format(use=use).rpartition("expect")[0]
    return flow.compile(model, squares, plan=plan)(tokens()), model


@pytest.mark.parametrize(
    ("experts", "why"),
    [
        (Whole, "its result is not the sum of what single experts make"),
        (Dropping, "it makes something else of the same each time: has it dropout"),
        (Counting, "it writes to its tensors"),
    ],
)
def test_a_module_that_is_no_layer_of_experts_is_refused(experts: type[nn.Module], why: str) -> None:
    with pytest.raises(flow.SbpError, match=f"layers.0.experts: {experts.__name__} is no layer .*{why}"):
        one_layer(experts(), "dropless")


def test_shares_that_are_no_factors_are_sent_and_find_no_rooms() -> None:
    torch.manual_seed(0)
    experts = Cubed()
    loss, model = one_layer(experts, "dropless")
    torch.testing.assert_close(loss.full_tensor(), squares(_plain(model), tokens()).detach())
    with pytest.raises(flow.SbpError, match="its shares are no factors"):
        one_layer(Cubed(), "capacity(1.25)")


def _plain(model: nn.Module) -> nn.Module:
    fresh = Mixtures(layers=1, count=4)
    fresh.layers[0].experts = Cubed()
    fresh.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    return fresh


@pytest.mark.parametrize("use", ["capacity", "capacity()", "capacity(1, 2)", "capacity(rooms=2)", "dropless(2)"])
def test_what_a_way_to_compute_takes_is_checked_where_it_is_said(use: str) -> None:
    with pytest.raises(flow.SbpError, match=r"is not how .* is said"):
        flow.nn.inside(Mixtures(), use=use, over="expert")


@pytest.mark.parametrize("factor", ["0", "-1", "'a'"])
def test_a_factor_is_a_number_above_zero(factor: str) -> None:
    layer: Any = Mixtures(count=4).layers[0]
    with pytest.raises(flow.SbpError, match="its factor is"):
        one_layer(layer.experts, f"capacity({factor})")


def test_what_is_changed_after_the_first_step_counts() -> None:
    model: Any = Mixtures(layers=1)
    step = flow.compile(model, squares, plan=PLAN.format(use="dropless").rpartition("expect")[0])
    step(tokens())
    model.layers[0].experts.limit = 0.1
    alone: Any = Mixtures(layers=1)
    alone.layers[0].experts.limit = 0.1
    torch.testing.assert_close(step(tokens()).full_tensor(), squares(alone, tokens()).detach(), rtol=1e-11, atol=1e-11)
