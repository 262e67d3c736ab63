"""Moving tensors: price, route, plan and execution of every change of layout."""

from .box import Pending, box, box_async, gather, scatter
from .infer_layout import layout_of
from .plan import Plan, plan
from .record import Moved, Moves, record
from .routes.bound import lower_bound
from .routes.moves import Move

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
