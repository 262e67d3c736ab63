"""Every optimizer steps in a graph as on one device, also on pieces of parameters, and keeps its state over time."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import sbpflow as flow
from sbpflow import B, S
from sbpflow.nn.graph.optimizer.adopt import states_of
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import GRID, LINE, WHERE, batch, compiled, eager, loss_fn, net, same, same_model, sgd
from tests.ranks import Ranks

Make = Callable[..., optim.Optimizer]
MAKES: dict[str, tuple[Make, dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (optim.Adam, {"amsgrad": True}),
    "AdamW": (optim.AdamW, {}),
    "Adagrad": (optim.Adagrad, {}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {"lr": 0.1}),
    "Adamax": (optim.Adamax, {}),
    "Adadelta": (optim.Adadelta, {}),
    "Rprop": (optim.Rprop, {}),
    "ASGD": (optim.ASGD, {}),
    "Adafactor": (optim.Adafactor, {"lr": 0.1}),
}
EVERY = pytest.mark.parametrize("name", MAKES)


def made(name: str, model: nn.Module) -> optim.Optimizer:
    make, options = MAKES[name]
    return make(model.parameters(), **options)


def wide() -> nn.Sequential:
    """Sizes that four ranks share evenly, so that there are pieces."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def cut(graph: flow.nn.Graph) -> list[str]:
    """The parameters of which each rank updates a piece."""
    return [s.value.name for s in graph.physical.sources if s.states is not None]


def tight(mine: optim.Optimizer, where: flow.Placement = LINE) -> float:
    """Bytes a rank: whole parameters fit, with the optimizer's states and gradients only in pieces."""
    return (21_500.0 if where is LINE else 23_000.0) + 1_760 * states_of([mine])


def pieces(name: str, model: nn.Module, where: flow.Placement = LINE, **options: Any) -> tuple[flow.nn.Graph, Any]:
    """A step in which parameters are whole and states are not."""
    flow.nn.shard(model, {"*": (B,) * where.ndim})
    mine = made(name, model)
    return flow.compile(model, loss_fn, mine, placement=where, memory=tight(mine, where), **options), mine


def close(name: str) -> float:
    return 1e-8 if name == "ASGD" else 1e-10  # torch keeps its rate in float32, one by one and all at once otherwise


@pytest.mark.sampled(4)
@EVERY
@WHERE
def test_steps_are_those_of_one_device(name: str, where: flow.Placement) -> None:
    model, one = net(), net()
    mine, ones = made(name, model), made(name, one)
    step = flow.compile(model, loss_fn, mine, placement=where)
    for at in range(3):
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at)), close(name))
    same_model(model, one, close(name))


@pytest.mark.sampled(3)
@EVERY
@WHERE
def test_pieces_are_stepped_alike(name: str, where: flow.Placement) -> None:
    model, one = wide(), wide()
    (step, mine), ones = pieces(name, model, where), made(name, one)
    for at in range(3):
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at)), close(name))
    same_model(model, one, close(name))
    if name not in ("SGD", "Adafactor"):  # which keep little
        assert "2.weight" in cut(step)
        held = next(state for p, state in mine.state.items() if p.shape == (8, 64))
        sizes = {name: part.numel() for name, part in held.items() if part.ndim}
        assert all(part._shards[0].numel() < 512 for part in held.values() if part.ndim), sizes


@WHERE
def test_pieces_are_clipped_together(where: flow.Placement) -> None:
    model, one = wide(), wide()
    (step, _), ones = pieces("AdamW", model, where, clip_grad_norm=0.1), made("AdamW", one)
    for at in range(3):
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at), clip=0.1))
    same_model(model, one)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("clip", [None, 0.1])
@WHERE
def test_pieces_are_stepped_after_the_hooks_of_their_parameters(where: flow.Placement, clip: float | None) -> None:
    def hooked(model: nn.Module) -> None:
        def halve(w: Tensor) -> None:
            assert w.grad is not None
            w.grad.mul_(0.5)

        for w in model.parameters():
            w.register_hook(lambda g: g.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]
            w.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]

    model, one = wide(), wide()
    hooked(model)
    hooked(one)
    (step, _), ones = (
        pieces("SGD", model, where, **({} if clip is None else {"clip_grad_norm": clip})),
        made("SGD", one),
    )
    for at in range(3):
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at), clip=clip))
    same_model(model, one)
    (step, _), ones = pieces("AdamW", model, where), made("AdamW", one)
    same(step(*batch()), eager(one, loss_fn, ones, *batch()))
    assert cut(step)
    same_model(model, one)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [8, 4])
