"""Seeking: degrees are estimated by figures of one layer a stage, and the best few of them are planned in full.

Figures are asked for only where they may matter: of several samples a micro-batch where one is good already, and of
blocks that run again where some choice does not fit.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ....placement import Cluster, default_cluster, use_cluster
from ...graph.captures import Captures
from ...graph.step import Step
from ..check import Loss, arguments, planned_step, samples_of
from ..plan import Plan
from .candidates import Candidate
from .degrees import Degrees, Space
from .estimate import PlanEstimate, estimate, links_over_data
from .runners_up import TriedPlan, said_of
from .shorter_model import shorter, trains
from .stage_figures import FEWER, LAYERS, StageFigures
from .trying import Trying

__all__ = ["Seeking"]

TRIES = 2  # plans in full that may be the answer
MISSES = 4  # besides, that take too much, or cannot be
NEAR = 0.01  # share of seconds that is worth no more stages, and no other plan in full
SLACK = 1.05  # by which an estimate of memory may be too high
SCHEDULED = 6  # choices for which all schedules are estimated
WIDER = 2  # sizes of `tensor` for which more samples a micro-batch are estimated
NEARLY = (
    1.25  # times the seconds of the best, which more samples a micro-batch may make up for where there is one stage
)
WORSE = 0.15  # share of seconds that more samples a micro-batch do not make up for
RERUN = 0.9  # share of the forward of blocks that those that run again take at least once more
PARTS = 32  # micro-batches of a plan of few layers at most: what is moved once a step is cheap where they are many
LISTED = 8  # estimates that are runners-up

Told = Callable[[str], object]
# ranks of `tensor`, samples of a micro-batch, whether blocks run again, ranks of `expert` and of `context`
Kind = tuple[int, int, bool, int, int]


class Seeking:
    """The search in a space, for a model and a batch. `trying` has what is planned in full."""

    def __init__(
        self,
        space: Space,
        trying: Trying,
        told: Told,
        *,
        loss_fn: Loss | None,
        optimizers: list[Optimizer],
    ) -> None:
        self.space, self.trying, self.told, self.limit = space, trying, told, trying.limit
        self.loss_fn = loss_fn
        self.few = [*shorter_models(trying.model, space)] if space.count > LAYERS else []
        self.optimizers = [[trains(one, few) for one in optimizers] for few in self.few]
        self.captures: dict[tuple[int, int], Captures] = {}  # by samples, and which of the models
        self.figures: dict[Kind, StageFigures | None] = {}
        self.links = links_over_data(space.kind)
        self.found: dict[Degrees, PlanEstimate] = {}
        self.heavier = 1.0  # memory of plans in full, as many times what was estimated

    def run(self) -> None:
        """Estimate, then plan the best in full. Who interrupts the estimates gets the best of those that are known, and
        who interrupts plans the best of them."""
        try:
            self.estimated()
        except KeyboardInterrupt:
            if not self.found:
                raise
            self.told("interrupted: the best of what is known")
        try:
            if self.found:
                self.tried()
            else:
                self.tried_unseen()
        except KeyboardInterrupt:
            if self.trying.best is None:
                raise
            self.told("interrupted: the best so far")
        if "pipe" in self.space.seeks and not self.space.layers:
            why = "the layers that repeat are in no one list that could be stages; a pipe line can say them"
            self.trying.tried.append(TriedPlan(Candidate("pipelines", Plan.read(self.space.given.text)), why=why))
        rest = [one for one in self.ranked() if str(one) not in {tried.of.name for tried in self.trying.tried}]
        for one in rest[:LISTED]:
            self.trying.tried.append(TriedPlan(self.candidate(one), why=f"{self.found[one]}, by one layer a stage"))

    def estimated(self) -> None:
        """Estimates of all choices that may be good."""
        least: dict[int, int] = {}
        for at in self.space.every():
            n = self.samples(at)
            least[at.tensor] = min(n, least.get(at.tensor, n))
        before = float("inf")
        for tensor in sorted(least):
            self.look(tensor, least[tensor], again=False)
            mine = self.best_of(tensor)
            if before < mine:  # fewer ranks fit and are quicker: more would move more yet
                break
            before = mine
        self.add_again([*self.found])
        for tensor in sorted(least, key=self.best_of)[:WIDER]:
            samples = least[tensor]
            if self.best_of(tensor) > (1 + WORSE) * self.best_of():
                continue
            while (more := self.wider(tensor, samples)) is not None and self.look(tensor, more):
                samples = more
        for one in self.ranked()[:SCHEDULED]:
            self.add(replace(one, by=by) for by in self.space.pipelines(one))

    def wider(self, tensor: int, samples: int) -> int | None:
        """The next number of samples of a micro-batch to estimate. Where one stage is about as good as several, that is
        the most that seem to fit, as kept bytes grow with them; None where no more do."""
        mine = {self.samples(at) for at in self.space.every() if at.tensor == tensor}
        more = sorted(n for n in mine if n > samples)
        known = [at for at in self.found if at.tensor == tensor and self.samples(at) == samples]
        if not more or not known:
            return None
        best = min(known, key=self.rank)
        alone = [at for at in known if at.pipe == 1 and self.found[at].seconds <= NEARLY * self.found[best].seconds]
        best = min(alone, key=self.rank, default=best)
        if best.pipe > 1:
            return more[0]
        held, figures = self.found[best], self.figures[self.kind(best)]
        assert figures is not None
        whole = figures.stage(self.space.count, first=True, last=True)
        grows = (whole.kept + whole.passing) / samples
        more = sorted(self.samples(at) for at in self.space.every() if (at.tensor, at.pipe) == (tensor, 1))
        fit = [n for n in more if n > samples and self.fits(replace(held, memory=held.memory + (n - samples) * grows))]
        return max(fit, default=None)

    def look(self, tensor: int, samples: int, *, again: bool = True) -> bool:
        """Estimate the choices of a kind, with blocks that run `again` where some do not fit; whether one of them is
        the best so far."""
        mine = [at for at in self.space.every() if at.tensor == tensor and self.samples(at) == samples]
        before = self.best_of()
        if not mine:
            return False
        self.add(at for one in mine for at in self.variants(one))
        if again:
            self.add_again(at for at in self.found if at.tensor == tensor and self.samples(at) == samples)
        return self.best_of() < before

    def add_again(self, choices: Iterable[Degrees]) -> None:
        """Estimate those of these choices that do not fit, and may be quicker than all that do, with blocks that run
        again."""
        if not self.space.may_run_again:
            return
        short = [at for at in choices if not at.again and not self.fits(self.found[at])]
        for at in sorted(short, key=self.again_at_least):
            if self.again_at_least(at) < self.best_of():
                self.add([replace(at, again=True)])

    def again_at_least(self, at: Degrees) -> float:
        """Seconds below which a choice is not if its blocks run again."""
        figures = self.figures[self.kind(at)]
        assert figures is not None
        return (
            self.found[at].seconds + RERUN * at.micro_batches * (self.space.count // at.pipe) * figures.middle.forward
        )

    def variants(self, of: Degrees) -> Iterator[Degrees]:
        yield of
        if of.alike > 1 and of.pipe == 1 and self.space.open_rest:
            yield replace(of, spread=True)
        yield from (replace(of, expert=size) for size in self.space.expert_sizes(of))

    def add(self, choices: Iterable[Degrees]) -> None:
        for at in choices:
            kind = self.kind(at)
            if kind not in self.figures:
                self.figures[kind] = self.figures_of(*kind)
            figures = self.figures[kind]
            if figures is not None and at not in self.found:
                self.found[at] = estimate(figures, self.space.count, at, self.links(at))

    def kind(self, at: Degrees) -> Kind:
        return at.tensor, self.samples(at), at.again, at.expert, at.context

    def figures_of(self, tensor: int, samples: int, again: bool, expert: int, context: int) -> StageFigures | None:
        """Figures of layers, or none where a model of a few of them cannot be planned."""
        stages = LAYERS if self.space.layers else 1
        parts = max(1, min(PARTS, self.space.batch // samples // expert))
        if not self.few or stages == parts == 1:  # figures are of micro-batches
            return None
        at = Degrees(stages, expert, tensor, parts, again=again, expert=expert, context=context)
        try:
            with use_cluster(roomy(default_cluster(self.space.kind))):
                steps = [self.sample(at, samples, which) for which in range(len(self.few))]
                self.space = replace(self.space, draws=any(op.draws for op in steps[0].plan.logical.ops))
                found = StageFigures.of(*steps) if self.space.layers else StageFigures.between(*steps)
        except Exception as error:  # also of a model that does not run with fewer layers
            self.told(f"no figures of layers under {at}: {str(error).partition(chr(10))[0]}")
            return None
        shared = "".join(f", {name}={size}" for name, size in (("expert", expert), ("context", context)) if size > 1)
        said = f"tensor={tensor}{shared}, {samples} sample{'s' * (samples > 1)}{', run again' * again}"
        self.told(f"a layer with {said}: {1e3 * found.middle.seconds:.3g} ms, {found.middle.kept / 2**20:.4g} MiB")
        return found.gathered(expert * context)

    def sample(self, at: Degrees, samples: int, which: int) -> Step:
        """The step of one of the models with few layers, by a choice."""
        many = at.data * at.micro_batches * samples
        return planned_step(
            Plan.read(self.space.text(at, sample=True)),
            self.few[which],
            rows(self.trying.batch, many),
            loss_fn=self.loss_fn,
            optimizer=self.optimizers[which] or None,
            ranks=at.pipe * at.alike * at.tensor,
            captures=self.captures.setdefault((many, which), Captures()),
        )

    def tried(self) -> None:
        """Plan the best choices in full, until no other promises more."""
        left, good, missed = self.ranked(), 0, 0
        misses = MISSES if self.fits(self.found[left[0]]) else 1  # where none may fit, one tells how far that is
        while left and good < TRIES and missed < misses:
            one = left.pop(0)
            known, best = self.found[one], self.trying.best
            if best is not None and (known.seconds > (1 - NEAR) * best.seconds or not self.fits(known)):
                continue
            tried = self.attempt(one)
            fits = tried.fits(self.limit)
            good, missed = good + fits, missed + (not fits)
            if tried.checked is not None and not fits:
                self.heavier = max(self.heavier, tried.checked.memory / known.memory)
                gone = {*self.found} - {*left}
                self.add_again([*self.found])
                left = [at for at in self.ranked() if at not in gone]

    def tried_unseen(self) -> None:
        """Plan choices of which nothing is known, whole batches of few cuts first: of those that take too much, the
        next is one that may take so much less."""
        every = [at for one in self.space.every() if one.pipe == 1 for at in self.variants(one)]
        if self.space.may_run_again:
            every += [replace(at, again=True) for at in every]
        left = sorted(every, key=lambda at: (at.again, at.tensor, at.spread, at.micro_batches))
        good = missed = 0
        while left and good < 2 * TRIES and missed < 2 * MISSES:
            one = left.pop(0)
            tried = self.attempt(one)
            fits = tried.fits(self.limit)
            good, missed = good + fits, missed + (not fits)
            if fits:
                left = [at for at in left if not at.again and at.tensor != one.tensor]
            elif tried.checked is not None and self.limit is not None:
                most = max(1.0, self.samples(one) * self.limit / tried.checked.memory)
                alike = one.again, one.tensor, one.spread
                left = [at for at in left if (at.again, at.tensor, at.spread) != alike or self.samples(at) <= most]

    def attempt(self, one: Degrees) -> TriedPlan:
        tried = self.trying.add(self.candidate(one))
        self.told(f"{one}: {said_of(tried)}")
        return tried

    def ranked(self) -> list[Degrees]:
        """All that was estimated: those that fit first, of these the quickest, and of such that are nearly so the one
        with the fewest stages."""
        made = sorted(self.found, key=self.rank)
        first = self.found[made[0]] if made else None
        if first is None or not self.fits(first):
            return made
        near = [at for at in made if self.fits(self.found[at]) and self.found[at].seconds <= (1 + NEAR) * first.seconds]
        return sorted(near, key=self.simpler) + made[len(near) :]

    def simpler(self, at: Degrees) -> tuple[bool, int, bool, int]:
        """The order of choices that are as quick: those that fit without any slack first, then of few stages."""
        tight = self.limit is not None and self.found[at].memory * self.heavier > self.limit
        return tight, at.pipe * at.by.chunks, at.spread, at.tensor

    def rank(self, at: Degrees) -> tuple[bool, float]:
        known = self.found[at]
        return not self.fits(known), known.seconds if self.fits(known) else known.memory

    def fits(self, known: PlanEstimate) -> bool:
        return self.limit is None or known.memory * self.heavier <= SLACK * self.limit

    def best_of(self, tensor: int | None = None) -> float:
        """The least estimate that fits, of a size of `tensor` or of all."""
        mine = (known for at, known in self.found.items() if tensor in (None, at.tensor) and self.fits(known))
        return min((known.seconds for known in mine), default=float("inf"))

    def samples(self, at: Degrees) -> int:
        """Those of a micro-batch on a rank of `data`."""
        return self.space.batch // at.data // at.micro_batches

    def candidate(self, at: Degrees) -> Candidate:
        return Candidate(str(at), Plan.read(self.space.text(at)))


def shorter_models(model: nn.Module, space: Space) -> Iterator[nn.Module]:
    """Models with few layers: the first of one list, one from the middle and the last, which may be of other kinds; of
    several lists as many of each as are compared."""
    if space.layers:
        yield shorter(model, space.layers, (0, space.count // 2, space.count - 1))
        return
    for many in (FEWER, LAYERS):
        made = model
        for path in space.lists:
            made = shorter(made, path, range(many))
        yield made


def rows(batch: Any, n: int) -> Any:
    """A batch of its first samples; what has no dim of samples stays."""
    many = samples_of(batch)

    def cut(x: Any) -> Any:
        return x[:n] if isinstance(x, Tensor) and x.dim() and len(x) == many else x

    args, kwargs = arguments(batch)
    return {name: cut(x) for name, x in kwargs.items()} if kwargs else tuple(map(cut, args))


def roomy(cluster: Cluster) -> Cluster:
    """A cluster in which so many stages have room, whatever it has itself: only layers are looked at."""
    *inner, top = cluster.levels
    if top.groups or cluster.graph is not None or cluster.links:
        return cluster
    return replace(cluster, levels=(*inner, replace(top, size=LAYERS * top.size)))
