"""The newest checkpoint of a folder: which of them are whole, and which go."""

import warnings
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from ...placement.errors import FileError
from ..files.checksums import checksum
from ..files.pieces import sizes_of
from ..files.raw import RawFile
from ..files.sums import altered
from ..files.values import Pieced, StoredPiece
from .folders.ownership import is_left_over, is_own, removed
from .host_search import found_on_hosts
from .manifest import WRITING, Manifest, is_checkpoint, read_manifest

__all__ = ["Saved", "newest", "tidied"]

BLOCK = 64 << 20


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole by its sizes and headers. `names` are those of its tensors."""

    path: Path
    step: int
    plan: str | None
    names: tuple[str, ...]

    @classmethod
    def of(cls, manifest: Manifest) -> "Saved":
        return cls(manifest.folder, manifest.step, manifest.plan, tuple(manifest.tensors))

    def verify(self) -> None:
        """Read all of it, and raise if it has other numbers than were written."""
        with torch.device("cpu"):  # whatever the default is
            for of in read_manifest(self.path).check().tensors.values():
                for piece in of.pieces:
                    self._verify(of, piece)

    def _verify(self, of: Pieced, piece: StoredPiece) -> None:
        file, sizes = RawFile(piece.file), sizes_of(piece.region)
        try:
            part = torch.empty(sizes, dtype=of.dtype, device="cpu")
            file.box(piece.at, sizes, tuple((0, size) for size in sizes), part)
        finally:
            file.close()
        if checksum(part, [lo for lo, _ in piece.region], of.shape) != piece.sum:
            raise altered(of, piece)


def newest(folder: str | PathLike[str], *, neighbours: int = 0) -> Saved | None:
    """The checkpoint below a folder that was saved last and is whole by sizes and headers; None if there is none. A
    warning tells of one that was saved later and is not whole. A folder that is one itself is the newest.

    With `neighbours` from 1 on, the folder is in each host's own memory, as `flow.save` with neighbours= fills it:
    every process calls it, and all hear of the newest step of which their hosts together have every piece.

    >>> newest("nowhere")
    """
    if neighbours:
        found, why = found_on_hosts("flow.newest", Path(folder).absolute())
        if why:
            told = "\n".join(f"  {line}" for line in why[:4])
            which = f"{found.folder.name} of step {found.step} is the newest that is" if found else _OTHERS
            warnings.warn(f"flow.newest: not whole on the hosts; {which}\n{told}", RuntimeWarning, stacklevel=2)
        return Saved.of(found) if found else None
    good, bad = _sorted(Path(folder))
    if bad:
        told = "\n".join(f"  {path.name}: {why}" for path, why in bad[:4])
        which = f"{good[-1].folder.name} of step {good[-1].step} is the newest that is" if good else "none is"
        warnings.warn(f"flow.newest: not whole in {folder}; {which}\n{told}", RuntimeWarning, stacklevel=2)
    return Saved.of(good[-1]) if good else None


_OTHERS = "none is; load one from a disk, as flow.newest of its folder names it"


def _sorted(folder: Path) -> tuple[list[Manifest], list[tuple[Path, str]]]:
    """Those that are whole, the newest last, and of later ones what is wrong."""
    found: list[Manifest] = []
    bad: list[tuple[Path, str]] = []
    begun: list[Path] = []
    try:
        inside = sorted(folder.iterdir()) if folder.is_dir() and not is_checkpoint(folder) else [folder]
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"flow.newest: {folder} cannot be read: {error}\n  make it readable for this process"
        ) from error
    for path in inside:
        if path.name.endswith(WRITING) and path is not folder:
            begun += [path] if is_own(path) else []
            continue
        try:
            if is_checkpoint(path):
                found.append(read_manifest(path))
        except FileError as error:
            bad.append((path, " ".join(line.strip() for line in str(error).splitlines()[:2])))
    found.sort(key=lambda each: (each.saved_at, each.step))
    while found:
        wrong = found[-1].wrong()
        if wrong is None:
            break
        bad.append((found.pop().folder, wrong))
    last = found[-1].saved_at if found else 0
    bad += [(path, "it was not written to its end") for path in begun if _changed_at(path) > last]
    return found, bad


def _changed_at(path: Path) -> int:
    """When it was; 0 if it is not there any more, since another process has just given it its name."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def tidied(new: Path, keep: int, *, hosts: bool = False) -> None:
    """Keep the newest whole checkpoints beside one that was just saved, and remove saves and removals that did not end.
    Of one that `hosts` have together no host can tell whether it is whole."""
    whole: list[Manifest] = []
    for path in new.parent.iterdir():
        if path.is_symlink():
            continue  # another name of one, such as latest, which is none more
        if is_left_over(path):
            removed(path)
            continue
        try:
            if is_checkpoint(path):
                whole.append(read_manifest(path))
        except FileError:
            continue  # what is not understood is not removed
    whole.sort(key=lambda each: (each.folder == new, each.saved_at, each.step))
    good = 0
    for each in reversed(whole):
        if good >= keep:
            removed(each.folder)
        elif hosts or each.wrong() is None:
            good += 1
