"""Matrices are stepped whole, once, on the ranks that own them; what comes of it is that of one device."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import sbpflow as flow
from sbpflow import B, S
from sbpflow.boxing.exchange.execute import transport
from sbpflow.nn.owners.balance import cost, owners
from tests.nn.graph.alike import eager, same_model
from tests.nn.graph.optimizer.test_on_shards import DATA, LIES, Shampoo, batch, laid, loss_fn
from tests.nn.graph.optimizer.test_on_whole import matrices, sends_what_is_told
from tests.ranks import Ranks

COUNTED = Counter[tuple[int, ...]]()


class Mine(Shampoo):
    """A user's own, that counts what it is given."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        COUNTED.update(tuple(p.shape) for group in self.param_groups for p in group["params"])
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step(closure)


flow.nn.steps_by_tensor(Mine)
MAKES: dict[str, Any] = {
    "Muon": lambda p: optim.Muon(p, 0.02),
    "Adafactor": lambda p: optim.Adafactor(p, 0.1),
    "Mine": Mine,
}
PIPES = {
    "ZeRO-1": "grid (pipe=2, data=2)\npipe layers over pipe by 1f1b, 2 micro-batches\nstates **: data=S(0)",
    "TP": "grid (pipe=2, tensor=2)\npipe layers over pipe by 1f1b, 2 micro-batches\nlayers.*.weight: tensor=S(0)",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def net() -> Net:
    torch.manual_seed(1)
    return Net().double()


def alike(model: nn.Module, one: nn.Module, make: str) -> None:
    """Muon's are the same to the digit; gradients of others may be added up in another order."""
    if make != "Muon":
        return same_model(model, one)
    for x, y in zip(model.parameters(), one.parameters(), strict=True):
        assert torch.equal(x.detach().full_tensor(), y.detach())  # type: ignore[attr-defined]
    return None


@pytest.mark.parametrize("sbp", [B, S(0), S(1)], ids=str)
@pytest.mark.parametrize("make", MAKES)
def test_an_eager_step_is_that_of_one_device(make: str, sbp: Any) -> None:
    model, one = flow.nn.to_global(matrices(), DATA, sbp), matrices()
    mine, ones = (MAKES[make](each.parameters()) for each in (model, one))
    schedule = optim.lr_scheduler.LambdaLR(mine, lambda step: 1.0)
    COUNTED.clear()
    for at in range(3):
        mine.zero_grad()
        loss_fn(model, *(flow.tensor(x, placement=DATA, sbp=B) for x in batch(at))).backward()  # type: ignore[no-untyped-call]
        mine.step()
        schedule.step()
    assert dict(COUNTED) == ({(7, 4): 3, (3, 7): 3} if make == "Mine" else {})
    for at in range(3):
        eager(one, loss_fn, ones, *batch(at))
    alike(model, one, make)
    assert mine.param_groups[0].get("steps") == ones.param_groups[0].get("steps")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", [*LIES, *PIPES])
@pytest.mark.parametrize("make", MAKES)
def test_a_compiled_step_is_that_of_one_device(make: str, plan: str) -> None:
    model, one = (net(), net()) if plan in PIPES else (laid(matrices(), plan), matrices())
    mine, ones = (MAKES[make](each.parameters()) for each in (model, one))
    kind: Any = {"plan": PIPES[plan]} if plan in PIPES else {"placement": DATA}
    step = flow.compile(model, loss_fn, mine, **kind)
    for at in range(3):
        step(*batch(at))
        eager(one, loss_fn, ones, *batch(at))
    alike(model, one, make)


@pytest.mark.parametrize("lies", ["pieces of rows", "rows"])
def test_what_owners_get_and_give_is_in_the_plan(lies: str) -> None:
    model = laid(matrices(), lies)
    step = flow.compile(model, loss_fn, optim.Muon(model.parameters(), lr=0.02), placement=DATA)
    sends_what_is_told(step)
    assert {s.owner for s in step.physical.sources if s.kind == "parameter"} == {0, 1}
    memory = step.explain().memory
    assert memory is not None
    for rank, held in step.memory_at_rest().items():
        assert held.states == memory.ranks[rank].states


def test_bytes_are_gradient_and_value_to_the_owner_and_the_value_back() -> None:
    model = flow.nn.to_global(matrices(), DATA, S(1))  # of 4 and 7 columns
    mine: Any = optim.Muon(model.parameters(), 0.02)
    for x in model.parameters():
        x.grad = flow.ones(*x.shape, placement=DATA, sbp=S(1), dtype=x.dtype)
    for _ in range(2):  # the state stays where it is
        before = transport().sent.bytes.total()
        mine.step()
        sent = transport().sent.bytes.total() - before
        parts = [3 * 8 * (x.numel() - x.layout_.local_shape(0)[1] * x.shape[0]) for x in model.parameters()]  # type: ignore[attr-defined]
        assert sent == sum(parts)


def steps(make: str, plan: str) -> tuple[list[Tensor], int, list[str]]:
    COUNTED.clear()
    model = net()
    mine = MAKES[make](model.parameters())
    step = flow.compile(model, loss_fn, mine, plan=PIPES[plan])
    for at in range(2):
        step(*batch(at))
    states = [f"{[*state]} {[part.layout_ for part in state.values()]}" for state in mine.state.values()]
    values = [x.detach().full_tensor() for x in model.parameters()]  # type: ignore[attr-defined]
    return values, sum(COUNTED.values()), states


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("make", "plan"), [("Muon", "ZeRO-1"), ("Mine", "TP"), ("Adafactor", "ZeRO-1")])
def test_real_ranks_step_each_matrix_once(ranks4: Ranks, make: str, plan: str) -> None:
    one = net()
    ones = MAKES[make](one.parameters())
    for at in range(2):
        eager(one, loss_fn, ones, *batch(at))
    found = ranks4(steps, make, plan)
    for values, *_ in found:
        for x, y in zip(values, one.parameters(), strict=True):
            torch.testing.assert_close(x, y.detach())
    if make == "Mine":
        assert sum(count for _, count, *_ in found) == 2 * 5
    assert found[0][2:] == found[1][2:]  # of one stage


