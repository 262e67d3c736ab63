"""Master weights and optimizer states on the host: what a step gives, where the bytes are, and what is left behind."""

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import sbpflow as flow
from sbpflow.nn.graph.host.memory import ROOT, Folder
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import LINE, eager, same, same_model
from tests.nn.graph.optimizer.test_adopt import MAKES
from tests.nn.graph.optimizer.test_rest import DATA, batch, cut, loss_fn, net, said

TO = pytest.mark.parametrize("to", ["cpu", "disk"])


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for files, which is empty again behind each test."""
    monkeypatch.setenv(ROOT, str(tmp_path))
    yield tmp_path
    if list(tmp_path.iterdir()):
        gc.collect()
    assert not list(tmp_path.iterdir())


def step_of(model: Any, mine: optim.Optimizer, to: Any, where: flow.Placement = DATA, **options: Any) -> Any:
    flow.nn.offload(model, "*", to=to)
    return flow.compile(model, loss_fn, mine, placement=where, **options)


def adamw(model: nn.Module, **options: Any) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.1, foreach=False, **options)


def shards(model: nn.Module, mine: optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    """Local tensors of the parameters, of the masters, and of states."""
    groups = [x for group in mine.param_groups for x in group["params"]]
    states = [part for state in mine.state.values() for part in state.values() if part.ndim]
    return {"parameters": _locals(model.parameters()), "masters": _locals(groups), "states": _locals(states)}


def _locals(values: Any) -> list[torch.Tensor]:
    return [x for value in values for x in value._shards]


@pytest.mark.sampled(3)
@TO
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rest", ["data parallel", "ZeRO-1", "ZeRO-3"])
def test_steps_are_bitwise_those_on_the_device_and_as_on_one(rest: str, ranks: int, to: str) -> None:
    where = flow.placement(f"cpu:[0-{ranks - 1}] as (data={ranks})")
    model, beside, one = said(net(), rest), said(net(), rest), net()
    mine, others, ones = adamw(model), adamw(beside), adamw(one)
    step, other = step_of(model, mine, to, where), flow.compile(beside, loss_fn, others, placement=where)
    for at in range(5):
        x, y = batch(at)
        loss = step(*cut(where, x, y))
        assert torch.equal(loss.full_tensor(), other(*cut(where, x, y)).full_tensor())
        same(loss, eager(one, loss_fn, ones, x, y))
    same_model(model, one)
    same_model(model, beside, 0)


@pytest.mark.sampled(3)
@TO
@pytest.mark.parametrize("name", MAKES)
def test_every_optimizer_steps_there(name: str, to: str) -> None:
    make, options = MAKES[name]
    model, one = said(net(), "ZeRO-1"), net()
    mine, ones = (make(each.parameters(), **options) for each in (model, one))
    step = step_of(model, mine, to)
    for at in range(3):
        same(step(*cut(DATA, *batch(at))), eager(one, loss_fn, ones, *batch(at)), 1e-8)
    same_model(model, one, 1e-8)


@TO
def test_what_is_clipped_and_hooked_steps_there(to: str) -> None:
    for clip, hooked in ((0.1, False), (None, True)):
        model: Any = said(net(), "ZeRO-1")
        one: Any = net()
        mine, ones = adamw(model), adamw(one)
        step = step_of(model, mine, to, clip_grad_norm=clip)
        for each in (model, one) if hooked else ():
            each[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        for at in range(3):
            same(step(*cut(DATA, *batch(at))), eager(one, loss_fn, ones, *batch(at), clip=clip))
        same_model(model, one)


@TO
def test_only_weights_and_gradients_rest_on_the_device(to: str, root: Path) -> None:
    model = said(net(8, 16, 4), "ZeRO-1")
    mine = adamw(model)
    step = step_of(model, mine, to)
    x, y = torch.randn(8, 8).double(), torch.randn(8, 4).double()
    step(*cut(DATA, x, y))
    held = step.explain().memory.ranks[0]
    parameters = sum(p.numel() for p in model.parameters()) * 8
    assert (held.parameters, held.gradients, held.states) == (parameters, parameters // 4, 0)
    mine_there = parameters // 4
    host, disk = (4 * mine_there, 0) if to == "cpu" else (mine_there, 3 * mine_there)
    assert (held.host, held.disk) == (host, disk)
    found = shards(model, mine)
    assert not {x.data_ptr() for x in found["parameters"]} & {x.data_ptr() for x in found["masters"]}
    assert sum(x.nbytes for x in (*found["masters"], *found["states"])) == 3 * parameters  # of four ranks
    assert "host" in str(step.explain())
    files = list(root.glob("*/*"))
    assert sum(file.stat().st_size for file in files) == 4 * disk


def test_files_have_the_names_and_bytes_of_what_is_in_them(root: Path) -> None:
    model = said(net(8, 16, 4), "ZeRO-1")
    mine = adamw(model)
    step = step_of(model, mine, "disk")
    step(*cut(DATA, torch.randn(8, 8).double(), torch.randn(8, 4).double()))
    names = {file.name for file in root.glob("*/*")}
    states = ("master", "exp_avg", "exp_avg_sq")
    params = [name for name, _ in model.named_parameters()]
    assert names == {f"{name}.rank{rank}.{state}" for name in params for rank in range(4) for state in states}
    state = next(state for x, state in mine.state.items() if tuple(x.shape) == (16, 8))
    for rank, shard in enumerate(state["exp_avg_sq"]._shards):
        (file,) = root.glob(f"*/0.weight.rank{rank}.exp_avg_sq")
        assert file.read_bytes() == shard.numpy().tobytes()


@TO
def test_states_are_saved_and_loaded(to: str) -> None:
    model, one = said(net(), "ZeRO-1"), net()
    mine, ones = adamw(model), adamw(one)
    step = step_of(model, mine, to)
    for at in range(2):
        step(*cut(DATA, *batch(at)))
        eager(one, loss_fn, ones, *batch(at))
    saved = copy.deepcopy((model.state_dict(), mine.state_dict()))
    plain = copy.deepcopy((one.state_dict(), ones.state_dict()))
    assert type(saved[1]["state"][0]) is dict
    for state in (saved, plain):  # our own, and that of one device
        step(*cut(DATA, *batch(7)))
        model.load_state_dict(state[0])
        mine.load_state_dict(copy.deepcopy(state[1]))
        one.load_state_dict(plain[0])
        ones.load_state_dict(copy.deepcopy(plain[1]))
        for at in range(2):
            same(step(*cut(DATA, *batch(at))), eager(one, loss_fn, ones, *batch(at)))
        same_model(model, one)


@TO
def test_other_shapes_and_copies_go_on_with_the_same_states(to: str) -> None:
    model: Any = said(net(), "ZeRO-1")
    one: Any = net()
    mine, ones = adamw(model), adamw(one)
    step: Any = step_of(model, mine, to)
    for at in range(4):
        x, y = batch(at, 8 if at % 2 else 16)
        if at == 2:
            for each in (model, one):
                with torch.no_grad():
                    each[0].bias.zero_()
        same(step(*cut(DATA, x, y)), eager(one, loss_fn, ones, x, y))
    other = copy.deepcopy(step)
    step(*cut(DATA, *batch(9)))
    for at in range(2):
        same(other(*cut(DATA, *batch(at))), eager(one, loss_fn, ones, *batch(at)))
    same_model(other.model, one)


def test_what_is_said_later_counts_and_none_takes_it_back() -> None:
    model = net()
    mine = adamw(model)
    step = step_of(model, mine, "cpu").plan_for(*batch(0))
    assert all(s.offload == "cpu" for s in step.physical.sources if s.kind == "parameter")
    flow.nn.offload(model, "*", to=None)
    step(*batch(0))
    assert not any(s.offload for s in step.physical.sources)


def test_a_limit_of_memory_is_met_by_what_is_offloaded() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).double()
    flow.nn.shard(model, {"*": flow.B})
    parameters = sum(p.nbytes for p in model.parameters())
    args = torch.randn(4, 64).double(), torch.randn(4, 64).double()
    limit = 3.5 * parameters  # with two states of each it would be 4 and more
    one = flow.placement("cpu", range(1))
    with pytest.raises(SbpError, match="fits into"):
        flow.compile(model, loss_fn, adamw(model), placement=one, memory=limit).plan_for(*args)
    step = step_of(model, adamw(model), "cpu", one, memory=limit).plan_for(*args)
    assert step.explain().memory.ranks[0].total <= limit


def test_a_folder_that_cannot_be_written_or_is_full_is_refused_before_anything_runs(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    step = step_of(model, adamw(model), "disk", LINE)
    file = root / "file"
    file.touch()
    monkeypatch.setenv(ROOT, str(file / "inside"))
    with pytest.raises(SbpError, match=rf"^offload to disk: no folder can be made in .*\n  found .*\n.*{ROOT}="):
        step(*batch(0))
    file.unlink()
    monkeypatch.setenv(ROOT, str(root))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(SbpError, match=r"^offload to disk: 15\.9 KiB are needed, and 100 B are free in"):
        step(*batch(0))
    assert not isinstance(model[0].weight, flow.GlobalTensor)


def test_a_file_that_the_disk_has_no_room_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    folder = Folder("x")
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(SbpError, match=r"^offload to disk: .*a\.b of 32 B cannot be written\n  found No space left"):
        folder.empty("a.b", (4,), torch.float64)
    assert not list(folder.path.iterdir())
