"""Ways past `__torch_function__`: they would see a global tensor's empty shell, and are closed.

torch.func and forward-mode differentiation wrap tensors in C++ without asking, and torch.distributed sends the shell's
memory. What would come out is empty or wrong.
"""

from functools import wraps
from typing import Any

import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch.autograd.forward_ad
from torch import nn

from ..placement.errors import SbpError
from .tensor import GlobalTensor

__all__ = ["install", "refuse_sending"]

_OURS = "use torch.autograd.grad, or a batch dim in the place of vmap"
_MOVE = "x.to_global(sbp=...) moves it, x.to_local() is the shard that torch.distributed may send"
_CLOSED = {
    (torch._functorch.eager_transforms, "_wrap_for_grad"): ("torch.func's derivatives", _OURS),
    (torch._functorch.vmap, "_add_batch_dim"): ("torch.vmap", _OURS),
    (torch.autograd.forward_ad, "make_dual"): ("forward-mode differentiation", _OURS),
}
# Through these go all collectives of torch.distributed, where it was built.
_SENT = ("_check_single_tensor", "_check_tensor_list")


def _close(module: Any, name: str, what: str, instead: str) -> None:
    inner = getattr(module, name)

    @wraps(inner)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if any(map(_is_global, args)):
            raise SbpError(f"{what}: not for global tensors\n  {instead}")
        return inner(*args, **kwargs)

    setattr(module, name, asked)


def _is_global(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(part, GlobalTensor) for part in value)
    if isinstance(value, nn.Module) and "_parameters" in vars(value):  # not one that is just being made
        return any(isinstance(part, GlobalTensor) for part in value.parameters())
    return isinstance(value, GlobalTensor)


def refuse_sending(func: Any) -> None:
    """Functions and ops of torch.distributed that do ask."""
    home = str(getattr(func, "__module__", "")), str(getattr(func, "namespace", ""))
    if home[0].startswith("torch.distributed.") or home[1] in ("c10d", "_c10d_functional"):
        raise SbpError(f"{getattr(func, '__name__', func)} of torch.distributed: not for global tensors\n  {_MOVE}")


def install() -> None:
    """Close them, once."""
    for (module, name), (what, instead) in _CLOSED.items():
        _close(module, name, what, instead)
    if torch.distributed.is_available():
        from torch.distributed import distributed_c10d

        for name in _SENT:
            if hasattr(distributed_c10d, name):
                _close(distributed_c10d, name, "a collective of torch.distributed", _MOVE)
        _close(
            nn.parallel.DistributedDataParallel,
            "__init__",
            "DistributedDataParallel",
            "parameters that are B and a batch that is S(0) are data parallelism already; call the module itself",
        )
