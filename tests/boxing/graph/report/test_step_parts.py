"""Parts of a step: they add up to it, in stages and micro-batches too, and the bar has each at its length."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.boxing.graph.report.page_data import page_data
from sbpflow.boxing.graph.report.step_parts import LOOKS, bar, step_parts
from sbpflow.sbp.joint.op_cost import rate

WIDTH, ROWS, BLOCKS = 256, 512, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(8, ROWS // 8, 4, WIDTH // 4).transpose(1, 2) if len(x) == ROWS else x.view(1, -1, 4, WIDTH // 4)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        made: torch.Tensor = self.down(nn.functional.gelu(self.up(seen.reshape(x.shape))))
        return made


PLANS = {
    "whole": "grid cuda (data=8)\n**: data=B",
    "in parts": "grid cuda (data=8)\n**: data=S(0)",
    "micro-batches": "grid cuda (data=8)\n4 micro-batches",
    "stages": "grid cuda (pipe=4, data=2)\npipe * over pipe by 1f1b, 4 micro-batches",
    "split backward": "grid cuda (pipe=4, data=2)\npipe * over pipe by zb_h1, 4 micro-batches",
    "offload": "grid cuda (data=8)\n**: data=B\noffload ** to cpu",
}


@pytest.mark.parametrize("name", PLANS)
def test_parts_add_up_to_the_step(name: str) -> None:
    with torch.device("meta"):
        found = flow.predict(
            nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.empty(ROWS, WIDTH), PLANS[name], cluster="h100x8"
        )
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert all(seconds > 0 for seconds in found.parts.values())
    assert {"products", "attention", "other ops", "optimizer"} <= set(found.parts)
    assert ("other stages" in found.parts) == ("pipe" in PLANS[name])
    assert found.dict()["parts"] == found.parts
    (drawn,) = (line for line in found.lines() if line.startswith("  parts"))
    assert len(drawn.split()[1]) == 72


def test_products_take_what_their_flops_and_bytes_do() -> None:
    """On a device that nobody fitted a large product takes its FLOPs at the peak."""
    with torch.device("meta"):
        model, x = nn.Linear(4096, 4096, bias=False), torch.empty(8192, 4096)
    parts = flow.predict(model, x, "grid cuda (data=1)", cluster=flow.cluster("h200x8")).parts
    flops = 2 * 2 * 8192 * 4096**2  # forward, and the weight's gradient: the input wants none
    assert parts["products"] == pytest.approx(flops / rate(flow.cluster("h200x8").device, torch.float32))


def test_a_graph_without_seconds_has_no_parts() -> None:
    step = flow.compile(nn.Tanh(), placement=flow.placement("cpu", [0]))
    step(torch.ones(2))
    report = step.explain()
    assert sum(step_parts(report).values()) == pytest.approx(report.predicted)
    assert step_parts(report.__class__(report.graph)) == {}


def test_the_bar_is_as_long_as_it_is_told_and_tells_small_parts() -> None:
    parts = dict.fromkeys(LOOKS, 1.0) | {"products": 1000.0}
    line, legend = bar(parts, 50)
    assert len(line) == 50
    assert legend.startswith("# products 99 %, @ attention 0.1 %")


def test_each_part_looks_unlike_the_others_on_white_and_near_black() -> None:
    assert len({look.sign for look in LOOKS.values()}) == len({look.fill for look in LOOKS.values()}) == len(LOOKS)
    for look in LOOKS.values():
        light = sum(int(look.fill[at : at + 2], 16) for at in (1, 3, 5)) / 3
        assert 0x60 < light < 0xC0, look


@pytest.mark.parametrize("name", ["in parts", "stages"])
def test_the_page_has_the_parts_with_their_colours(name: str) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.empty(ROWS, WIDTH)
    found = flow.Plan.read(PLANS[name]).check(model, x, cluster="h100x8")
    parts = step_parts(found.report)
    assert page_data(found.report)["parts"] == [[part, seconds, LOOKS[part].fill] for part, seconds in parts.items()]


@pytest.mark.parametrize("name", PLANS)
def test_small_kernels_wait_for_the_host_and_large_ones_do_not(name: str) -> None:
    """A host that takes long is what the step takes; one that is quicker than the card takes none of it."""
    preset = flow.cluster("h100x8")
    fitted = preset.device.fitted
    assert fitted is not None
    with torch.device("meta"):
        model, x = nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.empty(ROWS, WIDTH)
        plain, quick, slow, slower = (
            flow.predict(
                model,
                x,
                PLANS[name],
                cluster=replace(preset, device=replace(preset.device, fitted=replace(fitted, host=host))),
            )
            for host in (0.0, 1e-9, 1e-2, 2e-2)
        )
    assert quick.seconds == plain.seconds
    assert "the host" not in quick.parts or name == "offload"
    assert slow.parts["the host"] > 0.5 * (slow.seconds - slow.parts.get("other stages", 0.0))
    assert slower.seconds == pytest.approx(2 * slow.seconds, rel=0.02)
    assert sum(slow.parts.values()) == pytest.approx(slow.seconds)
    assert "waiting for the host's launches" in str(slow.checked.report)
