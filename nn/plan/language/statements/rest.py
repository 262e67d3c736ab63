"""The statement `[kind] PATH: signature`: how values lie between steps."""

from dataclasses import dataclass
from typing import Self

from torch.nn.parameter import is_lazy

from .....sbp import B, Partial, S, Sbp, Split
from ..axes import AxisEntries, signature_text
from ..statement import Assigning, LineFault, LineForm, Statement
from ..terms import Columns, Kinds, Signature, Token, kinds_of, kinds_text, path_of

__all__ = ["Rest"]


@dataclass(frozen=True)
class Rest(Statement):
    """The signature in which weights, gradients or optimizer states lie between steps."""

    path: str
    entries: AxisEntries
    kinds: Kinds = ("weights",)

    form = LineForm(
        heads=(":",),
        grammar='rest: PATH [PATH] ":" signature',
        examples={
            "states **: data=S(0)": ("**", (("data", S(0)),), ("states",)),
            "**: data=S(0)": ("**", (("data", S(0)),)),
            "{grads,states} h.[2:8].{up,down}: data=B, tensor=S(-1)": (
                "h.[2:8].{up,down}",
                (("data", B), ("tensor", S(-1))),
                ("grads", "states"),
            ),
            "model.layers.*.mlp.*: ?": ("model.layers.*.mlp.*", None),
            "h.0.weight: tensor=?": ("h.0.weight", (("tensor", None),)),
        },
        says="how weights (if no kind is said), gradients or states of the optimizer lie between steps; several kinds: "
        "`{grads,states} **: data=S(0)`",
        subject=("path", "kinds"),
    )

    @classmethod
    def read(cls, at: Columns, first: Token, second: Token | None, signature: Signature) -> Self:
        path = first if second is None else second
        kinds = kinds_of(None if second is None else first, at)
        at.update(signature[1])
        return cls(path_of(path, at), signature[0], kinds)

    def __str__(self) -> str:
        return f"{kinds_text(self.kinds)}{self.path}: {signature_text(self.entries)}"

    def assign(self, to: Assigning) -> None:
        names, many = to.met_parameters(self, self.path)
        to.reach[id(self)] = names
        for name in names:
            entries = self._fitting(to, name, many=many)
            for each in to.names_of(name):
                for kind in self.kinds:
                    to.pin(to.made.rests[kind].setdefault(each, {}), self, entries)
                if self.entries is None:
                    to.made.free[each] = self
                elif "weights" in self.kinds:
                    to.made.free.pop(each, None)
            to.fold(name.rpartition(".")[0], self.entries)

    def _fitting(self, to: Assigning, name: str, *, many: bool) -> AxisEntries:
        """The line as it is for one parameter.

        If it is meant for many, a parameter without this dim is left to be chosen, such as the bias of a split product,
        and one without dims is whole."""
        value = to.parameters[name]
        if self.entries is None or is_lazy(value):
            return self.entries
        found: list[tuple[str, Sbp | None]] = []
        for axis, entry in self.entries:
            if isinstance(entry, Partial):
                what = f"{name} cannot rest as addends\n  write {axis}=B, or {axis}=S(0) to cut it"
                raise LineFault(self, f"axis:{axis}", what)
            if isinstance(entry, Split) and not -value.ndim <= entry.dim < value.ndim:
                if not many:
                    dims = f"dims 0 to {value.ndim - 1}" if value.ndim > 1 else f"{value.ndim or 'no'} dim"
                    what = f"{entry!r} of {name} {tuple(value.shape)}, which has {dims}"
                    raise LineFault(self, f"axis:{axis}", what)
                if value.ndim:
                    found.append((axis, None))
                continue
            found.append((axis, entry))
        return tuple(found)
