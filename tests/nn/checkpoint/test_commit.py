"""Checkpoints of several processes: any number goes on with any other, and an error of one is one of all."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow.nn.checkpoint import commit
from sbpflow.nn.files.raw import traffic
from sbpflow.placement.errors import SbpflowError
from tests.nn.checkpoint import plans
from tests.nn.graph import pipes
from tests.ranks import Fresh, Ranks

PAIRS = [
    ("three", "tensor"), ("tensor", "three"), ("zero3", "stages"), ("stages", "zero1"), ("data", "three"),
    ("stages x tensor", "zero3"), ("zero1", "stages x tensor"), ("one", "zero3"), ("three", "stages x tensor"),
    ("zero3", "one"), ("stages", "three"), ("tensor", "stages"),
]  # fmt: skip


def train_and_save(
    folder: Path, kind: str, name: str, asynchronous: bool
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """On each rank: its weights and states whole, the next loss, and bytes written."""
    flow.init(timeout=60)
    model = plans.made(kind)
    optimizer = pipes.adamw(model)
    step = plans.step_of(model, optimizer, name, kind)
    for at in range(2):
        step(*plans.batch(at))
    with traffic() as bytes_:
        saving = flow.save(folder, model, optimizer=optimizer, plan=step, step=2, asynchronous=asynchronous)
        saving.wait()
    held, kept = plans.weights(model), plans.states(model, optimizer)
    return held, kept, (plans.whole(step(*plans.batch(2))), bytes_.written)


def load_and_go_on(folder: Path, kind: str, name: str) -> tuple[Any, Any, Any]:
    flow.init(timeout=60)
    model = plans.made(kind, meta=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    flow.load(folder, model, optimizer=optimizer)
    step = plans.step_of(model, optimizer, name, kind)
    with traffic() as bytes_:
        step.plan_for(*plans.batch(2)).planned.prepare()
    mine = {x.data_ptr(): x.nbytes for value in model.state_dict().values() for x in value._shards}
    for each in optimizer.state.values():
        for part in each.values():
            shards = part._shards if isinstance(part, flow.GlobalTensor) else (part,)
            mine |= {x.data_ptr(): x.nbytes for x in shards}
    held, kept = plans.weights(model), plans.states(model, optimizer)
    return held, kept, (plans.whole(step(*plans.batch(2))), bytes_.read, sum(mine.values()))


def answers(fresh: Fresh, name: str, function: Any, *args: object) -> list[Any]:
    ended = fresh(plans.WORLD.get(name, 4), function, *args, timeout=200.0)
    assert all(each.code == 0 and each.answer is not None and not each.answer.error for each in ended), ended
    return [each.answer.value for each in ended if each.answer is not None]


@pytest.mark.sweep
@pytest.mark.parametrize(("before", "after"), PAIRS, ids=map(" to ".join, PAIRS))
def test_as_many_processes_as_there_are_go_on(fresh: Fresh, tmp_path: Path, before: str, after: str) -> None:
    kind = "gpt" if len(before) % 2 else "llama"
    asynchronous = len(after) % 2 == 0
    saved = answers(fresh, before, train_and_save, tmp_path / "a", kind, before, asynchronous)
    files = sum(file.stat().st_size for file in (tmp_path / "a").iterdir())
    assert sum(written for *_, (_, written) in saved) == files
    loaded = answers(fresh, after, load_and_go_on, tmp_path / "a", kind, after)
    kept: dict[str, Any] = {}
    for _, states, _ in saved:
        kept |= states
    for weights, states, (loss, read, own) in loaded:
        plans.same(weights, saved[0][0])
        plans.same(states, {name: kept[name] for name in states})
        torch.testing.assert_close(loss, saved[0][2][0], rtol=1e-9 if kind == "gpt" else 1e-6, atol=0)
        assert own <= read <= own * 1.01 + 1000  # what ranks hold alike is told apart by its memory
    assert {name for _, states, _ in loaded for name in states} == kept.keys()


LINE = flow.placement("cpu", range(4))


def trained(at: int, where: flow.Placement, folder: Path, *, load: bool) -> tuple[dict[str, Any], dict[str, Any], int]:
    """A step of a small model that was loaded, or a checkpoint of it; its weights and states, and bytes."""
    torch.manual_seed(2)
    with torch.device("meta" if load else "cpu"):
        model = torch.nn.Sequential(torch.nn.Linear(40, 70), torch.nn.Tanh(), torch.nn.Linear(70, 40)).double()
    optimizer = torch.optim.AdamW(model.parameters())
    if load:
        flow.load(folder, model, optimizer=optimizer)
    flow.nn.shard(model, {"0.*": flow.S(0)})
    step = flow.compile(model, pipes.square_loss, optimizer, placement=where)
    with traffic() as bytes_:
        if load:
            step.plan_for(*pipes.numbers(at, 8, 40)).planned.prepare()
        else:
            step(*pipes.numbers(at, 8, 40))
            flow.save(folder, model, optimizer=optimizer, asynchronous=True).wait()
    return plans.weights(model), plans.states(model, optimizer), bytes_.read + bytes_.written


def on_ranks(at: int, folder: Path, load: bool) -> Any:
    return trained(at, LINE, folder, load=load)


def test_four_processes_go_on_with_what_one_has_saved_and_one_with_theirs(ranks4: Ranks, tmp_path: Path) -> None:
    one = trained(0, flow.placement("cpu", range(3)), tmp_path / "one", load=False)
    four = ranks4(on_ranks, 1, tmp_path / "four", False)
    assert sum(written for *_, written in four) == sum(f.stat().st_size for f in (tmp_path / "four").iterdir())
    back = trained(0, flow.placement("cpu:[0-5] as (2, 3)"), tmp_path / "four", load=True)
    plans.same(back[0], four[0][0])
    plans.same(back[1], four[3][1])
    held = (40 * 70 + 70, 70 * 40 + 40)
    for weights, states, read in ranks4(on_ranks, 0, tmp_path / "one", True):
        plans.same(weights, one[0])
        plans.same(states, one[1])
        assert read <= 3 * 8 * (held[0] // 4 + 71 + held[1]) * 1.01


def fail_on_one(folder: Path) -> list[str]:
    """Errors of each kind on one rank, and what is there afterwards."""
    rank = torch.distributed.get_rank()
    model = flow.nn.to_global(torch.nn.Linear(6, 6), flow.placement("cpu", range(4)), lambda name, value: flow.B)
    flow.save(folder / "step-1", model, step=1)
    said = []

    def tried(**more: Any) -> None:
        try:
            flow.save(folder / "step-2", model, **more).wait()
            said.append("")
        except SbpflowError as error:
            said.append(str(error))

    tried(extra={"x": torch.sum} if rank == 2 else None)
    tried(extra={"x": rank == 1})
    tried(extra={"x": torch.tensor([rank])})
    tried(step=rank)
    with pytest.MonkeyPatch.context() as broken:
        if rank == 3:
            broken.setattr(commit, "write_file", _full)
        tried(asynchronous=True)
        tried()
    said.append(" ".join(sorted(os.listdir(folder))))
    (folder / "step-1" / "00002-000.safetensors").unlink() if rank == 0 else None
    torch.distributed.barrier()
    try:
        flow.load(folder / "step-1", model)
    except SbpflowError as error:
        said.append(str(error))
    tried()
    return said


def _full(*args: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_an_error_of_one_is_one_of_all(ranks4: Ranks, tmp_path: Path) -> None:
    each = ranks4(fail_on_one, tmp_path)
    for at, words in enumerate(
        ["no pickle is written", "different things under extra.x", "different numbers in extra.x", "under step",
         "No space left", "No space left", "step-1", "00002-000.safetensors of 4 files is missing"]
    ):  # fmt: skip
        for said in each:
            assert words in said[at]
    assert all(said[-1] == "" for said in each)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]
