"""The model of a step that runs: its values are the graph's now, and gradients of steps change them."""

import operator
from collections.abc import Collection, Mapping, Sequence
from threading import Lock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ....boxing.graph.physical import Physical, Source
from ....boxing.kept import KeptErrors
from ....placement import Placement
from ....placement.world import owned
from ....sbp import Layout
from ...model.annotate import LayerMoves
from ...model.balance import settle
from ...model.slots import slots
from ...tensors.factories import whole_everywhere
from ...tensors.handle import has_grad
from ...tensors.moves import own_shards
from ...tensors.tensor import GlobalTensor, wrap
from ..choose.parameters import free_values, globalised, named_values
from ..compiler.generated_calls import Shards
from ..host.memory import Folder
from ..host.states import StateMemory
from .adopt import adopt, clip, owner_of, served
from .followers import Followers
from .kept_errors import keeps_errors
from .late_mean import means_of_step, means_put
from .loss_scale import LossScale, overflowed, steps_by, unscaled
from .nonfinite import SkippedSteps, spoilt
from .on_shards import step_on_shards
from .on_whole import step_on_whole
from .relocation import ModelMove, moves_made, relocated
from .trained import Trained

__all__ = ["AdoptedModel"]

_layout_of = operator.attrgetter("_layout")
_hooks_of = operator.attrgetter("parameter._hooks")