def test_other_shapes_step_the_same_pieces(rows: int) -> None:
    model, one = wide(), wide()
    (step, mine), ones = pieces("AdamW", model), made("AdamW", one)
    for at in range(4):
        x, y = batch(rows if at % 2 else 16, at)
        same(step(x, y), eager(one, loss_fn, ones, x, y))
    same_model(model, one)
    assert compiled(step) == 2
    assert len(mine.state) == 6


def test_graphs_that_cut_otherwise_take_over_from_each_other() -> None:
    model, one = wide(), wide()
    (first, mine), ones = pieces("AdamW", model), made("AdamW", one)
    second = flow.compile(model, loss_fn, mine, placement=LINE)  # no limit, so nothing is cut
    for at in range(6):
        step = second if at % 3 == 1 else first
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at)))
    same_model(model, one)
    assert cut(first)
    assert not cut(second)


def test_pieces_see_what_is_loaded_and_trained_between_steps() -> None:
    model, one = wide(), wide()
    (step, mine), ones = pieces("AdamW", model), made("AdamW", one)
    other = {name: value * 2 for name, value in one.state_dict().items()}
    for at in range(6):
        x, y = batch(at=at)
        if at == 2:
            model.load_state_dict(other)
            one.load_state_dict(other)
        if at == 4:  # an eager step with the graph's optimizer
            eager(model, loss_fn, mine, *(flow.tensor(t, placement=LINE, sbp=S(0)) for t in (x, y)))
        else:
            step(x, y)
        eager(one, loss_fn, ones, x, y)
    same_model(model, one)


def test_without_an_optimizer_a_limit_leaves_gradients_on_the_parameters() -> None:
    model, one = (nn.Sequential(nn.Linear(4, 1024), nn.Tanh(), nn.Linear(1024, 4)).double() for _ in range(2))
    one.load_state_dict(model.state_dict())
    flow.nn.shard(model, {"*": B})
    whole = flow.compile(copy.deepcopy(model), loss_fn, placement=LINE)
    whole(*batch())
    memory = whole.explain().memory
    assert memory is not None
    step = flow.compile(model, loss_fn, placement=LINE, memory=0.5 * memory.ranks[0].total)
    for at in range(2):
        step(*batch(at=at))
        loss_fn(one, *batch(at=at)).backward()  # type: ignore[no-untyped-call]
    assert cut(step)
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        same(p.grad, q.grad)


# What an optimizer is before, between and after


@pytest.mark.sampled(3)
@pytest.mark.parametrize("limited", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("name", ["momentum", "AdamW", "Adafactor"])
def test_an_optimizer_that_has_stepped_goes_on(name: str, limited: bool) -> None:
    model, one = wide(), wide()
    flow.nn.shard(model, {"*": B})
    mine, ones = made(name, model), made(name, one)
    eager(model, loss_fn, mine, *batch(at=9))
    eager(one, loss_fn, ones, *batch(at=9))
    step = flow.compile(model, loss_fn, mine, placement=LINE, memory=tight(mine) if limited else None)
    for at in range(3):
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at)))
    same_model(model, one)


def test_schedulers_set_the_rate_between_steps() -> None:
    model, one = net(), net()
    mine, ones = sgd(model), sgd(one)
    step = flow.compile(model, loss_fn, mine, placement=LINE)
    rates = [optim.lr_scheduler.CosineAnnealingLR(each, 4) for each in (mine, ones)]
    for at in range(4):
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at)))
        for rate in rates:
            rate.step()
    assert mine.param_groups[0]["lr"] == ones.param_groups[0]["lr"]
    same_model(model, one)


def test_a_rate_that_is_a_tensor() -> None:
    model, one = net(), net()
    mine, ones = (optim.AdamW(each.parameters(), lr=torch.tensor(0.1)) for each in (model, one))
    step = flow.compile(model, loss_fn, mine, placement=LINE)
    for at in range(2):
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at)))
    same_model(model, one)


@pytest.mark.parametrize("limited", [False, True], ids=["whole", "pieces"])
def test_states_are_saved_and_loaded_between_steps(limited: bool) -> None:
    model, one = wide(), wide()
    flow.nn.shard(model, {"*": B})
    mine, ones = made("AdamW", model), made("AdamW", one)
    step = flow.compile(model, loss_fn, mine, placement=LINE, memory=tight(mine) if limited else None)
    for _ in range(2):
        step(*batch())
        eager(one, loss_fn, ones, *batch())
    saved = copy.deepcopy((model.state_dict(), mine.state_dict()))
    plain = copy.deepcopy((one.state_dict(), ones.state_dict()))
    for state in (saved, plain):  # our own, and that of one device
        step(*batch(at=3))
        model.load_state_dict(state[0])
        mine.load_state_dict(copy.deepcopy(state[1]))  # torch keeps the tensors that it is given
        one.load_state_dict(plain[0])
        ones.load_state_dict(copy.deepcopy(plain[1]))
        for at in range(2):
            same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at)))
        same_model(model, one)


