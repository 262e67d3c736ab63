"""The families of models, by their names in the tables, and their loss."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .mixtures import DeepSeek, Mixtral
from .models import GPT, EvenLlama, Llama
from .setting import Architecture
from .titan import TitanLlama

__all__ = ["FAMILIES", "loss_of", "made"]

FAMILIES: dict[str, Callable[[Architecture], nn.Module]] = {
    "gpt": GPT,
    "llama": Llama,
    "even": EvenLlama,
    "titan": TitanLlama,
    "mixtral": Mixtral,
    "deepseek": DeepSeek,
}
FILLS = ("uniform_", "normal_", "fill_", "zero_")


class Unfilled(TorchFunctionMode):
    """First values are not drawn: on meta there are none, and torch takes milliseconds a weight to find that out."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in FILLS:
            return next(iter((*args, *(kwargs or {}).values())))
        return func(*args, **kwargs or {})


def made(of: Architecture) -> nn.Module:
    """The model on meta."""
    with torch.device("meta"), Unfilled():
        return FAMILIES[of.family](of)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
