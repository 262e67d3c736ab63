"""Checkpoints in the memory of hosts: each host keeps what its ranks hold, and a copy of what its neighbours do.

    /ram/run/step-10/ on host 0           on host 1            on host 2
        00000-000  of its own             00001-000            00002-000
        00002-000  a copy                 00000-000            00001-000
        manifest.json                     manifest.json        manifest.json

Whichever host is lost, its part is on the next. A copy is the file as it was written, taken over a socket from the
process that wrote it, so that nothing waits for it in the main thread and training's messages go on.

All of it is written aside on every host; then every host gives it its name; then older ones go. So at each moment some
step is whole over the hosts, whoever ends.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...placement.network.hosts import Hosts
from ..files.served import ServedFile, server
from .commit import (
    SLOW,
    begin_folder,
    check_alike,
    dumped,
    gathered_manifest,
    raise_told,
    renamed,
    write_manifest,
    written_files,
)
from .content import Content
from .folders.ownership import removed, synced
from .manifest import MANIFEST, WRITING
from .meeting import Meeting
from .newest import tidied
from .writing import FilePlan

__all__ = ["Files", "committed_by_hosts"]

BLOCK = 32 << 20  # bytes that are taken at once
Files = Mapping[tuple[int, ...], Sequence[FilePlan]]  # by which hosts behind it in the ring take a copy


def committed_by_hosts(
    path: Path, content: Content, files: Files, hosts: Hosts, keep: int | None, meeting: Meeting
) -> None:
    """Write what this process has to, take the copies that it has to, and have the checkpoint stand when all have."""
    aside, first = path.with_name(path.name + WRITING), hosts.is_first(meeting.me)
    try:
        meeting.together(lambda: begin_folder(path, aside) if first else None)
        plans = [file for several in files.values() for file in several]
        said = dumped(path=path.name, alike=content.alike, plain=content.plain, size=sum(file.size for file in plans))
        meeting.limit += int(meeting.agree(said, decide=check_alike)) / SLOW

        def wrote() -> str:
            urls = [[server().url(aside / f.name), f.size, lack] for lack, several in files.items() for f in several]
            return dumped(urls=urls, rest=json.loads(written_files(aside, content, plans)))

        verdict = meeting.together(wrote, lambda each: _gathered(aside, content, hosts, each))
        meeting.together(lambda: _copy(aside, hosts, meeting.me, json.loads(verdict)))
        meeting.together(lambda: renamed(aside, path) if first else None)
        if first and keep is not None:
            tidied(path, keep, hosts=True)
        meeting.end()
    except Exception as failure:
        if first:
            removed(aside)
        raise_told(failure, path)


def _gathered(aside: Path, content: Content, hosts: Hosts, each: Sequence[str]) -> str:
    """The manifest, on the first process's host; where it and the files are that others take."""
    said = [json.loads(one) for one in each]
    manifest = gathered_manifest(content, [one["rest"] for one in said], hosts=list(hosts.numbers))
    write_manifest(aside, manifest)
    size = (aside / MANIFEST).stat().st_size
    urls = [[process, *one] for process, several in enumerate(said) for one in several["urls"]]
    return dumped(manifest=[server().url(aside / MANIFEST) if hosts.count > 1 else "", size], urls=urls)


def _copy(aside: Path, hosts: Hosts, me: int, said: Mapping[str, Any]) -> None:
    """Take this process's share of what its host is to have of others, and its host's manifest."""
    here = hosts.numbers[me]
    wanted = [
        (size, url)
        for process, url, size, lack in said["urls"]
        if here in [hosts.taken(hosts.numbers[process], by=by) for by in lack]
    ]
    had = dict.fromkeys(hosts.members(here), 0)
    for size, url in sorted(wanted, reverse=True):
        least = min(had, key=lambda process: (had[process], process))
        had[least] += size
        if least == me:
            _take(url, size, aside)
    if hosts.is_first(me) and here != hosts.numbers[0]:
        _take(said["manifest"][0], said["manifest"][1], aside)
    synced(aside)


def _take(url: str, size: int, folder: Path) -> None:
    """A whole file of another process."""
    file = ServedFile(url)
    try:
        with (folder / Path(url).name).open("xb") as out:
            for at in range(0, size, BLOCK):
                block = torch.empty(min(BLOCK, size - at), dtype=torch.uint8, device="cpu")
                file.box(0, (size,), ((at, at + len(block)),), block)
                out.write(memoryview(block.numpy()))  # type: ignore[arg-type]
    finally:
        file.close()
