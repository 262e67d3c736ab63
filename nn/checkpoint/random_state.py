"""Random state: that of torch, of its cards, of Python and of numpy, as one process has them."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...placement.device import card_here

__all__ = ["fits", "random_state", "restore"]


def random_state() -> dict[str, Any]:
    """The state of every generator that a loop may draw from."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, np.array(numbers, dtype=np.int64), gauss],
        "numpy": list(np.random.get_state()),
    }
    card = card_here()
    if card is not None and card.module.is_initialized():
        found[card.name] = [state.cpu() for state in card.module.get_rng_state_all()]
    return found


def fits(state: Mapping[str, Any]) -> None:
    """Try a state on generators of nobody, which raise whatever is wrong with it."""
    torch.Generator().set_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.Random().setstate((version, tuple(numbers.tolist()), gauss))
    np.random.RandomState().set_state(tuple(state["numpy"]))


def restore(state: Mapping[str, Any]) -> None:
    """Go on drawing where that was; cards that there are not any more are left out."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    np.random.set_state(tuple(state["numpy"]))
    card = card_here()
    if card is not None:
        for at, held in zip(range(card.count), state.get(card.name, ()), strict=False):
            card.set_random_state(held, torch.device(card.name, at))
