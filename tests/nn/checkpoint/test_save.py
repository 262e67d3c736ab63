"""Saves: all of a model once, by bytes that are counted; asynchronous ones, errors, and what torch reads of it."""

import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import sbpflow as flow
from sbpflow import B, S
from sbpflow.nn.checkpoint import commit, writing
from sbpflow.nn.files.raw import traffic
from sbpflow.placement.errors import FileError, SbpError
from tests.nn.checkpoint.plans import weights
from tests.nn.checkpoint.small import LINE, loss, made, same, saved, snapshot, train, words


def test_a_plain_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(model, optimizer, 0, 1)
    scheduler.step()
    drawn = (torch.rand(2), random.random(), np.random.rand())
    extra: dict[str, Any] = {"scheduler": scheduler, "seen": 24, "best": torch.tensor([0.5]), "log": {"loss": [1.0, 2]}}
    flow.save(tmp_path / "a", model, optimizer=optimizer, step=2, extra=extra)
    wanted, numbers = snapshot(model, optimizer), (torch.rand(2), random.random(), np.random.rand())
    train(model, optimizer, 2, 3)
    end = snapshot(model, optimizer)

    model, optimizer = made()
    train(model, optimizer, 7)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    extra = {"scheduler": scheduler, "seen": 0, "best": (best := torch.zeros(1)), "log": None}
    found = flow.newest(tmp_path)
    assert found is not None
    assert (found.step, found.plan, found.path) == (2, None, tmp_path / "a")
    flow.load(found.path, model, optimizer=optimizer, extra=extra)
    same(snapshot(model, optimizer), wanted)
    assert (extra["seen"], best.item(), extra["log"], scheduler.last_epoch) == (24, 0.5, {"loss": [1.0, 2]}, 1)
    again = (torch.rand(2), random.random(), np.random.rand())
    assert torch.equal(again[0], numbers[0])
    assert again[1:] == numbers[1:] != drawn[1:]
    train(model, optimizer, 2, 3)
    same(snapshot(model, optimizer), end)


def test_each_byte_is_written_once_and_read_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(3)))
    held = sum(p.nbytes for p in model.parameters())
    for sbp in (B, S(0), S(1)):
        flow.nn.to_global(model, LINE, {"*.weight": sbp})
        path = tmp_path / str(sbp)
        with traffic() as bytes_:
            flow.save(path, model)
        files = sum(size.stat().st_size for size in path.iterdir())
        assert bytes_.written == files
        assert held <= sum(file.stat().st_size for file in path.glob("*.safetensors")) <= held + 20_000
        with traffic() as bytes_:
            flow.load(path, model)
        random_state = 5056 + 2 * 8 * 700
        assert held <= bytes_.read <= held + random_state
        model = torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(3)))


def test_every_dtype_is_written_as_torch_has_it(tmp_path: Path) -> None:
    from sbpflow.nn.files.headers import DTYPES

    raw = torch.randint(2, (3, 48), dtype=torch.uint8)
    extra = {name: raw.view(dtype).clone() for name, dtype in DTYPES.items()} | {"empty": torch.empty(0, 3)}
    extra["global"] = flow.tensor(torch.arange(7), placement=LINE, sbp=S(0))
    flow.save(tmp_path / "a", torch.nn.Linear(1, 1), extra=extra)
    found: dict[str, Any] = dict.fromkeys(extra)
    flow.load(tmp_path / "a", torch.nn.Linear(1, 1), extra=found)
    for name, value in extra.items():
        plain = value.full_tensor() if isinstance(value, flow.GlobalTensor) else value
        assert found[name].dtype is plain.dtype, name
        assert torch.equal(found[name].contiguous().view(torch.uint8), plain.contiguous().view(torch.uint8)), name
    with safe_open(tmp_path / "a" / "00000-000.safetensors", "pt") as file:
        assert file.get_tensor("extra.BF16").dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it_without_us(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    model, _ = made()
    flow.nn.to_global(model, LINE, lambda name, value: S(0) if value.ndim else B)
    flow.save(tmp_path / "a", model)
    plain = {name: value.full_tensor() for name, value in model.state_dict().items() if name != "head.weight"}
    read = {f"model.{name}": torch.zeros_like(value) for name, value in plain.items()}
    load(read, storage_reader=HuggingFaceStorageReader(str(tmp_path / "a")))
    same(read, {f"model.{name}": value for name, value in plain.items()})


def test_training_goes_on_while_a_snapshot_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), writing.write_file

    def late(*args: Any) -> Any:
        go.wait(20)
        return write(*args)

    monkeypatch.setattr(commit, "write_file", late)
    model, optimizer = made()
    step = flow.compile(model, loss, optimizer, placement=LINE)
    step(words(0))
    kept = weights(model)
    saving = flow.save(tmp_path / "a", model, optimizer=optimizer, asynchronous=True)
    step(words(1))
    assert not saving.done
    assert not (tmp_path / "a").exists()
    go.set()
    second = flow.save(tmp_path / "b", model, optimizer=optimizer, asynchronous=True)
    assert saving.done  # the next waits for it
    second.wait()
    flow.load(tmp_path / "a", model, optimizer=optimizer)
    same(weights(model), kept)


