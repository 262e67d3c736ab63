"""Estimating: choices of degrees are estimated by figures of one layer a stage, only where they may matter: several
samples a micro-batch where one is good already, and blocks that run again where some choice does not fit.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from math import inf

from .blocks_again import ALL, NONE, PARTLY, BlocksAgain
from .degrees import Degrees, Space
from .estimate import Estimates, PlanEstimate
from .shorter_model import ShortModels

__all__ = ["NEAR", "UNEVEN", "Estimating"]

NEAR = 0.01  # share of seconds that is worth no more stages, and no other plan in full
SCHEDULED = 6  # choices for which all schedules are estimated
WIDER = 2  # sizes of `tensor` for which more samples a micro-batch are estimated
NEARLY = 1.25  # times the seconds of the best, which more samples a micro-batch of one stage may make up for
WORSE = 0.15  # share of seconds that more samples a micro-batch do not make up for
RERUN = 0.9  # share of the forward of blocks that those that run again take at least once more
UNEVEN = 0.01  # share by which a stage with more of the blocks that keep more takes more than figures of layers say
PARTLY_TRIED = 3  # choices for which blocks that run again but for products are estimated
HOSTS = 3  # choices for which what lies on the host is estimated


class Estimating:
    """The choices of a space that were estimated, those within so many bytes before the others. What comes and goes has
    `gaps` of such a share of it."""

    def __init__(self, short: ShortModels, limit: float | None, gaps: float) -> None:
        self.short, self.limit = short, limit
        self.estimates = Estimates(short, gaps)
        self.found: dict[Degrees, PlanEstimate] = {}

    @property
    def space(self) -> Space:
        """The choices, as far as is known of the model."""
        return self.short.space

    def estimated(self) -> None:
        """Estimates of all choices that may be good."""
        least: dict[int, int] = {}
        for at in self.space.every():
            n = self.space.samples(at)
            least[at.tensor] = min(n, least.get(at.tensor, n))
        before = inf
        self.short.expect(at for tensor in sorted(least) for at in self.likely(tensor, least[tensor]))
        for tensor in sorted(least):
            self.look(tensor, least[tensor], again=False)
            mine = self.best_of(tensor)
            if before < mine:  # fewer ranks fit and are quicker: more would move more yet
                break
            before = mine
        self.add_again([*self.found])
        self.add_hosts()
        for tensor in sorted(least, key=self.best_of)[:WIDER]:
            samples = least[tensor]
            if self.best_of(tensor) > (1 + WORSE) * self.best_of():
                continue
            while (more := self.wider(tensor, samples)) is not None:
                self.short.expect(self.likely(tensor, more))
                if not self.look(tensor, more):
                    break
                samples = more
        self.add_partly()
        for at in [replace(one, by=by) for one in self.ranked()[:SCHEDULED] for by in self.space.pipelines(one)]:
            self.add_scheduled(at)

    def add_scheduled(self, at: Degrees) -> None:
        """Estimate a choice under another schedule. Where so many blocks that run again are too few for that, and it is
        quicker than all that fit, it has as many as it takes."""
        self.add([at])
        if at.again and (known := self.found.get(at)) and not self.fits(known) and known.seconds < self.best_of():
            self.add_fewest(at, ALL)

    def wider(self, tensor: int, samples: int) -> int | None:
        """The next number of samples of a micro-batch to estimate. Where one stage is about as good as several, that is
        the most that seem to fit, as kept bytes grow with them; None where no more do."""
        mine = {self.space.samples(at) for at in self.space.every() if at.tensor == tensor}
        more = sorted(n for n in mine if n > samples)
        known = [at for at in self.found if at.tensor == tensor and self.space.samples(at) == samples]
        if not more or not known:
            return None
        best = min(known, key=self.rank)
        alone = [at for at in known if at.pipe == 1 and self.found[at].seconds <= NEARLY * self.found[best].seconds]
        if not alone:
            return more[0]
        more = sorted(self.space.samples(at) for at in self.space.every() if (at.tensor, at.pipe) == (tensor, 1))
        fit = [n for n in more if n > samples and any(self.fits(self.widened(at, samples, n)) for at in alone)]
        return max(fit, default=None)

    def widened(self, at: Degrees, samples: int, more: int) -> PlanEstimate:
        """An estimate with so many more samples a micro-batch, as kept bytes grow with them."""
        held, figures = self.found[at], self.short.of(at)
        assert figures is not None
        whole = figures.stage(self.space.count, first=True, last=True)
        kept = (1 + self.estimates.gaps) * (whole.kept + whole.passing)
        return replace(held, memory=held.memory + (more - samples) * kept / samples)

    def look(self, tensor: int, samples: int, *, again: bool = True) -> bool:
        """Estimate the choices of a kind, with blocks that run `again` where some do not fit; whether one of them is
        the best so far."""
        before = self.best_of()
        self.add(at for one in self.alike(tensor, samples) for at in self.variants(one))
        if again:
            self.add_again(at for at in self.found if at.tensor == tensor and self.space.samples(at) == samples)
        return self.best_of() < before

    def alike(self, tensor: int, samples: int) -> list[Degrees]:
        """The choices with so many ranks of `tensor` and samples of a micro-batch."""
        return [at for at in self.space.every() if at.tensor == tensor and self.space.samples(at) == samples]

    def likely(self, tensor: int, samples: int) -> Iterator[Degrees]:
        """The variants of such choices, as far as nothing of them is known yet."""
        for of in self.alike(tensor, samples):
            shared = [replace(of, expert=size) for size in self.space.expert_sizes(of)]
            beyond = shared and of.data * of.tensor > self.space.node
            yield from filter(self.promises, shared if beyond else [of, *shared])

    def add_again(self, choices: Iterable[Degrees]) -> None:
        """Estimate those of these choices that do not fit, and may be quicker than all that do, with blocks that run
        again: with all, and with as few as it takes."""
        if not self.space.may_run_again:
            return
        short = [at for at in choices if not at.again and not self.fits(self.found[at]) and self.may_fit(at)]
        short.sort(key=self.again_at_least)
        good = [at for at in short if self.again_at_least(at) < self.best_of()]
        whole, partly = ([replace(at, again=again) for at in good] for again in (ALL, PARTLY))
        self.short.expect([*whole[::2], *partly[PARTLY_TRIED - 1 :: -1], *whole[1::2][::-1]])
        for at in short:
            if self.again_at_least(at) < self.best_of():
                self.add([replace(at, again=ALL)])
        for at in short:
            known = self.found.get(replace(at, again=ALL))
            if known is not None and self.fits(known) and self.again_at_least(at) < self.best_of():
                self.add_fewest(at, ALL)

    def may_fit(self, at: Degrees) -> bool:
        """Whether a choice leaves room for activations at all."""
        return self.estimates.resting(at) <= self.most(self.found[at])

    def add_partly(self) -> None:
        """Estimate the best choices in which blocks run again with some that do but for products and attention: these
        first, and where all of them are too few, with as few as it takes that run again whole."""
        good = [replace(at, again=NONE) for at in self.ranked() if at.again and self.fits(self.found[at])]
        good = [*dict.fromkeys(good)][:PARTLY_TRIED]
        self.short.expect(chain.from_iterable((at, replace(at, again=PARTLY)) for at in good))
        for at in good:
            partly = replace(at, again=PARTLY)
            self.add([at, partly])  # under a schedule beside the first one that of none may not be estimated yet
            if partly in self.found and self.found[partly].memory < self.found[at].memory:
                like = PARTLY if self.fits(self.found[partly]) else BlocksAgain(1, 1)
                self.add_fewest(at, like, 1 + UNEVEN * (at.pipe > 1))

    def add_fewest(self, at: Degrees, like: BlocksAgain, heavier: float = 1.0) -> Degrees:
        """Estimate a choice with as few blocks that run again like these as it takes, if some but not all of them do.
        Its memory is that of a plan so many times `heavier` than what was estimated."""
        limit, count = self.limit or 0, self.space.count

        def fit(n: int) -> bool:
            return self.estimates.memory(replace(at, again=like.some(n, count))) * heavier <= limit

        least = bisect_left(range(1, count), True, key=fit) + 1
        made = replace(at, again=like.some(least, count))
        if least < count:
            self.add([made])
        return made

    def add_hosts(self, gone: Collection[Degrees] = ()) -> None:
        """Where nothing fits, but for what was planned and does not, estimate the choices nearest to it with more and
        more on the host."""
        host: tuple[str, ...] = ()
        while (more := self.space.hosts(host)) is not None:
            host = more
            if any(self.fits(known) for at, known in self.found.items() if at not in gone):
                return
            others = [at for at in self.found if len(at.host) < len(host)]
            near = sorted(dict.fromkeys(replace(at, host=host) for at in others), key=self.without_states)
            self.add(near[:HOSTS])
            self.add_again([at for at in self.found if at.host == host])

    def without_states(self, at: Degrees) -> tuple[bool, float]:
        """The order of choices whose states go to the host: those that may fit then, the quickest first, and then those
        with the least memory."""
        known, figures = self.found.get(replace(at, host=())), self.short.of(replace(at, host=()))
        if known is None or figures is None:
            return True, inf
        states = self.space.count // at.pipe * figures.middle.states / at.alike
        left = replace(known, memory=known.memory - states)
        return not self.fits(left), known.seconds if self.fits(left) else left.memory

    def again_at_least(self, at: Degrees) -> float:
        """Seconds below which a choice is not if so many of its blocks run again that it fits."""
        known, figures = self.found[at], self.short.of(at)
        assert figures is not None
        share = 1 - self.most(known) / known.memory
        return known.seconds + share * RERUN * at.micro_batches * (self.space.count // at.pipe) * figures.middle.forward

    def variants(self, of: Degrees) -> Iterator[Degrees]:
        """A choice with its experts on each rank or shared, and weights whole or in pieces. Where they could be shared,
        they are so beyond a node: else the ranks of many nodes would sort tokens together."""
        shared = [replace(of, expert=size) for size in self.space.expert_sizes(of)]
        good = [at for at in shared if self.promises(at)]
        beyond = of.data * of.tensor > self.space.node and (len(good) < len(shared) or any(map(self.short.of, good)))
        if not beyond and self.promises(of):
            yield of
            if of.alike > 1 and of.pipe == 1 and self.space.open_rest:
                yield replace(of, spread=True)
        yield from good

    def promises(self, at: Degrees) -> bool:
        """Whether more samples a micro-batch may make a choice good, as far as its kind is known with fewer."""
        kind = self.short.kind(at)
        others = ((self.short.kind(other), known.seconds) for other, known in self.found.items())
        fewer = [
            seconds
            for mine, seconds in others
            if mine.samples < kind.samples and mine._replace(samples=kind.samples) == kind
        ]
        return min(fewer, default=0.0) <= (1 + WORSE) * self.best_of()

    def add(self, choices: Iterable[Degrees]) -> None:
        for at in choices:
            if at not in self.found and (known := self.estimates.of(at)) is not None:
                self.found[at] = known

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
        tight = self.limit is not None and self.found[at].memory > self.limit
        return tight, at.pipe * at.by.chunks, at.spread, at.tensor

    def rank(self, at: Degrees) -> tuple[bool, float]:
        known = self.found[at]
        return not self.fits(known), known.seconds if self.fits(known) else known.memory

    def fits(self, known: PlanEstimate) -> bool:
        return known.memory <= self.most(known)

    def most(self, known: PlanEstimate) -> float:
        """The bytes that an estimate may have."""
        return inf if self.limit is None else self.limit * known.slack

    def best_of(self, tensor: int | None = None) -> float:
        """The least estimate that fits, of a size of `tensor` or of all."""
        mine = (known for at, known in self.found.items() if tensor in (None, at.tensor) and self.fits(known))
        return min((known.seconds for known in mine), default=inf)
