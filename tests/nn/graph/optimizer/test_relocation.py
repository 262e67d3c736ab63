"""Moving a model between two steps: weights, masters and states follow to what another plan wants, and nothing else
changes."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn, optim

import sbpflow as flow
from sbpflow.boxing.routes.bound import least_sent
from sbpflow.nn import Graph
from sbpflow.placement.errors import PlacementError, SbpError
from tests.ranks import Ranks

FOUR = "grid cpu:[0-3] as (data=4)\nstates **: data=S(0)\n"
CUT = "grid cpu:[5-6] as (tensor=2)\nlayers.*.0: tensor=S(0)\n"
THREE = "grid cpu:[0-2] as (data=3)\nstates **: data=S(0)\n"
STAGES = "grid cpu:[0-3] as (pipe=2, data=2)\npipe layers over pipe by 1f1b, 2 micro-batches\n"
MORE = {
    "as it is": "",
    "bf16": "cast ** to bf16\ncast states ** to fp32\n",
    "fp16": "cast ** to fp16\ncast states ** to fp32\n",
    "offloaded": "offload states ** to cpu\n",
    "in files": "offload states ** to disk\n",
}
P2 = flow.placement("cpu:[0-1]")
EACH = 2  # steps by a plan


class Words(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 16)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)))
        self.norm = nn.Identity() if tied else nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 24, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.norm(self.layers(self.words(x))))
        return made


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).float(), y)


def batch(at: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(at)
    return torch.randint(24, (12,), generator=draw), torch.randint(24, (12,), generator=draw)


def optimizers(kind: str, model: Words) -> list[optim.Optimizer]:
    inner = {id(p) for p in model.layers.parameters() if p.ndim == 2}
    some = [p for p in model.parameters() if id(p) in inner]
    others = [p for p in model.parameters() if id(p) not in inner]
    if kind == "two":
        return [optim.Muon(some, lr=1e-2), optim.AdamW(others, lr=1e-2)]
    if kind == "Adafactor":
        return [optim.Adafactor(model.parameters(), lr=1e-2)]
    groups: list[dict[str, Any]] = [{"params": some}, {"params": others, "lr": 0.1}]
    return [optim.SGD(groups, lr=0.05, momentum=0.9) if kind == "groups" else optim.AdamW(groups, lr=1e-2)]


class Run:
    """A model that is trained by plans one after the other."""

    def __init__(self, plan: str, kind: str = "AdamW", tied: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Words(tied)
        self.optimizers = optimizers(kind, self.model)
        self.losses: list[float] = []
        self.step = flow.compile(self.model, loss_fn, self.optimizers, plan=plan)

    def train(self, steps: int = EACH) -> None:
        for _ in range(steps):
            torch.manual_seed(100 + len(self.losses))
            self.losses.append(self.step(*batch(len(self.losses))).item())

    def saved_and_loaded(self, plan: str, kind: str, tied: bool, path: Path) -> "Run":
        flow.save(path, self.model, optimizer=self.optimizers)
        other = Run(plan, kind, tied)
        flow.load(path, other.model, optimizer=other.optimizers)
        other.losses = self.losses
        return other


def weights(model: nn.Module) -> list[Tensor]:
    return [value.detach().full_tensor() for value in model.state_dict().values()]


def by_plans(plans: Sequence[str], kind: str, tied: bool, folder: Path | None) -> Run:
    run = Run(plans[0], kind, tied)
    run.train()
    for number, plan in enumerate(plans[1:]):
        if folder is None:
            run.step.move(plan=plan)
        else:
            run = run.saved_and_loaded(plan, kind, tied, folder / str(number))
        run.train()
    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["AdamW", "groups", "two", "Adafactor"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("more", MORE)
def test_a_move_is_a_save_and_a_load_bitwise(kind: str, tied: bool, more: str, tmp_path: Path) -> None:
    plans = [plan + MORE[more] for plan in (FOUR, CUT, THREE)]
    moved, loaded = by_plans(plans, kind, tied, None), by_plans(plans, kind, tied, tmp_path)
    assert moved.losses == loaded.losses
    assert all(torch.equal(a, b) for a, b in zip(weights(moved.model), weights(loaded.model), strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["AdamW", "groups"])
def test_a_run_that_moves_is_one_that_stays(kind: str) -> None:
    stays, moves = Run("grid cpu:[0-0] as (data=1)", kind, tied=True), Run(STAGES, kind, tied=True)
    for each in (stays, moves):
        each.model.eval()
        each.train()
    for plan in (CUT, STAGES, THREE):
        moves.step.move(plan=plan)
        moves.train()
        stays.train()
    assert moves.losses == pytest.approx(stays.losses, abs=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*map(weights, (stays.model, moves.model)), strict=True))


def test_objects_stay_and_schedulers_go_on() -> None:
    run = Run(FOUR)
    (optimizer,) = run.optimizers
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run.train(1)
    scheduler.step()
    held, groups = dict(run.model.named_parameters()), optimizer.param_groups
    before = held["head.weight"].detach()
    run.step.move(plan=CUT)
    assert held["head.weight"].placement == flow.placement("cpu:[0-3] as (data=4)")  # type: ignore[attr-defined]
    run.train(1)
    assert all(value is held[name] for name, value in run.model.named_parameters())
    assert {value.placement.flat for value in held.values()} == {(5, 6)}  # type: ignore[attr-defined]
    assert optimizer.param_groups is groups
    assert groups[0]["lr"] == 1e-2 / 2
    assert before.placement.flat == (0, 1, 2, 3)  # type: ignore[attr-defined]
    state = optimizer.state[groups[1]["params"][0]]
    assert state["step"] == 2
    assert state["exp_avg"].placement.flat == (5, 6)


def test_what_is_sent_is_what_ranks_need_and_do_not_hold() -> None:
    run = Run(FOUR)
    run.train(1)
    run.step.move(plan=THREE.replace("states", "weights"))
    with flow.record() as moves:
        run.train(1)
    sent = [move.boxing for move in moves if move.op == "moved weights"]
    assert sum(plan.total for plan in sent if plan.src.shape != (16,)) == 0 < len(sent)  # all had all, but of buffers
    states = [move.boxing for move in moves if move.op == "moved states"]
    assert len(states) == 2 * len(list(run.model.parameters()))
    assert all(plan.total == least_sent(plan.src, plan.dst) for plan in [*sent, *states])
    assert 0 < sum(plan.total for plan in states) < sum(plan.src.nbytes for plan in states)
    with flow.record() as moves:
        run.train(1)
    assert not [move for move in moves if move.op.startswith("moved")]


def test_no_rank_has_all_of_what_lies_in_pieces() -> None:
    run = Run(FOUR.replace("states", "weights"))
    run.train(1)
    run.step.move(plan=THREE.replace("states", "weights"))
    with flow.record() as moves:
        run.train(1)
    plans = [move.boxing for move in moves if move.op.startswith("moved") and move.boxing.src.shape == (24, 16)]
    assert plans
    for plan in plans:
        assert all(plan.received(rank) < plan.src.nbytes / 2 for rank in plan.ranks)


def test_notes_by_hand_and_options_may_change_instead_of_a_plan() -> None:
    run = Run("grid cpu:[0-3] as (data=4)")
    run.train(1)
    stages = [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
    flow.nn.pipeline(run.model.layers, stages, costs=[1, 1, 2])
    run.model.norm.eval()
    run.step.move(micro_batches=3, schedule="gpipe")
    run.train(1)
    assert [layer[0].weight.placement.flat for layer in run.model.layers] == [(0,), (0,), (1,)]  # type: ignore[index]
    assert run.step.micro_batches == 3


def test_a_graph_of_ones_own_moves() -> None:
    class Training(Graph):
        def __init__(self) -> None:
            super().__init__(placement=flow.placement("cpu:[0-1]"))
            self.model = nn.Linear(4, 2)
            self.optimizer = optim.Adam(self.model.parameters())

        def build(self, x: Tensor) -> Tensor:
            loss: Tensor = self.model(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

    graph = Training()
    alone = copy.deepcopy(graph.model)
    adam = optim.Adam(alone.parameters())
    for at in range(4):
        if at == 2:
            graph.move(placement=flow.placement("cpu:[2-4]"))
        x = torch.full((6, 4), at / 3)
        loss: Tensor = alone(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        adam.zero_grad()
        assert graph(x).item() == pytest.approx(loss.item(), abs=1e-6)
    assert graph.model.weight.placement.flat == (2, 3, 4)  # type: ignore[attr-defined]


def test_another_graph_of_the_model_follows() -> None:
    run = Run(FOUR)
    look = flow.compile(run.model)
    x, _ = batch(0)

    def seen() -> Tensor:
        run.model.eval()
        with torch.no_grad():
            found: Tensor = look(x).full_tensor()
        run.model.train()
        return found

    run.train(1)
    before = seen()
    run.step.move(plan=CUT)
    assert torch.equal(seen(), before)  # it comes first, and moves nothing
    assert run.model.head.weight.placement.size == 4  # type: ignore[attr-defined]
    run.train(1)
    other = copy.deepcopy(run.model)
    assert run.model.head.weight.placement.flat == (5, 6)  # type: ignore[attr-defined]
    with torch.no_grad():
        assert torch.allclose(seen(), other.eval()(x).full_tensor(), atol=1e-6)


def test_nothing_is_read_on_lost_ranks() -> None:
    run, other = Run(STAGES, tied=True), Run(STAGES, tied=True)
    for each in (run, other):
        each.train(1)
    spoil(other, 3)
    spoil(other, 1)
    other.step.move(plan="grid cpu:[4-5,0] as (data=3)", lost=[3, 1])
    run.step.move(plan="grid cpu:[4-5,0] as (data=3)")
    for each in (run, other):
        each.train(2)
    assert other.losses == run.losses
    assert all(torch.equal(a, b) for a, b in zip(weights(run.model), weights(other.model), strict=True))


def spoil(run: Run, rank: int) -> None:
    """Nothing that a rank holds is a number any more."""
    states = [part for each in run.optimizers for state in each.state.values() for part in state.values()]
    for value in [*run.model.state_dict().values(), *states]:
        for at, shard in zip(value.placement.flat, value._shards, strict=True) if is_global(value) else ():
            if at == rank:
                shard.detach().fill_(torch.nan)


def is_global(value: object) -> bool:
    return isinstance(value, flow.GlobalTensor)


def test_what_only_the_lost_rank_had_is_named() -> None:
    run = Run(FOUR, tied=True)
    run.train(1)
    run.step.move(plan=THREE, lost=[3])
    with pytest.raises(SbpError, match=r"layers.0.0.weight.exp_avg \(16, 16\) is lost(.|\n)*rank 3(.|\n)*checkpoint"):
        run.train(1)


REFUSED = {
    "a plan of another model": "blocks",
    "a lost rank with work": "without rank 3",
    "a gradient": "has a gradient",
    "a parameter of another": "no module",
    "an option twice": "beside a plan",
    "no option": "no option speed=",
    "another dtype": "global already",
    "no place": "placement=3",
}


def refused(name: str, run: Run) -> None:
    move: Any = run.step.move
    if name == "a plan of another model":
        move(plan="grid (data=2)\nblocks.*: data=S(0)")
    elif name == "a lost rank with work":
        move(plan=FOUR, lost=[3])
    elif name == "a gradient":
        run.model.head.weight.grad = torch.zeros_like(run.model.head.weight)
        move(plan=CUT)
    elif name == "a parameter of another":
        run.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        move(plan=CUT)
    elif name == "an option twice":
        move(plan=CUT, placement=P2)
    elif name == "no option":
        move(plan=CUT, speed=3)
    elif name == "another dtype":
        move(plan=CUT + "cast ** to bf16\n")
    else:
        move(placement=3)
    run.train(1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_move_is_refused_and_stays(name: str) -> None:
    run = Run(FOUR)
    run.train(1)
    before = [value.placement for value in run.model.state_dict().values()]
    with pytest.raises((SbpError, PlacementError), match=REFUSED[name]):
        refused(name, run)
    assert [value.placement for value in run.model.state_dict().values()] == before


def test_a_step_that_runs_does_not_move() -> None:
    model = nn.Linear(4, 2)
    step = flow.compile(model, lambda model, x: model(x).sum(), optim.SGD(model.parameters()), placement=P2)
    step(torch.ones(2, 4))
    hooked: Any = model.weight
    hooked.register_hook(lambda grad: step.move(placement=flow.placement("cpu:[2-3]")))
    with pytest.raises(SbpError, match="while it runs"):
        step(torch.ones(2, 4))


def test_devices_of_another_kind_are_refused() -> None:
    model = nn.Linear(4, 2)
    step = flow.compile(model, lambda model, x: model(x).sum(), optim.SGD(model.parameters()), placement=P2)
    step(torch.ones(2, 4))
    step.move(placement=flow.placement("cuda:[0-1]"))
    with pytest.raises((PlacementError, SbpError)):
        step(torch.ones(2, 4))
    assert cast("flow.GlobalTensor", model.weight).placement is P2


def moved_on_ranks() -> list[float]:
    run = Run(STAGES, tied=True)
    run.model.eval()
    for plan in ("grid cpu:[0-2] as (data=3)\n**: data=S(0)", STAGES, "grid cpu:[3-3] as (data=1)", FOUR):
        run.train(1)
        run.step.move(plan=plan)
    run.train(1)
    assert run.model.head.weight.placement.size == 4  # type: ignore[attr-defined]
    return run.losses


def test_real_ranks_move_states_to_who_had_none(ranks4: Ranks) -> None:
    torch.manual_seed(0)
    found = ranks4(moved_on_ranks)
    assert all(losses == found[0] for losses in found)
    assert found[0] == pytest.approx(moved_on_ranks(), abs=1e-6)
