"""The runner of a straight step: one function on this process, for the whole batch at once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...boxing.graph.physical import Var
from ...sbp.call import mapped
from ..tensors.tensor import GlobalTensor, wrap
from .capture.arguments import cutter
from .compiler.generated_calls import trimmed
from .optimizer.adopted_model import AdoptedModel
from .plan import Planned

__all__ = ["StraightRunner"]


class StraightRunner:
    """Cuts arguments, runs the program, and gives gradients to the model."""

    def __init__(self, plan: Planned, model: AdoptedModel) -> None:
        self.plan, self.model, self.program = plan, model, plan.program
        self.graph, self.constants, self.trains = plan.graph, plan.passes.constants, plan.trains
        sources = [s for s in plan.graph.sources if s.kind in ("input", "constant")]
        self.cut = {s.value.name: cutter(s.value.layout) for s in sources}

    def run(self, given: Mapping[str, Tensor]) -> Any:
        """One step on the tensors of its arguments."""
        shards = self.model.shards()
        for name, cut in self.cut.items():
            shards[name] = cut(given[name] if name in given else self.constants[name]())
        with torch.no_grad():
            done = self.program(shards)
            self.model.write(done.values)
        if self.trains:
            self.model.learn(done.grads, given)

        def put(var: Var) -> GlobalTensor:
            return wrap(trimmed(done.values[var.name]), self.graph.layout(var.name))

        return self.plan.logical.rebuild(mapped(self.graph.result, Var, put))
