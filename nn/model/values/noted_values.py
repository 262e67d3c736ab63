"""Values that wait in files, say, until a model that has no memory becomes global: then each process reads its part.

Modules keep a note of them, like those of `place` and `shard`: copies and pickles have it, and nothing else of a model
changes. It goes when the values are there.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self, TypeAlias
from zlib import crc32

from ....placement import Placement
from ....placement.errors import FileError, SbpError
from ....sbp import Layout
from ...tensors.agreement import told
from ...tensors.tensor import GlobalTensor
from ..annotate import note
from ..slots import TensorSlot
from .same_values import ranks_of

__all__ = ["WaitingValue", "check_same_waiting", "forget_values", "note_value", "read_values", "waiting_values"]

VALUES = "_sbpflow_files"  # of what the module itself holds, by its short names


ReadTogether: TypeAlias = Callable[
    [str, Any, Layout], GlobalTensor
]  # of a name, a value that waits, and how it is to lie


class WaitingValue(Protocol):
    """A value that waits for a tensor, perhaps under several names that are tied."""

    @property
    def file(self) -> str:
        """The file in which it waits, for errors."""

    @property
    def said(self) -> object:
        """All that ranks must have alike of it."""

    def joined(self, others: Sequence[Any]) -> Self:
        """This and what other slots of the same tensor wait for, each once."""

    def check(self, slot: TensorSlot) -> None:
        """Refuse a tensor of another shape, or of numbers of another kind."""

    def reading(self, everybody: Placement | None) -> AbstractContextManager[ReadTogether]:
        """Ranks read together for a while."""


def note_value(slot: TensorSlot, value: WaitingValue | None) -> None:
    """Have a module keep what a tensor of it waits for; None takes that back."""
    kept: dict[str, WaitingValue] = {**slot.module.__dict__.get(VALUES, {})}
    kept.pop(slot.name, None)
    note(slot.module, VALUES, (kept if value is None else {**kept, slot.name: value}) or None)


def waiting_values(groups: Mapping[int, list[TensorSlot]]) -> dict[int, WaitingValue]:
    """The values that slots wait for, by the ids of their tensors; slots that wait for none are left out."""
    found: dict[int, WaitingValue] = {}
    for key, group in groups.items():
        tables: list[Mapping[str, WaitingValue]] = [slot.module.__dict__.get(VALUES, {}) for slot in group]
        noted = [table[slot.name] for slot, table in zip(group, tables, strict=True) if slot.name in table]
        if not noted:
            continue
        value = noted[0].joined(noted[1:])
        if not group[0].value.is_meta:
            raise SbpError(
                f"{group[0].full} is to be read from {value.file}, and has got other memory since\n"
                f"  it is on {group[0].value.device}, perhaps by to_empty() or load_state_dict(assign=True)\n"
                "  call flow.load(path, model) again: it reads into the memory that is there now"
            )
        value.check(group[0])
        found[key] = value
    return found


def check_same_waiting(values: Mapping[str, WaitingValue], everybody: Placement) -> None:
    """Refuse ranks that would read, by name, other tensors than others do. Of each tensor they compare what the header
    says; its file may lie elsewhere on each host."""
    said = [f"{full} {value.said}" for full, value in values.items()]
    mine = crc32("\n".join(said).encode())
    rows = told([mine], everybody, "same files") or []
    for rank, (other,) in zip(everybody.flat, rows, strict=False):
        if other != rows[0][0]:
            here = f"{len(said)} values, such as {said[0].partition(' ')[0]}" if said else "no values"
            raise FileError(
                f"flow.load: ranks {everybody.flat[0]} and {rank} are to read different values from files\n"
                f"  noted here: {here}\n"
                "  call flow.load with the same weights on every rank, before the model becomes global"
            )


def read_values(
    groups: Mapping[int, list[TensorSlot]], values: Mapping[int, WaitingValue], lies: Mapping[int, Layout], kind: str
) -> dict[int, GlobalTensor]:
    """Values of slots that wait, by their ids, as they are to lie: each process reads its part."""
    if not values:
        return {}
    with next(iter(values.values())).reading(ranks_of({lies[key].placement for key in values}, kind)) as read:
        return {key: read(groups[key][0].full, value, lies[key]) for key, value in values.items()}


def forget_values(group: Sequence[TensorSlot]) -> None:
    """Take the note back, of a value that is there."""
    for slot in group:
        if slot.name in slot.module.__dict__.get(VALUES, {}):
            note_value(slot, None)
