"""Seeking: degrees are estimated by figures of one layer a stage, and the best few of them are planned in full."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from torch.optim import Optimizer

from ....boxing.figures import volume
from ..check import Loss
from ..plan import Plan
from .candidates import Candidate
from .estimates.blocks_again import ALL, PARTLY, BlocksAgain
from .estimates.degrees import Degrees, Space
from .estimates.estimate import PlanEstimate, PlanTold
from .estimates.estimating import NEAR, UNEVEN, Estimating
from .estimates.shorter_model import ShortModels, Told
from .runners_up import TriedPlan, said_of
from .trying import Trying

__all__ = ["Seeking"]

TRIES = 2  # plans in full that may be the answer
MISSES = 4  # besides, that take too much, or cannot be
ROOM = 0.03  # share of the limit that may be left
LISTED = 8  # estimates that are runners-up


class Seeking(Estimating):
    """The search in a space, for a model and a batch. `trying` has what is planned in full."""

    def __init__(
        self,
        space: Space,
        trying: Trying,
        told: Told,
        *,
        loss_fn: Loss | None,
        optimizers: list[Optimizer],
        processes: int = 1,
    ) -> None:
        short = ShortModels(
            space,
            trying.model,
            trying.batch,
            told,
            loss_fn=loss_fn,
            optimizers=optimizers,
            whole=trying.captures,
            processes=processes,
        )
        super().__init__(short, trying.limit, trying.gaps)
        self.trying, self.told = trying, told

    def run(self) -> None:
        """Estimate, then plan the best in full. Who interrupts the estimates gets the best of those that are known, and
        who interrupts plans the best of them."""
        try:
            self.estimated()
        except KeyboardInterrupt:
            if not self.found:
                raise
            self.told("interrupted: the best of what is known")
        finally:
            self.short.ahead.close()
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
