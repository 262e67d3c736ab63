"""The handle of a global tensor: the shards that this process holds, how they lie, and what this alone tells.

`GlobalTensor` extends it by what users do with one. What stands between the two (gradients, hooks, moves, text) takes
a handle, and makes another of the same class by `type(x)._wrap`.
"""

from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from ...placement import Placement
from ...placement.errors import SbpError
from ...sbp import B, Layout, Sbp, SbpLike
from .shell import shell

__all__ = ["AnyHandle", "Handle", "TensorMemory", "attributes", "has_grad", "is_param", "plain"]

_make = torch.Tensor._make_subclass


def has_grad(of: Layout) -> bool:
    """Whether tensors of this dtype can have a gradient."""
    return of.dtype.is_floating_point or of.dtype.is_complex


def plain(of: Layout) -> Layout:
    """The same layout with nothing said of the gradient."""
    return of if not of.grad_partial else of.with_state(of.state)


class Handle(torch.Tensor):
    """Shards of one logical tensor, and its layout."""

    _shards: tuple[Tensor, ...]
    _layout: Layout
    _grad: Self | None = None
    _leaf: Any = None  # what a leaf that requires grad keeps: see autograd.Leaf
    _moved: Any = None  # copies in other layouts, so that several consumers share one move: see moves
    _torn: Any = None  # made by a view op, but moved: what it was a view of, see eager.moved_views
    _apart = False  # a detached tensor: what is written to it does not go into the graph of what it was a view of
    _made = ""  # the user's line, where it is known
    _path = ""  # of a parameter, in the model that became global
    _memory: "TensorMemory | None" = None  # what was told of it: the same each time, as long as shards are
    _hooks: Any = None
    _heard: Any = ()  # shards that hooks of ours leave gradients on, and by what they were made: see hooks.retain_grad
    _of_step = ""  # the graph that returned it as, or changes it by, the end of a training step
    _asked = False  # a backward pass was told to leave the gradient here, though this is no leaf

    @classmethod
    def _wrap(cls, shards: tuple[Tensor, ...], of: Layout) -> Self:
        """The global tensor of which this process holds these shards, one for each rank it owns; nothing is checked."""
        # Under inference mode and no_grad alike the shell itself never takes part in autograd.
        made: Self = _make(cls, shell(of))
        made._shards = shards
        made._layout = of
        return made

    def _there(self, placement: Placement | None, sbp: SbpLike | None, grad_sbp: SbpLike | None) -> Layout:
        """The layout that `to_global` is asked for."""
        of, where = self._layout, placement or self._layout.placement
        if sbp is None and where.ndim != of.placement.ndim:
            sbp = B
        if sbp is None and grad_sbp is None and where.shape == of.placement.shape:
            return Layout(where, of.state, of.shape, of.dtype, order=of.order)
        return of.to(sbp, where, grad_sbp)

    @property
    def _behind(self) -> tuple[Tensor, ...]:
        """The shards on which gradients are retained: behind the hooks, which may change them."""
        return getattr(self._hooks, "inner", None) or self._shards

    # What the shards tell

    @property
    def placement(self) -> Placement:
        return self._layout.placement

    @property
    def sbp(self) -> tuple[Sbp, ...]:
        return self._layout.sbp

    @property
    def layout_(self) -> Layout:
        """Shape, dtype, placement and state in one value; `Tensor.layout` means strided or sparse."""
        return self._layout

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self._layout.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._layout.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._shards[0].device

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._layout.shape)

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return torch.strided

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self._layout.shape[dim]

    def dim(self) -> int:
        return len(self._layout.shape)

    ndimension = dim

    def numel(self) -> int:
        return self._layout.numel

    nelement = numel

    def element_size(self) -> int:
        return self._layout.dtype.itemsize

    @property
    def itemsize(self) -> int:  # type: ignore[override]
        return self._layout.dtype.itemsize

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._layout.nbytes

    def __len__(self) -> int:
        if not self._layout.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._layout.shape[0]

    def stride(self, dim: int | None = None) -> Any:
        """The strides that the tensor would have on one device; shards have their own."""
        return self._layout.strides if dim is None else self._layout.strides[dim]

    def storage_offset(self) -> int:
        return 0

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        of = self._layout
        if memory_format is torch.contiguous_format:
            return of.in_rows
        one = torch.empty_strided(of.shape, of.strides, device="meta")
        return one.is_contiguous(memory_format=memory_format)

    def is_floating_point(self) -> bool:
        return self._layout.dtype.is_floating_point

    def is_complex(self) -> bool:
        return self._layout.dtype.is_complex

    def is_signed(self) -> bool:
        return self._layout.dtype.is_signed

    def is_inference(self) -> bool:
        return self._shards[0].is_inference()

    def data_ptr(self) -> int:
        """A number that tensors of the same memory have alike: where the first shard is that is anywhere."""
        found = next((at for shard in self._shards if (at := shard.data_ptr())), 0)
        return found or self._shards[0].untyped_storage()._cdata

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self._shards[0]._version

    __hash__ = object.__hash__  # by identity, as torch has it, and without a call of Python


AnyHandle = TypeVar("AnyHandle", bound=Handle)  # where what is made is of the class of what was given
_OURS = {*Handle.__annotations__, *vars(Handle), "_is_param"}


def attributes(x: Tensor) -> dict[str, Any]:
    """Attributes that users hang on a tensor."""
    return {name: value for name, value in vars(x).items() if name not in _OURS}


def is_param(x: Tensor) -> bool:
    return bool(x.__dict__.get("_is_param", False))


class TensorMemory:
    """The memory of a global tensor, as code asks for it that looks for what is shared, or copies a whole storage.

    Its bytes are those of shards, and nobody reads them here. Without a tensor it is room that `copy_` fills.
    """

    def __init__(self, size: int, *, device: object = None, of: Handle | None = None) -> None:
        self._size, self._device, self.of = size, device, of

    def data_ptr(self) -> int:
        return 0 if self.of is None else self.of.data_ptr()

    def size(self) -> int:
        return self._size

    nbytes = size

    @property
    def device(self) -> object:
        return self._device

    def copy_(self, other: "TensorMemory", non_blocking: bool = False) -> "TensorMemory":
        if not isinstance(other, TensorMemory) or other.of is None:
            raise SbpError("the memory of a global tensor is copied from that of another\n  copy tensors: x.copy_(y)")
        held = other.of
        self.of = type(held)._wrap(tuple(shard.detach().clone() for shard in held._shards), plain(held._layout))
        return self

    def __deepcopy__(self, memo: object) -> "TensorMemory":
        return TensorMemory(self._size, device=self._device)  # a copy of the tensor has memory of its own

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise SbpError(
            f"a global tensor has no single memory, and no storage with {name}\n"
            "  use x.to_local().untyped_storage() for a shard's, or x.full_tensor() for the whole value"
        )
