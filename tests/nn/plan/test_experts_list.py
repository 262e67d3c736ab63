"""An expert's list: what somebody who trains on many cards looks at first in a plan, and would send it back for.

Stages where all fits in a node, and choices of degrees, are in search/test_seeking.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow.nn.plan.check import Checked
from sbpflow.nn.plan.grids import grids_of
from sbpflow.nn.plan.language.statements import Pipe
from sbpflow.nn.plan.search.planner import FoundPlan
from sbpflow.sbp import Split
from tests.nn.plan.search.test_seeking import loss_of, made

NODE = 8


def found(text: str, ranks: int, samples: int, layers: int = 2, **more: Any) -> FoundPlan:
    model, tokens = made(layers, samples)
    given = {"cluster": f"h100x8*{max(1, ranks // NODE)}", "ranks": ranks, "loss_fn": loss_of, **more}
    return flow.find_plan(model, tokens, plan=text, **given)


def checked(text: str, samples: int = 16, layers: int = 2, dtype: torch.dtype = torch.float32) -> Checked:
    model, tokens = made(layers, samples)
    return flow.Plan.read(text).check(model.to(dtype), tokens, cluster="h100x8*1", loss_fn=loss_of)


def cut(one: Checked) -> tuple[int, int]:
    """The parameters that lie in pieces along some axis, and those whose optimizer states do."""
    sources = [source for source in one.report.graph.sources if source.kind == "parameter"]
    held = [[source.value.layout, *([] if source.master is None else [source.master])] for source in sources]

    def in_pieces(at: int) -> int:
        return sum(any(isinstance(entry, Split) for entry in each[at].sbp) for each in held)

    return in_pieces(0), in_pieces(-1)


def is_weight(row: str) -> bool:
    """Whether a row of moves is of weights or their gradients: `layers.*.up.weight and 3 more`."""
    first = row.partition(" and ")[0]
    return any(fnmatch(name, first) for name, _ in made(2, 1)[0].named_parameters())


@pytest.mark.parametrize("ranks", [8, 64, 1024, pytest.param(16384, marks=pytest.mark.sweep)])
def test_tensor_parallel_stays_inside_of_a_node(ranks: int) -> None:
    """There is a sample for each node alone, so that its cards share one."""
    plan = found("seek data, tensor", ranks, ranks // NODE)
    whole = grids_of(plan, ranks, made(2, 1)[0]).whole
    assert whole.names is not None
    assert whole.shape[whole.names.index("tensor")] == NODE
    assert whole.names[-1] == "tensor"  # neighbours


def test_only_weights_and_their_gradients_go_between_nodes() -> None:
    ranks = 64
    plan = found("seek data, tensor", ranks, ranks // NODE)
    across = [row for row in plan.checked.report.moves if any("data" in way.axes for way in row.ways)]
    assert across
    assert all(is_weight(row.name) or row.bytes <= 8 * ranks for row in across)  # of others a number of each rank


@pytest.mark.sweep
def test_stages_are_where_links_ask_for_them() -> None:
    fast = flow.cluster("h100x8*2")
    node, network = fast.levels
    slow = replace(fast, levels=(node, replace(network, bandwidth=network.bandwidth / 200)))
    text = "grid cuda (pipe=?, data=?, tensor=2)\nseek micro-batches"
    stages = [found(text, 16, 16, layers=6, cluster=each) for each in (fast, slow)]
    assert [any(isinstance(line, Pipe) for line in plan.statements) for plan in stages] == [False, True]


def test_weights_stay_whole_where_states_in_pieces_fit() -> None:
    """Before ZeRO-3 comes whatever leaves weights whole: with room, where whole states are as quick, and with no more
    than ZeRO-1 takes."""
    grid = "grid cuda (data=8)"
    whole, states, all_cut = (
        checked(f"{grid}\n{lines}") for lines in ("**: data=B", "states **: data=S(0)", "**: data=S(0)")
    )
    assert cut(whole) == (0, 0)
    assert cut(states)[0] == 0 < cut(states)[1]
    assert cut(all_cut)[0] > 0
    for limit in (2 * whole.memory, states.memory):
        one = found(grid, 8, 16, memory=limit).checked
        assert all_cut.memory <= limit
        assert cut(one)[0] == 0
        assert (cut(one)[1] > 0) or limit > whole.memory
        assert one.seconds < all_cut.seconds


def test_states_of_float32_count_for_whether_a_plan_fits() -> None:
    """Beside weights of two bytes a master and two states of four bytes each; the limit lies between."""
    lines = "grid cuda (data=8)\n**: data=B\ncast ** to bf16\ncast {grads,states} ** to "
    few, wide = (checked(lines + dtype) for dtype in ("bf16", "fp32"))
    numbers = sum(x.numel() for x in made(2, 1)[0].parameters())
    of = [next(iter(each.report.memory.ranks.values())).states for each in (few, wide) if each.report.memory]
    assert of == [2 * 2 * numbers, 3 * 4 * numbers]
    between = (few.memory + wide.memory) / 2
    card = replace(few.device, memory=between / (1 - 0.05))
    assert [replace(each, device=card).fits for each in (few, wide)] == [True, False]


def again(one: Checked) -> Sequence[str]:
    assert one.report.memory is not None
    return one.report.memory.again


def test_no_more_blocks_run_again_than_have_to() -> None:
    """Each limit is below what one block fewer takes, and leaves some of the four blocks alone."""
    text = "grid cuda (data=2)\n1 micro-batches"
    free = checked(text, samples=64, layers=4)
    assert again(found(text, 2, 64, layers=4, memory=free.memory).checked) == ()
    taken = free.memory
    for many, share in enumerate((0.9, 0.7), 1):
        limit = int(share * free.memory)
        assert taken > limit
        one = checked(f"{text}\n**: ?\nlimit memory {limit} B", samples=64, layers=4)
        assert again(one) == tuple(f"layers.{n}" for n in range(many))
        assert one.memory <= limit
        taken = one.memory


def test_more_cards_take_no_longer_for_the_same_batch() -> None:
    seconds = [found("seek data, tensor", ranks, 256).checked.seconds for ranks in (8, 64, 256)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0] / 2
