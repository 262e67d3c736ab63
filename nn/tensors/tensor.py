"""GlobalTensor: one logical tensor that lives on a placement, for plain torch code.

It stands above autograd. torch functions that meet one come to `dispatch`, which runs them on the plain local shards
under ordinary local autograd; the tensor itself is an empty shell of the right class, dtype and device.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Self

from torch import Tensor

from ...boxing.encoding import MoveEncoder
from ...boxing.exchange.execute import token
from ...boxing.kept import KeptUnder
from ...placement import Placement
from ...placement.errors import SbpError
from ...placement.world import owned
from ...sbp import Layout, SbpLike
from ..tensors import autograd, hooks, moves
from .handle import Handle, TensorMemory, attributes, is_param, plain
from .show import html, table, text

__all__ = ["GlobalTensor", "assemble", "wrap"]


class GlobalTensor(Handle):
    """One logical tensor on a placement; see `sbp` for how it lies there. Made by `flow.tensor` and its kin."""

    # Autograd

    @property
    def requires_grad(self) -> bool:
        shards = self._shards
        return shards[0].requires_grad or (len(shards) > 1 and any(s.requires_grad for s in shards))

    @requires_grad.setter
    def requires_grad(self, on: bool) -> None:
        self.requires_grad_(on)

    def requires_grad_(self, requires_grad: bool = True) -> "GlobalTensor":
        autograd.become_leaf(self, requires_grad)
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
    def grad(self) -> Self | None:
        """The gradient, lying as the tensor does."""
        leaf = self._leaf
        if leaf is None and not self.is_leaf and (self._asked or self.retains_grad):
            return hooks.retained(self)
        return self._grad if leaf is None or not leaf.direct else leaf.gathered(self)

    @grad.setter
    def grad(self, value: Self | None) -> None:
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
        return self._alias(moves.data_of(self._shards))

    @data.setter
    def data(self, value: Tensor) -> None:
        autograd.set_data(self, value)

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | Tensor | None = None,
    ) -> None:
        autograd.backward((self,), (gradient,), retain_graph, create_graph, inputs)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        return hooks.register_hook(self, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        return hooks.register_post_hook(self, hook)

    def retain_grad(self) -> None:
        hooks.retain_grad(self)

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._leaf is None and self._behind[0].retains_grad

    def detach(self) -> "GlobalTensor":
        return self._alias(tuple(shard.detach() for shard in self._shards))

    def _alias(self, shards: tuple[Tensor, ...]) -> "GlobalTensor":
        made = wrap(shards, plain(self._layout))
        if self._torn is not None:  # as moved_views.keep does
            made._torn, made._apart = (self._torn if isinstance(self._torn, GlobalTensor) else self), True
        return made

    def add_(self, other: Any, *, alpha: Any = 1) -> "GlobalTensor":
        # Where torch wants a number, its C++ code would look for one in the shell; LBFGS passes single numbers there.
        if alpha.__class__ is GlobalTensor:
            alpha = alpha.item()
        return super().add_(other) if alpha == 1 else super().add_(other, alpha=alpha)  # type: ignore[return-value]

    def set_(self, source: Any = None, *where: Any, **kwargs: Any) -> "GlobalTensor":
        """Take another tensor's memory, or what was told of the memory of one."""
        if not isinstance(source, TensorMemory):
            return super().set_(source, *where, **kwargs)  # type: ignore[return-value]
        of = source.of
        said = dict(zip(("storage_offset", "size", "stride"), where, strict=False)) | kwargs
        part = {name: tuple(each) if isinstance(each, list) else each for name, each in said.items()}
        if of is None or any(
            part.get(name, all_of) not in (all_of, None)
            for name, all_of in (("storage_offset", 0), ("size", of.shape), ("stride", of.stride()))
        ):
            raise SbpError(
                "set_ of a global tensor takes all of another's memory, as x.set_(y.untyped_storage())\n"
                "  copy values instead: x.copy_(y)"
            )
        autograd.set_data(self, of)
        return self

    # Moving

    def to_global(
        self,
        placement: Placement | None = None,
        sbp: SbpLike | None = None,
        *,
        grad_sbp: SbpLike | None = None,
        encoder: MoveEncoder | None = None,
        kept: KeptUnder | None = None,
    ) -> "GlobalTensor":
        """The same logical tensor under another signature, placement or both; its gradient is moved back.

        With an `encoder` a sum over ranks, or a hop to others, goes in fewer bytes, and has no gradient. With `kept`,
        as in `kept=errors["w"]` of `errors = flow.encoders.KeptErrors()`, a sum takes what earlier ones have left out.
        """
        there = self._there(placement, sbp, grad_sbp)
        if encoder is not None:
            return wrap(moves.encoded_shards(self, there, encoder, kept), there)
        if kept is not None:
            raise SbpError("to_global: kept= without encoder=\n  a plain move leaves nothing out: leave kept= out too")
        if there is self._layout.in_order(self._layout.order):
            return self
        return wrap(moves.own_shards(self, there, "to_global"), there)

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
        return moves.everywhere(self)

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
        return text(self)

    def __str__(self) -> str:
        return text(self)

    def __format__(self, spec: str) -> str:
        if not self._layout.shape and spec:
            return format(self.item(), spec)
        return format(str(self), spec)

    def show(self) -> str:
        """A table of who holds what."""
        return table(self)

    def _repr_html_(self) -> str:
        return html(self)

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> "GlobalTensor":
        """As torch copies a leaf: its values, its gradient and its attributes, not its hooks."""
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
            )
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        shards = tuple(shard.detach().clone() for shard in self._shards)
        memo[id(self)] = made = assemble(shards, self._layout, self.requires_grad, is_param(self))
        if self.grad is not None:
            made.grad = self.grad.__deepcopy__(memo)
        vars(made).update({name: deepcopy(value, memo) for name, value in attributes(self).items()})
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return assemble, (
            tuple(shard.detach() for shard in self._shards),
            self._layout,
            self.requires_grad,
            is_param(self),
            tuple(owned(self.placement)),
        )


wrap = GlobalTensor._wrap


def assemble(
    shards: tuple[Tensor, ...], of: Layout, requires_grad: bool, param: bool, ranks: tuple[int, ...] | None = None
) -> GlobalTensor:
    """A leaf made of shards. Copies hold it so; pickles add the ranks of the shards, and another rank takes the shard
    of one that has the same part of the tensor."""
    if ranks is not None:
        here = owned(of.placement)
        taken = [next((at for at, one in enumerate(ranks) if _same_part(of, one, rank)), None) for rank in here]
        if None in taken or not (here or shards):
            raise SbpError(
                f"a file with a global tensor holds what the process that saved it owned: {of}\n"
                f"  that was of ranks {list(ranks)}; ranks {list(here)} are here, which have other parts\n"
                "  load what the same ranks saved, or save by flow.save or torch.distributed.checkpoint, which load "
                "anywhere; so does x.full_tensor()"
            )
        found = tuple(shards[at] for at in taken if at is not None)
        shards = tuple(x.clone() if at in taken[:n] else x for n, (at, x) in enumerate(zip(taken, found, strict=True)))
        shards = shards or (token(of),)
    made = wrap(shards, of)
    if requires_grad:
        made.requires_grad_()
    if param:
        made._is_param = True
    return made


def _same_part(of: Layout, one: int, other: int) -> bool:
    return one == other or (not of.state.partial and of.spans(one) == of.spans(other))


assemble.__module__ = f"{__package__}.copies"  # by which files name it
