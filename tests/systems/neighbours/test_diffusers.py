"""Nets of diffusers on images cut along their height: halos for convolutions, sums for norms, equal to one device."""

# mypy: disallow-untyped-calls=False

import pytest
import torch
from torch import Tensor

from tests.nn.families import FAMILIES, made

from .models import planned, routes

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, SIDE = 1, 32
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
    family = f"diffusers {name}"
    rows = planned(made(family), FAMILIES[family].loss, PLANS[name], [batch(name) for _ in range(2)])
    assert {"halo", "halo_sum"} <= routes(rows)
    # What is gathered are keys and values of attention over all places, and numbers of groups, never an image.
    image = ROWS * 8 * SIDE * SIDE * 8
    assert all(row.bytes < image // 2 for row in rows if "gather" in row.route)


@pytest.mark.sweep
def test_a_net_that_attends_to_a_prompt_is_that_of_one_device() -> None:
    """Halos where it convolves; where it attends to all places the planner may gather what they are made of."""
    family = "diffusers UNet2DConditionModel"
    plan = PLANS["UNet2DModel"] + "\n**.attentions.* -> space=S(2)"
    rows = planned(made(family), FAMILIES[family].loss, plan, [batch("UNet2DConditionModel") for _ in range(2)])
    assert {"halo", "halo_sum"} <= routes(rows)