def test_groups_keep_their_settings() -> None:
    model, one = net(), net()

    def make(each: nn.Sequential) -> optim.Optimizer:
        groups = [{"params": each[0].parameters(), "lr": 0.5}, {"params": each[2].parameters(), "weight_decay": 0.1}]
        return optim.AdamW(groups, lr=0.01)

    mine, ones = make(model), make(one)
    step = flow.compile(model, loss_fn, mine, placement=GRID)
    for at in range(2):
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at)))
    same_model(model, one)
    assert [len(group["params"]) for group in mine.param_groups] == [2, 2]


def test_several_placements_are_stepped_and_clipped_as_one() -> None:
    model, one = net(), net()
    flow.nn.place(model[:2], GRID[0])
    flow.nn.place(model[2], GRID[1])
    mine, ones = made("AdamW", model), made("AdamW", one)
    step = flow.compile(model, loss_fn, mine, clip_grad_norm=0.05)
    for at in range(3):
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at), clip=0.05))
    same_model(model, one)


def test_a_copied_graph_steps_pieces_of_its_own() -> None:
    model, one = wide(), wide()
    (step, _), ones = pieces("AdamW", model), made("AdamW", one)
    step(*batch())
    eager(one, loss_fn, ones, *batch())
    other: Any = copy.deepcopy(step)
    step(*batch(at=5))
    for at in range(2):
        same(other(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at)))
    same_model(other.model, one)


def test_under_no_grad_pieces_stay() -> None:
    model = wide()
    step, mine = pieces("AdamW", model)
    step(*batch())
    before = [id(p) for group in mine.param_groups for p in group["params"]]
    with torch.no_grad():
        step(*batch())
    assert [id(p) for group in mine.param_groups for p in group["params"]] == before


def test_evaluation_before_training() -> None:
    model, one = net(), net()
    mine, ones = sgd(model), sgd(one)
    step = flow.compile(model, loss_fn, mine, placement=LINE)
    with torch.no_grad():
        step(*batch())
    same(step(*batch()), eager(one, loss_fn, ones, *batch()))
    same_model(model, one)


def test_an_optimizer_that_needs_the_loss_again_is_refused() -> None:
    model = net()
    step = flow.compile(model, loss_fn, optim.LBFGS(model.parameters()), placement=LINE)
    with pytest.raises(SbpError, match=r"^LBFGS computes the loss several times .*\n  compile the loss without an opt"):
        step(*batch())


def test_lbfgs_with_a_graph_in_its_closure() -> None:
    model, one = net(), net()
    step = flow.compile(model, loss_fn, placement=LINE)
    step(*batch())  # makes the parameters global, of which the optimizer is made
    model.zero_grad()
    found = []
    for each, loss in ((model, step), (one, None)):
        optimizer = optim.LBFGS(each.parameters(), lr=0.1, max_iter=3)

        def closure(each: Any = each, loss: Any = loss, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            if loss is not None:
                return torch.tensor(loss(*batch()).item())
            value = loss_fn(each, *batch())
            value.backward()  # type: ignore[no-untyped-call]
            return value.detach()

        found.append(float(optimizer.step(closure)))  # type: ignore[no-untyped-call]
    assert abs(found[0] - found[1]) < 1e-6
    same_model(model, one, 1e-6)


def pieces_on_ranks() -> list[float]:
    model, one = wide(), wide()
    torch.manual_seed(0)
    (step, _), ones = pieces("AdamW", model, GRID, clip_grad_norm=0.1), made("AdamW", one)
    losses = []
    for at in range(3):
        losses.append(step(*batch(at=at)).item())
        eager(one, loss_fn, ones, *batch(at=at), clip=0.1)
    same_model(model, one)
    assert cut(step)
    return losses


def stages_on_ranks() -> None:
    model, one = net(), net()
    torch.manual_seed(0)
    flow.nn.place(model[:2], GRID[0])
    flow.nn.place(model[2], GRID[1])
    mine, ones = made("AdamW", model), made("AdamW", one)
    step = flow.compile(model, loss_fn, mine, clip_grad_norm=0.05)
    for at in range(3):
        step(*batch(at=at))
        eager(one, loss_fn, ones, *batch(at=at), clip=0.05)
    same_model(model, one)


def test_on_real_ranks(ranks4: Ranks) -> None:
    losses = ranks4(pieces_on_ranks)
    assert all(each == losses[0] for each in losses)
    ranks4(stages_on_ranks)