class AdoptedModel:
    """Modules whose values lie as a graph has them, and the optimizers of these.

    Parameters and buffers that are `kept` lie so from now on, and those that the graph does not use are whole on
    `rest`; some layers are moved to other stages. With a `move`, values that are global already and lie otherwise are
    brought there, with their optimizer states. `norm` is that of the gradients before the last step clipped them to
    `limit`, and `scale` the factor of losses, if they had one. `skipped` counts steps that are left out, if some are to
    be, and `errors` are the parts of gradients that encoders leave out: they count once a step is done. One that
    `leaves` gradients steps no optimizer, which is others' to do.
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
        scale: LossScale | None = None,
        skipped: SkippedSteps | None = None,
        errors: KeptErrors | None = None,
        move: ModelMove | None = None,
        leaves: bool = False,
    ) -> None:
        self.optimizers, self.graph, self.limit, self.scale = optimizers, graph, limit, scale
        self.stepping = () if leaves else optimizers
        others = rest or next(value.layout.placement for value in graph.values.values())
        followers = None
        if move is not None and not move.done:
            homes = {s.value.name: s.home.placement for s in graph.sources}
            followers = Followers(optimizers, named_values(modules), move, graph.ranks, _lost_errors(errors, homes))
            relocated(free_values(modules, kept, others), move.lost)
        changed = globalised(modules, kept, others)
        settle(moved)
        values = named_values(modules)
        self.held: dict[str, GlobalTensor] = {name: values[name] for name in kept}  # type: ignore[misc]
        known = {id(value) for value in self.held.values()}
        held = [slot for slot in slots(modules) if id(slot.value) in known]  # tied ones under all their names
        self.tables, self.names = [slot.table for slot in held], [slot.name for slot in held]
        self.values = [slot.value for slot in held]
        self.lies = [value._layout for value in self.held.values()]
        self.sources = {s.value.name: s for s in graph.sources}
        self.many, self.stepped = self._stepped()
        mapped = bool(optimizers and graph.losses) and any(s.offload == "disk" for s in graph.sources)
        folder = Folder(graph.name) if mapped else None
        self.trained = {
            name: self._trained(value, self.sources[name], folder)
            for name, value in self.held.items()
            if graph.losses and value.requires_grad
        }
        self.offloaded = [each for each in self.trained.values() if each.host is not None]
        self.known = {id(t.parameter): t for t in self.trained.values()}
        self.leaves = self._leaves()
        self.pieces = {name: t for name, t in self.trained.items() if t.master is not t.parameter}
        if move is not None and followers is not None:
            followers.bring(self.known)
            move.done = True
        self.moves = moves_made()
        adopt(optimizers, self.known, changed)
        for optimizer in optimizers if scale is not None else ():
            assert scale is not None
            steps_by(optimizer, scale)
        self.changed = {id(value): value for value in changed.values()}  # what was before may be gone by then
        self.skipped, self.errors = skipped, KeptErrors() if errors is None else errors
        self.encodes = any(back.encoding for back in graph.backs)
        for optimizer in optimizers:
            keeps_errors(optimizer, self.errors)
        self.norm: Tensor | None = None
        self.means = -1  # how many had been put when parameters were last asked for theirs
        self.updating = Lock()

    def _trained(self, value: GlobalTensor, source: Source, folder: Folder | None) -> Trained:
        if id(value) not in self.stepped:
            return Trained(value, source.home)
        return Trained(value, source.home, source.master, _host(source, folder))

    def in_place(self) -> bool:
        """Whether modules still hold these values, of these shapes and dtypes, and no other graph has moved them.
        Memory that users have put there (`x.data = y`) may lie in another way: the next step brings it back."""
        if not all(map(operator.is_, map(dict.get, self.tables, self.names), self.values)):
            return False
        if not self._known_memory() and not all(self._like(name, value) for name, value in self.held.items()):
            return False
        if self.moves != moves_made():
            if any(not _lies_so(value, self.sources[name].value.layout) for name, value in self.held.items()):
                return False
            self.moves = moves_made()
        return True

    def _known_memory(self) -> bool:
        """Whether nobody has put other memory there that lies in another way."""
        return all(map(operator.is_, map(_layout_of, self.held.values()), self.lies))

    def _like(self, name: str, value: Tensor) -> bool:
        of = self.sources[name].value.layout
        return tuple(value.shape) == of.shape and value.dtype is of.dtype

    def _bring_back(self) -> None:
        """Lay memory that users have put there as the graph has it."""
        for name, value in self.held.items():
            of = self.sources[name].value.layout
            if not _lies_so(value, of):
                with torch.no_grad():
                    value.data = wrap(own_shards(value.detach(), of, "other data"), of)
        self.lies = [value._layout for value in self.held.values()]

    def shards(self) -> dict[str, Shards]:
        """The values that a step reads."""
        if not self._known_memory():
            self._bring_back()
        self.errors.drop()  # what a step that failed has left
        if self.trained and self.optimizers:
            self.errors.check_asked(self.encodes)
        found = {name: tuple(map(Tensor.detach, value._shards)) for name, value in self.held.items()}
        found["kept"] = self.errors  # type: ignore[assignment]  # errors of what was encoded
        return found

    def late_means(self, corrected: Collection[str]) -> dict[str, Shards]:
        """The means of late updates of parameters that the step about to run corrects; others it has none of."""
        if not self.trained or not self.optimizers or not (corrected or self.means < means_put()):
            return {}
        found = means_of_step(self.held, corrected)
        self.means = means_put()
        return found

    def skips(self, losses: Sequence[tuple[Placement, Shards]], grads: Mapping[str, Shards]) -> bool:
        """Whether this step is to change nothing, since a loss or a gradient is not finite on some rank. Where losses
        have a scale, that looks at gradients by itself."""
        if self.skipped is None:
            return False
        come = {} if self.scale is not None else {name: each for name, each in grads.items() if name in self.trained}
        held = {name: (value.placement, value._shards) for name, value in self.held.items() if has_grad(value._layout)}
        homes = {name: (self.trained[name].home.placement, shards) for name, shards in come.items()}
        found = spoilt(losses, homes, held, self.graph.ranks, self.skipped)
        if found:
            self.no_norm(grads)
        return found

    def no_norm(self, names: Collection[str]) -> None:
        """Note the norm, which is no number, of a step that changed nothing because these gradients were not finite."""
        if self.limit is not None:
            homes_of = [t.held.placement for name, t in self.trained.items() if name in names]
            self.norm = whole_everywhere(torch.tensor(torch.nan, device="cpu"), homes_of[-1])

    def take(
        self,
        values: Mapping[str, Shards],
        losses: Sequence[tuple[Placement, Shards]],
        grads: Mapping[str, Shards] | None,
        given: Mapping[str, Tensor],
    ) -> None:
        """A step counts, unless it is to change nothing: its buffers, and its gradients where it learns at its end."""
        if grads is not None and self.skips(losses, grads):
            return
        writes = self.graph.writes.items()  # none of those that are on other ranks comes here
        pairs = [(x, new) for of, name in writes for x, new in zip(self.held[of]._shards, values.get(name, ()))]  # noqa: B905
        written = {x.untyped_storage()._cdata for x, _ in pairs}
        with torch.no_grad():
            # One that becomes what another was, or a view of itself, is read before any is written.
            news = [new.clone() if new.untyped_storage()._cdata in written else new for _, new in pairs]
            for (mine, _), new in zip(pairs, news, strict=True):
                mine.copy_(new)
        if grads is not None:
            self.learn(grads, given)
        self.errors.commit()

    def hold(self) -> None:
        """Optimizers get the graph's parameters back from graphs of other shapes that they served meanwhile."""
        adopt(self.optimizers, self.known, self.changed)

    def learn(self, grads: Mapping[str, Shards], given: Mapping[str, Tensor]) -> None:
        """Gradients to the parameters, and to arguments that want them."""
        self.hold()
        for name in [name for name in grads if name not in self.trained]:
            plain = grads[name] if self.scale is None else tuple([x / self.scale.value for x in grads[name]])
            _leave(given[name], plain, self.sources[name].home)
        self.update(grads)

    def update(self, grads: Mapping[str, Shards]) -> None:
        """Gradients to the parameters; with optimizers to step a step of each, after which they are gone.
        Stages of one process may call it at any time."""
        come = [(self.trained[name], shards) for name, shards in grads.items() if name in self.trained]
        with self.updating:
            if self.scale is not None:
                factor = self.scale.value
                overflow = overflowed([(each.home.placement, shards) for each, shards in come], self.graph.ranks)
                self.scale.after(overflow=overflow)
                if overflow:
                    self.no_norm(grads)
                    if self.skipped is not None:
                        self.skipped.overflow()
                    return
            for name, each in self.pieces.items():
                each.idle = name not in grads
            if self.stepping:
                self.look_at_optimizers()
                if self.leaves:
                    come = self.left(come, 1.0 if self.scale is None else factor)
            # A parameter's hooks are called with its own gradient, which has to go by it then.
            hooked = any(map(_hooks_of, self.trained.values()))
            if hooked or not self.stepping:
                if self.scale is not None:
                    come = _unscaled(come, factor)
                for each, shards in come:
                    each.give(shards, keep=not self.stepping)
                steps = list(self.stepping)
            else:
                brought = [
                    (each, shards if each.comes_there and each.host is None else each.brought(shards))
                    for each, shards in come
                ]
                for each in self.offloaded:
                    assert each.host is not None
                    each.host.arrive()
                if self.scale is not None:
                    brought = _unscaled(brought, factor)
                mine = {id(each.master): shards for each, shards in brought}
                steps = list(self.stepping)
                if self.limit is None:
                    steps = [o for o in steps if not step_on_shards(o, mine)]
                if steps and self.limit is None and self.scale is None:
                    at_home = {id(each.master): shards for each, shards in come}
                    steps = [o for o in steps if not step_on_whole(o, served(o), at_home)]
                for each, shards in brought if steps else ():
                    each.take(shards)
            if self.limit is not None and steps:
                self.norm = clip(self.trained.values(), self.limit)
            for optimizer in steps:
                if not step_on_whole(optimizer, served(optimizer), {}):
                    optimizer.step()
            for optimizer in self.stepping if steps else ():
                optimizer.zero_grad(set_to_none=True)
            for each in self.pieces.values():
                each.idle = False

    def look_at_optimizers(self) -> None:
        """See again which parameters optimizers hold, if they hold more or fewer than before."""
        if self.many != self._many():
            self.many, self.stepped = self._stepped()
            self.leaves = self._leaves()

    def _many(self) -> int:
        """The number of parameters that optimizers hold."""
        return sum([len(group["params"]) for each in self.optimizers for group in each.param_groups])

    def _stepped(self) -> tuple[int, set[int]]:
        """The number of parameters that optimizers hold, and their ids."""
        held = (value for each in self.optimizers for group in each.param_groups for value in group["params"])
        return self._many(), {id(owner_of(value)) for value in held}

    def _leaves(self) -> bool:
        """Whether some parameters are trained that no optimizer holds."""
        return not all(id(each.parameter) in self.stepped for each in self.trained.values())

    def left(self, come: list[tuple[Trained, Shards]], scale: float) -> list[tuple[Trained, Shards]]:
        """The gradients that optimizers step by.

        A gradient of a parameter that none of them holds is added to the parameter's own, as torch does, for whoever
        wants it."""
        others = [(each, shards) for each, shards in come if id(each.parameter) not in self.stepped]
        for each, shards in others if scale == 1.0 else _unscaled(others, scale):
            each.give(shards, keep=True)
        return [(each, shards) for each, shards in come if id(each.parameter) in self.stepped] if others else come


