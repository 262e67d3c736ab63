"""Forwards that stand in a module in the place of its own, and say something of it."""

import sys
from collections.abc import Callable
from inspect import Signature, signature
from typing import Any, TypeAlias
from weakref import ref

from torch import nn

from ....placement.errors import PlacementError, SbpError
from ..annotate import Modules

__all__ = ["OwnForward", "Run", "check_called", "forwards_of"]

Run: TypeAlias = Callable[..., Any]


class OwnForward:
    """The forward of a module, in front of the one that it had. It holds on to the module no more than a method does to
    its object."""

    __slots__ = ("__weakref__", "_module", "inner")

    def __init__(self, module: nn.Module, inner: Run | None) -> None:
        self._module = ref(module)
        self.inner = inner  # a forward that the module has of its own, not of its class

    def called(self) -> nn.Module:
        """The module that is called, asked by this object's `__call__`; a shallow copy has the forward of the one that
        it was made of."""
        found = sys._getframe(2).f_locals.get("self")
        if isinstance(found, nn.Module) and vars(found).get("forward") is self:
            return found
        module = self._module()
        assert module is not None
        return module

    @property
    def __signature__(self) -> Signature:
        module = self._module()
        assert module is not None
        return signature(self.inner or type(module).forward.__get__(module))

    @classmethod
    def take_back(cls, module: nn.Module) -> None:
        """Give a module the forward that it had before one of this kind."""
        said = vars(module).get("forward")
        if isinstance(said, cls):
            del module.__dict__["forward"]
            if said.inner is not None:
                module.__dict__["forward"] = said.inner


def check_called(module: Any, word: str, says: str, expected: str, example: str) -> None:
    """Refuse what is no module, and a module whose forward is never called."""
    if not isinstance(module, nn.Module):
        raise PlacementError(
            f"{word}: expected {expected}, found {type(module).__name__}\n"
            f"  pass what is in the model, as in flow.nn.{word}({example})"
        )
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        raise SbpError(
            f"{word}: {type(module).__name__} is never called, so there is nothing to {says}\n"
            f"  say it of those in it, as in flow.nn.{word}(list(model.layers))"
        )


def forwards_of(modules: Modules, kind: type[OwnForward]) -> dict[str, str]:
    """The modules that have a forward of this kind, by path, and what it says."""
    parts = ((path, part) for prefix, root in modules.items() for path, part in root.named_modules(prefix=prefix))
    found = ((path, vars(part).get("forward")) for path, part in parts)
    return {path: str(said) for path, said in found if isinstance(said, kind)}
