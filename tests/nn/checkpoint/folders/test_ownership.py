"""Folders that flow.save has not made stay, whatever their names; what is left of its own goes with the next save."""

import contextlib
import errno
import os
import shutil
from pathlib import Path

import pytest

import sbpflow as flow
from sbpflow.nn.checkpoint.folders import ownership
from sbpflow.nn.checkpoint.folders.ownership import MARK, begun, is_left_over, is_own, removed
from sbpflow.placement.errors import FileError
from tests.nn.checkpoint.small import made, saved

FOREIGN = ["notes.writing", "s7.replaced", "plain", "site"]


def foreign(folder: Path) -> None:
    for name in FOREIGN:
        (folder / name).mkdir()
        (folder / name / "thesis.txt").write_text("years")
    (folder / "site" / "manifest.json").write_text('{"name": "a page", "icons": []}')
    (folder / "away").mkdir()
    (folder / "link.writing").symlink_to(folder / "plain")


@pytest.mark.filterwarnings("ignore:flow.newest")
def test_keep_leaves_what_is_not_ours(tmp_path: Path) -> None:
    foreign(tmp_path)
    for step in (1, 2, 3):
        saved(tmp_path, step, keep=1)
    assert sorted(os.listdir(tmp_path)) == sorted([*FOREIGN, "away", "link.writing", "step-3"])
    assert all((tmp_path / name / "thesis.txt").read_text() == "years" for name in FOREIGN)
    assert getattr(flow.newest(tmp_path), "step", 0) == 3


@pytest.mark.parametrize("name", ["s7.writing", "s7.replaced", "s7"])
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_in_the_way_of_a_save_is_an_error_and_stays(tmp_path: Path, name: str, kind: str) -> None:
    if name == "s7.replaced":
        flow.save(tmp_path / "s7", made()[0], step=1)
    (tmp_path / "there").mkdir()
    there = tmp_path / (name if kind != "link" else "there")
    there.mkdir(exist_ok=True) if kind != "file" else there.write_text("years")
    (there / "thesis.txt").write_text("years") if kind != "file" else None
    (tmp_path / name).symlink_to(there) if kind == "link" else None
    with pytest.raises(FileError, match="which would be lost"):
        flow.save(tmp_path / "s7", made()[0], step=2)
    assert (there if kind == "file" else there / "thesis.txt").read_text() == "years"
    assert os.path.lexists(tmp_path / name)


@pytest.mark.parametrize("at", range(6))
def test_a_removal_that_was_killed_anywhere_is_ended_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    left = [at]

    def dying(plain: object) -> object:
        def call(*args: object, **more: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return plain(*args, **more)  # type: ignore[operator]

        return call

    old = saved(tmp_path, 1)
    with monkeypatch.context() as broken:
        for name in ("replace", "rename", "unlink", "rmdir"):
            broken.setattr(Path, name, dying(getattr(Path, name)))
        with contextlib.suppress(KeyboardInterrupt):
            removed(old)
    saved(tmp_path, 2)
    saved(tmp_path, 3, keep=2)
    saved(tmp_path, 4, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4"]


def test_one_that_was_replaced_goes_where_its_name_is_taken(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    shutil.copytree(path, tmp_path / "step-1.replaced")
    assert is_left_over(tmp_path / "step-1.replaced")
    saved(tmp_path, 2, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


def test_the_mark_is_there_first_and_gone_in_the_end(tmp_path: Path) -> None:
    begun(tmp_path / "a.writing")
    assert os.listdir(tmp_path / "a.writing") == [MARK]
    assert is_own(tmp_path / "a.writing")
    flow.save(tmp_path / "a", made()[0])
    assert MARK not in os.listdir(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


def test_a_disk_that_is_read_only_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **more: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(FileError, match=r"a could not be written: .*Read-only file system"):
        flow.save(tmp_path / "a", made()[0])
    with pytest.raises(FileError, match="Read-only"):
        flow.save(tmp_path / "a", made()[0], asynchronous=True).wait()
    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(FileError, match=r"flow\.newest: .* cannot be read"):
        flow.newest(tmp_path)
    assert ownership.is_own(tmp_path) is False


def test_a_link_to_an_empty_folder_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "step-1.writing").symlink_to("theirs")
    with pytest.raises(FileError, match=r"flow.save has not made it\n  it is a link to theirs"):
        flow.save(tmp_path / "step-1", made()[0])
    assert (tmp_path / "step-1.writing").is_symlink()