def test_an_error_of_the_writer_comes_at_wait_or_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = saved(tmp_path, 1)

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    model, optimizer = made()
    for _ in range(2):
        with monkeypatch.context() as broken:
            broken.setattr(commit, "write_file", full)
            saving = flow.save(first, model, optimizer=optimizer, asynchronous=True)
            if _:
                with pytest.raises(FileError, match="No space left"):
                    saving.wait()
            else:
                saving._thread.join()  # type: ignore[union-attr]
                with pytest.raises(FileError, match="could not be written"):
                    flow.save(tmp_path / "c", model)
        assert os.listdir(tmp_path) == ["step-1"]
        flow.load(first, model, optimizer=optimizer)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for step in range(1, 5):
        (tmp_path / "step-9.writing").mkdir(exist_ok=True)
        saved(tmp_path, step, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4"]


def test_one_may_be_saved_over(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    model, _ = made()
    flow.save(path, model, step=7)
    assert json.loads((path / "manifest.json").read_text())["step"] == 7
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(FileError, match=r"is no checkpoint(.|\n)*step-1, which would be lost(.|\n)*step-100"):
        flow.save(tmp_path, made()[0])
    assert os.listdir(tmp_path / "step-1")


def test_mistakes_are_named_before_anything_is_written(tmp_path: Path) -> None:
    model, optimizer = made()
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(SbpError, match="SGD holds a parameter"):
        flow.save(tmp_path / "a", model, optimizer=[optimizer, other])
    with pytest.raises(SbpError, match="in two optimizers"):
        flow.save(tmp_path / "a", model, optimizer=[optimizer, torch.optim.SGD(model.inner.parameters())])
    with pytest.raises(SbpError, match="on meta, and has no numbers"):
        flow.save(tmp_path / "a", made(meta=True)[0])
    with pytest.raises(SbpError, match=r"give it one of torch\.optim"):
        flow.save(tmp_path / "a", model, optimizer=model)  # type: ignore[arg-type]
    with pytest.raises(SbpError, match="keep=0"):
        flow.save(tmp_path / "a", model, keep=0)
    with pytest.raises(SbpError, match=r"extra\.f is a function"):
        flow.save(tmp_path / "a", model, extra={"f": made})
    assert not os.listdir(tmp_path)


def test_an_average_of_weights_is_an_extra_that_lies_as_it_does_now(tmp_path: Path) -> None:
    from torch.optim.swa_utils import AveragedModel

    def averaged(where: flow.Placement, sbp: Any) -> tuple[Any, AveragedModel]:
        model = flow.nn.to_global(torch.nn.Linear(6, 5), where, sbp)
        average = AveragedModel(model)
        average.update_parameters(model)
        return model, average

    model, average = averaged(LINE, S(0))
    with torch.no_grad():
        model.weight.mul_(3)
    average.update_parameters(model)
    flow.save(tmp_path / "a", model, extra={"average": average})
    other, again = averaged(flow.placement("cpu", range(4)), B)
    flow.load(tmp_path / "a", other, extra={"average": again})
    for mine, wanted in zip(again.parameters(), average.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), wanted.full_tensor())  # type: ignore[attr-defined]
        assert mine.sbp == (B,)  # type: ignore[attr-defined]
    assert int(again.n_averaged) == 2


class Counting(torch.nn.Linear):
    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_what_modules_keep_besides_tensors_comes_along(tmp_path: Path) -> None:
    one, other = torch.nn.Sequential(Counting(2, 2)), torch.nn.Sequential(Counting(2, 2))
    setattr(one[0], "calls", 5)  # noqa: B010 of a Module only tensors are known
    flow.save(tmp_path / "a", one)
    flow.load(tmp_path / "a", other)
    assert other[0].calls == 5
    flow.save(tmp_path / "b", torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(FileError, match="has no extra state of 0"):
        flow.load(tmp_path / "b", other)


def test_a_tied_checkpoint_and_an_untied_model(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    wanted, _ = made()
    flow.load(path, wanted)
    model, _ = made()
    model.head.weight = torch.nn.Parameter(torch.zeros_like(model.head.weight))
    flow.load(path, model)
    assert torch.equal(model.head.weight, wanted.emb.weight)
    flow.save(tmp_path / "untied", model)
    flow.load(tmp_path / "untied", wanted)
    with torch.no_grad():
        model.head.weight.zero_()
    flow.save(tmp_path / "untied", model)
    with pytest.raises(FileError, match="are tied in the model, and the files have different values"):
        flow.load(tmp_path / "untied", wanted)
