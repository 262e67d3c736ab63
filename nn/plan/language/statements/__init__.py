"""The statements of plans, a kind a file: how its lines are written and read, and how a model follows them.

A new one is a file beside these, and its name in STATEMENTS: the grammar, errors of the syntax, the table in
docs/plans.md and the tests' lines are made from that. The base of all is in statement.py.

A path in a line is a pattern of names: `*` is any part of one name, `**` any number of names, {a,b} one of several,
[2:8] a range of numbers.
"""

from ..axes import AxisEntries, GridAxis
from ..statement import Statement
from ..terms import Kind
from .accumulate import Accumulate, DrawBy
from .cast import Cast
from .compress import Compress
from .expect import ExpectAtMost, ExpectGathered, ExpectMoves
from .flow import Flow, Input
from .freeze import Freeze
from .grid import Grid
from .hold import Hold
from .inside import Inside
from .limit import Limit, Seek
from .offload import Offload
from .pipe import Pipe
from .place import Place
from .recompute import Recompute
from .rest import Rest
from .take import TakePlan

__all__ = [
    "STATEMENTS", "Accumulate", "AxisEntries", "Cast", "DrawBy", "ExpectAtMost", "ExpectGathered", "ExpectMoves",
    "Flow", "Grid", "GridAxis", "Hold", "Input", "Inside", "Kind", "Limit", "Offload", "Pipe", "Recompute", "Rest",
    "Seek", "Statement", "TakePlan",
]  # fmt: skip

STATEMENTS: tuple[type[Statement], ...] = (
    Grid, Rest, Flow, Input, TakePlan, Place, Pipe, Accumulate, DrawBy, Recompute, Offload, Cast, Freeze, Inside,
    Compress, Hold, Limit, Seek, ExpectMoves, ExpectGathered, ExpectAtMost,
)  # fmt: skip
