"""Swin on rows in pieces: shifts, and windows that end elsewhere, take rows of a neighbour; nothing is gathered."""

# mypy: disallow-untyped-calls=False

from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow import S
from tests.libraries import library
from tests.ranks import Ranks

from .models import F64, classes, planned, routes, trained

WIDE = 4  # a window's side
ROUTES = {"halo", "halo_sum", "all_reduce"}
PLAN = """grid (space=2)
input x <- space=S(2)
features.0.0 -> space=S(2)
features.*.*.{norm1,attn,mlp,norm2} -> space=S(1)
features.2 -> space=S(1)"""


def swin(version: int, depths: tuple[int, ...] = (2, 2)) -> nn.Module:
    """In float64; what begins at zero or one would hide what lies behind it."""
    part = library("torchvision").models.swin_transformer
    second = {"block": part.SwinTransformerBlockV2, "downsample_layer": part.PatchMergingV2}
    heads, window = [2**k for k in range(len(depths))], [WIDE, WIDE]
    torch.manual_seed(0)
    model: nn.Module = part.SwinTransformer(
        [4, 4], 8, list(depths), heads, window, stochastic_depth_prob=0.0, num_classes=3,
        **(second if version == 2 else {}),
    )  # fmt: skip
    for each in model.parameters():
        if each.ndim == 1:
            nn.init.normal_(each, std=0.3)
    return model.double()


def pictures(rows: int, columns: int = 32, steps: int = 2) -> list[Any]:
    return [(torch.randn(1, 3, rows, columns, dtype=F64), torch.randint(3, (1,))) for _ in range(steps)]


def line(ranks: int) -> flow.Placement:
    return flow.placement(f"cpu:[0-{ranks - 1}] as (space={ranks})")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [128, 112, 104], ids=["even", "uneven_windows", "padded"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("version", [1, 2])
def test_it_trains_as_on_one_device_and_gathers_nothing(version: int, ranks: int, rows: int) -> None:
    """Of 28 rows in four a rank has one window's rows and three quarters of the next; those of 26 are padded."""
    moves = trained(swin(version), classes, line(ranks), S(2), pictures(rows), eager=True)
    assert routes(moves) == ROUTES


@pytest.mark.parametrize("version", [1, 2])
def test_a_shift_sends_half_a_window_of_rows(version: int) -> None:
    """Once there and once back, and their gradients; windows themselves are whole."""
    moves = trained(swin(version, (2,)), classes, line(2), S(2), pictures(64, steps=1), eager=True)
    row = 8 * 8 * 8  # columns, channels, bytes of a number
    sent = [(m.route, m.bytes) for m in moves if "halo" in m.route and m.bytes]
    assert sent == [("halo", WIDE // 2 * row)] * 2 + [("halo_sum", WIDE // 2 * row)] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("version", [1, 2])
def test_a_plan_says_so_of_a_graph(version: int) -> None:
    rows = planned(swin(version, (2,)), classes, PLAN.removesuffix("\nfeatures.2 -> space=S(1)"), pictures(64, 128))
    assert routes(rows) == ROUTES
    halos = [row.bytes * row.count for row in rows if "halo" in row.route]
    assert sum(halos) == 4 * WIDE // 2 * 32 * 8 * 8


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [64, 112])
@pytest.mark.parametrize("version", [1, 2])
def test_a_graph_of_both_stages_is_that_of_one_device(version: int, rows: int) -> None:
    moves = planned(swin(version), classes, PLAN, pictures(rows, 256))
    assert any("halo" in row.route for row in moves)


def on_ranks() -> None:
    trained(swin(1), classes, line(4), S(2), pictures(112), eager=True)
    trained(swin(2, (2,)), classes, line(4), S(2), pictures(64), eager=True)


@pytest.mark.sweep
def test_real_ranks_train_it(ranks4: Ranks) -> None:
    library("torchvision")
    ranks4(on_ranks)
