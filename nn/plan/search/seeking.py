"""Seeking: degrees are estimated by figures of one layer a stage, and the best few of them are planned in full.

Figures are asked for only where they may matter: of several samples a micro-batch where one is good already, and of
blocks that run again where some choice does not fit.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from math import inf

from torch.optim import Optimizer

from ....boxing.figures import volume
from ..check import Loss
from ..plan import Plan
from .blocks_again import ALL, NONE, PARTLY, BlocksAgain
from .candidates import Candidate
from .degrees import Degrees, Space
from .estimate import Estimates, PlanEstimate, PlanTold
from .runners_up import TriedPlan, said_of
from .shorter_model import ShortModels, Told
from .trying import Trying

__all__ = ["Seeking"]

TRIES = 2  # plans in full that may be the answer
MISSES = 4  # besides, that take too much, or cannot be
NEAR = 0.01  # share of seconds that is worth no more stages, and no other plan in full
SCHEDULED = 6  # choices for which all schedules are estimated
WIDER = 2  # sizes of `tensor` for which more samples a micro-batch are estimated
NEARLY = 1.25  # times the seconds of the best, which more samples a micro-batch of one stage may make up for
WORSE = 0.15  # share of seconds that more samples a micro-batch do not make up for
RERUN = 0.9  # share of the forward of blocks that those that run again take at least once more
ROOM = 0.03  # share of the limit that may be left
UNEVEN = 0.01  # share by which a stage with more of the blocks that keep more takes more than figures of layers say
PARTLY_TRIED = 3  # choices for which blocks that run again but for products are estimated
HOSTS = 3  # choices for which what lies on the host is estimated
LISTED = 8  # estimates that are runners-up


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
        self.trying, self.told, self.limit = trying, told, trying.limit
        self.short = ShortModels(
            space,
            trying.model,
            trying.batch,
            told,
            loss_fn=loss_fn,
            optimizers=optimizers,
            whole=trying.captures,
        )
        self.estimates = Estimates(self.short, trying.gaps)
        self.found: dict[Degrees, PlanEstimate] = {}

    @property
    def space(self) -> Space:
        """The choices, as far as is known of the model."""
        return self.short.space

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
            self.trying.tried.append(TriedPlan(self.candidate(one), why=self.why(one)))

    def estimated(self) -> None:
        """Estimates of all choices that may be good."""
        least: dict[int, int] = {}
        for at in self.space.every():
            n = self.space.samples(at)
            least[at.tensor] = min(n, least.get(at.tensor, n))
        before = inf
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
            while (more := self.wider(tensor, samples)) is not None and self.look(tensor, more):
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
        kept = (1 + self.trying.gaps) * (whole.kept + whole.passing)
        return replace(held, memory=held.memory + (more - samples) * kept / samples)

    def look(self, tensor: int, samples: int, *, again: bool = True) -> bool:
        """Estimate the choices of a kind, with blocks that run `again` where some do not fit; whether one of them is
        the best so far."""
        mine = [at for at in self.space.every() if at.tensor == tensor and self.space.samples(at) == samples]
        before = self.best_of()
        if not mine:
            return False
        self.add(at for one in mine for at in self.variants(one))
        if again:
            self.add_again(at for at in self.found if at.tensor == tensor and self.space.samples(at) == samples)
        return self.best_of() < before

    def add_again(self, choices: Iterable[Degrees]) -> None:
        """Estimate those of these choices that do not fit, and may be quicker than all that do, with blocks that run
        again: with all, and with as few as it takes."""
        if not self.space.may_run_again:
            return
        short = [at for at in choices if not at.again and not self.fits(self.found[at]) and self.may_fit(at)]
        short.sort(key=self.again_at_least)
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
        for at in [*dict.fromkeys(good)][:PARTLY_TRIED]:
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

    def tried(self) -> None:
        """Plan the best choices in full, until no other promises more."""
        left, good, missed = self.ranked(), 0, 0
        alike: Degrees | None = None
        misses = MISSES if self.fits(self.found[left[0]]) else 1  # where none may fit, one tells how far that is
        while left and good < TRIES and missed < misses:
            one, best = alike or left[0], self.trying.best
            left.remove(one)
            known, alike = self.found[one], None
            if best is not None and (known.seconds > (1 - NEAR) * best.seconds or not self.fits(known)):
                continue
            tried = self.attempt(one)
            fits = tried.fits(self.limit)
            good, missed = good + fits, missed + (not fits)
            if tried.checked is None:
                continue
            gone = {*self.found} - {*left}
            slower = max(1.0, tried.checked.seconds / known.seconds)
            self.tell(one, slower, 1.0 if fits else max(1.0, tried.taken / known.memory), sure=not fits)
            if not fits:
                self.add_again([*self.found])
                self.add_partly()
            self.add_nearer(one, tried.checked.seconds, tried.taken)
            if self.trying.best is None:
                self.add_hosts(gone)
            left = [at for at in self.ranked() if at not in gone]
            if tried.taken > (1 + UNEVEN) * (self.limit or inf) and one.again.kinds[2] and self.trying.best is None:
                alike = self.all_alike(left)

    def all_alike(self, left: Iterable[Degrees]) -> Degrees | None:
        """The quickest of these choices all of whose blocks run again in one way, of those within the limit: in stages
        a few bytes of mixed ones may be too much, however many run again, and of these less is known."""
        within = [at for at in left if at.again and not at.again.kinds[2]]
        within = [at for at in within if self.found[at].memory <= (self.limit or inf)]
        return min(within, key=lambda at: self.found[at].seconds, default=None)

    def tell(self, one: Degrees, slower: float, heavier: float, *, sure: bool) -> None:
        """Estimate all of a choice's kin so much slower and heavier. Those that share experts move more between groups
        that share them, of which figures have one, and have weights that these cannot have in pieces."""
        more, kin = PlanTold(slower, heavier, sure), self.estimates.kin
        self.estimates.tell(one, more)
        self.found |= {at: more.of(known) for at, known in self.found.items() if kin(at) == kin(one)}

    def add_nearer(self, one: Degrees, seconds: float, taken: float) -> None:
        """Where a plan leaves much of the limit, or takes more, estimate it with as many blocks that run again as its
        own memory asks for: of those that do but for products, where all of these are too few, as many whole."""
        known, limit = self.found[one], self.limit
        again = BlocksAgain(1, 1) if one.again == PARTLY and taken > (limit or inf) else one.again
        if not again or limit is None or (1 - ROOM) * limit < taken <= limit:
            return
        heavier = taken / known.memory
        made = self.add_fewest(one, again, heavier * (1 + UNEVEN * (taken > limit)))
        if made in self.found and made != one:
            of = self.found[made]
            self.found[made] = PlanEstimate(of.seconds * seconds / known.seconds, of.memory * heavier, of.slack)

    def tried_unseen(self) -> None:
        """Plan choices of which nothing is known, whole batches of few cuts first: of those that take too much, the
        next is one that may take so much less."""
        every = [at for one in self.space.every() if one.pipe == 1 for at in self.variants(one)]
        if self.space.may_run_again:
            every += [replace(at, again=ALL) for at in every]
        host: tuple[str, ...] = ()
        while (more := self.space.hosts(host)) is not None:
            host = more
            every += [replace(at, host=host) for at in every if not at.host]
        left = sorted(every, key=lambda at: (len(at.host), bool(at.again), at.tensor, at.spread, at.micro_batches))
        if self.space.open_rest and left[0].tensor * left[0].context == 1:
            self.told_of(self.trying.add(self.candidate(left[0], opened=True)))
        good = missed = 0
        while left and good < 2 * TRIES and missed < 2 * MISSES:
            one = left.pop(0)
            tried = self.attempt(one)
            fits = tried.fits(self.limit) or (tried.step is not None and tried.checked is None)  # but costs no less
            good, missed = good + fits, missed + (not fits)
            if fits:
                left = [at for at in left if not (at.again or at.host) and at.tensor != one.tensor]
            elif tried.checked is not None and self.limit is not None:
                most = max(1.0, self.space.samples(one) * self.limit / tried.taken)
                alike = replace(one, data=1, micro_batches=1)
                fewer = {at for at in left if self.space.samples(at) <= most}
                left = [at for at in left if replace(at, data=1, micro_batches=1) != alike or at in fewer]

    def attempt(self, one: Degrees) -> TriedPlan:
        return self.told_of(self.trying.add(self.candidate(one)))

    def told_of(self, tried: TriedPlan) -> TriedPlan:
        self.told(f"{tried.of.name}: {said_of(tried)}")
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

    def why(self, at: Degrees) -> str:
        """Words on a choice that was not planned in full."""
        known, best = self.found[at], self.trying.best
        if not self.fits(known):
            return f"{known} of {volume(int(self.limit or 0))}, by one layer a stage"
        more = f", {known.seconds / best.seconds - 1:+.1%}" if best is not None and best.seconds else ""
        return f"{known}{more}, by one layer a stage"

    def candidate(self, at: Degrees, *, opened: bool = False) -> Candidate:
        name = f"{at}, weights as chosen" if opened else str(at)
        return Candidate(name, Plan.read(self.space.text(at, opened=opened)))
