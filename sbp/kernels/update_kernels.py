"""The kernels of an optimizer's step, counted on a small parameter that steps as its own do.

AdamW, fused     one kernel, which reads parameter, gradient and two states, and writes all but the gradient
AdamW, else      eight: decay, two means in three, a root, a division, a sum, the step; 20 reads and writes for 7
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ..call import tensors_in

__all__ = ["ONE_KERNEL", "UpdateKernels", "update_kernels"]

SIDE = 4  # of the small parameter, which has dims as those of layers have


class UpdateKernels(NamedTuple):
    """The kernels of an optimizer's step on one parameter: how many; whether a card has one of each for all parameters
    `together`; and how often they read or write a tensor of its size beyond what one kernel would."""

    launches: float = 1.0
    together: bool = True
    more: float = 0.0


ONE_KERNEL = UpdateKernels()


def update_kernels(optimizers: Sequence[Optimizer], states: int, known: Container[type]) -> UpdateKernels:
    """The kernels of a parameter's step, of which so many states are kept: those of the optimizer that has most.

    Of those whose types are not `known` to change each element by itself, nobody knows more than that they read and
    write it all once."""
    return max((_counted(each, states) for each in optimizers if type(each) in known), default=ONE_KERNEL)


def _counted(optimizer: Optimizer, states: int) -> UpdateKernels:
    group = optimizer.param_groups[0]
    parameter = torch.ones(SIDE, SIDE, device="cpu", requires_grad=True)
    parameter.grad = torch.ones(SIDE, SIDE, device="cpu")
    here = {"params": [parameter], "capturable": False, "lr": float(group["lr"])}
    twin: Any = type(optimizer).__new__(type(optimizer))
    twin.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": [{**group, **here}]})
    try:
        twin.step()  # the first makes states
    except RuntimeError:  # of a torch whose accelerator has no module yet, which each step asks
        return ONE_KERNEL
    count = _Count()
    with count:
        twin.step()
    together = bool(group.get("fused")) or group.get("foreach") is not False
    return UpdateKernels(float(count.kernels), together, max(0.0, float(count.passes - (2 * states + 3))))


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Kernels of tensors of the parameter's size, and how often they read or write one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = self.passes = 0

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        given = [*_large((args, kwargs or {}))]
        made = [x for x in _large(result) if all(x is not y for y in given)]
        written = sum(_writes(op, args, kwargs or {})) if op._schema.is_mutable else len(made)
        if given or made:
            self.kernels += 1
            self.passes += len({id(x) for x in given}) + written
        return result


def _large(values: Any) -> Iterator[Tensor]:
    return (x for x in tensors_in(values) if x.numel() == SIDE * SIDE)


def _writes(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[int]:
    """For each argument how many tensors of the parameter's size are written there. A fused update gets its gradient
    as what it may scale, which it does only where somebody scales losses."""
    for at, of in enumerate(op._schema.arguments):
        if of.is_write and not (op._schema.name.startswith("aten::_fused") and of.name == "grads"):
            yield len([*_large(args[at] if at < len(args) else kwargs.get(of.name))])
