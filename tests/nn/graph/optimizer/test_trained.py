"""A master of another dtype than its parameter is a tensor of its own, and the parameter is what it rounds to."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import sbpflow as flow
from sbpflow import B, S
from sbpflow.boxing.graph import insert
from sbpflow.boxing.graph.physical import Source
from sbpflow.nn.graph.optimizer.at_rest import _bytes
from sbpflow.nn.graph.optimizer.trained import Trained

PAIR = flow.placement("cpu:[0-1] as (data=2)")
CUT, WHOLE = {"data": S(0)}, {"data": B}
RESTS: dict[str, tuple[Any, Any]] = {"whole": (WHOLE, WHOLE), "ZeRO-1": (WHOLE, CUT), "ZeRO-3": (CUT, CUT)}
EVERY = pytest.mark.parametrize("rest", RESTS)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs whose optimizers step in float32, whatever the parameters are."""
    widen(monkeypatch.setattr)


def widen(put: Callable[..., None]) -> None:
    made = insert._Insertion.source

    def source(self: Any, number: int, stored: Any, there: Any) -> Source:
        found = made(self, number, stored, there)
        return replace(found, states=found.master.with_dtype(torch.float32))

    put(insert._Insertion, "source", source)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).bfloat16()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = (model(x) - y).float().square().mean()
    return loss


def batch(at: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(at)
    x, y = (torch.randn(8, n, generator=draw).bfloat16() for n in (4, 3))
    return x, y


class Mixed:
    """One device: float32 copies, of which the model is the rounding."""

    def __init__(self, model: nn.Module, make: Any) -> None:
        self.model = model
        self.copies = [nn.Parameter(p.detach().float()) for p in model.parameters()]
        self.optimizer = make(self.copies)

    def __call__(self, *args: Tensor) -> Tensor:
        loss = loss_fn(self.model, *args)
        loss.backward()  # type: ignore[no-untyped-call]
        for p, wide in zip(self.model.parameters(), self.copies, strict=True):
            assert p.grad is not None
            wide.grad, p.grad = p.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for p, wide in zip(self.model.parameters(), self.copies, strict=True):
                p.copy_(wide)
        return loss.detach()


def laid(rest: str) -> nn.Module:
    model = net()
    for kind, sbp in zip(("weights", "states"), RESTS[rest], strict=True):
        flow.nn.shard(model, {"*": sbp}, kind)  # type: ignore[arg-type]
    return model


def small(params: Any) -> optim.Optimizer:
    """Steps that are mostly lost where weights are rounded after each."""
    return optim.AdamW(params, lr=3e-4)


@pytest.mark.sampled(1)
@EVERY
def test_steps_are_those_of_copies_on_one_device(rest: str, wide: None) -> None:
    model, one = laid(rest), Mixed(net(), small)
    mine = small(model.parameters())
    step = flow.compile(model, loss_fn, mine, placement=PAIR)
    for at in range(8):
        torch.testing.assert_close(step(*batch(at)).full_tensor(), one(*batch(at)), rtol=1e-2, atol=1e-3)
    masters = [p for group in mine.param_groups for p in group["params"]]
    for p, master, wanted in zip(model.parameters(), masters, one.copies, strict=True):
        assert master.dtype is torch.float32
        torch.testing.assert_close(master.full_tensor(), wanted, rtol=0, atol=3e-4)  # a gradient of bfloat16 may differ
        assert torch.equal(p.full_tensor(), master.full_tensor().bfloat16())  # type: ignore[attr-defined]
    held = step.memory_at_rest()[0]
    memory = step.explain().memory
    assert memory is not None
    assert held.states == memory.ranks[0].states
    share = sum(-(-len(p) // 2) * p[0].numel() if RESTS[rest][1] is CUT else p.numel() for p in net().parameters())
    assert held.states == 12 * share  # a copy and two moments, of 4 bytes each


@pytest.mark.sampled(1)
@EVERY
def test_digits_stay_where_graphs_take_turns(rest: str, wide: None) -> None:
    model, one = laid(rest), Mixed(net(), small)
    step = flow.compile(model, loss_fn, small(model.parameters()), placement=PAIR)
    for at in range(6):
        x, y = batch(at)
        rows = 8 if at % 2 else 4
        step(x[:rows], y[:rows])
        one(x[:rows], y[:rows])
    masters = [t.master for t in step.planned.model.trained.values()]
    for master, wanted in zip(masters, one.copies, strict=True):
        torch.testing.assert_close(master.full_tensor(), wanted, rtol=0, atol=3e-4)


def test_what_is_loaded_counts_for_the_copy(wide: None) -> None:
    model, other = laid("ZeRO-1"), {name: 2 * value for name, value in net().state_dict().items()}
    step = flow.compile(model, loss_fn, optim.SGD(model.parameters(), lr=0.0), placement=PAIR)
    step(*batch(0))
    model.load_state_dict(other)
    step(*batch(0))
    for p, wanted in zip(model.parameters(), other.values(), strict=True):
        assert torch.equal(p.full_tensor(), wanted)  # type: ignore[attr-defined]


def test_other_memory_counts_for_the_copy_though_it_lies_where_the_last_did() -> None:
    memory = torch.zeros(6)

    def there() -> Tensor:
        """The values that lie there now, as a tensor that has just been made there."""
        return torch.frombuffer(memory.numpy(), dtype=torch.float32)

    one = flow.placement("cpu", [0])
    p = flow.from_local(torch.ones(6), placement=one, sbp=B).requires_grad_()
    each = Trained(p, rest=p._layout.with_state(p._layout.state).with_dtype(torch.float64))
    p.data = flow.from_local(there(), placement=one, sbp=B)
    each.gather()
    each.stamped()
    assert each.fresh
    memory.fill_(7)
    p.data = flow.from_local(there(), placement=one, sbp=B)
    each.gather()
    assert each.master.full_tensor().tolist() == [7] * 6


def test_tensors_that_are_made_to_be_counted_count_once_each() -> None:
    one, seen = flow.placement("cpu", [0]), defaultdict[int, Any](dict)
    made = (flow.from_local(torch.ones(64, dtype=torch.float64), placement=one, sbp=B) for _ in range(20))
    assert _bytes(made, seen) == {0: 20 * 64 * 8}


@EVERY
def test_what_is_written_to_data_counts_for_the_copy_and_leaves_digits(rest: str) -> None:
    """`x.data` has versions of its own, so that autograd does not see writes: the master overwrote them."""
    lies = {"whole": "", "ZeRO-1": "states **: data=S(0)\n", "ZeRO-3": "**: data=S(0)\n"}[rest]
    model, rate = net().bfloat16(), torch.tensor(1e-3)
    sgd = optim.SGD(model.parameters(), lr=rate)
    step = flow.compile(model, loss_fn, sgd, plan=f"grid (data=2)\n{lies}cast states ** to fp32\n")
    x, y = (part.bfloat16() for part in batch(0))
    step(x, y)
    weight: Any = model[0].weight
    (master,) = [each.master for each in step.planned.model.trained.values() if each.parameter is weight]
    fine = master.detach().full_tensor()
    weight.data.clamp_(-0.2, 0.2)
    rounded = weight.detach().full_tensor().float()
    rate.zero_()
    step(x, y)
    assert torch.equal(weight.detach().full_tensor().float(), rounded)
    inside = fine.bfloat16().float() == rounded
    assert not torch.equal(fine[inside], rounded[inside])
    assert torch.equal(master.detach().full_tensor(), torch.where(inside, fine, rounded))
