"""Modes by which a step differs besides its arguments: which modules train, which parameters do, autocast."""

import operator
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ....placement.device import FAMILIES
from ....placement.errors import SbpError

__all__ = ["Modes"]


class Modes:
    """The modes of modules, and those around them, as they stood; steps are kept by `key`, one for each."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        parts = dict.fromkeys(part for root in modules.values() for part in root.modules())
        for name, root in modules.items():
            _refuse_compiled(name, root)
        self._held = [part.__dict__ for part in parts]
        self._training = ["training"] * len(parts)
        places = [(held["_parameters"], name) for held in self._held for name in held["_parameters"]]
        self._tables, self._names = [table for table, _ in places], [name for _, name in places]
        self._was = self._now()
        self.key: Hashable = tuple([tuple(part) for part in self._was])

    def _now(self) -> tuple[list[Any], list[bool], list[bool]]:
        around: list[Any] = [torch.is_grad_enabled(), torch.get_default_dtype()]
        if torch._C._is_any_autocast_enabled():
            on = [kind for kind in FAMILIES if torch.is_autocast_enabled(kind)]
            around += [(kind, torch.get_autocast_dtype(kind)) for kind in on]
        held: Iterable[Any] = map(operator.getitem, self._tables, self._names)
        trained = [x is not None and x.requires_grad for x in held]
        return around, list(map(operator.getitem, self._held, self._training)), trained

    @property
    def of_modules(self) -> Hashable:
        """Those of modules alone."""
        return tuple(self._was[1]), tuple(self._was[2])

    def same(self) -> bool:
        """Whether modes and settings are now what they were, and modules have the parameters that they had."""
        try:
            return self._now() == self._was
        except KeyError:
            return False


def _refuse_compiled(name: str, root: nn.Module) -> None:
    """Refuse modules whose forward is a program that was made elsewhere, into which no capture sees."""
    for path, part in root.named_modules(prefix=name):
        by, given = "", "the module that it was made of"
        if isinstance(part, torch.jit.ScriptModule):
            by = "torch.jit"
        elif "_orig_mod" in part._modules:
            by, given = "torch.compile", "the module itself, which is in _orig_mod"
        if by:
            raise SbpError(
                f"{path or 'the model'} was compiled by {by}, and a graph captures Python's forward\n"
                f"  give flow.compile {given}: it compiles each rank's part"
            )
