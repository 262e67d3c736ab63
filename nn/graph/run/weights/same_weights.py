"""The same weights for all micro-batches of a step: brought to who needs them before, their gradients home behind.

Micro-batches of another kind or on another route have weights of their own, which are copies.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from .....boxing import box
from .....sbp import Layout
from ...compiler.generated_calls import Shards
from ...instructions.codegen import Bundles
from ...instructions.instruction import Instruction
from ...lower.registers import LocalRegister
from ..variant import Variant
from .step_state import StepState, Sums, VariantKey
from .weights import Weights

__all__ = ["Once", "SameWeights"]


class Once:
    """The work that is done once a step for the micro-batches of a variant, before and behind them all: these things,
    and how gradients that are added up in `slots` come home."""

    def __init__(
        self,
        variant: Variant,
        before: Sequence[Instruction],
        after: Sequence[Instruction],
        slots: Sequence[LocalRegister],
        homes: Mapping[str, LocalRegister],
    ) -> None:
        made: dict[str, LocalRegister] = {y: y for do in before for y in do.writes}
        self.slots = tuple(slots)
        self._before = variant.running("before", before, Bundles((), (made,)))
        self._after = variant.running("after", after, Bundles(tuple((s,) for s in self.slots), (homes,)))

    @classmethod
    def all_of(cls, variant: Variant) -> "Once":
        """All of it."""
        tasks = variant.tasks
        return cls(variant, tasks.before, tasks.after, tuple(dict.fromkeys(tasks.sums.values())), tasks.grads)

    def before(self, held: Mapping[str, Shards]) -> dict[str, Shards]:
        """The weights with those that other groups need of them."""
        (made,) = self._before.run(held)
        return {**held, **made}

    def after(self, held: Mapping[str, Shards], sums: Sums) -> dict[str, Shards]:
        """Gradients at home, of what is added up here; a token of what others have."""
        made: dict[str, Shards]
        (made,) = self._after.run(held, *(tuple(sums.get(slot, ())) for slot in self.slots))
        return made


class SameWeights(Weights):
    """How a schedule with a flush keeps weights."""

    def __init__(self, variants: Mapping[VariantKey, Variant], micro_batches: Sequence[VariantKey]) -> None:
        self.variants, self.home = variants, variants[micro_batches[0]]
        self.keys = list(dict.fromkeys(micro_batches))
        self.there: dict[VariantKey, Mapping[str, Shards]] = {}

    @cached_property
    def once(self) -> dict[VariantKey, Once]:
        return {key: Once.all_of(self.variants[key]) for key in self.keys}

    def prepare(self) -> None:
        _ = self.once

    def begin(self, step: StepState) -> dict[VariantKey, Mapping[str, Shards]]:
        self.step = step
        self.there = {key: self.copied(step.held, self.variants[key]) for key in self.keys}
        return {key: once.before(self.there[key]) for key, once in self.once.items()}

    def grads(self) -> dict[str, Shards]:
        sums, found = self.step.sums, dict[str, Shards]()
        for key, other in self.added_to.items():
            for slot, parts in sums[key].items():
                if parts and slot in sums[other]:
                    torch._foreach_add_(sums[other][slot], parts)
                else:
                    sums[other].setdefault(slot, parts)
        for key, once in self.once.items():
            if key not in self.added_to:
                self.returned(self.variants[key], once.after(self.there[key], sums[key]), found)
        return found

    @cached_property
    def added_to(self) -> dict[VariantKey, VariantKey]:
        """The kinds of micro-batches whose gradients lie as those of another kind on their route, and so come home
        with these."""
        found: dict[VariantKey, VariantKey] = {}
        firsts: dict[tuple[int, frozenset[tuple[str, Layout]]], VariantKey] = {}
        for key in self.keys:
            made = self.variants[key].tasks
            registers = {*made.sums.values(), *made.grads.values()}
            first = firsts.setdefault((key[0], frozenset((of, made.layouts[of]) for of in registers)), key)
            if first != key:
                found[key] = first
        return found

    def end(self) -> None:
        super().end()
        self.there = {}

    def copied(self, held: Mapping[str, Shards], variant: Variant) -> Mapping[str, Shards]:
        """The weights as a variant has them: on the ranks of another route, or as they are."""
        there = self.there_and_back[variant][0]
        return {**held, **{name: tuple(box(held[name], *ends)) for name, ends in there.items()}} if there else held

    def returned(self, variant: Variant, theirs: Mapping[str, Shards], grads: dict[str, Shards]) -> None:
        """A variant's gradients, added to those of others where the weights have their homes."""
        back = self.there_and_back[variant][1]
        for name, mine in theirs.items():
            mine = box(mine, *back[name]) if name in back else mine
            grads[name] = tuple(a + b for a, b in zip(grads[name], mine, strict=True)) if name in grads else mine

    @cached_property
    def there_and_back(self) -> dict[Variant, list[dict[str, tuple[Layout, Layout]]]]:
        """For each variant the ends of weights' moves to where it has them, and of their gradients' home from there."""
        found = {}
        for variant in self.variants.values():
            other = {s.value.name: s for s in variant.graph.sources}
            pairs = [(s, other[s.value.name]) for s in self.home.graph.sources if s.kind != "input"]
            there = {a.value.name: (a.value.layout, b.value.layout) for a, b in pairs}
            back = {a.value.name: (b.home, a.home) for a, b in pairs}
            found[variant] = [
                {name: ends for name, ends in of.items() if ends[0] is not ends[1]} for of in (there, back)
            ]
        return found
