"""Equal layers are worked out once: what a check asks of the rule book and of torch does not grow with their number."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.graph.choose import stage_work
from sbpflow.nn.graph.instructions.instruction import Storages
from sbpflow.nn.graph.instructions.moves import MoveNow
from sbpflow.nn.graph.microbatch import along, opened_calls
from sbpflow.nn.plan.check import planned_step, priced_by
from sbpflow.sbp.joint.edge_cost import EdgeCosts
from sbpflow.sbp.joint.solver.solve import solve

LAYERS = (4, 12)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 2, 12).transpose(1, 2).chunk(3, -1)
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        found: Tensor = x + self.proj(made.reshape(x.shape))
        return found


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def checked(layers: int, text: str) -> object:
    with torch.device("meta"):
        model = Net(layers)
    return flow.Plan.read(text).check(model, torch.empty(16, 4, 8, device="meta"), cluster="h100x8")


def counted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> Counter[str]:
    """How often a function of a module is called from now on."""
    many: Counter[str] = Counter()
    function: Callable[..., object] = getattr(where, name)

    def called(*args: Any, **kwargs: Any) -> object:
        many[name] += 1
        return function(*args, **kwargs)

    monkeypatch.setattr(where, name, called)
    return many


@pytest.mark.parametrize(
    ("where", "name", "axes"),
    [(along, "all_ways", "data=2"), (opened_calls, "opened", "data=4"), (EdgeCosts, "_ways", "data=2, tensor=2")],
    ids=["asked", "opened", "priced"],
)
def test_equal_layers_are_worked_out_once(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, axes: str) -> None:
    many = counted(monkeypatch, where, name)
    found = []
    for layers in LAYERS:
        many.clear()
        checked(layers, f"grid cuda ({axes})\n4 micro-batches")
        found.append(many[name])
    assert found[0] == found[1] > 0


def test_the_memory_of_a_rank_looks_at_no_moves_of_other_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    effect = MoveNow.effect

    def noted(self: MoveNow, memory: Storages) -> None:
        seen.append(any(memory.rank in of.placement for pair in memory.transfers[self.number].pairs for of in pair))
        effect(self, memory)

    monkeypatch.setattr(MoveNow, "effect", noted)
    checked(8, "grid cuda (pipe=4, data=2)\npipe layers over pipe by 1f1b, 8 micro-batches")
    assert seen
    assert all(seen)


def test_a_cut_of_stages_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    simulated = stage_work.StageWork._seconds
    monkeypatch.setattr(stage_work, "COUNTED", 0)  # as of deep models, of whose cuts those near a good one are tried

    def seconds(self: stage_work.StageWork, ends: Any) -> float:
        seen.append(tuple(ends))
        return simulated(self, ends)

    monkeypatch.setattr(stage_work.StageWork, "_seconds", seconds)
    checked(12, "grid cuda (pipe=4)\npipe layers over pipe by 1f1b, 8 micro-batches")
    assert len(seen) == len(set(seen)) > 0


@pytest.mark.parametrize("turns", [0, 2], ids=["", "in turns"])
def test_equal_stages_choose_alike_and_nearly_as_well_as_each_by_itself(turns: int) -> None:
    """Layers of a stage are first, last or between; those that run again are so next to others that do not. Layers as
    small as these may save a ten-thousandth by choosing each by itself."""
    many = []
    for stages in (4, 8):
        again = f"\nrecompute layers.{{{','.join(map(str, range(0, 4 * stages, turns)))}}}" if turns else ""
        text = f"grid cuda (pipe={stages})\npipe layers over pipe by 1f1b, 8 micro-batches{again}"
        with torch.device("meta"):
            model, x = Net(4 * stages), torch.empty(16, 4, 8)
        with priced_by("h100x8"):
            step = planned_step(flow.Plan.read(text), model, x)
            assert step.plan.pieces is not None
            decided = step.plan.pieces.first.decided
            problem = decided.formulated.problem
            alone = solve(replace(problem, tied=(), block=()))
        assert decided.solution.cost == pytest.approx(alone.cost, rel=1e-3)
        many.append(len({*problem.tied}))
    assert many[0] == many[1] > 1
