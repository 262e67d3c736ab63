"""The statement `recompute`: modules that the backward runs again."""

from dataclasses import dataclass, replace
from typing import Any, Self

from torch import nn

from ....model.path_syntax import TextFault
from ....model.paths import met
from ....model.recompute.kept_ops import EVERY_SECOND
from ....model.recompute.recomputation import recompute
from ..axes import Grids
from ..statement import Assigning, LineForm, Statement
from ..terms import Columns, Token, column, once, path_of

__all__ = ["Recompute"]

CORE = ".core"


@dataclass(frozen=True)
class Recompute(Statement):
    """Modules that the backward runs again: all of them, all but the ops that are kept, or some ops alone."""

    path: str
    keep: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    form = LineForm(
        heads=("recompute",),
        grammar=r"""
recompute: _RECOMPUTE PATH [KEEP kept] [ONLY ops]
kept: (OP | second) ("," (OP | second))* ","?
second: _EVERY _SECOND OP
ops: OP ("," OP)* ","?
OP: /[^\W\d][\w.:]*/
KEEP.2: /keep(?!\S)/i
ONLY.2: /only(?!\S)/i
_EVERY.2: /every(?!\S)/i
_SECOND.2: /second(?!\S)/i
""",
        words={"OP": "an op"},
        examples={
            "recompute model.layers.* keep mm, attention": ("model.layers.*", ("mm", "attention")),
            "recompute h.*": ("h.*",),
            "recompute layers.* keep attention, every second mm": ("layers.*", ("attention", "every second mm")),
            "recompute h.[0:63] keep mm": ("h.[0:63]", ("mm",)),
            "recompute h.* only gelu": ("h.*", (), ("gelu",)),
        },
        says="what the backward runs again: all, all but some ops (`every second mm`: but one of two), or `only` some",
    )

    @classmethod
    def read(cls, at: Columns, path: Token, *ops: Any) -> Self:
        _, keep, also, only = ops
        if keep and only:
            what = "keep and only stand together"
            raise TextFault(column(also), what, "say which ops are kept, or which alone run again")
        kept = [
            (f"{EVERY_SECOND}{each[0]}", each[0]) if isinstance(each, tuple) else (str(each), each)
            for each in keep or ()
        ]
        for _, token in (*kept, *((str(token), token) for token in only or ())):
            once(at, f"op:{token}", token, f"the op {str(token)!r}")
        return cls(path_of(path, at), tuple(name for name, _ in kept), tuple(map(str, only or ())))

    def __str__(self) -> str:
        return (
            f"recompute {self.path}"
            + (f" keep {', '.join(self.keep)}" if self.keep else "")
            + (f" only {', '.join(self.only)}" if self.only else "")
        )

    def assign(self, to: Assigning) -> None:
        """Modules, or their `core`: what attention makes of queries, keys and values, which in most is no module."""
        path, only = self.path, self.only
        if path.endswith(CORE) and not met(path, to.modules):
            path, only = path.removesuffix(CORE), ("attention",)
        modules = to.met_modules(self, path)
        to.mark(replace(self, path=path, only=only), modules)

    def note(self, model: nn.Module, names: list[str], grids: Grids) -> None:
        recompute([model.get_submodule(name) for name in names], keep=self.keep, only=self.only)
