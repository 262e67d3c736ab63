"""Values from files: read at once into a model that has memory; noted on one without, until it is global.

with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(config)
flow.load(folder, model)                       # reads names and shapes
step = flow.compile(model, ...)                # its first run reads, each rank its own part
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...placement import Placement
from ...placement.errors import FileError, SbpError, ShapeError, nearest
from ...sbp import Layout
from ..model.slots import TensorSlot, slots, tied
from ..model.values.noted_values import note_value
from ..model.values.same_values import ranks_of
from ..tensors.tensor import GlobalTensor
from .headers import file_tensors
from .names import spared_names, values_by_name
from .reading import Reading, check_dtype
from .values import FileValue

__all__ = ["FileValues", "load", "matched", "note_files", "read_now", "saved_slots"]

M = TypeVar("M", bound=nn.Module)
Group: TypeAlias = tuple[list[TensorSlot], tuple[FileValue, ...]]  # the slots of a value, and what the files have of it


@dataclass(frozen=True)
class FileValues:
    """A value that waits in files; of tied ones that of each name."""

    each: tuple[FileValue, ...]

    @property
    def file(self) -> str:
        return next(self.each[0].tensors()).file

    @property
    def said(self) -> object:
        return [(one.name, one.shape, one.dtype) for value in self.each for one in value.tensors()]

    def joined(self, others: Sequence["FileValues"]) -> "FileValues":
        return FileValues(tuple(dict.fromkeys(value for some in (self, *others) for value in some.each)))

    def check(self, slot: TensorSlot) -> None:
        _check_fit(slot, self.each)

    @contextmanager
    def reading(self, everybody: Placement | None) -> Iterator[Callable[[str, "FileValues", Layout], GlobalTensor]]:
        with Reading(everybody) as files:
            yield lambda full, values, of: files.shards(full, values.each, of)


def load(path: str | PathLike[str], model: M) -> M:
    """Give a model the values of a file *.safetensors, or of a folder as `save_pretrained` writes it. It is returned.

    What is on meta is noted, and read when the model becomes global: at a graph's first run, by `flow.nn.materialise`
    or by `flow.nn.to_global`. Each process then reads the elements that it keeps and no others. (The system reads whole
    pages: of a tensor split along its last dim, in rows shorter than 4 KiB a rank, each process has the disk read all
    rows, and keeps its columns.) What is plain is read whole, at once; of what is global already each process reads its
    part at once. Names and shapes must be those of the model's state_dict, but for what transformers itself renames and
    converts for its models; floats are converted to the model's dtype. Buffers that are in no state_dict are computed
    by the model's initialisers where they are on meta, as `flow.nn.materialise` does.

    An error in names, shapes, dtypes and files comes before anything changes. One in the reading itself comes on every
    rank: of a disk, or of a number that the model's dtype does not hold. A model on meta is then as it was, and another
    has some of the new values.
    """
    held = saved_slots(model)
    stored = file_tensors(path)
    groups = matched(path, model, held, values_by_name(model, stored, [slot.full for slot in held]))
    places = [group[0].value.placement for group, _ in groups if isinstance(group[0].value, GlobalTensor)]
    with Reading(ranks_of(places, places[0].type) if places else None) as files:
        read_now(groups, files)
    note_files(groups)
    return model


def saved_slots(model: nn.Module) -> list[TensorSlot]:
    """The slots of all that a state_dict of a model has, under each of its names."""
    if not isinstance(model, nn.Module):
        raise SbpError(
            f"flow.load: expected a module to give values to, found {type(model).__name__}\n"
            "  a graph's model is loaded itself: flow.load(path, model), before or after flow.compile(model, ...)"
        )
    held = [slot for slot in slots({"": model}) if slot.in_state_dict]
    lazy = next((slot.full for slot in held if is_lazy(slot.value)), None)
    if lazy is not None:
        raise SbpError(f"flow.load: {lazy} has no shape yet\n  run the lazy module on a batch first")
    return held


def note_files(groups: Sequence[Group]) -> None:
    """Have modules keep where the values are of what is on meta; what has been read is noted no more."""
    for group, values in groups:
        for slot in group:
            note_value(slot, FileValues(values) if slot.value.is_meta else None)


def matched(
    path: str | PathLike[str], model: nn.Module, held: list[TensorSlot], found: Mapping[str, FileValue]
) -> list[Group]:
    """Every value of a model with those of the files for it, checked."""
    groups = list(tied(held).values())
    names = {slot.full for slot in held}
    missing = {group[0].full for group in groups if not any(slot.full in found for slot in group)}
    computed = {slot.full for slot in held if slot.kind == "buffer"}  # only these may be made by initialisers instead
    missing -= spared_names(model, "missing", missing & computed)
    unexpected = {name for name in found if name not in names}
    unexpected -= spared_names(model, "unexpected", unexpected)
    if missing or unexpected:
        raise _other_names(path, model, sorted(missing), sorted(unexpected))
    told: list[Group] = []
    for group in groups:
        values = tuple(dict.fromkeys(found[slot.full] for slot in group if slot.full in found))
        if values:
            _check_fit(group[0], values)
            told.append((group, values))
    return told


def _check_fit(slot: TensorSlot, values: Sequence[FileValue]) -> None:
    shape = tuple(slot.value.shape)
    for value in values:
        if value.shape != shape:
            tensors = list(value.tensors())
            of = tensors[0].name + (f" and {len(tensors) - 1} more" if len(tensors) > 1 else "")
            raise ShapeError(
                f"flow.load: {slot.full} is {shape} in the model, and {value.shape} in the files\n"
                f"  there it is {of} in {tensors[0].file}\n"
                "  make the model with the config that the files were saved with"
            )
    check_dtype(slot.full, values, slot.value.dtype)


def _other_names(path: str | PathLike[str], model: nn.Module, missing: list[str], unexpected: list[str]) -> FileError:
    lines = []
    for what, names, others in (
        ("missing in the files", missing, unexpected),
        ("not in the model", unexpected, missing),
    ):
        if names:
            near = nearest(names[0], others)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"  {what}: {names[0]}{more}" + (f"; {' or '.join(near)} is near" if near else ""))
    return FileError(
        f"flow.load: {path} does not hold the weights of this {type(model).__name__}\n" + "\n".join(lines) + "\n"
        "  make the model that was saved, as by its config.json, or save the files anew from a model with these names"
    )


def read_now(groups: Sequence[Group], files: Reading) -> None:
    """Into the memory that values have, but for those on meta."""
    with torch.no_grad():
        for (first, *_), values in groups:
            value = first.value
            if value.is_meta:
                continue
            if not isinstance(value, GlobalTensor):
                files.fill_whole(first.full, values, value.detach())
                continue
            new = files.shards(first.full, values, value._layout, into=value)
            if new is not value and files.error is None:
                value.copy_(new)
