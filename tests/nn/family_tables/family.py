"""One family of models: how a tiny one is made, what it is trained on, and its loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CLASSES", "IMAGE", "Family", "classified", "named_loss"]

CLASSES, IMAGE = 3, 32


def named_loss(model: nn.Module, **batch: Tensor) -> Tensor:
    """Models of transformers compute their loss where they are given labels."""
    config: Any = model.config
    more = {"use_cache": False} if hasattr(config, "use_cache") else {}
    return model(**batch, **more).loss  # type: ignore[no-any-return]


def classified(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(pixels), labels)


@dataclass(frozen=True)
class Family:
    """`make` is given sizes that go before the usual ones. Where a family is refused, `otherwise` is what to say in its
    config so that it is not. `eagerly` has the module that a graph runs eagerly, and why."""

    library: str
    make: Callable[[Mapping[str, Any]], nn.Module]
    drawn: Callable[[int, int], dict[str, Tensor]]
    loss: Callable[..., Tensor] = named_loss
    otherwise: dict[str, Any] = field(default_factory=dict)
    eagerly: tuple[str, str] | None = None

    def batch(self, rows: int = 8, length: int = 10) -> dict[str, Tensor]:
        return self.drawn(rows, length)
