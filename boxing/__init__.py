"""Moving tensors: price, route and execution of every change of layout.

boxing       how a tensor gets from one layout to another: routes/ finds it, exchange/ runs it
box          along it, with gradients; record: every move that happened; infer_layout, memory: of given pieces
bundle       the messages of many tensors in few exchanges
survivors    the rest of a tensor where ranks are lost
reductions   addends on one rank; explanation: the value that every `explain` returns; figures: numbers in words; html:
             tables that notebooks show
picture/     pictures of moves; graph/: all moves of a step; demo: every move between signatures
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..placement.moved import missing_of as _missing_of
from ..placement.world import close as close
from ..placement.world import owned as owned
from .box import Pending as Pending
from .box import box as box
from .box import box_async as box_async
from .box import gather as gather
from .box import scatter as scatter
from .boxing import Boxing as Boxing
from .boxing import between as between
from .exchange.slow_link import SlowLink as SlowLink
from .exchange.slow_link import slow_link as slow_link
from .explanation import Explanation as Explanation
from .infer_layout import layout_of as layout_of
from .picture import draw as _draw
from .record import Moved as Moved
from .record import Moves as Moves
from .record import record as record
from .routes.bound import lower_bound as lower_bound
from .routes.moves import Move as Move

if not _TYPE_CHECKING:
    __getattr__ = _missing_of(__name__)

__all__ = [
    "Boxing", "Explanation", "Move", "Moved", "Moves", "Pending", "SlowLink", "between", "box_async", "close", "gather",
    "layout_of", "lower_bound", "owned", "scatter", "slow_link",
]  # fmt: skip

_draw.install()
