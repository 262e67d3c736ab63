"""The tensors that modules of an eager part hold, and others in their place while it runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["HeldTensors"]


class HeldTensors:
    """The parameters and buffers of some modules and of all in them; one that is held twice counts once."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self.modules = list(dict.fromkeys(part for root in roots for part in root.modules()))
        self.names: list[str] = []
        self.kinds: list[str] = []
        self._places: list[list[tuple[dict[str, Any], str]]] = []
        self.tensors: list[Tensor] = []  # that are there now
        seen: dict[int, int] = {}
        paths: dict[int, str] = {}
        for root in roots:
            for path, part in root.named_modules():
                paths.setdefault(id(part), path)
        for module in self.modules:
            for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, value in table.items():
                    if value is None:
                        continue
                    at = seen.setdefault(id(value), len(seen))
                    if at == len(self.tensors):
                        self.tensors.append(value)
                        self.kinds.append(kind)
                        self.names.append(".".join(filter(None, (paths[id(module)], name))))
                        self._places.append([])
                    self._places[at].append((table, name))

    @contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the modules hold these."""
        before = [[table[name] for table, name in places] for places in self._places]
        try:
            for value, places in zip(tensors, self._places, strict=True):
                for table, name in places:
                    table[name] = value
            yield
        finally:
            for values, places in zip(before, self._places, strict=True):
                for value, (table, name) in zip(values, places, strict=True):
                    table[name] = value

    def now(self, at: int) -> Tensor:
        """The tensor that they hold in the place of this one."""
        table, name = self._places[at][0]
        found: Tensor = table[name]
        return found
