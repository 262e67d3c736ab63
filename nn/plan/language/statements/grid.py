"""The statement `grid`: the ranks on which a step runs."""

from dataclasses import dataclass
from typing import Any, Self

from .....placement.errors import PlacementError
from .....placement.ranks import check_type
from ....model.path_syntax import TextFault
from ..axes import GridAxis
from ..statement import LineForm, Statement
from ..terms import Columns, Token, axis_of, column, known_word, whole

__all__ = ["Grid"]


@dataclass(frozen=True)
class Grid(Statement):
    """The placement: a type of device, or what the run has, and axes; or a placement's own text."""

    axes: tuple[GridAxis, ...] = ()
    type: str | None = None
    placement: str | None = None

    form = LineForm(
        heads=("grid",),
        grammar=r"""
grid: _GRID PLACEMENT
    | _GRID [DEVICE] "(" axis ("," axis)* ","? ")"
axis: NAME "=" (INT | STAR | HOLE) ["folds"i NAME]
_GRID.2: /grid(?![^\s(])(?!\s*(:|->|<-))/i
PLACEMENT.2: /[^\s:,()\[\]=]+\s*:.*/
DEVICE: /[^\W\d]\w*/
STAR: "*"
""",
        words={"DEVICE": "a type of device", "PLACEMENT": "a placement", "STAR": "'*'"},
        examples={
            "grid cuda (data=2, tensor=4)": ((GridAxis("data", 2), GridAxis("tensor", 4)), "cuda"),
            "grid (pipe=8, data=*, tensor=?)": ((GridAxis("pipe", 8), GridAxis("data", "*"), GridAxis("tensor", "?")),),
            "grid (data=8, expert=4 folds data)": ((GridAxis("data", 8), GridAxis("expert", 4, "data")),),
            "grid cuda:[0-7] as (data=2, tensor=4)": ((), None, "cuda:[0-7] as (data=2, tensor=4)"),
        },
        says="the ranks: `data=*` are those that the launcher has left, `data=?` the planner's; `expert=4 folds data` "
        "is the same ranks as `data` once more. Also a whole placement, `grid cuda:[0-7] as (data=2, tensor=4)`",
        subject=(),
    )

    @classmethod
    def read(cls, at: Columns, first: Token | None, *axes: tuple[Token, Token, Token | None]) -> Self:
        if first is not None and not axes:
            return cls._placed(at, first)
        device = first
        if device is not None:
            at["type"] = column(device)
            try:
                check_type(device.lower())
            except PlacementError as error:
                message, *_, fix = str(error).split("\n")
                raise TextFault(column(device), message, fix.strip()) from None
        at["axes"] = column(axes[0][0])
        made = dict[str, GridAxis]()
        for name, size, folds in axes:
            if str(name) in made:
                raise TextFault(
                    column(name), f"the axis {str(name)!r} stands twice", "give each axis a name of its own"
                )
            if size == "*" and any(axis.size == "*" for axis in made.values()):
                raise TextFault(column(size), "two axes are *", "one axis alone can have what the launcher has left")
            many: Any = whole(size, 1) if size.type == "INT" else size.value
            made[str(name)] = GridAxis(axis_of(name, at), many, folds and str(folds))
            at[f"size:{name}"] = column(size)
        for name, size, folds in axes:
            if folds is not None:
                cls._folded(at, made, (name, size, folds))
        return cls(tuple(made.values()), device and device.lower())

    @classmethod
    def _folded(cls, at: Columns, made: dict[str, GridAxis], axis: tuple[Token, Token, Token]) -> None:
        """Refuse an axis that folds what cannot be folded so."""
        name, size, folds = axis
        plain = [other.name for other in made.values() if other.folds is None and other.name != str(name)]
        at[f"folds:{name}"], of = column(folds), known_word(folds, str(folds), plain, "axis that can be folded")
        mine, there = made[str(name)].size, made[of].size
        if isinstance(mine, int) and isinstance(there, int) and there % mine:
            what = f"{mine} ranks of {name} do not divide the {there} of {of}"
            raise TextFault(column(size), what, f"{name} is the ranks of {of} once more, all or in equal groups")

    @classmethod
    def _placed(cls, at: Columns, token: Token) -> Self:
        from .....placement.text import parse as check_placement  # with lark, which takes long to load

        try:
            check_placement(str(token).strip())
        except PlacementError as error:
            first, *rest = str(error).split("\n")
            mark = next((line.index("^") - 2 for line in rest if line.strip() == "^"), 0)
            fix = (rest or [""])[-1].strip(" ^") or "as in grid cuda:[0-7]"
            raise TextFault(column(token) + mark, first, fix) from None
        at["placement"] = column(token)
        return cls(placement=" ".join(token.split()))

    def __str__(self) -> str:
        if self.placement is not None:
            return f"grid {self.placement}"
        return " ".join(filter(None, ("grid", self.type, f"({', '.join(map(str, self.axes))})")))
