"""The model of a step that runs: its values are the graph's now, and gradients of steps change them."""

from collections.abc import Mapping, Sequence
from threading import Lock

from torch import Tensor, nn
from torch.optim import Optimizer

from ....boxing.graph.physical import Physical
from ....placement import Placement
from ....sbp import Layout
from ...model.annotate import LayerMoves
from ...model.balance import settle
from ...tensors.tensor import GlobalTensor, wrap
from ..choose.parameters import globalised, named_values
from ..compiler.generated_calls import Shards
from .adopt import Trained, adopt, clip
from .on_shards import step_on_shards

__all__ = ["AdoptedModel"]


class AdoptedModel:
    """Modules whose values lie as a graph has them, and the optimizers of these.

    Parameters and buffers that are `kept` lie so from now on, and what the graph does not use is whole on `rest`; some
    layers are moved to other stages. `norm` is that of the gradients before the last step clipped them to `limit`.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        graph: Physical,
        kept: Mapping[str, Layout],
        rest: Placement | None,
        moved: LayerMoves,
        limit: float | None,
    ) -> None:
        self.optimizers, self.graph, self.limit = optimizers, graph, limit
        others = rest or next(value.layout.placement for value in graph.values.values())
        changed = globalised(modules, kept, others)
        settle(moved)
        values = named_values(modules)
        self.held: dict[str, GlobalTensor] = {name: values[name] for name in kept}  # type: ignore[misc]
        self.homes = {s.value.name: s.home for s in graph.sources}
        self.trained = {
            name: Trained(value, self.homes[name])
            for name, value in self.held.items()
            if graph.losses and value.requires_grad
        }
        self.known = {id(t.parameter): t for t in self.trained.values()}
        adopt(optimizers, self.known, changed)
        self.changed = {id(value): value for value in changed.values()}  # what was before may be gone by then
        self.norm: Tensor | None = None
        self.updating = Lock()

    def shards(self) -> dict[str, Shards]:
        """The values that a step reads."""
        return {name: tuple([s.detach() for s in value._shards]) for name, value in self.held.items()}

    def write(self, values: Mapping[str, Shards]) -> None:
        """Buffers get what they hold after a step; none of those that are on other ranks comes here."""
        for buffer, name in self.graph.writes.items():
            for mine, new in zip(self.held[buffer]._shards, values.get(name, ()), strict=False):
                mine.copy_(new)

    def hold(self) -> None:
        """Optimizers get the graph's parameters back from graphs of other shapes that they served meanwhile."""
        adopt(self.optimizers, self.known, self.changed)

    def learn(self, grads: Mapping[str, Shards], given: Mapping[str, Tensor]) -> None:
        """Gradients to the parameters, and to arguments that want them."""
        self.hold()
        for name, shards in grads.items():
            if name not in self.trained:
                _leave(given[name], shards, self.homes[name])
        self.update(grads)

    def update(self, grads: Mapping[str, Shards]) -> None:
        """Gradients to the parameters; with optimizers a step of each, after which the gradients are gone. Stages of
        one process may call it at any time."""
        trained = self.trained
        mine = {id(trained[name].master): shards for name, shards in grads.items() if name in trained}
        with self.updating:
            # A parameter's hooks are called with its own gradient, which has to go by it then.
            whole = self.limit is not None or any(each.parameter._hooks is not None for each in trained.values())
            steps = [o for o in self.optimizers if whole or not step_on_shards(o, mine)]
            if steps or not self.optimizers:
                for each in trained.values():
                    if id(each.master) in mine:
                        each.give(mine[id(each.master)], keep=not self.optimizers)
            if self.limit is not None and steps:
                self.norm = clip(trained.values(), self.limit)
            for optimizer in steps:
                optimizer.step()
            for optimizer in self.optimizers if steps else ():
                optimizer.zero_grad(set_to_none=True)


def _leave(x: Tensor, shards: Shards, home: Layout) -> None:
    """The gradient of an argument that wants one."""
    new = wrap(shards, home)
    grad = new.to_global(sbp=x.sbp) if isinstance(x, GlobalTensor) else new.full_tensor().to(x.device)
    x.grad = grad if x.grad is None else x.grad + grad
