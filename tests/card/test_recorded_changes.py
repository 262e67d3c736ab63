"""Changes between steps count for one that is recorded as for any other; what cannot be recorded says so."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.placement.errors import SbpError
from tests.card.recorded_steps import Course, course, like, rows, squares, whole

ALONE = "grid cuda:[0] as (data=1)"
ZERO = f"grid cuda:[0, {torch.cuda.device_count()}] as (data=2)\n**: data=B\nstates **: data=S(0)"

Between = Callable[[int, Any, Any, Any], object]


def other_memory(n: int, step: Any, net: Any, adam: Any) -> None:
    if n == 3:
        net[0].weight.data = net[0].weight.data * 2


def written(n: int, step: Any, net: Any, adam: Any) -> None:
    if n == 3:
        with torch.no_grad():
            net[3].weight.mul_(3)


def loaded(n: int, step: Any, net: Any, adam: Any) -> None:
    if n == 2:
        net.kept = {name: value.clone() for name, value in net.state_dict().items()}
        adam.kept = copy.deepcopy(adam.state_dict())
    if n == 3:
        net.load_state_dict(net.kept)
        adam.load_state_dict(adam.kept)


def moments(n: int, step: Any, net: Any, adam: Any) -> None:
    if n == 3:
        for state in adam.state.values():
            state["exp_avg"].mul_(0.25)


def settings(n: int, step: Any, net: Any, adam: Any) -> None:
    adam.param_groups[0]["weight_decay"] = 0.1 * n


def betas_once(n: int, step: Any, net: Any, adam: Any) -> None:
    if n == 3:
        adam.param_groups[0]["betas"] = (0.5, 0.9)


def eager_gradients(n: int, step: Any, net: Any, adam: Any) -> None:
    if n in (3, 4):
        torch.autograd.backward(squares(net, *(x.cuda() for x in rows(n))))


def gradients_cleared(n: int, step: Any, net: Any, adam: Any) -> None:
    eager_gradients(n, step, net, adam)
    for x in net.parameters():
        x.grad = None


def eager_steps(n: int, step: Any, net: Any, adam: Any) -> None:
    if n == 3:
        torch.autograd.backward(squares(net, *(x.cuda() for x in rows(n))))
        adam.step()
        adam.zero_grad()


def a_layer(n: int, step: Any, net: Any, adam: Any) -> None:
    if n == 3:
        net[1] = nn.ReLU()


def evaluated(n: int, step: Any, net: Any, adam: Any) -> None:
    net.train(n % 2 == 0)


def frozen(n: int, step: Any, net: Any, adam: Any) -> None:
    net[0].requires_grad_(n < 3)


def hooked(n: int, step: Any, net: Any, adam: Any) -> None:
    if n == 3:
        net[0].weight.register_hook(lambda grad: grad * 2)


def stepping_hook(n: int, step: Any, net: Any, adam: Any) -> None:
    if n == 3:
        adam.register_step_post_hook(lambda *_: net[3].bias.data.mul_(0.5))


def other_loss(n: int, step: Any, net: Any, adam: Any) -> None:
    if n == 3:
        step.loss = lambda model, x, y: (model(x) - y).abs().mean()


def replaced(n: int, step: Any, net: Any, adam: Any) -> None:
    if n == 3:
        net[3].weight = nn.Parameter(torch.ones(4, 16, device="cuda"))
        adam.add_param_group({"params": [net[3].weight]})


CHANGES: list[Between] = [
    other_memory, written, loaded, moments, settings, betas_once, eager_gradients, gradients_cleared,
    eager_steps, a_layer, evaluated, frozen, hooked, stepping_hook, other_loss, replaced,
]  # fmt: skip


@pytest.mark.parametrize("plan", [ALONE, ZERO], ids=["alone", "zero-1"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_replays_counts(change: Between, plan: str) -> None:
    like(*(course("mlp", "adamw", plan, graph, steps=8, between=change) for graph in (True, False)))


def recorded(step: Any) -> str:
    found: str = step.explain().recorded
    return found


def trained(graph: bool, optimizer: Callable[[Any], Any], steps: int = 6, **options: Any) -> tuple[Course, Any]:
    torch.manual_seed(0)
    with torch.device("cpu"):
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    net = net.cuda()
    held = optimizer(net.parameters())
    step = flow.compile(net, squares, held, plan=ALONE, cuda_graph=graph, **options)
    losses = [step(*(x.cuda() for x in rows(n))).item() for n in range(steps)]
    values = {name: whole(value) for name, value in net.state_dict().items()}
    return Course(losses, values, [], [], step, torch.zeros(0)), net


class Own(torch.optim.SGD):
    """Nothing is known of its step."""


BY_HOST: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "counts on the host": (torch.optim.AdamW, {}, r"AdamW counts its steps on the host: AdamW\(..., capturable=True\)"),
    "of one's own": (lambda held: Own(held, lr=1e-2), {}, "Own steps on whole tensors"),
    "none": (lambda held: None, {}, "gradients are left"),
    "left": (lambda held: torch.optim.SGD(held, lr=1e-2), {"leave_gradients": True}, "gradients are left"),
    "looked at": (lambda held: torch.optim.SGD(held, lr=1e-2), {"skip_nonfinite": True}, "skip_nonfinite=True"),
    "scaled": (lambda held: torch.optim.SGD(held, lr=1e-2), {"loss_scale": 8.0}, "loss scale"),
}


@pytest.mark.parametrize("what", BY_HOST)
def test_what_the_host_has_in_its_hands_is_left_out_and_told(what: str) -> None:
    optimizer, options, why = BY_HOST[what]
    (mine, net), (plain, other) = (trained(graph, optimizer, **options) for graph in (True, False))
    like(mine, plain)
    for x, y in zip(net.parameters(), other.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None) == (what not in ("none", "left"))
        assert x.grad is None or torch.equal(whole(x.grad), whole(y.grad))
    assert re.search(f"all but the update, because .*{why}", recorded(mine.step))


def test_rates_that_are_numbers_are_written_to_the_card() -> None:
    def run(graph: bool) -> tuple[list[float], Any, Any]:
        torch.manual_seed(0)
        with torch.device("cpu"):
            net = nn.Linear(8, 4)
        net = net.cuda()
        adam = torch.optim.AdamW(net.parameters(), lr=0.1, capturable=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)
        step = flow.compile(net, squares, adam, plan=ALONE, cuda_graph=graph)
        losses = []
        for n in range(8):
            losses.append(step(*(x.cuda() for x in rows(n))).item())
            schedule.step()
        assert type(adam.param_groups[0]["lr"]) is float
        return losses, whole(net.weight), step

    losses, weight, step = run(True)
    others, plain, _ = run(False)
    assert losses == pytest.approx(others, rel=1e-6)
    torch.testing.assert_close(weight, plain, rtol=1e-6, atol=1e-8)
    assert recorded(step) == "all of the step"


def test_a_rate_that_sgd_takes_as_a_number_is_followed() -> None:
    def rated(n: int, step: Any, net: Any, sgd: Any) -> None:
        sgd.param_groups[0]["lr"] *= 0.5

    mine, plain = (course("mlp", "sgd", ALONE, graph, steps=9, between=rated) for graph in (True, False))
    like(mine, plain)
    assert "settings of optimizers" in recorded(mine.step)


def test_results_are_not_written_to_by_the_next_step() -> None:
    step = flow.compile(nn.Linear(8, 4).cuda(), plan=ALONE, cuda_graph=True)
    with torch.no_grad():
        given = [torch.full((2, 8), float(n), device="cuda") for n in range(6)]
        made = [step(x) for x in given]
        wanted = [step.model(x) for x in given]
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one.full_tensor(), other.full_tensor())
    assert recorded(step) == "all of the step"


def test_other_shapes_are_recorded_beside_the_first() -> None:
    def run(graph: bool) -> list[float]:
        torch.manual_seed(0)
        with torch.device("cpu"):
            net = nn.Linear(8, 4)
        net = net.cuda()
        adam = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-2, device="cuda"), capturable=True)
        step = flow.compile(net, squares, adam, plan=ALONE, cuda_graph=graph)
        batches = [[x.cuda()[: 8 - n % 2 * 3] for x in rows(n)] for n in range(10)]
        return [step(*batch).item() for batch in batches]

    assert run(True) == run(False)


def test_an_open_record_sees_the_moves_of_its_steps() -> None:
    plan = f"grid cuda:[0, {torch.cuda.device_count()}] as (data=2)"

    def looked(n: int, step: Any, net: Any, adam: Any) -> None:
        if n == 4:
            with flow.record() as moves:
                step(*(x.cuda() for x in rows(n)))
            assert sum(move.boxing.total for move in moves) == sum(r.total * r.count for r in step.explain().moves)

    like(*(course("mlp", "adamw", plan, graph, between=looked) for graph in (True, False)))


def test_a_saved_weight_that_a_replay_has_changed_is_an_error_of_autograd() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)).cuda()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    step = flow.compile(net, squares, sgd, plan=ALONE, cuda_graph=True)
    batch = [x.cuda() for x in rows(0)]
    for _ in range(4):
        step(*batch)
    loss = net(batch[0]).square().sum()
    step(*batch)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def masked(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = model(x)
    z = z.index_put((z.detach() > 0,), torch.zeros((), device="cuda"))
    made: Tensor = (z - y).square().mean()
    return made


@flow.nn.eager
def looking(x: Tensor, y: Tensor) -> Tensor:
    made: Tensor = (x - y).square().mean()
    return made if made.item() > 0 else made * 2


def by_part(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    made: Tensor = looking(model(x), y)
    return made


REFUSED: dict[str, tuple[Callable[..., Tensor], str, dict[str, Any], str]] = {
    "an item": (
        lambda model, x, y: squares(model, x, y) * squares(model, x, y).item(),
        ALONE,
        {},
        r"test_recorded.*\.py",
    ),
    "a mask": (masked, ALONE, {}, r"cannot be recorded: .*\n.*index_put.* at .*test_recorded_changes.py"),
    "an eager part": (by_part, ALONE, {}, r"runs eagerly, at .*test_recorded_changes.py"),
    "a CPU": (squares, "grid cpu:[0] as (data=1)", {}, "lies on a CPU, which has no graphs"),
    "micro-batches": (squares, ALONE, {"micro_batches": 2}, "whose actors the host runs"),
    "no bool": (squares, ALONE, {"cuda_graph": 1}, "say True or False"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_recorded_is_an_error_with_its_line(what: str) -> None:
    loss, plan, options, said = REFUSED[what]
    with torch.device("cpu"):
        net = nn.Linear(8, 4)
    net = net.cuda() if "cuda" in plan else net
    batch = [x.cuda() if "cuda" in plan else x for x in rows(0)]

    def run() -> None:
        given: dict[str, Any] = {"cuda_graph": True, **options}
        step = flow.compile(net, loss, torch.optim.SGD(net.parameters()), plan=plan, **given)
        for _ in range(3):
            step(*batch)

    with pytest.raises(SbpError, match=said):
        run()


def test_a_step_that_could_not_be_recorded_has_changed_nothing() -> None:
    net = nn.Linear(8, 4).cuda()
    step = flow.compile(net, masked, torch.optim.SGD(net.parameters(), lr=0.1), plan=ALONE, cuda_graph=True)
    batch = [x.cuda() for x in rows(0)]
    for _ in range(2):
        step(*batch)
    before = whole(net.weight)
    for _ in range(2):
        with pytest.raises(SbpError, match="cannot be recorded"):
            step(*batch)
    assert torch.equal(whole(net.weight), before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_several_cards_are_refused() -> None:
    net = nn.Linear(8, 4).cuda()
    step = flow.compile(net, squares, plan="grid cuda:[0-1] as (data=2)", cuda_graph=True)
    with pytest.raises(SbpError, match="lies on cuda:0, cuda:1: the memory of a graph is of one card"):
        step(*(x.cuda() for x in rows(0)))


def test_draws_of_a_region_that_runs_again_are_refused() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)).cuda()
    flow.nn.recompute(net[1])
    step = flow.compile(net, squares, plan=ALONE, cuda_graph=True)
    with pytest.raises(SbpError, match="run again for the backward draws random numbers"):
        step(*(x.cuda() for x in rows(0)))
