"""Torn, altered and foreign files: found, named, and nothing has changed; the one before is offered."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.nn.checkpoint import manifest
from sbpflow.nn.checkpoint.manifest import _sum, read_manifest
from sbpflow.nn.checkpoint.newest import tidied
from sbpflow.placement.errors import DtypeError, FileError, SbpError, SbpflowError, ShapeError
from tests.nn.checkpoint.small import LINE, made, same, saved, snapshot, train

LATER = 10**19  # nanoseconds of a clock that is far ahead


def first_file(path: Path) -> Path:
    return sorted(path.glob("*.safetensors"))[0]


def cut_off(path: Path) -> None:
    file = first_file(path)
    file.write_bytes(file.read_bytes()[:-9])


def broken_header(path: Path) -> None:
    file = first_file(path)
    file.write_bytes(b"\x30" + file.read_bytes()[1:])


def other_header(path: Path) -> None:
    file = first_file(path)
    file.write_bytes(file.read_bytes().replace(b"model.inner.bias", b"model.inner.bear"))


def without_file(path: Path) -> None:
    first_file(path).unlink()


def cut_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[: len(text) // 2])


def said(path: Path, **more: Any) -> None:
    found = json.loads((path / "manifest.json").read_text())
    found = {**found, **more}
    (path / "manifest.json").write_text(json.dumps({**found, "sum": _sum(found)}))


def other_rate(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"lr":0.02', '"lr":0.03').replace('"lr": 0.02', '"lr": 0.03'))


def lost_piece(path: Path) -> None:
    found = json.loads((path / "manifest.json").read_text())["tensors"]
    found["model.inner.bias"]["pieces"] = []
    said(path, tensors=found)


def file_elsewhere(path: Path) -> None:
    found = json.loads((path / "manifest.json").read_text())
    first_file(path).rename(path.parent / "x")
    text = json.dumps({key: found[key] for key in ("files", "tensors")}).replace("00000-000.safetensors", "../x")
    said(path, **json.loads(text))


TEARS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut off": (cut_off, "00000-000.safetensors has [0-9]+ bytes, and was written with"),
    "broken header": (broken_header, "has no header of safetensors|has other tensors"),
    "other header": (other_header, "has other tensors than were written to it, such as model.inner.bear"),
    "without a file": (without_file, "of 1 files is missing"),
    "half a manifest": (cut_manifest, "is no manifest of a checkpoint"),
    "another number": (other_rate, "it was changed: its checksum is another"),
    "lost piece": (lost_piece, "the pieces of model.inner.bias"),
    "a file elsewhere": (file_elsewhere, "it names ../x, which is no file of its own"),
    "another kind": (lambda path: said(path, kind="x"), "it is a 'x'"),
}


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_one_is_passed_over_and_named(tmp_path: Path, tear: str) -> None:
    good, torn = saved(tmp_path, 1), saved(tmp_path, 2)
    do, message = TEARS[tear]
    do(torn)
    with pytest.warns(RuntimeWarning, match=f"step-1 of step 1 is the newest that is(.|\n)*step-2: .*({message})"):
        found = flow.newest(tmp_path)
    assert found is not None
    assert found.path == good
    model, optimizer = made()
    train(model, optimizer, 5)
    before = snapshot(model, optimizer)
    with pytest.raises(FileError, match=f"(.|\n)*({message})(.|\n)*load the one before: .*step-1 of step 1"):
        flow.load(torn, model, optimizer=optimizer)
    same(snapshot(model, optimizer), before)


def test_one_that_was_not_written_to_its_end_is_named(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    shutil.copytree(saved(tmp_path, 2), tmp_path / "step-3.writing")
    (tmp_path / "step-3.writing").touch()
    with pytest.warns(RuntimeWarning, match=r"step-3\.writing: it was not written to its end"):
        found = flow.newest(tmp_path)
    assert found is not None
    assert found.step == 2
    (tmp_path / "step-2" / "manifest.json").unlink()
    with pytest.raises(FileError, match="not written to its end"):
        flow.load(tmp_path / "step-2", made()[0])
    assert flow.newest(tmp_path / "nothing") is None


def test_a_checkpoint_itself_is_the_newest_of_its_folder(tmp_path: Path) -> None:
    path = saved(tmp_path)
    found = flow.newest(path)
    assert found is not None
    assert found.path == path


@pytest.mark.parametrize("name", ["model.emb.weight", "optimizer.state.inner.weight.exp_avg", "extra.note"])
def test_altered_numbers_are_found_by_their_checksum(tmp_path: Path, name: str) -> None:
    saved(tmp_path, 1)
    path = saved(tmp_path, 2, extra={"note": torch.ones(3)})
    piece = json.loads((path / "manifest.json").read_text())["tensors"][name]["pieces"][0]
    file = path / piece[0]
    raw = bytearray(file.read_bytes())
    raw[piece[1] + 2] ^= 4
    file.write_bytes(raw)
    found = flow.newest(tmp_path)  # sizes and headers are right
    assert found is not None
    error = f"00000-000.safetensors has other numbers(.|\n)*of {name}(.|\n)*the one before: .*step-1"
    with pytest.raises(FileError, match=error):
        found.verify()
    model, optimizer = made()
    with pytest.raises(FileError, match=error):
        flow.load(path, model, optimizer=optimizer, extra={"note": torch.zeros(3)})
    fresh, optimizer = made(meta=True)
    if name.startswith("model"):
        flow.load(path, fresh)
        with pytest.raises(FileError, match=error):
            flow.nn.to_global(fresh, LINE, lambda name, value: flow.S(0) if value.ndim else flow.B)
        assert all(value.is_meta for value in fresh.parameters())
    flow.load(tmp_path / "step-1", model)


def test_another_version_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    said(path, version=9)
    with pytest.raises(FileError, match="of version 9, and this sbpflow reads version 1"):
        flow.load(path, made()[0])


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner_, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(()))


def shaped() -> nn.Module:
    model, _ = made()
    model.inner = nn.Linear(6, 7)
    return model


def counted() -> nn.Module:
    model, _ = made()
    model.scale = nn.Parameter(torch.ones((), dtype=torch.int64), requires_grad=False)
    return model


OTHERS: dict[str, tuple[Callable[[], nn.Module], type[SbpflowError], str]] = {
    "other names": (
        Renamed,
        FileError,
        "missing in the files: inner_.bias and 1 more; inner.bias is near",
    ),
    "another shape": (shaped, ShapeError, r"inner.weight is \(7, 6\) in the model, and \(6, 6\) in the files"),
    "another kind": (counted, DtypeError, "scale is torch.int64, and model.scale"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_refused(tmp_path: Path, other: str) -> None:
    path = saved(tmp_path, 1)
    make, kind, message = OTHERS[other]
    model = make()
    before = snapshot(model)
    with pytest.raises(kind, match=message):
        flow.load(path, model)
    same(snapshot(model), before)


def test_a_name_that_only_what_is_not_whole_has_is_refused(tmp_path: Path) -> None:
    for name in ("a.writing", "a.replaced", ".."):
        with pytest.raises(SbpError, match="is no name of a checkpoint"):
            flow.save(tmp_path / name, made()[0])


def test_other_optimizers_and_extras_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, extra={"seen": 3, "mean": torch.tensor([0.5])})
    model, optimizer = made()
    train(model, optimizer, 1)
    before = snapshot(model, optimizer)
    with pytest.raises(FileError, match="has states of AdamW, and SGD was passed"):
        flow.load(path, model, optimizer=torch.optim.SGD(model.emb.parameters()))
    with pytest.raises(FileError, match=r"has no states of AdamW for inner\.bias"):
        flow.load(path, model, optimizer=torch.optim.AdamW([model.inner.bias]))
    with pytest.raises(FileError, match="saved with different lr, and are in one group now"):
        flow.load(path, model, optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    with pytest.raises(FileError, match=r"has no extra sean\n  it has mean, seen"):
        flow.load(path, model, optimizer=optimizer, extra={"sean": 0})
    with pytest.raises(ShapeError, match=r"extra mean is \(2,\), and \(1,\) in"):
        flow.load(path, model, optimizer=optimizer, extra={"mean": torch.zeros(2)})
    with pytest.raises(DtypeError, match=r"extra mean is torch\.int64"):
        flow.load(path, model, optimizer=optimizer, extra={"mean": torch.zeros(1, dtype=torch.int64)})
    weights = saved(tmp_path, 2)
    flow.save(weights, model)
    with pytest.raises(FileError, match="was saved without an optimizer"):
        flow.load(weights, model, optimizer=optimizer)
    same(snapshot(model, optimizer), before)


def test_what_is_no_checkpoint_is_refused_with_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = made()
    (tmp_path / "file").write_text("garbage")
    for path in (tmp_path, tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(FileError, match=r"is no checkpoint of flow\.save, and optimizer= is given"):
            flow.load(path, model, optimizer=optimizer)
        with pytest.raises(FileError):
            flow.load(path, model)


def test_a_link_is_another_name_and_what_it_names_stays(tmp_path: Path) -> None:
    for step in (1, 2):
        saved(tmp_path, step)
    (tmp_path / "latest").symlink_to("step-2")
    flow.save(tmp_path / "step-3", made()[0], step=3, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-2", "step-3"]
    flow.save(tmp_path / "latest", made()[0], step=4)  # takes the place of the link, not of what it named
    assert [read_manifest(tmp_path / name).step for name in ("latest", "step-2")] == [4, 2]
    assert not (tmp_path / "latest").is_symlink()


def test_the_default_device_is_not_where_files_are(tmp_path: Path) -> None:
    model, optimizer = made()
    train(model, optimizer, 0)
    with torch.device("meta"):  # as torch.set_default_device("cuda"), which is not everywhere
        flow.save(tmp_path / "a", model, optimizer=optimizer, extra={"no": b""})
        found = flow.newest(tmp_path)
        assert found is not None
        found.verify()


def test_a_clock_that_was_put_back_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved(tmp_path, 1)
    monkeypatch.setattr(manifest, "_known", 0)  # as in a new process
    said(before, saved_at=LATER)
    flow.save(tmp_path / "step-2", made()[0], step=2, keep=1)  # which has not looked what there is
    assert os.listdir(tmp_path) == ["step-2"]
    said(tmp_path / "step-2", saved_at=LATER)
    assert flow.newest(tmp_path) is not None
    flow.save(tmp_path / "step-3", made()[0], step=3)
    assert getattr(flow.newest(tmp_path), "step", 0) == 3


@pytest.mark.parametrize(
    ("hosts", "left"), [(True, ["s2", "s3"]), (False, ["s1", "s2", "s3"])], ids=["hosts", "a disk"]
)
def test_what_hosts_have_together_counts_though_a_host_has_a_part(tmp_path: Path, hosts: bool, left: list[str]) -> None:
    for step in (1, 2, 3):
        flow.save(tmp_path / f"s{step}", nn.Linear(2, 2), step=step)
    first_file(tmp_path / "s2").unlink()
    tidied(tmp_path / "s3", 2, hosts=hosts)
    assert sorted(path.name for path in tmp_path.iterdir()) == left


@pytest.mark.filterwarnings("ignore:flow.save. neighbours=1, and there are so many hosts. 1")
def test_what_a_host_has_in_its_memory_is_as_many_as_it_is_to_keep(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        flow.save(tmp_path / f"s{step}", nn.Linear(2, 2), step=step, neighbours=1, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s2", "s3"]


def test_other_names_of_a_checkpoint_are_none_of_those_that_are_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        saved(tmp_path, step)
    (tmp_path / "latest").symlink_to("step-2")
    flow.save(tmp_path / "step-3", made()[0], step=3, keep=3)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-1", "step-2", "step-3"]


def test_the_newest_was_saved_last_whatever_step_it_is_of(tmp_path: Path) -> None:
    for step in (5, 1):  # begun anew from an earlier one
        saved(tmp_path, step)
    assert getattr(flow.newest(tmp_path), "step", 0) == 1


def test_one_that_was_begun_before_the_newest_is_not_told_of(tmp_path: Path) -> None:
    shutil.copytree(saved(tmp_path, 1), tmp_path / "step-2.writing")
    os.utime(tmp_path / "step-2.writing", ns=(1, 1))
    assert getattr(flow.newest(tmp_path), "step", 0) == 1
