"""torch.distributed.checkpoint takes global tensors: from any layout into any other, and from and into plain ones."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

import sbpflow as flow
from sbpflow import B, GlobalTensor, P, S, SbpError
from sbpflow.nn.files.held import written_here
from sbpflow.nn.files.pieces import sizes_of
from tests.ranks import Ranks

dcp: Any = import_module("torch.distributed.checkpoint")  # its functions are exported by no name that types know
states: Any = import_module("torch.distributed.checkpoint.state_dict")

GRID = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
THREE = flow.placement("cpu:[0-2]")
ONE = flow.placement("cpu:[3]")
WAYS = {
    "split twice": (GRID, (S(0), S(0))),
    "in tiles": (GRID, (S(1), S(0))),
    "whole": (GRID, (B, B)),
    "mixed": (GRID, (B, S(1))),
    "uneven": (THREE, (S(0),)),
    "one": (ONE, (B,)),
}
SHAPES = {"even": (8, 8), "odd": (5, 7), "few": (1, 3), "row": (6,), "none": (0, 4), "number": ()}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


def lying(x: Tensor, way: str) -> Any:
    where, sbp = WAYS[way]
    each = [entry if isinstance(entry, flow.sbp.Split) and entry.dim < x.ndim else B for entry in sbp]
    return flow.tensor(x, placement=where, sbp=each)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, GlobalTensor) else x


def values(offset: float) -> dict[str, Tensor]:
    return {
        name: torch.arange(float(torch.Size(shape).numel())).reshape(shape) + offset for name, shape in SHAPES.items()
    }


@pytest.mark.sampled(9)
@pytest.mark.parametrize("into", [*WAYS, "plain"])
@pytest.mark.parametrize("of", [*WAYS, "plain"])
def test_values_come_from_any_layout_into_any_other(of: str, into: str, tmp_path: Path) -> None:
    def made(offset: float, way: str) -> dict[str, Tensor]:
        return {name: x if way == "plain" else lying(x, way) for name, x in values(offset).items()}

    dcp.save(made(1.0, of), checkpoint_id=tmp_path)
    found = made(-9.0, into)
    dcp.load(found, checkpoint_id=tmp_path)
    for name, want in values(1.0).items():
        got: Any = found[name]
        shards = got._shards if isinstance(got, GlobalTensor) else (got,)
        assert torch.equal(whole(got), want), name
        if isinstance(got, GlobalTensor):  # and on every rank that has it
            again = flow.tensor(want, placement=got.placement, sbp=got.sbp)
            assert all(torch.equal(a, b) for a, b in zip(shards, again._shards, strict=True)), name


def test_each_element_is_written_once_by_somebody(tmp_path: Path) -> None:
    state = {way: lying(torch.randn(12, 10), way) for way in WAYS}
    told: Any = dcp.save(state, checkpoint_id=tmp_path)
    for chunks in (told.state_dict_metadata[way].chunks for way in WAYS):
        assert sum(chunk.sizes.numel() for chunk in chunks) == 120
    assert {sizes_of(region) for region in written_here(state["in tiles"]._layout)} == {(6, 5)}


def trained(where: Any, cuts: dict[str, Any], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    flow.nn.to_global(model, where, cuts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq", "step")]
    found = [*model.state_dict().values(), *states]
    return [whole(x) for x in found]


def test_a_model_and_its_optimizer_go_to_another_grid_by_their_state_dicts(tmp_path: Path) -> None:
    one = trained(GRID, {"0.weight": (B, S(0)), "2.weight": (S(0), S(1))}, 1)
    model_state, optimizer_state = states.get_state_dict(*one)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
    other = trained(THREE, {"0.weight": S(1)}, 2)
    assert not all(torch.equal(a, b) for a, b in zip(everything(*one), everything(*other), strict=True))
    model_state, optimizer_state = states.get_state_dict(*other)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=tmp_path)
    states.set_state_dict(*other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert all(torch.equal(a, b) for a, b in zip(everything(*one), everything(*other), strict=True))
    for model, optimizer in (one, other):
        model(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(everything(*one), everything(*other), strict=True))


def test_what_is_loaded_counts_also_where_copies_of_the_old_are_kept(tmp_path: Path) -> None:
    x = flow.tensor(torch.ones(4, 4), placement=THREE, sbp=S(0))
    y = flow.tensor(torch.eye(4), placement=THREE, sbp=B)
    dcp.save({"x": flow.tensor(torch.full((4, 4), 2.0), placement=ONE, sbp=B)}, checkpoint_id=tmp_path)
    before = y @ x
    dcp.load({"x": x}, checkpoint_id=tmp_path)
    assert torch.equal(whole(y @ x), 2 * whole(before))


def test_a_partial_sum_is_an_error_that_says_how_to_add_it_up(tmp_path: Path) -> None:
    x = flow.tensor(torch.ones(4, 4), placement=THREE, sbp=P)
    with pytest.raises(CheckpointException, match=r"to_global\(sbp=flow.B\)"):
        dcp.save({"x": x}, checkpoint_id=tmp_path)
    with pytest.raises(SbpError, match="did not ask where pieces are"):
        x.__get_tensor_shard__(dcp.metadata.MetadataIndex("x", torch.Size((0, 0))))  # type: ignore[attr-defined]


def state_of(filled: bool) -> dict[str, Any]:
    large, small = torch.arange(280000.0).reshape(280, 1000), torch.arange(3.0)
    return {
        "large": flow.tensor(large if filled else 0 * large, placement=GRID, sbp=(B, S(1))),
        "small": flow.tensor(small if filled else 0 * small, placement=flow.placement("cpu:[1-2]"), sbp=S(0)),
    }


def saved(folder: str) -> list[tuple[int, ...]]:
    state = state_of(True)
    dcp.save(state, checkpoint_id=folder)
    return [sizes_of(region) for x in state.values() for region in written_here(x._layout)]


def loaded(folder: str) -> list[Tensor]:
    state = state_of(False)
    dcp.load(state, checkpoint_id=folder)
    return [whole(x) for x in state.values()]


def test_real_ranks_write_their_shares_and_any_number_reads_them(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4(saved, str(tmp_path)) == [[(140, 500)], [(140, 500), (2,)], [(140, 500), (1,)], [(140, 500)]]
    want = [whole(x) for x in state_of(True).values()]
    for found in (*ranks4(loaded, str(tmp_path)), loaded(str(tmp_path))):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_an_asynchronous_save_has_the_values_of_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for a process group; one process stands for all ranks here."""
    dist: Any = import_module("torch.distributed")

    made = {name: lying(x, "split twice") for name, x in values(1.0).items()}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        saving = dcp.async_save(made, checkpoint_id=tmp_path)
        with torch.no_grad():
            for x in made.values():
                x.zero_()
        saving.result()
        dcp.load(made, checkpoint_id=tmp_path)
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(whole(made[name]), want) for name, want in values(1.0).items())


def test_tensors_of_one_memory_are_known_and_others_are_not() -> None:
    x, y = (flow.zeros(4, 4, placement=THREE, sbp=S(0)) for _ in range(2))
    assert x.untyped_storage() is x.untyped_storage()
    assert x.untyped_storage().data_ptr() == x.detach().untyped_storage().data_ptr() == x.data_ptr()
    assert x.data_ptr() != y.data_ptr()
    assert x.untyped_storage().nbytes() == x.nbytes
    with pytest.raises(SbpError, match="no storage with fill_"):
        assert getattr(x.untyped_storage(), "fill_")  # noqa: B009 no storage of torch has it
    with pytest.raises(SbpError, match="takes all of another's memory"):
        x.set_(y.untyped_storage(), 0, (2, 2), (2, 1))
