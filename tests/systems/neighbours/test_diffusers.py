"""Nets of diffusers on images cut along their height: halos for convolutions, sums for norms, equal to one device."""

# mypy: disallow-untyped-calls=False

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow.boxing.graph.move_table import moves_of
from tests.nn.families import FAMILIES, made, sgd

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, SIDE = 1, 32
FLAT = flow.cluster("flat")
# To send a byte takes as long as to read a thousand, and a message as long as thirty: so it is with large images.
LINKS = replace(
    FLAT,
    levels=tuple(replace(level, latency=30.0) for level in FLAT.levels),
    device=replace(FLAT.device, memory_bandwidth=1e3, flops=dict.fromkeys(FLAT.device.flops, 1e4)),
)
PLANS = {
    "UNet2DModel": """grid (space=2)
input sample <- space=S(2)
input noise <- space=S(2)
{conv_in,conv_out} -> space=S(2)
**.resnets.* -> space=S(2)
**.resnets.*.conv* -> space=S(2)
**.*samplers.* -> space=S(2)""",
    "AutoencoderKL": """grid (space=2)
input sample <- space=S(2)
**.{conv_in,conv_out} -> space=S(2)
**.resnets.* -> space=S(2)
**.resnets.*.conv* -> space=S(2)
**.*samplers.* -> space=S(2)""",
}


def batch(name: str) -> dict[str, Tensor]:
    """Images twice as wide and high as the usual ones."""
    given = FAMILIES[f"diffusers {name}"].batch(ROWS, 0)
    images = {key for key, x in given.items() if x.ndim == 4}
    return {
        key: torch.randn(*x.shape[:2], SIDE, SIDE, dtype=x.dtype) if key in images else x for key, x in given.items()
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PLANS)
def test_a_net_on_images_in_pieces_is_that_of_one_device(name: str) -> None:
    loss_fn = FAMILIES[f"diffusers {name}"].loss
    model = made(f"diffusers {name}")
    one, batches = copy.deepcopy(model), [batch(name) for _ in range(2)]
    plain = sgd(one)
    wanted = []
    for each in batches:
        plain.zero_grad()
        loss = loss_fn(one, **each)
        loss.backward()
        plain.step()
        wanted.append(loss.item())
    with flow.use_cluster(LINKS):
        step = flow.compile(model, loss_fn, sgd(model), plan=PLANS[name])
        losses = [step(**batches[0]).item()]
        with flow.record() as moves:
            losses.append(step(**batches[1]).item())
    torch.testing.assert_close(losses, wanted)
    for name, value in one.named_parameters():
        mine: Any = dict(model.named_parameters())[name]
        torch.testing.assert_close(mine.full_tensor(), value)
    sent = Counter[str]()
    for move in moves:
        sent[move.route.removesuffix("_once")] += move.bytes
    rows = moves_of(step.physical, step.planned.program.again)
    assert sum(sent.values()) == sum(row.bytes * row.count for row in rows)
    assert sent["halo"]
    assert sent["halo_sum"]
    # What is gathered are keys and values of attention over all places, and numbers of groups, never an image.
    image = ROWS * 8 * SIDE * SIDE * 8
    assert all(row.bytes < image // 2 for row in rows if "gather" in row.route)
