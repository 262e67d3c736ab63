"""Recomputation: modules of which the backward runs the forward again, so that little of it is kept until then.

    flow.nn.recompute(model.layers[0])                             all that goes on inside
    flow.nn.recompute(model.layers[0], keep=["mm", "attention"])   but for the results of these ops
    flow.nn.recompute(model.layers[0].attn, only=["attention"])    nothing but these

The module keeps its class and its state_dict; its `forward` is a note, by which eager calls go through
`torch.utils.checkpoint`, and graphs make a region. Random numbers are drawn again as they were, running statistics
change once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ....placement.errors import SbpError
from ..annotate import Modules
from .core_replay import core_replayed
from .kept_ops import kept_ops
from .own_forward import OwnForward, Run, check_called, forwards_of
from .replay import Contexts

__all__ = ["Recomputing", "recompute", "recomputed_of", "regions_by"]

Repeated = TypeVar("Repeated", bound=nn.Module | Sequence[nn.Module])
Regions: TypeAlias = Callable[["Recomputing", Run, tuple[Any, ...], dict[str, Any]], Any]

_regions: Regions | None = None


@contextmanager
def regions_by(regions: Regions | None) -> Iterator[None]:
    """Inside, modules that are recomputed are run by `regions`, as where a graph is captured; None: as without one."""
    global _regions
    before, _regions = _regions, regions
    try:
        yield
    finally:
        _regions = before


class Recomputing(OwnForward):
    """The forward of a module that is run again."""

    __slots__ = ("keep", "only")

    def __init__(self, module: nn.Module, keep: tuple[str, ...], only: tuple[str, ...], inner: Run | None) -> None:
        super().__init__(module, inner)
        self.keep, self.only = keep, only

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.called()
        run = self.inner or type(module).forward.__get__(module)
        if _regions is not None:
            return _regions(self, run, args, kwargs)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if self.only:
            return core_replayed(run, args, kwargs, type(module).__name__)

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return run(*args, **kwargs)

        contexts = Contexts(module, kept_ops(self.keep))
        with contexts.watched():
            # As positions: torch keeps the random numbers of the devices of these alone.
            return checkpoint(call, args, kwargs, use_reentrant=False, context_fn=contexts)

    def __eq__(self, other: object) -> bool:
        """Whether it says the same of its module as another does of its own."""
        return isinstance(other, Recomputing) and self._said() == other._said()

    def __hash__(self) -> int:
        return hash(self._said())

    def _said(self) -> tuple[object, ...]:
        return self.keep, self.only, self.inner

    def __reduce__(self) -> tuple[Any, ...]:
        return Recomputing, (self._module(), self.keep, self.only, self.inner)

    def __str__(self) -> str:
        said = [f"{word} {', '.join(ops)}" for word, ops in (("keep", self.keep), ("only", self.only)) if ops]
        return " ".join(["recomputed", *said])


def recompute(
    modules: Repeated, again: bool | None = True, *, keep: str | Iterable[str] = (), only: str | Iterable[str] = ()
) -> Repeated:
    """Say that the backward runs a module, or each of several, once more; `again=None` takes it back.

    Results of the ops in `keep` are kept: `mm` are all products of matrices, `attention` fused attention and softmax,
    and other ops have their own names, such as `gelu` or `layer_norm`. Of `every second mm` the first product of the
    module is kept, the second is run again, and so on in turns. With `only="attention"` all is kept but what
    attention makes between query, key, value and the context: scores, what masks, softmax, dropout make of them.
    """
    each = [modules] if isinstance(modules, nn.Module) else modules
    for module in each if isinstance(each, list | tuple) else [each]:
        check_called(module, "recompute", "run again", "a module or a list of modules", "list(model.layers)")
    kept, alone = ((words,) if isinstance(words, str) else tuple(words) for words in (keep, only))
    if kept and alone:
        raise SbpError(
            f"recompute: keep={list(kept)} and only={list(alone)}\n"
            "  keep= says what is not run again, only= says what is: give one"
        )
    kept_ops(kept)  # which refuses what is no op
    if alone not in ((), ("attention",)):
        raise SbpError(
            f"recompute: only={list(alone)}\n  there is only=['attention'], its core\n"
            "  name other ops that are not run again: keep=[...]"
        )
    for module in each:
        Recomputing.take_back(module)
        if again:
            module.__dict__["forward"] = Recomputing(module, kept, alone, vars(module).get("forward"))
    return modules


def recomputed_of(modules: Modules) -> dict[str, str]:
    """The modules that are run again, by path, and how."""
    return forwards_of(modules, Recomputing)
