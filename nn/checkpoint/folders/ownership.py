"""Folders that are flow.save's own, as a file in each says: no other is ever removed.

    step-3.writing/   a mark comes first, then all else, then the manifest; the mark goes before the name is given
    step-3/           the manifest
    step-3.replaced/  on its way out: the manifest became the mark, then it got this name, then all goes, mark last

So whoever is killed at whatever moment, what is left of a folder still says whose it is, and the next save removes it.
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from ....placement.errors import FileError, some_of

__all__ = [
    "KIND",
    "MANIFEST",
    "MARK",
    "REPLACED",
    "WRITING",
    "begun",
    "described",
    "is_empty",
    "is_left_over",
    "is_own",
    "removed",
    "synced",
    "unmarked",
]

KIND = "sbpflow checkpoint"
MANIFEST, MARK = "manifest.json", "unfinished.json"
WRITING, REPLACED = ".writing", ".replaced"  # behind the name of one that is not whole yet, or not needed any more
OURS = re.compile(rb'\s*\{\s*"kind"\s*:\s*"' + KIND.encode() + b'"')
TEXT = f'{{"kind": "{KIND}", "note": "it is being written, or removed: flow.save takes this folder away"}}\n'


def is_own(folder: Path) -> bool:
    """Whether it is a folder, and no link to one, that flow.save has made: its manifest or its mark begins as ours."""
    return not folder.is_symlink() and (_is_ours(folder / MANIFEST) or _is_ours(folder / MARK))


def is_left_over(folder: Path) -> bool:
    """Whether a save or a removal that did not end left the folder, such as a replaced one beside its successor. Before
    its mark and behind it one is empty, and nothing can be lost of it."""
    if not is_own(folder):
        return folder.name.endswith((WRITING, REPLACED)) and is_empty(folder)
    if folder.name.endswith(REPLACED) and is_own(folder.with_name(folder.name.removesuffix(REPLACED))):
        return True
    return folder.name.endswith(WRITING) or not (folder / MANIFEST).exists()


def _is_ours(file: Path) -> bool:
    try:
        with file.open("rb") as open_file:
            return OURS.match(open_file.read(100)) is not None
    except OSError:  # it is not there, or cannot be read, and then nothing is known of it
        return False


def is_empty(folder: Path) -> bool:
    """Whether it is a folder, and no link to one, that has nothing in it."""
    return folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())


def begun(aside: Path, others: tuple[Path, ...] = ()) -> None:
    """An empty folder with the mark; what an earlier save has left there goes, and what is not ours is an error. So it
    is at `others`, which are going to be written over."""
    for path in (aside, *others):
        if os.path.lexists(path) and not is_own(path) and not is_empty(path):
            raise FileError(
                f"flow.save: {path} is there, and flow.save has not made it\n"
                f"  it is {described(path)}, which would be lost\n"
                "  move it elsewhere, or save under another name"
            )
    aside.parent.mkdir(parents=True, exist_ok=True)
    removed(aside)
    aside.mkdir(exist_ok=True)
    fd = os.open(aside / MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.write(fd, TEXT.encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def described(path: Path) -> str:
    """A file, folder or link, in the words of errors."""
    if path.is_symlink():
        return f"a link to {os.readlink(path)}"
    return f"a folder with {some_of(sorted(x.name for x in path.iterdir()))}" if path.is_dir() else "a file"


def unmarked(folder: Path) -> None:
    """It has its manifest, and needs no mark any more."""
    (folder / MARK).unlink(missing_ok=True)


def removed(folder: Path) -> None:
    """Remove one that is our own, with all that is in it, and nothing else. What cannot be removed stays marked."""
    if not is_left_over(folder) and not is_own(folder):
        return
    with suppress(OSError):
        if (folder / MANIFEST).exists():
            (folder / MANIFEST).replace(folder / MARK)  # it needs no room, and from here on is no checkpoint
        bin_ = folder if folder.name.endswith((WRITING, REPLACED)) else folder.with_name(folder.name + REPLACED)
        if bin_ is not folder and is_left_over(bin_):
            removed(bin_)
        if bin_ is not folder and not os.path.lexists(bin_):
            folder = folder.rename(bin_)
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARK:
                path.unlink()
        (folder / MARK).unlink(missing_ok=True)
        folder.rmdir()


def synced(folder: Path) -> None:
    """Have the disk keep which names a folder has."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
