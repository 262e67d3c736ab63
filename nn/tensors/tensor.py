"""GlobalTensor: one logical tensor that lives on a placement, for plain torch code.

It stands above autograd. torch functions that meet one come to `dispatch`, which runs them on the plain local shards
under ordinary local autograd; the tensor itself is an empty shell of the right class, dtype and device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...placement import Placement
from ...sbp import B, Layout, Sbp, SbpLike
from .shell import shell

__all__ = ["GlobalTensor", "has_grad", "on_backward", "on_call", "plain", "wrap"]

_make = torch.Tensor._make_subclass


_backward: Callable[..., None]  # autograd's, which stands above


def on_backward(run: Callable[..., None]) -> None:
    """Have `x.backward()` done by this."""
    global _backward
    _backward = run


def on_call(answer: Callable[..., Any]) -> None:
    """Have every torch function that meets a global tensor answered by this: `dispatch`, which stands above."""
    GlobalTensor.__torch_function__ = classmethod(answer)  # type: ignore[assignment,method-assign]


def has_grad(of: Layout) -> bool:
    """Whether tensors of this dtype can have a gradient."""
    return of.dtype.is_floating_point or of.dtype.is_complex


def plain(of: Layout) -> Layout:
    """The same layout with nothing said of the gradient."""
    return of if not of.grad_partial else of.with_state(of.state)


def wrap(shards: tuple[Tensor, ...], of: Layout) -> "GlobalTensor":
    """The global tensor of which this process holds these shards, one for each rank it owns; nothing is checked."""
    # Under inference mode and no_grad alike the shell itself never takes part in autograd.
    made: GlobalTensor = _make(GlobalTensor, shell(of))
    made._shards = shards
    made._layout = of
    return made


class GlobalTensor(torch.Tensor):
    """One logical tensor on a placement; see `sbp` for how it lies there. Made by `flow.tensor` and its kin."""

    _shards: tuple[Tensor, ...]
    _layout: Layout
    _grad: "GlobalTensor | None" = None
    _leaf: Any = None  # what a leaf that requires grad keeps: see autograd.Leaf
    _moved: Any = None  # copies in other layouts, so that several consumers share one move: see moving
    _torn: Any = None  # made by a view op, but moved: what it was a view of, see severed
    _apart = False  # a detached tensor: what is written to it does not go into the graph of what it was a view of
    _made = ""  # the user's line, where it is known
    _path = ""  # of a parameter, in the model that became global
    _hooks: Any = None
    _heard: Any = ()  # shards that hooks of ours leave gradients on, and by what they were made: see hooks.retain_grad
    _asked = False  # a backward pass was told to leave the gradient here, though this is no leaf

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
        return self._shards[0].data_ptr() if len(self._shards) == 1 else id(self._shards)

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self._shards[0]._version

    def __hash__(self) -> int:
        return id(self)

    # Autograd

    @property
    def requires_grad(self) -> bool:
        shards = self._shards
        return shards[0].requires_grad or (len(shards) > 1 and any(s.requires_grad for s in shards))

    @requires_grad.setter
    def requires_grad(self, on: bool) -> None:
        self.requires_grad_(on)

    def requires_grad_(self, requires_grad: bool = True) -> "GlobalTensor":
        from .autograd import become_leaf

        become_leaf(self, requires_grad)
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self._shards[0].is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return self._shards[0].grad_fn

    @property
    def output_nr(self) -> int:  # type: ignore[override]
        return self._shards[0].output_nr

    @property  # type: ignore[override]
    def grad(self) -> "GlobalTensor | None":
        """The gradient, lying as the tensor does."""
        leaf = self._leaf
        if leaf is None and not self.is_leaf and (self._asked or self.retains_grad):
            from .hooks import retained

            return retained(self)
        return self._grad if leaf is None or not leaf.direct else leaf.gathered(self)

    @grad.setter
    def grad(self, value: "GlobalTensor | None") -> None:
        if value is not None and (not isinstance(value, GlobalTensor) or value.shape != self.shape):
            raise TypeError(
                f"assigned grad must be a global tensor of shape {tuple(self.shape)}, found {type(value).__name__}"
                f"{tuple(getattr(value, 'shape', ()))}\n  make it one: flow.tensor(g, placement=x.placement, sbp=x.sbp)"
            )
        if value is not None and value.dtype is not self.dtype:
            raise RuntimeError(f"assigned grad has dtype {value.dtype}, the tensor {self.dtype}")
        leaf = self._leaf
        if leaf is not None and leaf.direct:
            leaf.put(self, value)
        else:
            self._grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> "GlobalTensor":
        return self._alias(tuple(shard.data for shard in self._shards))

    @data.setter
    def data(self, value: Tensor) -> None:
        from .autograd import set_data

        set_data(self, value)

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | Tensor | None = None,
    ) -> None:
        _backward((self,), (gradient,), retain_graph, create_graph, inputs)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        from .hooks import register_hook

        return register_hook(self, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        from .hooks import register_post_hook

        return register_post_hook(self, hook)

    def retain_grad(self) -> None:
        from .hooks import retain_grad

        retain_grad(self)

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        held = getattr(self._hooks, "inner", None) or self._shards  # behind the hooks, which may change it
        return self._leaf is None and held[0].retains_grad

    def detach(self) -> "GlobalTensor":
        return self._alias(tuple(shard.detach() for shard in self._shards))

    def _alias(self, shards: tuple[Tensor, ...]) -> "GlobalTensor":
        made = wrap(shards, plain(self._layout))
        if self._torn is not None:  # as severed.keep does
            made._torn, made._apart = (self._torn if isinstance(self._torn, GlobalTensor) else self), True
        return made

    def add_(self, other: Any, *, alpha: Any = 1) -> "GlobalTensor":
        # Where torch wants a number, its C++ code would look for one in the shell; LBFGS passes single numbers there.
        if alpha.__class__ is GlobalTensor:
            alpha = alpha.item()
        return super().add_(other) if alpha == 1 else super().add_(other, alpha=alpha)  # type: ignore[return-value]

    # Moving

    def to_global(
        self, placement: Placement | None = None, sbp: SbpLike | None = None, *, grad_sbp: SbpLike | None = None
    ) -> "GlobalTensor":
        """The same logical tensor under another signature, placement or both; its gradient is moved back."""
        from .moves import own_shards

        where = placement or self.placement
        if sbp is None and placement is not None and placement.ndim != self.placement.ndim:
            sbp = B
        if sbp is None and grad_sbp is None and where.shape == self.placement.shape:
            there = Layout(where, self._layout.state, self._layout.shape, self._layout.dtype)
        else:
            there = self._layout.to(sbp, where, grad_sbp)
        there = there.in_order(self._layout.order)
        if there is self._layout.in_order(self._layout.order):
            return self
        return wrap(own_shards(self, there, "to_global"), there)

    def to_local(self) -> Any:
        """This process's shard; a list of them, one a rank, where one process owns several.

        It keeps its graph and shares memory. Its gradient is one of this tensor's: of S and P, what each rank makes of
        it is an addend; where all ranks make the same of a B, take `to_global(grad_sbp=B)` of it first.
        """
        # Not the shard itself, or `requires_grad_()` of what the user gets would make this a tensor that requires grad.
        held = [shard if shard.requires_grad else shard.detach() for shard in self._shards]
        return held[0] if len(held) == 1 else held

    def full_tensor(self) -> Tensor:
        """The whole logical value as a plain tensor, on every process; it keeps its graph."""
        from .moves import everywhere

        return everywhere(self)

    def item(self) -> Any:
        return self.detach().full_tensor().item()

    def tolist(self) -> Any:
        return self.detach().full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.detach().full_tensor().cpu().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def __bool__(self) -> bool:
        return bool(self.detach().full_tensor())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        return int(self.detach().full_tensor().__index__())

    def __iter__(self) -> Any:
        if not self._layout.shape:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    def __contains__(self, element: Any) -> bool:
        return bool((self == element).any())

    # Text

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        from .show import text

        return text(self)

    def __str__(self) -> str:
        from .show import text

        return text(self)

    def __format__(self, spec: str) -> str:
        if not self._layout.shape and spec:
            return format(self.item(), spec)
        return format(str(self), spec)

    def show(self) -> str:
        """A table of who holds what."""
        from .show import table

        return table(self)

    def _repr_html_(self) -> str:
        from .show import html

        return html(self)

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> "GlobalTensor":
        from .copies import deep

        return deep(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        from .copies import assemble, is_param

        return assemble, (
            tuple(shard.detach() for shard in self._shards),
            self._layout,
            self.requires_grad,
            is_param(self),
        )
