"""Weights that leave played cards while training goes on: snapshots, other plans, readers of weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B, S

from .host import as_on_host, batch, cross_entropy, net, whole

PLANS = {
    "ZeRO-1": "grid (data=4)\nstates **: data=S(0)",
    "ZeRO-3": "grid (data=2)\n**: data=S(0)",
    "tensor": "grid (tensor=2)\nlayers.*.up.weight: tensor=S(0)\nlayers.*.down.weight: tensor=S(1)",
    "pipeline": "grid (pipe=2, data=2)\npipe layers over pipe by 1f1b, 2 micro-batches\nstates **: data=S(0)",
    "states on the host": "grid (data=2)\noffload states ** to cpu",
}
EVERY = ["ZeRO-3", *(pytest.param(name, marks=pytest.mark.sweep) for name in PLANS if name != "ZeRO-3")]


def started(plan: str, kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, flow.nn.Graph]:
    model = net()
    adam = torch.optim.AdamW(model.parameters(), 0.01)
    return (
        model,
        adam,
        flow.compile(model, cross_entropy, adam, plan=PLANS[plan].replace("grid (", f"grid {kind} (", 1)),
    )


@pytest.mark.parametrize("name", EVERY)
def test_a_snapshot_has_the_values_of_its_moment(name: str, tmp_path: Path) -> None:
    def program(kind: str) -> list[Tensor]:
        model, adam, step = started(name, kind)
        saved: list[Tensor] = []
        for at in range(4):
            step(*batch(at, kind))
            kept = flow.save(tmp_path / kind / str(at), model, optimizer=adam, asynchronous=True)
            step(*batch(10 + at, kind))  # writes to what is saved
        kept.wait()
        for at in range(4):
            flow.load(tmp_path / kind / str(at), model, optimizer=adam)
            saved += whole(model)
            saved.append(step(*batch(20, kind)).full_tensor())
        return saved

    as_on_host(program, 1e-11)


def lies(sbp: str, x: Tensor) -> flow.sbp.Sbp:
    return S(0) if sbp == "S(0)" else B if sbp == "B" else S(x.ndim - 1)


@pytest.mark.sweep
@pytest.mark.parametrize("to", ["[2-3] B", "[2-3] S(0)", "[1] B", "[0-3] S(1)", "[2,0,3,1] S(0)"])
@pytest.mark.parametrize("name", PLANS)
def test_weights_go_into_another_plan_as_on_the_host(name: str, to: str) -> None:
    def program(kind: str) -> list[Tensor]:
        model, _, step = started(name, kind)
        ranks, sbp = to.split()
        there = flow.nn.to_global(net(), flow.placement(f"{kind}:{ranks}"), lambda _, x: lies(sbp, x))
        found: list[Tensor] = []
        for at in range(3):
            step(*batch(at, kind))
            flow.refit(model, there, bucket_bytes=200 if at else 1 << 20)
            step(*batch(10 + at, kind))
            found += whole(there)
        return found

    as_on_host(program, 1e-11)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "other"), [("ZeRO-3", "tensor"), ("pipeline", "ZeRO-1"), ("ZeRO-1", "pipeline")])
def test_a_step_goes_on_by_another_plan(name: str, other: str, tmp_path: Path) -> None:
    def program(kind: str) -> list[Tensor]:
        model, adam, step = started(name, kind)
        step(*batch(0, kind))
        flow.save(tmp_path / kind, model, optimizer=adam, asynchronous=True).wait()
        model, adam, step = started(other, kind)
        flow.load(tmp_path / kind, model, optimizer=adam)
        return [step(*batch(at, kind)).full_tensor() for at in range(3)] + whole(model)

    as_on_host(program, 1e-11)
