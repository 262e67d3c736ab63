"""Files of weights that can be read, and those that cannot: each a clear error."""

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sbpflow.nn.files.headers import file_tensors
from sbpflow.placement.errors import DtypeError, FileError, MissingError

WEIGHTS = {"a.weight": torch.ones(3, 4), "b": torch.zeros((), dtype=torch.bfloat16), "c": torch.arange(5)}


def shards(folder: Path) -> None:
    save_file({"a.weight": WEIGHTS["a.weight"]}, folder / "x-1.safetensors")
    save_file({"b": WEIGHTS["b"], "c": WEIGHTS["c"]}, folder / "x-2.safetensors")
    names = {"a.weight": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("path", ["", "model.safetensors", "model.safetensors.index.json"])
def test_a_file_a_folder_and_an_index_say_what_they_hold(tmp_path: Path, path: str) -> None:
    if path.endswith("json"):
        shards(tmp_path)
    else:
        save_file(WEIGHTS, tmp_path / "model.safetensors")
    found = file_tensors(str(tmp_path / path))
    assert {name: (each.name, each.shape, each.dtype) for name, each in found.items()} == {
        name: (name, tuple(each.shape), each.dtype) for name, each in WEIGHTS.items()
    }
    assert {Path(each.file).parent for each in found.values()} == {tmp_path}


def whole(folder: Path) -> bytes:
    save_file(WEIGHTS, folder / "whole.safetensors")
    return (folder / "whole.safetensors").read_bytes()


def write(name: str, content: Callable[[Path], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content(folder))


def pickled(folder: Path) -> None:
    torch.save(WEIGHTS, folder / "pytorch_model.bin")


def disguised(folder: Path) -> None:
    torch.save(WEIGHTS, folder / "model.safetensors")


def without_a_shard(folder: Path) -> None:
    shards(folder)
    (folder / "x-2.safetensors").unlink()


def other_shards(folder: Path) -> None:
    shards(folder)
    save_file({"b": WEIGHTS["b"]}, folder / "x-2.safetensors")


def two_of_them(folder: Path) -> None:
    for name in ("one", "two"):
        save_file(WEIGHTS, folder / f"{name}.safetensors")


def index(text: str) -> Callable[[Path], object]:
    return write("model.safetensors.index.json", lambda folder: text.encode())


ERRORS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no such file": (
        lambda folder: whole(folder),
        "hole.safetensors",
        "flow.load: {}/hole.safetensors is not there\n  {} has whole.safetensors\n  did you mean 'whole.safetensors'?",
    ),
    "no such folder": (
        lambda folder: None,
        "meta-llama/Llama",
        "flow.load: {}/meta-llama/Llama is not there\n  nor is {}/meta-llama\n  a model of the hub",
    ),
    "rubbish": (
        write("m.safetensors", lambda folder: b"\x80\x02rubbish" * 10),
        "m.safetensors",
        "flow.load: {}/m.safetensors cannot be read: Error while deserializing header",
    ),
    "empty": (
        write("m.safetensors", lambda folder: b""),
        "m.safetensors",
        "flow.load: {}/m.safetensors cannot be read: ",
    ),
    "torn data": (
        write("m.safetensors", lambda folder: whole(folder)[:-8]),
        "m.safetensors",
        "flow.load: {}/m.safetensors cannot be read: ",
    ),
    "a header longer than the file": (
        write("m.safetensors", lambda folder: struct.pack("<Q", 10**6) + whole(folder)[8:]),
        "m.safetensors",
        "flow.load: {}/m.safetensors cannot be read: ",
    ),
    "a pickle": (pickled, "pytorch_model.bin", "flow.load: {}/pytorch_model.bin is a pickle, and no pickle is read"),
    "a pickle by another name": (disguised, "model.safetensors", "flow.load: {}/model.safetensors cannot be read: "),
    "a folder with a pickle": (
        pickled,
        "",
        "flow.load: the folder {} has no model.safetensors, nor one *.safetensors.index.json\n"
        "  it has pytorch_model.bin, and no pickle is read: it runs whatever code is in it\n  save the weights anew",
    ),
    "an empty folder": (lambda folder: None, "", "flow.load: the folder {} has no model.safetensors"),
    "a folder with several": (two_of_them, "", "flow.load: the folder {} has no model.safetensors"),
    "another suffix": (
        write("m.gguf", lambda folder: b"GGUF"),
        "m.gguf",
        "flow.load: {}/m.gguf is no file *.safetensors",
    ),
    "a missing shard": (
        without_a_shard,
        "",
        "flow.load: x-2.safetensors of 2 shards is missing\n  model.safetensors.index.json names them",
    ),
    "a shard that lacks a tensor": (
        other_shards,
        "",
        "flow.load: model.safetensors.index.json says that x-2.safetensors holds c, and it does not",
    ),
    "an index of rubbish": (index("{rubbish"), "", "flow.load: {}/model.safetensors.index.json is no index of shards"),
    "an index of something else": (index("[1]"), "", "flow.load: {}/model.safetensors.index.json is no index"),
    "an index with numbers": (index('{"weight_map": {"a": 1}}'), "", "flow.load: {}/model.safetensors.index.json is"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_read_is_told(tmp_path: Path, name: str) -> None:
    make, path, said = ERRORS[name]
    make(tmp_path)
    with pytest.raises(FileError) as caught:
        file_tensors(tmp_path / path)
    assert str(caught.value).startswith(said.replace("{}", str(tmp_path)))
    assert isinstance(caught.value, OSError)


def test_a_dtype_that_torch_lacks_is_told(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(DtypeError, match=r"^flow.load: a in .*m.safetensors is of F8_E8M0"):
        file_tensors(tmp_path / "m.safetensors")


def test_where_safetensors_is_not_installed_the_command_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(WEIGHTS, tmp_path / "m.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingError, match=r"pip install 'sbpflow\[load\]'"):
        file_tensors(tmp_path / "m.safetensors")
