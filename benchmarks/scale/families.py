"""The families of models, by their names in the tables, and their loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mixtures import DeepSeek, Mixtral
from .models import GPT, Llama
from .setting import Architecture

__all__ = ["FAMILIES", "loss_of", "made"]

FAMILIES: dict[str, type[nn.Module]] = {"gpt": GPT, "llama": Llama, "mixtral": Mixtral, "deepseek": DeepSeek}


def made(of: Architecture) -> nn.Module:
    """The model on meta."""
    with torch.device("meta"):
        return FAMILIES[of.family](of)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