def test_a_state_goes_to_a_plain_one_and_back() -> None:
    model, one = flow.nn.to_global(matrices(), DATA, S(0)), matrices()
    mine, ones = (MAKES["Muon"](each.parameters()) for each in (model, one))
    for at in range(4):
        if at == 2:
            mine.load_state_dict(ones.state_dict())
        mine.zero_grad()
        loss_fn(model, *(flow.tensor(x, placement=DATA, sbp=B) for x in batch(at))).backward()  # type: ignore[no-untyped-call]
        mine.step()
        eager(one, loss_fn, ones, *batch(at))
    alike(model, one, "Muon")
    for x, y in zip(mine.state.values(), ones.state.values(), strict=True):
        torch.testing.assert_close(x["momentum_buffer"].full_tensor(), y["momentum_buffer"])


def around_a_load() -> list[Tensor]:
    model = flow.nn.to_global(matrices(), DATA, S(0))
    mine = MAKES["Muon"](model.parameters())
    for at in range(4):
        if at == 2:  # as from a checkpoint: the same, beside the parameters
            for x, state in mine.state.items():
                mine.state[x] = {name: part.to_global(x.placement, x.sbp) for name, part in state.items()}
        mine.zero_grad()
        loss_fn(model, *(flow.tensor(x, placement=DATA, sbp=B) for x in batch(at))).backward()  # type: ignore[no-untyped-call]
        mine.step()
    return [x.detach().full_tensor() for x in model.parameters()]  # type: ignore[attr-defined]


def test_all_ranks_are_told_again_after_a_load(ranks4: Ranks) -> None:
    one = matrices()
    ones = MAKES["Muon"](one.parameters())
    for at in range(4):
        eager(one, loss_fn, ones, *batch(at))
    for values in ranks4(around_a_load)[:2]:
        for x, y in zip(values, one.parameters(), strict=True):
            torch.testing.assert_close(x, y.detach())


def test_owners_have_as_much_to_do() -> None:
    shapes = [(64, 64)] * 5 + [(128, 64)] * 4 + [(256, 64)] * 3 + [(64,)] * 7
    ranks = owners(tuple((DATA, shape) for shape in shapes))
    load = Counter[int]()
    for rank, shape in zip(ranks, shapes, strict=True):
        load[rank] += cost(shape)
    assert max(load.values()) <= 1.2 * sum(load.values()) / 4


def test_only_classes_of_optimizers_can_be_said_to_step_by_tensor() -> None:
    with pytest.raises(flow.SbpError, match="no class of optimizers"):
        flow.nn.steps_by_tensor(Mine([nn.Parameter(torch.ones(2))]))  # type: ignore[type-var]


def test_a_value_that_an_owner_has_is_not_sent_to_it() -> None:
    """With states in pieces of rows and weights whole, it takes the weight and not the pieces."""
    model = laid(matrices(), "pieces of rows")
    step = flow.compile(model, loss_fn, optim.Muon(model.parameters(), lr=0.02), placement=DATA)
    step(*batch(0))
    with flow.record() as moves:
        step(*batch(1))
    ways = [move.boxing for move in moves if move.op == "optimizer whole"]
    to_owners = [way for way in ways if way.dst.placement.size == 1 and way.total]
    assert len(to_owners) == 2  # gradients


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.gate = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Any:
        return (x @ self.matrix).square().mean() * self.gate


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1, 2]], ids=str)
def test_states_are_of_the_shapes_that_one_device_gives_them(ranks: list[int]) -> None:
    """Rows and columns of a matrix, and of a parameter of no dims what it has; also where an owner is alone."""
    found, shapes = [], []
    for where in (None, flow.placement("cpu", ranks)):
        model = Gated().double()
        if where is not None:
            flow.nn.to_global(model, where, {"matrix": S(0)})
        optimizer: Any = optim.Adafactor(model.parameters(), 0.1)
        x = torch.arange(20.0).view(4, 5).double()
        for _ in range(2):
            model(x if where is None else flow.tensor(x, placement=where, sbp=B)).backward()
            optimizer.step()
            optimizer.zero_grad()
        held = [x for p in model.parameters() for x in (p, *optimizer.state[p].values())]
        shapes.append([tuple(x.shape) for x in held])
        found.append([x.full_tensor() if isinstance(x, flow.GlobalTensor) else x for x in held])
    torch.testing.assert_close(found[1], found[0])
    assert shapes[1] == shapes[0]


def test_parameters_of_no_dims_count_as_an_element() -> None:
    assert [cost(shape) for shape in ((), (1,), (0, 3), (3,))] == [1, 1, 0, 3]
    where, alone = flow.placement("cpu", range(2)), flow.placement("cpu", [1])
    assert owners(((alone, (4, 4)), (where, ()), (where, ()), (alone, ()))) == (1, 0, 0, 1)
