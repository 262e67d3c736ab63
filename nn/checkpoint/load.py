"""`flow.load`: values of files for a model; of a checkpoint also for its optimizers and what else a run has.

All is checked on every rank before anything changes: names, shapes, dtypes, files. Then each process reads its part. A
model on meta notes where its values are, as it does with other files, and so does the optimizer of one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...placement import Placement
from ...placement.errors import FileError, SbpError, ShapeError, some_of
from ..files import load as plain
from ..files.held import me
from ..files.reading import Reading, check_dtype
from ..files.values import FileValue, Pieced
from ..graph.optimizer.loss_scale import go_on
from ..model.values.noted_states import note_states
from ..tensors.tensor import GlobalTensor
from .content import extra_state_modules, keeps_state
from .entries import everybody, processes
from .folders.manifest_fields import ODD
from .folders.ownership import is_own
from .host_search import found_on_hosts
from .manifest import MANIFEST, REPLACED, WRITING, Manifest, is_checkpoint, read_manifest
from .meeting import Meeting
from .random_state import fits, restore
from .saving import finished
from .states.loaded_groups import check_optimizers, put_options
from .states.loaded_states import LoadedStates, wide_weight
from .states.owners import HeldParameter, held_by, listed
from .trees import Json, decoded, encoded

__all__ = ["load"]

M = TypeVar("M", bound=nn.Module)


def load(
    path: str | PathLike[str],
    model: M,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    extra: dict[str, Any] | None = None,
    neighbours: int = 0,
) -> M:
    """Give a model the values of files, and return it. The files are a checkpoint of `flow.save`, a file *.safetensors,
    or a folder as `save_pretrained` writes it.

    The model may be plain, global or compiled, before or after its first step, in any plan. What is on meta is noted,
    and read when the model becomes global: at a graph's first run, by `flow.nn.materialise` or by `flow.nn.to_global`.
    Each process then reads the elements that it keeps and no others. (The system reads whole pages: of a tensor split
    along its last dim, in rows shorter than 4 KiB a rank, each process has the disk read all rows, and keeps its
    columns.) What is plain is read whole, at once; of what is global already each process reads its part at once. Names
    and shapes must be those of the model's state_dict, but for what transformers itself renames and converts for its
    models; floats are converted to the model's dtype. Buffers that are in no state_dict are computed by the model's
    initialisers where they are on meta, as `flow.nn.materialise` does.

    Of a checkpoint `optimizer`, one or a list, gets its states and the numbers of its groups, and `extra` by the names
    they were saved under: what has load_state_dict is given its state, a tensor its values, and numbers and texts are
    put into the dict itself. The random state is that of the save. Every process calls it.

    What was saved with `neighbours` is loaded with it: each process reads what is on its host, and only what it needs
    of the rest from hosts that have it, at once or at the first step. All of them still run until then.

    An error in names, shapes, dtypes and files comes before anything changes. One in the reading itself comes on every
    rank: of a disk, of numbers that are not those that were written, or that the model's dtype does not hold. A model
    on meta is then as it was, and another has some of the new values.
    """
    finished()
    folder = Path(path).absolute()
    if not is_checkpoint(folder) and not neighbours:
        _refuse_others(folder, optimizer, extra)
        return plain.load(path, model)
    manifest = _on_hosts(folder) if neighbours else None
    meeting = Meeting("flow.load")
    try:
        job = _checked(manifest or read_manifest(folder).check(), model, listed(optimizer, "flow.load"), extra)
    except Exception as error:
        meeting.agree(error=error)
        raise
    same = json.dumps(job.manifest.said, sort_keys=True).encode()
    meeting.agree(str(crc32(same)), decide=_same)
    job.run()
    return model


def _on_hosts(folder: Path) -> Manifest:
    found, why = found_on_hosts("flow.load", folder.parent, folder.name)
    if found is None:
        raise FileError(
            f"flow.load: the hosts have not all of {folder}\n  {' '.join(why) or 'it is on none of them'}\n"
            "  flow.newest(folder, neighbours=1) names the newest of which they have all; or load one from a disk"
        )
    return found


def _same(each: Sequence[str]) -> str:
    other = next((rank for rank, said in enumerate(each) if said != each[0]), None)
    if other is not None:
        raise FileError(
            f"flow.load: ranks 0 and {other} are to load different checkpoints\n"
            "  have one rank say which, or let all look at the same folder"
        )
    return ""


def _refuse_others(folder: Path, optimizer: object, extra: object) -> None:
    """An error where a checkpoint is wanted, and there is none that is whole."""
    files = "[0-9][0-9][0-9][0-9][0-9]-[0-9][0-9][0-9].safetensors"
    broken = folder.is_dir() and (is_own(folder) or any(folder.glob(files)))
    if broken or folder.name.endswith((WRITING, REPLACED)):
        raise FileError(
            f"flow.load: {folder} has no {MANIFEST}: it was not written to its end\n"
            "  flow.newest(folder) names the newest checkpoint that was"
        )
    if optimizer is not None or extra is not None:
        what = "optimizer=" if optimizer is not None else "extra="
        raise FileError(
            f"flow.load: {folder} is no checkpoint of flow.save, and {what} is given\n"
            f"  {'it has no ' + MANIFEST if folder.exists() else 'it is not there'}\n"
            f"  leave {what} out to load weights alone, or load the folder of a checkpoint"
        )


@dataclass(frozen=True, eq=False)
class _Job:
    """All that is to be done, after it was checked."""

    manifest: Manifest
    model: nn.Module
    groups: list[plain.Group]
    optimizers: list[tuple[Optimizer, LoadedStates, list[dict[str, Json]], Mapping[str, Any]]]
    extra: dict[str, Any]

    def run(self) -> None:
        said, tensors = self.manifest.said, self.manifest.tensors
        with Reading(self._everybody() if processes() > 1 else None) as files:
            take = _taking(tensors, files)
            random = decoded(said["random"][me() % len(said["random"])], take)
            if files.error is None:
                files.error = self._wrong_random(random)
            plain.read_now(self.groups, files)
            now = [each for each in self.optimizers if not _on_meta(each[0])]
            for optimizer, states, *_ in now:
                states.read(optimizer, files)
            options = [[decoded(tree, take) for tree in each[2]] for each in self.optimizers]
            others = [decoded(each[3]["others"], take) for each in self.optimizers]
            extra = {name: self._extra(name, value, files) for name, value in self.extra.items()}
            modules = {path: decoded(tree, take) for path, tree in said["modules"].items()}
        plain.note_files(self.groups)
        for each, groups, more in zip(self.optimizers, options, others, strict=True):
            self._settle(each, groups, more)
        for path, module in extra_state_modules(self.model).items():
            if path in modules:
                module.set_extra_state(modules[path])
        for name, value in extra.items():
            _put_extra(self.extra, name, value)
        restore(random)

    def _wrong_random(self, random: Any) -> FileError | None:
        try:
            fits(random)
        except ODD as error:
            return FileError(
                f"flow.load: {self.manifest.folder / MANIFEST} has a random state that no generator takes\n"
                f"  its random.{me()}: {type(error).__name__}: {error}\n"
                "  load another checkpoint; flow.newest(folder) names the newest that is whole"
            )
        return None

    def _everybody(self) -> Placement:
        """All processes, on the kind of device that they talk by anyway."""
        values = [group[0].value for group, _ in self.groups]
        return everybody(next((x.placement.type for x in values if isinstance(x, GlobalTensor)), "cpu"))

    def _settle(self, each: Any, groups: list[dict[str, Any]], others: Mapping[Any, Any]) -> None:
        optimizer, states, _, said = each
        waits = _on_meta(optimizer)
        note_states(optimizer, states if waits else None)
        if waits:
            optimizer.state.clear()
        for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
            del optimizer.state[key]
        optimizer.state.update(others)
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            put_options(group, options)
        if said["scale"] is not None:
            go_on(optimizer, said["scale"]["value"], said["scale"]["good"])

    def _extra(self, name: str, value: Any, files: Reading) -> Any:
        """The value that was saved, with global tensors where there are such now."""
        there: dict[str, Tensor] = {}
        kept = value.state_dict() if keeps_state(value) else value
        try:
            encoded(kept, f"extra.{name}", there.__setitem__)
        except (SbpError, TypeError):
            there = {}  # what is there now is of no kind that is saved, and is replaced
        take = _taking(self.manifest.tensors, files, there)
        return decoded(self.manifest.said["extra"][name], take)


def _put_extra(extra: dict[str, Any], name: str, value: Any) -> None:
    held = extra[name]
    if keeps_state(held):
        held.load_state_dict(value)
    elif isinstance(held, Tensor) and isinstance(value, Tensor):
        with torch.no_grad():
            held.copy_(value)
    else:
        extra[name] = value


def _taking(tensors: Mapping[str, Pieced], files: Reading, there: Mapping[str, Tensor] = {}) -> Callable[[str], Tensor]:
    """Read a tensor by its name: as one lies that is there already, else whole."""

    def take(name: str) -> Tensor:
        of, beside = tensors[name], there.get(name)
        if isinstance(beside, GlobalTensor) and tuple(beside.shape) == of.shape:
            return files.shards(name, (of,), beside._layout.with_dtype(of.dtype))
        made = torch.empty(of.shape, dtype=of.dtype, device="cpu")
        files.fill_whole(name, (of,), made)
        return made

    return take


def _on_meta(optimizer: Optimizer) -> bool:
    return any(value.is_meta for group in optimizer.param_groups for value in group["params"])


def _checked(manifest: Manifest, model: nn.Module, optimizers: list[Optimizer], extra: dict[str, Any] | None) -> _Job:
    folder = manifest.folder
    said, tensors = manifest.said, manifest.tensors
    known: dict[str, str] = dict(said["tied"])  # names of tied values, by their others
    held = plain.saved_slots(model)
    groups = plain.matched(folder, model, held, _weights(tensors, known, held))
    lost = [path for path in extra_state_modules(model) if path not in said["modules"]]
    if lost:
        raise FileError(
            f"flow.load: {folder} has no extra state of {some_of(lost)}\n"
            "  it was saved of a model whose modules have none\n  make the model that was saved"
        )
    owners = held_by(optimizers, model, "flow.load")
    options = check_optimizers(folder, said["optimizers"], optimizers, owners, known) if optimizers else []
    of_names = {name: each for each in said["optimizers"] for group in each["groups"] for name in group["names"]}
    jobs = [
        (each, _states(manifest, mine, known), wanted, of_names[known.get(mine[0].name, mine[0].name)])
        for each, mine, wanted in zip(optimizers, owners, options, strict=True)
    ]
    return _Job(manifest, model, groups, jobs, _wanted(folder, said["extra"], tensors, extra))


def _weights(tensors: Mapping[str, Pieced], known: Mapping[str, str], held: Sequence[Any]) -> dict[str, FileValue]:
    """The values that the model's names stand for: exact ones for what has more digits than rested in the weights."""
    prefix = "model."
    names = {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
    dtypes = {slot.full: slot.value.dtype for slot in held}
    found: dict[str, FileValue] = {}
    for name, first in {**{name: name for name in names}, **known}.items():
        rests, exact = tensors[prefix + first], wide_weight(tensors, first)
        wanted = dtypes.get(name, rests.dtype)
        more = wanted is not rests.dtype and wanted.itemsize > rests.dtype.itemsize
        if name in dtypes or name in names:
            found[name] = exact if more else rests
    return found


def _states(manifest: Manifest, held: Sequence[HeldParameter], known: Mapping[str, str]) -> LoadedStates:
    named = [(each, known.get(each.name, each.name)) for each in held]
    return LoadedStates.of(manifest.tensors, manifest.said["states"], named)


def _wanted(
    folder: Path, saved: Mapping[str, Json], tensors: Mapping[str, Pieced], extra: dict[str, Any] | None
) -> dict[str, Any]:
    missing = [name for name in extra or {} if name not in saved]
    if missing:
        raise FileError(
            f"flow.load: {folder} has no extra {some_of(missing)}\n"
            f"  it has {some_of(sorted(saved)) or 'none'}\n  pass those, or leave it out"
        )
    for name, held in (extra or {}).items():
        of = tensors.get(f"extra.{name}") if saved[name] == {"$tensor": f"extra.{name}"} else None
        if of is None or not isinstance(held, Tensor):
            continue
        if of.shape != tuple(held.shape):
            raise ShapeError(
                f"flow.load: extra {name} is {tuple(held.shape)}, and {of.shape} in {folder}\n"
                f"  give a tensor of that shape, or {name}=None to get the one that was saved"
            )
        check_dtype(f"extra {name}", (of,), held.dtype)
    return {} if extra is None else extra
