"""Lighter plans as a choice: a limit that nothing else meets is met, and one that is met without stays without."""

from dataclasses import replace
from math import isclose

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.plan.language.statements import Accumulate, DrawBy, Offload, Recompute
from sbpflow.nn.plan.search.planner import FoundPlan
from sbpflow.placement.errors import ShortageError
from sbpflow.placement.hardware import GAPS, KEPT_FREE

GRID = "grid (data=2)"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(net(x).square().mean())


def found_within(net: nn.Module, x: Tensor, share: float) -> FoundPlan:
    """The plan within a share of the memory that is taken without a limit."""
    most = flow.find_plan(net, x, plan=GRID, loss_fn=loss_fn).checked.memory
    return flow.find_plan(net, x, plan=GRID, loss_fn=loss_fn, memory=share * most)


def test_a_limit_that_nothing_else_meets_is_met_by_states_on_the_host() -> None:
    net, x = Net(), torch.randn(64, 64)
    limit = 0.4 * flow.find_plan(net, x, plan=GRID, loss_fn=loss_fn).checked.memory
    with pytest.raises(ShortageError):
        flow.Plan.read(f"{GRID}\n**: ?\nlimit memory {int(limit)} B").check(net, x, loss_fn=loss_fn)
    found = flow.find_plan(net, x, plan=GRID, loss_fn=loss_fn, memory=limit)
    assert found.checked.memory <= limit
    assert any(isinstance(line, Offload) and line.what == "states" for line in found.statements)
    alone = loss_fn(net, x).item()
    step = flow.compile(net, loss_fn, torch.optim.AdamW(net.parameters()), plan=str(found))
    assert isclose(step(x).item(), alone, rel_tol=1e-5)  # sums are in another order
    assert max(held.total for held in step.planned.held().values()) <= limit


def test_activations_go_to_the_host_where_that_is_cheaper_than_running_blocks_again() -> None:
    net, x = Net(), torch.randn(4096, 64)
    found = found_within(net, x, 0.8)
    assert [line.what for line in found.statements if isinstance(line, Offload)] == ["saved"]
    assert not any(isinstance(line, Recompute) for line in found.statements)
    again = [one for one in found.runners_up if one.name.endswith("blocks run again")]
    assert again
    assert all("no less than" in one.why for one in again)
    alone = loss_fn(net, x).item()
    assert isclose(flow.compile(net, loss_fn, plan=str(found))(x).item(), alone, rel_tol=1e-5)  # sums in another order


def test_a_limit_that_is_met_without_stays_without() -> None:
    found = found_within(Net(), torch.randn(4096, 64), 1.0)
    assert not any(isinstance(line, Offload) for line in found.statements)
    assert all("host" not in one.name for one in found.runners_up)


def on_meta(samples: int) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return Net(), torch.empty(samples, 64)


def h100_of(memory: float) -> flow.Cluster:
    known = flow.cluster("h100x8")
    return replace(known, device=replace(known.device, memory=memory))


def test_the_memory_of_the_device_is_the_limit_less_what_is_kept_free_and_gaps() -> None:
    net, x = on_meta(2**14)
    plan = "grid cuda (data=2)"
    free = flow.find_plan(net, x, plan=plan, loss_fn=loss_fn, cluster="h100x8")
    assert "of which 4% are kept free; what comes and goes takes 27% more" in str(free)
    most = free.checked.memory
    assert free.checked.taken(GAPS) > most
    found = flow.find_plan(net, x, plan=plan, loss_fn=loss_fn, cluster=h100_of(most))  # 4 % too little, and gaps
    assert found.checked.taken(GAPS) <= (1 - KEPT_FREE) * most
    assert found.checked.fits
    (line,) = (line for line in str(found).splitlines() if "are kept free" in line)
    alive = int(line.split()[3])
    assert found.checked.memory <= alive
    assert alive + GAPS * (alive - found.checked.stays) == pytest.approx((1 - KEPT_FREE) * most, rel=1e-6)
    asked = flow.find_plan(net, x, plan=plan, loss_fn=loss_fn, cluster=h100_of(most), memory=most)
    assert asked.checked.memory == most
    said = flow.find_plan(net, x, plan=f"{plan}\nlimit memory {most} B", loss_fn=loss_fn, cluster=h100_of(most))
    assert said.checked.memory == most
    assert not said.checked.fits
    assert "does not fit: H100 has" in str(said.checked)


def test_nobody_knows_the_memory_of_the_hosts_cpu() -> None:
    found = flow.find_plan(*on_meta(2**22), plan=GRID, loss_fn=loss_fn)
    assert found.checked.memory > 2**33
    assert found.checked.fits
    assert not any(isinstance(line, Accumulate) for line in found.statements)


def test_a_batch_runs_in_as_few_parts_as_fit() -> None:
    net, x = on_meta(2**14)
    whole = flow.find_plan(net, x, plan="grid cuda (data=2)", loss_fn=loss_fn, cluster="h100x8")
    limit = 0.45 * whole.checked.memory
    found = flow.find_plan(net, x, plan="grid cuda (data=2)", loss_fn=loss_fn, cluster="h100x8", memory=limit)
    assert [line.micro_batches for line in found.statements if isinstance(line, Accumulate)] == [4]
    assert found.checked.memory <= limit
    others = [one.checked for one in found.runners_up if one.checked is not None and one.checked.memory <= limit]
    assert all(found.checked.seconds <= other.seconds for other in others)
    alone = torch.randn(64, 64)
    here = Net()
    step = flow.compile(here, loss_fn, plan=str(found).replace("cuda", "cpu").replace("expect", "#"))
    assert isclose(step(alone).item(), loss_fn(here, alone).item(), rel_tol=1e-5)


def test_a_plan_that_says_how_weights_rest_runs_in_parts_as_it_says() -> None:
    net, x = on_meta(2**14)
    plan = "grid cuda (data=2)\nstates **: data=S(0)"
    whole = flow.find_plan(net, x, plan=plan, loss_fn=loss_fn, cluster="h100x8")
    found = flow.find_plan(net, x, plan=plan, loss_fn=loss_fn, cluster="h100x8", memory=0.45 * whole.checked.memory)
    assert "states **: data=S(0)\n4 micro-batches\n" in str(found)


def test_a_plan_that_says_how_many_parts_keeps_them() -> None:
    net, x = on_meta(2**14)
    plan = "grid cuda (data=2)\n1 micro-batches"
    whole = flow.find_plan(net, x, plan=plan, loss_fn=loss_fn, cluster="h100x8")
    found = flow.find_plan(net, x, plan=plan, loss_fn=loss_fn, cluster="h100x8", memory=0.6 * whole.checked.memory)
    assert [line.micro_batches for line in found.statements if isinstance(line, Accumulate)] == [1]


@pytest.mark.parametrize(("line", "drawn"), [("", ["draw by micro-batch"]), ("draw by batch", ["draw by batch"])])
def test_parts_draw_their_own_numbers_where_those_of_the_batch_are_many(line: str, drawn: list[str]) -> None:
    net, x = on_meta(2**14)
    model = torch.nn.Sequential(torch.nn.Dropout(0.1), net)
    plan = f"grid cuda (data=2)\n{line}"
    whole = flow.find_plan(net, x, plan="grid cuda (data=2)", loss_fn=loss_fn, cluster="h100x8")
    found = flow.find_plan(model, x, plan=plan, loss_fn=loss_fn, cluster="h100x8", memory=0.45 * whole.checked.memory)
    assert [str(each) for each in found.statements if isinstance(each, DrawBy)] == drawn
