"""Graph: a training step or an inference that users write, run, and look at."""

from ..added.additions import OpenGraph
from .step_views import StepViews

__all__ = ["Graph"]


class Graph(StepViews, OpenGraph):
    """Subclass it, give it modules and optimizers as attributes, and write `build`; then call it like a function.

    `build` runs once for each shape of its arguments, on tensors without values. Where it calls `loss.backward()`, the
    graph trains: with an optimizer it steps, without one gradients are left on the parameters. Parameters become
    global tensors, and stay the modules' own. `super().__init__` takes the options that `Options` lists.

    >>> import torch
    >>> import sbpflow as flow
    >>> class Double(Graph):
    ...     def build(self, x):
    ...         return x * 2
    >>> Double(placement=flow.placement("cpu", range(2)))(torch.ones(2)).numpy()
    array([2., 2.], dtype=float32)
    """
