"""Abstract tensors: global tensors without shards. Where one lies is known, its values are not, for `explain`."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ...boxing.encoding import MoveEncoder
from ...boxing.kept import KeptUnder
from ...placement import Placement
from ...placement.errors import SbpError
from ...sbp import Layout, SbpLike
from ...sbp.state import State
from ..tensors.handle import plain
from ..tensors.shell import shell
from ..tensors.tensor import GlobalTensor

__all__ = ["Ghost", "Unknown", "ghost"]

_make = torch.Tensor._make_subclass


class Unknown(SbpError):
    """The values of a ghost were asked for."""


class Ghost(GlobalTensor):
    """A global tensor of which only the layout is known, and whether it would require grad."""

    _needs: bool
    _tell: Callable[["Ghost", Layout], None]  # who wants to hear of explicit moves

    @property
    def _shards(self) -> NoReturn:  # type: ignore[override]
        raise Unknown("nothing was computed, so there are no values to look at")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.placement.type)

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        return memory_format is torch.contiguous_format and self._layout.in_rows

    def data_ptr(self) -> int:
        return id(self)

    _version = 0
    output_nr = 0
    grad_fn = None

    @property
    def requires_grad(self) -> bool:
        return self._needs

    @requires_grad.setter
    def requires_grad(self, on: bool) -> None:
        self._needs = on

    def requires_grad_(self, requires_grad: bool = True) -> "Ghost":
        self._needs = requires_grad
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return not self._needs

    def detach(self) -> "Ghost":
        return ghost(plain(self._layout), False, self._tell)

    @property
    def data(self) -> "Ghost":
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        raise Unknown("other values were put into a tensor")

    def to_global(
        self,
        placement: Placement | None = None,
        sbp: SbpLike | None = None,
        *,
        grad_sbp: SbpLike | None = None,
        encoder: MoveEncoder | None = None,
        kept: KeptUnder | None = None,
    ) -> "Ghost":
        if encoder is not None:
            raise Unknown(f"a tensor was encoded by {encoder}, which takes its values")
        there = self._there(placement, sbp, grad_sbp)
        self._tell(self, there)
        return ghost(there, self._needs and torch.is_grad_enabled(), self._tell)

    def drawn(self) -> "Ghost":
        """The layout of random numbers of its shape: as it lies; addends are drawn whole."""
        return ghost(self._layout.with_state(State(self._layout.state.dims)), False, self._tell)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"tensor(not computed, {self._layout})"

    __str__ = __repr__


def ghost(of: Layout, needs: bool, tell: Callable[[Ghost, Layout], None]) -> Ghost:
    """A ghost that lies so."""
    made: Ghost = _make(Ghost, shell(of))
    made._layout, made._needs, made._tell = of, needs, tell
    return made
