"""Replay: what an eager forward that is run again keeps, and puts back.

Calls are seen below autograd, where a linear is an addmm; global tensors make one for each of their shards.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ....placement.errors import SbpError
from ....placement.structure import ByIdentity
from ....sbp.call import map_tensors, tensors_in
from ...tensors.moves import version
from ...tensors.tensor import GlobalTensor
from .kept_ops import KeptOps

__all__ = ["Contexts", "name_of"]


def name_of(op: Any) -> str:
    """The name of a call below autograd, without `aten::`."""
    return str(op._schema.name).removeprefix("aten::")


def real(args: Any) -> bool:
    """Whether a call computes, unlike those on tensors without values by which ways of calling are found."""
    return not any(isinstance(x, FakeTensor) or x.is_meta for x in tensors_in(args))


class Contexts:
    """The contexts of a forward and of its second run. The second uses results of ops that the first kept, and does not
    change again what the module changed of itself."""

    def __init__(self, module: nn.Module, keep: KeptOps) -> None:
        self.module, self.keep = module, keep
        self.kept: dict[Any, list[tuple[Any, list[int]]]] = {}  # of each op in order, with the versions of its results
        self.changed: list[nn.Module] = []  # modules with running statistics that the forward changed

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return _Keeping(self) if self.keep else ExitStack(), self.again()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the first run: notes which buffers change."""
        before = _stamps(self.module)
        yield
        after = _stamps(self.module)
        for key in [key for key, stamp in after.items() if before.get(key) != stamp]:
            owner, name = key
            if not isinstance(owner, nn.modules.batchnorm._NormBase):
                raise SbpError(
                    f"recompute: the forward of {type(owner).__name__} changes its buffer {name}, so that run again it "
                    "would not compute what it did\n  leave it out of what is recomputed, or run it in a graph"
                )
            if owner not in self.changed:
                self.changed.append(owner)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the second run."""
        held = [(part, dict(part._buffers)) for part in self.changed]
        for part, buffers in held:
            part._buffers.update({name: None if x is None else x.detach().clone() for name, x in buffers.items()})
        try:
            with _Kept(self) if self.keep else ExitStack():
                yield
        finally:
            for part, buffers in held:
                part._buffers.update(buffers)


def _stamps(module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """By which to know whether a buffer is what it was."""
    return {
        (part, name): (ByIdentity(x), [version(y) for y in (x._shards if isinstance(x, GlobalTensor) else (x,))])
        for part in module.modules()
        for name, x in part._buffers.items()
        if x is not None and not x.is_inference()
    }


class _Keeping(TorchDispatchMode):
    def __init__(self, of: Contexts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of, self.keeps = of, of.keep.counted()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if real((args, kwargs)) and self.keeps(name_of(func)):
            kept = map_tensors(out, Tensor.detach)
            self.of.kept.setdefault(func, []).append((kept, [x._version for x in tensors_in(kept)]))
        return out


class _Kept(TorchDispatchMode):
    def __init__(self, of: Contexts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of, self.keeps = of, of.keep.counted()
        self.counts: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not real((args, kwargs)) or not self.keeps(name_of(func)):
            return func(*args, **(kwargs or {}))
        at = self.counts[func] = self.counts.get(func, -1) + 1
        kept, versions = self.of.kept[func][at]
        if versions != [x._version for x in tensors_in(kept)]:
            raise SbpError(
                f"recompute: the result of {name_of(func)} is to be kept, and was written to afterwards\n"
                "  leave the op out of keep=, or write to a copy"
            )
        return map_tensors(kept, Tensor.detach)