def _lost_errors(errors: KeptErrors | None, homes: Mapping[str, Placement]) -> str | None:
    """The errors of a compressed gradient that would stay on ranks that have nothing of it any more."""
    for name in errors or ():
        rows = errors.rows_of(name) if errors is not None else None
        if rows is not None and homes.get(name, rows.lies.placement) is not rows.lies.placement:
            return f"the compressed gradient of {name} has errors on {rows.lies.placement}"
    return None


def _unscaled(come: list[tuple[Trained, Shards]], scale: float) -> list[tuple[Trained, Shards]]:
    plain = unscaled([shards for _, shards in come], scale)
    return [(each, shards) for (each, _), shards in zip(come, plain, strict=True)]


def _lies_so(value: GlobalTensor, of: Layout) -> bool:
    return value.placement is of.placement and value._layout.state == of.state


def _host(source: Source, folder: Folder | None) -> StateMemory | None:
    if source.offload is None:
        return None
    ranks = owned(source.master.placement)
    return StateMemory(source.offload, source.value.name, ranks, folder if source.offload == "disk" else None)


def _leave(x: Tensor, shards: Shards, home: Layout) -> None:
    """The gradient of an argument that wants one."""
    new = wrap(shards, home)
    grad = new.to_global(sbp=x.sbp) if isinstance(x, GlobalTensor) else new.full_tensor().to(x.device)
    x.grad = grad if x.grad is None else x.grad + grad
