"""The same model with fewer layers, and which lists have these: modules are shared, and lists of layers are not.

`ShortModels` plans them for a choice of degrees, for the figures of its layers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from .....placement import Cluster, default_cluster, use_cluster
from .....sbp.joint.known_options import KnownOptions
from ....graph.captures import Captures
from ....graph.step import Step
from ...check import Loss, arguments, planned_step, samples_of
from ...plan import Plan
from .ahead import Ahead
from .blocks_again import BlocksAgain
from .degrees import Degrees, Space
from .stage_figures import FEWER, LAYERS, StageFigures

__all__ = ["LayerKind", "LayersKnown", "ShortModels", "Told", "lists_of", "mixtures_of", "shorter", "trains"]

Told = Callable[[str], object]
PARTS = 32  # micro-batches of a plan of few layers at least: what is moved once a step is cheap where they are many
SAMPLES = 256  # of such a plan, unless so many micro-batches take more: degrees share a capture


class LayerKind(NamedTuple):
    """The kind of layers that figures are of: ranks of `tensor`, samples of a micro-batch, how all blocks run again,
    ranks of `data`, `expert` and `context`, and what is on the host."""

    tensor: int
    samples: int
    again: BlocksAgain
    data: int = 1
    expert: int = 1
    context: int = 1
    host: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = ("data", self.data // self.expert), ("expert", self.expert), ("context", self.context)
        shared = "".join(f", {name}={size}" for name, size in sizes if size > 1)
        more = f", {self.again}" * bool(self.again) + f", {' and '.join(self.host)} on the host" * bool(self.host)
        return f"tensor={self.tensor}{shared}, {self.samples} sample{'s' * (self.samples > 1)}{more}"


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
        if many > 1 and len(counts) == 1 and counts != {1}:
            found.add((path.rpartition(".")[2], *counts))
    if len(found) != 1:
        return "", 0
    ((name, count),) = found
    return f"**.{name}", count


def shorter_models(model: nn.Module, lists: Sequence[str], count: int) -> Iterator[nn.Module]:
    """Models with few layers: the first of one list, one from the middle and the last, which may be of other kinds; of
    several lists as many of each as are compared."""
    if len(lists) == 1:
        yield shorter(model, lists[0], (0, count // 2, count - 1))
        return
    for many in (FEWER, LAYERS):
        made = model
        for path in lists:
            made = shorter(made, path, range(many))
        yield made


def rows(batch: Any, n: int) -> Any:
    """A batch of its first samples; what has no dim of samples stays."""
    many = samples_of(batch)

    def cut(x: Any) -> Any:
        return x[:n] if isinstance(x, Tensor) and x.dim() and len(x) == many else x

    args, kwargs = arguments(batch)
    return {name: cut(x) for name, x in kwargs.items()} if kwargs else tuple(map(cut, args))


class LayersKnown(NamedTuple):
    """Layers of a kind, as planned: their figures, if a model of a few of them can be planned, whether they draw random
    numbers, if that is known, and words."""

    figures: StageFigures | None = None
    draws: bool | None = None
    said: str = ""


class ShortModels:
    """A model with a few of its layers, for what layers take in a space of choices: each kind is planned once, by one
    of two `processes` if there are two. `whole` are the captures of all its layers."""

    def __init__(
        self,
        space: Space,
        model: nn.Module,
        batch: Any,
        told: Told,
        *,
        loss_fn: Loss | None,
        optimizers: list[Optimizer],
        whole: Captures,
        processes: int = 1,
    ) -> None:
        self.space, self.batch, self.told, self.loss_fn, self.whole = space, batch, told, loss_fn, whole
        self.few = [*shorter_models(model, space.lists, space.count)] if space.count > LAYERS else []
        self.optimizers = [[trains(one, few) for one in optimizers] for few in self.few]
        self.options = KnownOptions()
        self.captures: dict[tuple[int, int], Captures] = {}  # by samples, and which of the models
        self.figures: dict[LayerKind, StageFigures | None] = {}
        self.ahead = Ahead(self.looked_at, processes=processes)

    def of(self, at: Degrees) -> StageFigures | None:
        """The figures of a choice, of which some blocks may run again otherwise than the others."""
        made = list[StageFigures]()
        for kind in self.kinds(at):
            if kind not in self.figures:
                found = self.ahead.of(kind)
                self.figures[kind] = found.figures
                if found.draws is not None:
                    self.space = replace(self.space, draws=found.draws)
                if found.said:
                    self.told(found.said)
            figures = self.figures[kind]
            if figures is None:
                return None
            made.append(figures)
        return made[0].mixed(made[-1], at.again.kinds[2])

    def expect(self, choices: Iterable[Degrees]) -> None:
        """The figures of these choices are likely to be asked for next."""
        self.ahead.expect(kind for at in choices for kind in self.kinds(at))

    def kinds(self, at: Degrees) -> list[LayerKind]:
        """The kinds of layers of a choice, one or two."""
        base, some, _ = at.again.kinds
        return [self.kind(replace(at, again=again)) for again in dict.fromkeys((base, some))]

    def kind(self, at: Degrees) -> LayerKind:
        return LayerKind(at.tensor, self.space.samples(at), at.again, self.sampled(at), at.expert, at.context, at.host)

    def sampled(self, at: Degrees) -> int:
        """The ranks of `data` with which a choice is looked at: those that share experts. Where none do, and each has
        all experts, tokens are sorted by these together, and what that moves is looked at inside of a node."""
        if at.expert > 1 or at.data == 1 or not self.space.mixtures:
            return at.expert
        return max(2, self.space.node // at.tensor)

    def looked_at(self, kind: LayerKind) -> LayersKnown:
        """Plan layers of a kind."""
        tensor, samples, again, data, expert, context, host = kind
        stages, draws = LAYERS if self.space.layers else 1, None
        parts = max(1, min(max(PARTS, SAMPLES // samples // data), self.space.batch // samples // data))
        if not self.few or stages == parts == 1:  # figures are of micro-batches
            return LayersKnown()
        at = Degrees(stages, data, tensor, parts, again=again, expert=expert, context=context, host=host)
        try:
            with use_cluster(roomy(default_cluster(self.space.kind))):
                steps = [self.sample(at, samples, which) for which in range(len(self.few))]
                draws = any(op.draws for op in steps[0].plan.logical.ops)
                found = StageFigures.of(*steps) if self.space.layers else StageFigures.between(*steps)
        except Exception as error:  # also of a model that does not run with fewer layers
            return LayersKnown(None, draws, f"no figures of layers under {at}: {str(error).partition(chr(10))[0]}")
        said = f"a layer with {kind}: {1e3 * found.middle.seconds:.3g} ms, {found.middle.kept / 2**20:.4g} MiB"
        return LayersKnown(found.gathered(data * context), draws, said)

    def sample(self, at: Degrees, samples: int, which: int) -> Step:
        """The step of one of the models with few layers, by a choice."""
        many = at.data * at.micro_batches * samples
        return planned_step(
            Plan.read(self.space.text(at, sample=True)),
            self.few[which],
            rows(self.batch, many),
            loss_fn=self.loss_fn,
            optimizer=self.optimizers[which] or None,
            ranks=at.pipe * at.alike * at.tensor,
            captures=self.captures.setdefault((many, which), Captures(self.whole, self.options)),
        )


def roomy(cluster: Cluster) -> Cluster:
    """A cluster in which so many stages have room, whatever it has itself: only layers are looked at."""
    *inner, top = cluster.levels
    if top.groups or cluster.graph is not None or cluster.links:
        return cluster
    return replace(cluster, levels=(*inner, replace(top, size=LAYERS * top.size)))
