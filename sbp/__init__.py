"""Signatures, states and layouts: how a tensor lies."""

from .layout import Layout as Layout
from .layout import layout as layout
from .signature import B as B
from .signature import Broadcast as Broadcast
from .signature import P as P
from .signature import Partial as Partial
from .signature import S as S
from .signature import Sbp as Sbp
from .signature import Split as Split
from .state import State as State
from .text import SbpLike as SbpLike
from .text import signature as signature

# OneFlow's spellings.
split = S
broadcast = B
partial_sum = P

# `B`, `P`, `S`, `Layout` and `layout` are exported by sbpflow itself.
__all__ = [
    "Broadcast", "Partial", "Sbp", "SbpLike", "Split", "State", "broadcast", "partial_sum", "signature", "split",
]  # fmt: skip
