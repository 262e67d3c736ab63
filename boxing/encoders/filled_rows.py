"""Filled rows: of a value that goes from rank to rank only rows that hold something are sent, as tokens to experts."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar, NoReturn

import torch

from ...placement.errors import SbpError
from ...sbp import Layout
from ..plan import BoxingPlan, plan
from .encoder import Encoder

__all__ = ["FilledRowsEncoder"]


@dataclass(frozen=True)
class FilledRowsEncoder(Encoder):
    """Rows along the last dim that are zero everywhere are not sent; all others are, with their very values.

    How many there are is known only as the move runs. It is priced by a `share` of them, those expected.
    """

    share: float = 1.0

    name: ClassVar[str] = "filled"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise SbpError(f"filled(share={self.share!r})\n  give it the part of the rows that is expected to be sent")

    def expected(self, src: Layout, dst: Layout) -> BoxingPlan:
        """The plan of as many bytes as are expected to go; each rank's own sizes are those of the run."""
        *lead, width = src.shape
        shape = (*lead, ceil(width * self.share))
        return plan(*(Layout(of.placement, of.state, shape, of.dtype) for of in (src, dst)))

    def check(self, dtype: torch.dtype, of: str) -> NoReturn:
        raise SbpError(
            f"{of} cannot be encoded by {self}: composites say it of what they send\n"
            "  take one that encodes a value, as flow.encoders.int8()"
        )
