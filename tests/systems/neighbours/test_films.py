"""Films cut along time or height, and places that are shifted and seen as windows: neighbours send what is lacked."""

# mypy: disallow-untyped-calls=False

from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow import S
from tests.nn.families import FAMILIES, made

from .models import F64, LINKS, Film, Shifted, planned, routes, squares, trained


def line(ranks: int) -> flow.Placement:
    return flow.placement(f"cpu:[0-{ranks - 1}] as (space={ranks})")


def films(frames: int, height: int, steps: int = 2) -> list[Any]:
    return [tuple(torch.randn(1, 2, frames, height, 2, dtype=F64) for _ in range(2)) for _ in range(steps)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("dim", "frames", "height"), [(2, 16, 4), (3, 4, 16), (2, 20, 4)], ids=str)
def test_a_net_of_films_trains_as_on_one_device(dim: int, frames: int, height: int, ranks: int, eager: bool) -> None:
    """Of 20 frames a rank has five, and of the ten that a pool leaves three or two."""
    with flow.use_cluster("flat" if eager else LINKS):
        moves = trained(Film().double(), squares, line(ranks), S(dim), films(frames, height), eager=eager)
    if eager:  # what is gathered beside halos are a number or two of each channel, for norms
        assert {"halo", "halo_sum"} <= routes(moves)
        assert all(m.bytes <= 4 * 2 * 8 for m in moves if "gather" in m.route or "all_to_all" in m.route)


def test_a_convolution_of_time_sends_a_frame_a_side() -> None:
    model = nn.Conv3d(2, 2, 3, padding=1).double()
    moves = trained(model, squares, line(4), S(2), films(16, 4, 1), eager=True)
    assert [m.bytes for m in moves if m.route == "halo"] == [2 * 2 * 4 * 2 * 8]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize("rows", [32, 28, 12])
def test_shifted_windows_of_rows_in_pieces(rows: int, eager: bool) -> None:
    """Of seven windows over four ranks, and of three."""
    batches = [(torch.randn(rows, 5, 3, dtype=F64), torch.randn(rows // 2, 5, 2, dtype=F64)) for _ in range(2)]
    with flow.use_cluster("flat"):
        moves = trained(Shifted().double(), squares, line(4), S(0), batches, eager=eager)
    if eager:
        assert routes(moves) == {"halo", "halo_sum", "all_reduce"}


R3D = """grid (space=2)
input pixels <- space=S(3)
stem.0 -> space=S(3)
layer*.**.conv*.0 -> space=S(3)
layer*.* -> space=S(3)"""


@pytest.mark.sweep
def test_a_plan_of_torchvisions_films() -> None:
    family = FAMILIES["torchvision r3d"]
    given = [family.batch(2, 0) for _ in range(2)]
    batches = [{**each, "pixels": torch.randn(2, 3, 8, 32, 32, dtype=F64)} for each in given]
    assert "halo" in routes(planned(made("torchvision r3d"), family.loss, R3D, batches))
