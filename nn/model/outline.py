"""A model as text: its modules with their placements, its parameters with signatures and sizes.

What repeats is written once: (0-11) stands for twelve modules of a list that read the same.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...boxing.figures import volume
from ...boxing.html import paragraph, table
from ...placement import Placement
from ...placement.errors import SbpflowError
from ...sbp import Layout, SbpLike, layout
from ...sbp.text import on_all_axes
from ..eager_parts.marks import EagerForward
from ..tensors.tensor import GlobalTensor
from .annotate import KINDS, Hint, hints_of, placement_of
from .cast import Types, short, types_of
from .flows import flows_said
from .inside import uses_of
from .offload import saved_offloads, state_offloads
from .recompute.recomputation import Recomputing
from .slots import joined_path

__all__ = ["Annotations", "OutlineRow", "annotations"]

HEAD = ("", "shape", "dtype", "signature", "on a rank", "in all")


@dataclass(frozen=True)
class OutlineRow:
    """A module, or a tensor that it holds. `cells` are shape, dtype, signature, bytes of a rank and bytes in all."""

    level: int
    label: str
    cells: tuple[str, ...] = ()


@dataclass(frozen=True)
class Annotations:
    """The annotations of a model; prints as a table. Modules that hold nothing and are placed nowhere are left out."""

    lines: tuple[OutlineRow, ...]
    total: str

    def __str__(self) -> str:
        table = [("  " * line.level + line.label, *line.cells) for line in self.lines]
        wide = [max(len(row[c]) for row in (HEAD, *table) if len(row) > 1) for c in range(len(HEAD))]
        text = [
            row[0]
            if len(row) == 1
            else "  ".join(
                cell.rjust(n) if c > 3 else cell.ljust(n) for c, (cell, n) in enumerate(zip(row, wide, strict=True))
            ).rstrip()
            for row in (HEAD, *table)
        ]
        return "\n".join([*text, self.total])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [("  " * line.level + line.label, *line.cells) for line in self.lines]
        return table(HEAD, rows, range(4, len(HEAD))) + paragraph(self.total)


def annotations(model: nn.Module) -> Annotations:
    """The modules of a model with what was said of them, or with how they lie where they are global.

    A hint is shown as `hint S(0)`, those for gradients and states as `grads S(0)` and `states S(0)`, and a cast as
    `float32 to bf16, states fp32`; the bytes on a rank are those of the rank that holds most.
    """
    outline = _Outline(model)
    return Annotations(tuple(outline.lines(model, "", None, 0)), outline.total())


class _Outline:
    def __init__(self, model: nn.Module) -> None:
        self.placements = placement_of({"": model})
        self.hints = hints_of({"": model})
        self.rests = {kind: hints_of({"": model}, kind) for kind in KINDS if kind != "weights"}
        self.types = types_of({"": model})
        self.uses = uses_of({"": model})
        self.offloads, self.saved = state_offloads({"": model}), saved_offloads({"": model})
        self.names: dict[int, str] = {}  # of tensors that were seen, to know those that are tied
        self.known: list[tuple[Tensor, Layout | None]] = []

    def lines(self, module: nn.Module, path: str, outer: Placement | None, level: int) -> list[OutlineRow]:
        where = self.placements.get(path) or _common(module)
        label = type(module).__name__ + (f"  on {where}" if where is not None and where is not outer else "")
        uses = [
            f"use {use.use} over {', '.join(map(str, use.over))}" for use in self.uses.get(path, ()) if not use.part
        ]
        saved = [f"saved on {self.saved[path].to} ahead {self.saved[path].ahead}"] if path in self.saved else []
        label = "  ".join([label, *flows_said(module), *_again(module), *uses, *saved])
        found = [OutlineRow(level, label)]
        for held, kind in ((module._parameters, ""), (module._buffers, " (buffer)")):
            for name, value in held.items():
                if value is not None:
                    full = joined_path(path, name)
                    found.append(OutlineRow(level + 1, name + kind, self.cells(full, value, where)))
        inner = []
        for name, child in module._modules.items():
            if child is not None:
                lines = self.lines(child, joined_path(path, name), where or outer, level + 1)
                if len(lines) > 1 or "  " in lines[0].label:
                    inner.append((name, lines))
        return found + _folded(inner)

    def cells(self, full: str, value: Tensor, where: Placement | None) -> tuple[str, ...]:
        if is_lazy(value):
            return ("not known yet", _short(value.dtype), self.hint(full), "", "")
        first = self.names.setdefault(id(value), full)
        shape, dtype = str(tuple(value.shape)), _short(value.dtype) + _cast(value.dtype, self.types.get(full))
        if first != full:
            return (shape, dtype, f"is {first}", "", "")
        of = self.lies(full, value, where)
        self.known.append((value, of))
        part = volume(max(map(_bytes_of(of), of.placement.flat))) if of else ""
        if isinstance(value, GlobalTensor):
            elsewhere = f" on {value.placement}" if value.placement is not where else ""
            more = "".join(f"; {said}" for said in self.rest(full))
            return (shape, dtype, value._layout._signature + elsewhere + more, part, volume(value.nbytes))
        return (shape, dtype, self.hint(full), part, volume(value.nbytes))

    def hint(self, full: str) -> str:
        said = self.hints.get(full)
        return "; ".join([*([] if said is None else [f"hint {_hint(said)}"]), *self.rest(full)])

    def rest(self, full: str) -> list[str]:
        """The words on gradients and states of a parameter."""
        said = [f"{kind} {_hint(hints[full])}" for kind, hints in self.rests.items() if full in hints]
        return [*said, *([f"states on {self.offloads[full]}"] if full in self.offloads else [])]

    def lies(self, full: str, value: Tensor, where: Placement | None) -> Layout | None:
        """How it lies where that is known: a hint that does not fit its placement is shown, but has no size."""
        if isinstance(value, GlobalTensor):
            return value._layout
        said = self.hints.get(full)
        if where is None or said is None or (isinstance(said, dict) and None in said.values()):
            return None
        try:
            return layout(where, on_all_axes(cast(SbpLike, said), where), tuple(value.shape), value.dtype)
        except SbpflowError:
            return None

    def total(self) -> str:
        parameters = [value for value, _ in self.known if isinstance(value, nn.Parameter)]
        numbers = sum(value.numel() for value in parameters)
        text = f"{numbers:,} parameters in {len(parameters)} tensors, {volume(sum(p.nbytes for p in parameters))}"
        held: dict[int, int] = {}
        for _, of in self.known:
            for rank in of.placement.flat if of else ():
                held[rank] = held.get(rank, 0) + _bytes_of(of)(rank)
        unknown = sum(of is None for _, of in self.known)
        if held:
            text += f"; at most {volume(max(held.values()))} on a rank"
            text += f", without {unknown} of which that is not known" if unknown else ""
        return text + ("; on meta, without values" if parameters and all(p.is_meta for p in parameters) else "")


def _hint(said: Hint) -> str:
    if isinstance(said, dict):
        return ", ".join(f"{axis}: {'chosen' if entry is None else repr(entry)}" for axis, entry in said.items())
    return repr(said)


def _common(module: nn.Module) -> Placement | None:
    """The placement of all global tensors in a module, if it is one."""
    held = {v.placement for v in (*module.parameters(), *module.buffers()) if isinstance(v, GlobalTensor)}
    return held.pop() if len(held) == 1 else None


def _bytes_of(of: Layout | None) -> Any:
    return lambda rank: torch.Size(of.local_shape(rank)).numel() * of.dtype.itemsize if of else 0


def _again(module: nn.Module) -> list[str]:
    """Whether and how it is run again, or runs eagerly."""
    said = vars(module).get("forward")
    return [str(said)] if isinstance(said, Recomputing | EagerForward) else []


def _cast(dtype: torch.dtype, types: Types | None) -> str:
    """The types that are said of a tensor, as `to bf16, grads fp32`, where they differ from what it is of."""
    if types is None:
        return ""
    apart = {"grads": types.grads, "states": types.states}
    said = [f"{kind} {short(of)}" for kind, of in apart.items() if of is not types.weights]
    head = f" to {short(types.weights)}" if types.weights is not dtype else ""
    return ", ".join([head, *said]) if said else head


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _folded(inner: list[tuple[str, list[OutlineRow]]]) -> list[OutlineRow]:
    """Children one after the other, those with numbers that follow each other and read the same as one."""
    found = []
    numbered = [(name, int(name) - n if name.isdigit() else -n - 1, lines) for n, (name, lines) in enumerate(inner)]
    for (_, (head, *rest)), same in groupby(numbered, key=lambda child: (child[1], child[2])):
        names = [name for name, _, _ in same]
        label = names[0] if len(names) == 1 else f"({names[0]}-{names[-1]})"
        found += [OutlineRow(head.level, f"{label}: {head.label}"), *rest]
    return found
