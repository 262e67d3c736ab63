"""Learning rates by delay: where weights are read late, steps begin smaller and grow to what was asked for.

rate of a parameter at step t   =   base / delay ** max(0, 1 - t / anneal)
"""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...placement.errors import SbpError
from ..graph.choose.parameters import named_values
from ..graph.graph import StepGraph

__all__ = ["DelayedLR"]


class DelayedLR(LRScheduler):
    """A scheduler that divides the rate of a parameter by its delay at first, and after `anneal` steps by nothing.

    Delays are those of a planned pipeline without a flush: `step.delays().parameters`. Each group of parameters becomes
    a group for each delay in it, with the same settings; so make it before an optimizer's state is loaded. What is on
    one stage of `step` that is in time keeps its rate, and so does what the graph does not train.
    """

    def __init__(self, optimizer: Optimizer, step: StepGraph, *, anneal: int, last_epoch: int = -1) -> None:
        if anneal < 1:
            raise SbpError(f"DelayedLR: anneal={anneal}\n  say after how many steps rates are what was asked for")
        late = step.delays().parameters
        values = named_values(step.planned.plan.passes.modules)
        delays = {id(values[name]): delay for name, delay in late.items()}
        known = {id(x) for group in optimizer.param_groups for x in map(_whole, group["params"])}
        if known.isdisjoint(delays):
            raise SbpError(
                "DelayedLR: the optimizer has no parameter that the graph trains\n"
                "  give it the optimizer that the graph was made with"
            )
        groups = [made for group in optimizer.param_groups for made in _split(group, delays)]
        if len(groups) > len(optimizer.param_groups) and any("initial_lr" in group for group in optimizer.param_groups):
            raise SbpError(
                "DelayedLR: another scheduler was made before, of the groups as they were, and these become more\n"
                "  make DelayedLR first, and others behind it"
            )
        optimizer.param_groups[:] = groups
        self.anneal = anneal
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        left = max(0.0, 1 - self.last_epoch / self.anneal)
        groups = zip(self.base_lrs, self.optimizer.param_groups, strict=True)
        return [base / max(1, group["delay"]) ** left for base, group in groups]


def _split(group: dict[str, Any], delays: dict[int, int]) -> list[dict[str, Any]]:
    """A group for each delay, the least first."""
    apart: dict[int, list[Tensor]] = {}
    for x in group["params"]:
        apart.setdefault(delays.get(id(_whole(x)), 0), []).append(x)
    return [{**group, "params": held, "delay": delay} for delay, held in sorted(apart.items())]


def _whole(x: Tensor) -> Tensor:
    """The parameter of which an optimizer has a piece, once a graph has run."""
    whole: Tensor = vars(x).get("_piece_of", x)
    return whole
