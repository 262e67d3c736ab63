"""The search for a checkpoint that hosts have apart: the newest of which they together have every piece.

Each process says what is in its host's folder; the first decides; all know where each file is. One that is not on the
own host is read over a socket, only the parts that are needed, when they are.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...placement.errors import FileError, some_of
from ...placement.world import world
from ..files.served import REMOTE, ServedFile, server
from .manifest import MANIFEST, WRITING, Manifest, is_checkpoint, manifest_of, read_manifest
from .meeting import Meeting

__all__ = ["found_on_hosts"]


def found_on_hosts(asked: str, folder: Path, name: str | None = None) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint in the folder, or the one of a name, of which the hosts together have all. With it come the
    places of its files, and why later ones are none. Every process calls it and hears the same."""
    meeting = Meeting(asked)
    here: dict[str, Manifest] = {}
    said = meeting.together(lambda: _offered(folder, name, here), lambda each: _decided(folder, each, here))
    meeting.end()
    verdict = json.loads(said)
    if verdict["name"] is None:
        return None, verdict["why"]
    path = folder / verdict["name"]
    manifest = _one_of(here, path, verdict["when"], verdict["manifest"])
    own = {file: str(path / file) for file in manifest.present()} if manifest is here.get(path.name) else {}
    places = {file: where[meeting.me % len(where)] for file, where in verdict["places"].items()}
    return Manifest(path, manifest.said, places | own), verdict["why"]


def _offered(folder: Path, name: str | None, here: dict[str, Manifest]) -> str:
    """The checkpoints of this process's host, as others can read them."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.endswith(WRITING) or name not in (None, path.name):
            continue
        try:
            if not is_checkpoint(path):
                continue
            manifest = here[path.name] = read_manifest(path)
        except FileError:
            continue  # as if this host had lost it
        files = manifest.present()
        shared = world().size is not None
        found[path.name] = {
            "when": [manifest.saved_at, manifest.step],
            "files": files,
            "url": (server().url(path / MANIFEST) if shared else str(path / MANIFEST)).removesuffix(MANIFEST),
            "size": (path / MANIFEST).stat().st_size,
        }
    return json.dumps(found)


def _decided(folder: Path, each: Sequence[str], here: Mapping[str, Manifest]) -> str:
    """The newest of all that is whole; rank 0 reads one manifest after the other, from whoever has it."""
    rows = [json.loads(one) for one in each]
    names = {name: max(row[name]["when"] for row in rows if name in row) for row in rows for name in row}
    why: list[str] = []
    for name in sorted(names, key=lambda name: names[name], reverse=True):
        having = [row[name] for row in rows if name in row and row[name]["when"] == names[name]]
        places: dict[str, list[str]] = {}
        for row in having:
            for file in row["files"]:
                places.setdefault(file, []).append(row["url"] + file)
        source = [having[0]["url"] + MANIFEST, having[0]["size"]]
        manifest = _one_of(here, folder / name, names[name], source)
        lost = sorted(manifest.lost(places))
        if not lost:
            return json.dumps({"name": name, "when": names[name], "manifest": source, "places": places, "why": why})
        why.append(
            f"{name}: {some_of(lost)} of {len(manifest.files)} files {'is' if len(lost) == 1 else 'are'} on no host"
        )
    return json.dumps({"name": None, "why": why})


def _one_of(here: Mapping[str, Manifest], path: Path, when: list[int], source: list[Any]) -> Manifest:
    """This host's manifest if it is of that save, and not of an older one of the same name; else another's."""
    mine = here.get(path.name)
    if mine is not None and [mine.saved_at, mine.step] == when:
        return mine
    return manifest_of(path, _text_of(*source))


def _text_of(url: str, size: int) -> bytes:
    """The text of a manifest, of whichever host."""
    if not url.startswith(REMOTE):
        return Path(url).read_bytes()
    file, text = ServedFile(url), torch.empty(size, dtype=torch.uint8, device="cpu")
    try:
        file.box(0, (size,), ((0, size),), text)
    finally:
        file.close()
    return text.numpy().tobytes()
