"""Shards from files: those of the whole tensor, in any layout, and no element is read twice or for nothing."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.nn.files.headers import file_tensors
from sbpflow.nn.files.reading import Reading, check_dtype
from sbpflow.nn.files.values import Concatenated, FileValue
from sbpflow.placement.errors import DtypeError, FileError
from sbpflow.sbp import Layout
from sbpflow.sbp.state import State
from tests.nn.files.counting import bytes_read

GRID = flow.placement("cpu:[0-5] as (a=2, b=3)")
SIGNATURES = [*itertools.product([B, S(0), S(1), P], [B, S(0), S(1)]), (S(1), P), (P("max"), B), (P, P)]


def saved(folder: Path, **tensors: torch.Tensor) -> dict[str, FileValue]:
    save_file(tensors, folder / "m.safetensors")
    return {**file_tensors(folder / "m.safetensors")}


def read(value: FileValue, of: Layout) -> flow.GlobalTensor:
    with Reading(None) as files:
        return files.shards("x", (value,), of)


@pytest.mark.parametrize("shape", [(7, 5), (1, 6), (6, 0), (2, 3)], ids=["uneven", "few", "empty", "small"])
@pytest.mark.parametrize("sbp", SIGNATURES, ids=str)
def test_a_value_lies_as_its_layout_says(tmp_path: Path, sbp: tuple[flow.sbp.Sbp, ...], shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape)
    made = read(saved(tmp_path, x=whole)["x"], flow.layout(GRID, sbp, shape))
    plain = flow.tensor(whole, placement=GRID, sbp=sbp)
    assert made.sbp == plain.sbp
    assert all(map(torch.equal, made.to_local(), plain.to_local()))
    assert torch.equal(made.full_tensor(), whole)


STATES = {
    "nested in the other order": State(((1, 0), ())),
    "a hole": State(((-3, 0), ())),
    "a hole inside": State(((0, -2, 1), ())),
    "strided along both": State(((-2, 0), (-2, 1))),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_with_holes_is_read_run_by_run(tmp_path: Path, name: str) -> None:
    whole = torch.arange(13 * 8).reshape(13, 8)
    of = Layout(GRID, STATES[name], (13, 8), torch.int64)
    with bytes_read() as seen:
        made = read(saved(tmp_path, x=whole)["x"], of)
    different = {}
    for rank, shard in zip(GRID.flat, made._shards, strict=True):
        rows, columns = ([i for lo, hi in dim for i in range(lo, hi)] for dim in of.spans(rank))
        assert torch.equal(shard, whole[rows][:, columns])
        different[of.spans(rank)] = shard.nbytes
    assert seen.total == sum(different.values())


def test_ranks_of_one_process_that_hold_the_same_read_it_once_and_keep_it_apart(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    value = saved(tmp_path, x=whole)["x"]
    with bytes_read() as seen:
        made = read(value, flow.layout(GRID, (B, S(0)), (6, 4)))
    assert seen.total == whole.nbytes
    assert len({shard.data_ptr() for shard in made._shards}) == GRID.size


def test_a_scalar_and_a_value_of_two_tensors(tmp_path: Path) -> None:
    held = saved(tmp_path, s=torch.tensor(3.5), one=torch.ones(2, 4), two=torch.zeros(3, 4))
    assert read(held["s"], flow.layout(GRID, B, ())).item() == 3.5
    both = Concatenated((held["one"], held["two"]), 0)
    made = read(both, flow.layout(GRID, (S(1), S(0)), (5, 4)))
    assert torch.equal(made.full_tensor(), torch.cat([torch.ones(2, 4), torch.zeros(3, 4)]))


def test_what_is_tied_must_be_the_same_bit_by_bit(tmp_path: Path) -> None:
    held = saved(tmp_path, one=torch.tensor([1.0, torch.nan]), same=torch.tensor([1.0, torch.nan]), two=torch.ones(2))
    of = flow.layout(GRID, (S(0), B), (2,))
    with Reading(None) as files:
        files.shards("w", (held["one"], held["same"]), of)
    with pytest.raises(FileError, match=r"^flow.load: one and two are tied in the model"), Reading(None) as files:
        files.shards("w", (held["one"], held["two"]), of)


def test_a_file_that_was_changed_or_removed_since_is_an_error(tmp_path: Path) -> None:
    value = saved(tmp_path, x=torch.ones(2, 2))["x"]
    for now, said in (
        ({"x": torch.ones(3, 2)}, r"x is torch.float32 \(3, 2\), and was torch.float32 \(2, 2\)"),
        ({"x": torch.ones(2, 2).half()}, r"x is torch.float16 \(2, 2\), and was torch.float32 \(2, 2\)"),
        ({"y": torch.ones(2, 2)}, "it has no x"),
    ):
        saved(tmp_path, **now)
        with pytest.raises(FileError, match=f"was changed since: {said}"):
            read(value, flow.layout(GRID, B, (2, 2)))
    (tmp_path / "m.safetensors").unlink()
    with pytest.raises(FileError, match=r"m.safetensors cannot be read: No such file"):
        read(value, flow.layout(GRID, B, (2, 2)))


@pytest.mark.parametrize(
    ("given", "to"),
    [(torch.int8, torch.float32), (torch.float32, torch.int64), (torch.int32, torch.int64), (torch.bool, torch.uint8)],
)
def test_only_floats_are_converted(tmp_path: Path, given: torch.dtype, to: torch.dtype) -> None:
    value = saved(tmp_path, x=torch.ones(2).to(given))["x"]
    check_dtype("x", (value,), given)
    with pytest.raises(DtypeError, match=f"^flow.load: x is {to}, and x in .* is {given}\n"):
        check_dtype("x", (value,), to)
