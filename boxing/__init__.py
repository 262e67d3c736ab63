"""Moving tensors: price, route, plan and execution of every change of layout."""

from .adopt import layout_of
from .bound import lower_bound
from .box import Pending, box, box_async, gather, scatter
from .moves import Move
from .plan import Plan, plan
from .record import Moved, Moves, record

__all__ = [
    "Move",
    "Moved",
    "Moves",
    "Pending",
    "Plan",
    "box",
    "box_async",
    "gather",
    "layout_of",
    "lower_bound",
    "plan",
    "record",
    "scatter",
]
