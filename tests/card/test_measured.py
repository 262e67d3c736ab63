"""Cards, measured and watched: links between them without a launcher, updates that were timed, and steps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sbpflow as flow
from sbpflow.placement.compute.hosts import devices_of
from sbpflow.placement.compute.timing import KernelTime
from sbpflow.placement.errors import PlacementError
from sbpflow.placement.measure import measure
from sbpflow.placement.network.hosts import Hosts

from .host import batch, cross_entropy, net
from .test_machine import of_a_card


def test_cards_of_a_machine_are_measured_without_a_launcher() -> None:
    found = measure(2)
    assert (found.type, len(found.links)) == ("cuda", 1)
    with pytest.raises(PlacementError, match=r"this machine has 4 cards.*\n  try --ranks 4"):
        measure(5)
    with pytest.raises(PlacementError, match="at least 2"):
        measure(1)


def test_updates_that_were_timed_are_priced_with_their_launches_but_for_fused_ones() -> None:
    updates = [KernelTime("update", "float32", 0.0, 28.0 * n, 4e-6 + 42.0 * n / 2e12) for n in (2**20, 2**24)]
    (device,) = devices_of(Hosts((0, 0)), ("a",), [[*of_a_card(), *updates]] * 2, "cuda", "today")
    assert device.fitted is not None
    assert device.fitted.update is not None
    cluster = replace(flow.cluster("h100x8"), device=device)

    def seconds(fused: bool) -> float:
        model = net().to("cuda")
        adam = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused, foreach=False)
        given = {"loss_fn": cross_entropy, "optimizer": adam, "cluster": cluster}
        return flow.Plan.read("grid cuda (data=2)").check(model, batch(0, "cuda"), **given).seconds  # type: ignore[arg-type]

    assert seconds(True) < seconds(False)


def test_degrees_are_looked_for_on_the_cards_that_are_here() -> None:
    found = flow.find_plan(net(), batch(0, "cuda", 32), plan="seek data", loss_fn=cross_entropy, ranks=4)
    assert "grid cuda (data=4)" in found.text


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_watched_step_tells_the_memory_of_its_device(kind: str, tmp_path: Path) -> None:
    model, path = net().to(kind), tmp_path / "run.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = flow.compile(model, cross_entropy, optimizer, plan=f"grid {kind} (data=2)")
    with flow.watch(step, to=path, every=2) as train:
        for at in range(4):
            train(*batch(at, kind))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    most = torch.cuda.max_memory_allocated() if kind == "cuda" else float("inf")
    assert all(0 < line["gib"] * 2**30 <= most for line in lines)
