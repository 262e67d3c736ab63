"""The same model with fewer layers, and which lists have these: modules are shared, and lists of layers are not."""

from collections.abc import Sequence
from copy import copy

from torch import nn
from torch.optim import Optimizer

__all__ = ["lists_of", "mixtures_of", "shorter", "trains"]


def shorter(model: nn.Module, path: str, numbers: Sequence[int]) -> nn.Module:
    """A model whose list at this path has the layers with these numbers alone, the same modules and parameters. Those
    that hold the list are other objects; the model is as it was.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    >>> less = shorter(net, "1", (0, 2, 3))
    >>> len(less[1]), len(net[1]), less[1][2] is net[1][3]
    (3, 4, True)
    """
    made = copy(model)
    made._modules = dict(model._modules)
    if not path:
        layers = list(made._modules.values())
        made._modules = {str(at): layers[number] for at, number in enumerate(numbers)}
        return made
    name, _, rest = path.partition(".")
    child = model._modules[name]
    assert child is not None
    made._modules[name] = shorter(child, rest, numbers)
    return made


def trains(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """An optimizer that is the same but for parameters that this model lacks; it is looked at, and steps nowhere."""
    here = {id(p) for p in model.parameters()}
    made = copy(optimizer)
    made.param_groups = [
        {**group, "params": [p for p in group["params"] if id(p) in here]} for group in optimizer.param_groups
    ]
    return made


def lists_of(model: nn.Module, pattern: str) -> tuple[tuple[str, ...], int]:
    """The paths of the lists of layers that a pattern means, such as `layers.*` or `{encoder.block,decoder.block}.*`,
    and how many layers each of them has; none where these are not equally many.

    >>> net = nn.ModuleDict({name: nn.ModuleList(nn.Linear(2, 2) for _ in range(4)) for name in ("a", "b")})
    >>> lists_of(net, "{a,b}.*"), lists_of(net, "a.*")
    ((('a', 'b'), 4), (('a',), 4))
    """
    path = pattern.removesuffix(".*")
    if not path or path == pattern:
        return (), 0
    paths = tuple(path.strip("{}").split(","))
    counts = {len(model.get_submodule(each)._modules) for each in paths}
    return (paths, counts.pop()) if len(counts) == 1 else ((), 0)


def mixtures_of(model: nn.Module) -> tuple[str, int]:
    """The pattern of modules that seem to be layers of experts, whose weights have a dim of as many experts first, and
    how many these are; none where there are no such modules, or several names of them."""
    found = set()
    for path, part in model.named_modules():
        counts = {len(w) for w in part._parameters.values() if w is not None and w.dim() == 3}
        many = sum(w is not None and w.dim() == 3 for w in part._parameters.values())
        if many > 1 and len(counts) == 1:
            found.add((path.rpartition(".")[2], *counts))
    if len(found) != 1:
        return "", 0
    ((name, count),) = found
    return f"**.{name}", count
