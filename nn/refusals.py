"""Ways past `__torch_function__`: they would see a global tensor's empty shell, and are closed.

torch.func and forward-mode differentiation wrap tensors in C++ without asking. What would come out is empty or wrong.
"""

from functools import wraps
from typing import Any

import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch.autograd.forward_ad

from ..placement.errors import SbpError
from .tensor import GlobalTensor

__all__ = ["install"]

_CLOSED = {
    (torch._functorch.eager_transforms, "_wrap_for_grad"): "torch.func's derivatives",
    (torch._functorch.vmap, "_add_batch_dim"): "torch.vmap",
    (torch.autograd.forward_ad, "make_dual"): "forward-mode differentiation",
}


def _close(module: Any, name: str, what: str) -> None:
    inner = getattr(module, name)

    @wraps(inner)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, GlobalTensor) for a in args):
            raise SbpError(
                f"{what}: not for global tensors\n  use torch.autograd.grad, or a batch dim in the place of vmap"
            )
        return inner(*args, **kwargs)

    setattr(module, name, asked)


def install() -> None:
    """Close them, once."""
    for (module, name), what in _CLOSED.items():
        _close(module, name, what)
