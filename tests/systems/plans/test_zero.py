"""DeepSpeed's ZeRO, FSDP and SimpleFSDP: what rests on a rank, and what is sent for it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B
from sbpflow.boxing.graph import buckets
from sbpflow.boxing.graph.move_table import moves_of
from sbpflow.placement import cluster
from sbpflow.placement.device import family
from tests.ranks import Ranks

from ..small import GPT, batches, gpt, loss_fn, same_as_one_device

N = 4
PLANS = {
    "ddp": "grid (data=4)\n",
    "zero1": "grid (data=4)\nstates **: data=S(0)\n",
    "zero2": "grid (data=4)\n{grads,states} **: data=S(0)\n",
    "zero3": "grid (data=4)\n**: data=S(0)\n",
}
MASTERS = "cast ** to bf16\ncast states ** to fp32\n"
# Mixed precision with Adam. ZeRO-1 has 4 + 12 / N in the paper: gradients of a step in one go are in pieces as well.
PER_NUMBER = {"ddp": 16, "zero1": 2 + 14 / N, "zero2": 2 + 14 / N, "zero3": 16 / N}
OF_DATA_PARALLEL = {"ddp": 1.0, "zero1": 1.0, "zero2": 1.0, "zero3": 1.5}  # bytes sent


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PLANS)
def test_each_trains_as_one_device_does(name: str) -> None:
    same_as_one_device(gpt(), plan=PLANS[name], near=1e-7, optimizer=torch.optim.AdamW)


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_holds_the_papers_bytes_a_number(name: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 8))
    adam = torch.optim.AdamW(model.parameters())
    step = flow.compile(model, lambda m, x: m(x).float().square().mean(), adam, plan=PLANS[name] + MASTERS)
    step(torch.randn(8, 16).bfloat16())
    numbers = sum(value.numel() for value in model.parameters())
    held = {of.parameters + of.gradients + of.states for of in step.planned.held().values()}
    assert held == {PER_NUMBER[name] * numbers}
    assert {of.parameters + of.states for of in step.memory_at_rest().values()} == {
        PER_NUMBER[name] * numbers - next(iter(step.planned.held().values())).gradients
    }


def large(plan: str, layers: int = 2) -> tuple[Any, int]:
    """A step of a model whose tokens weigh more than its weights, planned, and how many numbers it trains."""
    with torch.device("meta"):
        model = GPT(layers, 512)
        words = torch.zeros(64, 128, dtype=torch.long)
    step = flow.compile(model, loss_fn, torch.optim.AdamW(model.parameters()), plan=plan).plan_for(words, words)
    return step, sum(value.numel() for value in model.parameters())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_gradients_and_weights_send_the_papers_share_of_data_parallelism(name: str) -> None:
    step, numbers = large(PLANS[name])
    sent = sum(row.total * row.count for row in moves_of(step.physical, step.planned.program.again))
    assert sent / (2 * (N - 1) * numbers * 4) == pytest.approx(OF_DATA_PARALLEL[name], rel=0.02)


HOSTS: dict[str, Any] = {"one": "flat", "two": cluster("two_level").with_node(2)}


def sent(plan: str, width: int, **options: Any) -> int:
    """The bytes that a step sends, without losses and the norms by which it clips."""
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width + 1))
    text, adam = plan + "**: data=B\ninput * <- data=S(0)\n", torch.optim.AdamW(model.parameters())
    step = flow.compile(model, lambda m, x: m(x).square().mean(), adam, plan=text, **options)
    step(torch.randn(1024, width))
    with flow.record() as moves:
        step(torch.randn(1024, width))
    return sum(move.boxing.total for move in moves if move.op != "same values" and move.boxing.src.numel > 16)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("width", [64, 51], ids=["even", "uneven"])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 4}, {"micro_batches": 4, "clip_grad_norm": 0.01}])
def test_zero_1_sends_what_data_parallelism_sends(hosts: str, width: int, options: dict[str, Any]) -> None:
    """Gradients that only the update reads are scattered: once a step, however many micro-batches it has. Over two
    hosts pieces are put in their order inside of each host, an eighth more, none of it between the hosts."""
    with flow.use_cluster(HOSTS[hosts]):
        wanted = sent(PLANS["ddp"], width, **options)
        most = 1.0 if hosts == "one" else 1.13
        assert 0 < wanted <= sent(PLANS["zero1"], width, **options) <= most * wanted
        if options:
            assert sent(PLANS["zero2"], width, **options) > 2 * wanted  # with every micro-batch


def test_gradients_that_somebody_reads_whole_are_summed_whole() -> None:
    """By a hook, or as the plan says."""
    model, hooked, seen = gpt(), gpt(), list[Tensor]()
    hooked.head.weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    homes = []
    for each, more in ((model, "grads **: data=B\n"), (hooked, "")):
        adam = torch.optim.AdamW(each.parameters())
        step = flow.compile(each, loss_fn, adam, plan=PLANS["zero1"] + more)
        step(*batches(1)[0])
        homes.append({s.value.name: s.home.state.split for s in step.physical.sources if s.kind == "parameter"})
    assert not any(homes[0].values())
    assert {name for name, cut in homes[1].items() if not cut} == {"head.weight"}
    assert [grad.sbp for grad in seen] == [(B,)]  # type: ignore[attr-defined]


def test_a_plan_found_for_zero_1_says_no_more_than_that() -> None:
    step, _ = large(PLANS["zero1"])
    assert "grads" not in str(step.plan)


def test_fsdp_gathers_a_layer_twice_and_scatters_its_gradients_once() -> None:
    text = "expect gathered at once <= 2 layers\nexpect no all_reduce over data a layer\n"
    step, _ = large(PLANS["zero3"] + text, layers=4)
    rows = [row for row in moves_of(step.physical, step.planned.program.again) if ".up.weight" in row.name]
    gathered = [row.direction for row in rows if row.boxing.route.startswith("all_gather")]
    assert gathered == ["forward", "again"]
    assert {row.count for row in rows} == {4}
    assert all("reduce_scatter" in row.boxing.route for row in rows if row.direction == "backward")


def in_buckets(plan: str, limit: int | None) -> tuple[list[Tensor], list[str], int]:
    """Two steps with buckets of so many bytes: losses and weights; exchanges of the last, and its bytes."""
    model, found = gpt(1), list[Tensor]()
    step = flow.compile(model, loss_fn, torch.optim.AdamW(model.parameters()), plan=plan)
    with pytest.MonkeyPatch.context() as patch:
        if limit is not None:
            patch.setattr(buckets, "family", lambda name: replace(family(name), bucket=limit))
        for batch in batches(2):
            with flow.record() as moves:
                found.append(step(*batch).full_tensor())
    weights = [weight.full_tensor() for weight in model.parameters()]  # type: ignore[attr-defined]
    return found + weights, [move.boxing.route for move in moves], sum(move.boxing.total for move in moves)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_buckets_change_no_bit_and_send_fewer_messages(name: str) -> None:
    """SimpleFSDP: a limit of one byte sends each gradient by itself."""
    plan = PLANS[name] + ("** -> data=S(0)\n" if name == "zero1" else "")  # it would be computed whole
    together, routes, nbytes = in_buckets(plan, None)
    alone, more, as_many = in_buckets(plan, 1)
    assert all(map(torch.equal, together, alone))
    assert nbytes == as_many
    scatters = [sum("reduce_scatter" in route for route in each) for each in (routes, more)]
    assert scatters == {"zero1": [1, 21], "zero3": [5, 11]}[name]
    assert len(more) - len(routes) == scatters[1] - scatters[0]


def buckets_on_ranks() -> tuple[bool, int, int]:
    (together, few, _), (alone, many, _) = (in_buckets(PLANS["zero3"], limit) for limit in (None, 1))
    return all(map(torch.equal, together, alone)), len(few), len(many)


def test_buckets_change_no_bit_between_processes(ranks4: Ranks) -> None:
    assert all(equal and few < many for equal, few, many in ranks4(buckets_on_ranks))
