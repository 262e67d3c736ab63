"""Copies on the host come back as they were, in memory that is used again, and are made once."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sbpflow.nn.graph.host.copies import Copies
from sbpflow.nn.graph.host.memory import ROOT
from sbpflow.sbp.logical import OffloadPlace

TO = pytest.mark.parametrize("to", ["cpu", "disk"])
BASE = torch.arange(60, dtype=torch.float64).reshape(3, 4, 5)
TENSORS = {
    "plain": BASE,
    "transposed": BASE.transpose(0, 2),
    "with gaps": BASE[:, 1:3, ::2],
    "a part": BASE[1],
    "expanded": BASE[:, :, :1].expand(3, 4, 7),
    "of one number": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "bool": BASE > 30,
    "complex, conjugate": torch.complex(BASE, BASE).conj(),
    "bfloat16": BASE.to(torch.bfloat16),
    "int": torch.arange(7),
}


@TO
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(name: str, to: OffloadPlace) -> None:
    x = TENSORS[name].clone(memory_format=torch.preserve_format) if name == "plain" else TENSORS[name]
    (back,) = Copies(to, "x").stow([x]).fetch().wait()
    assert torch.equal(back, x)
    assert (back.dtype, back.shape, back.device) == (x.dtype, x.shape, x.device)
    assert back.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not x.numel()
    if name in ("plain", "transposed", "expanded"):
        assert back.stride() == x.stride()


def test_what_happens_to_the_tensor_or_its_memory_later_is_not_seen() -> None:
    x, copies = torch.ones(4), Copies("cpu", "x")
    away = copies.stow([x])
    x.zero_()
    assert torch.equal(away.fetch().wait()[0], torch.ones(4))
    del away
    assert torch.equal(copies.stow([x]).fetch().wait()[0], torch.zeros(4))  # none outlives those that hold it


def test_one_that_is_kept_twice_is_copied_once() -> None:
    x, copies = torch.ones(4), Copies("cpu", "x")
    first, second = copies.stow([x, torch.zeros(2)]), copies.stow((x,))
    assert first.copies[0] is second.copies[0]
    one, other = first.fetch().wait()[0], second.fetch().wait()[0]
    assert one.data_ptr() != other.data_ptr()


@pytest.mark.sampled(1)
@TO
def test_memory_is_used_again(to: OffloadPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path))
    copies = Copies(to, "again")
    seen: set[int] = set()
    for _ in range(3):
        away = copies.stow([torch.randn(8), torch.randn(8), torch.randn(3)])
        seen.update(copy.memory.bytes.data_ptr() for copy in away.copies if copy.memory)
        del away
    assert len(seen) == 3
    assert len(list(tmp_path.glob("*/*"))) == (3 if to == "disk" else 0)
    del copies
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_what_is_in_a_file_is_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path))
    x: Tensor = torch.randn(5)
    away = Copies("disk", "x").stow([x])
    (file,) = tmp_path.glob("*/*")
    assert file.read_bytes() == x.numpy().tobytes()
    del away
