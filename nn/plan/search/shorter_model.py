"""The same model with fewer layers: modules are shared, and lists of layers are not."""

from copy import copy

from torch import nn
from torch.optim import Optimizer

__all__ = ["shorter", "trains"]


def shorter(model: nn.Module, path: str, layers: int) -> nn.Module:
    """A model whose list at this path has its first layers alone, of the same modules and parameters. Those that hold
    the list are other objects; the model is as it was.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    >>> less = shorter(net, "1", 3)
    >>> len(less[1]), len(net[1]), less[1][2] is net[1][2]
    (3, 4, True)
    """
    made = copy(model)
    made._modules = dict(model._modules)
    if not path:
        made._modules = dict(list(made._modules.items())[:layers])
        return made
    name, _, rest = path.partition(".")
    child = model._modules[name]
    assert child is not None
    made._modules[name] = shorter(child, rest, layers)
    return made


def trains(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """An optimizer that is the same but for parameters that this model lacks; it is looked at, and steps nowhere."""
    here = {id(p) for p in model.parameters()}
    made = copy(optimizer)
    made.param_groups = [
        {**group, "params": [p for p in group["params"] if id(p) in here]} for group in optimizer.param_groups
    ]
    return made
