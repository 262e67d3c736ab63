"""Propagation: the option of each op that follows from what is said of sources and flows, without looking for a cheaper
one.

Op by op, in the order of the program, the option is taken that leaves most as it comes:

    samples stay         what is computed is not moved along axes along which arguments are cut: weights come to it
    weights stay         along all others, where what is computed comes to them
    sums are added up    where they are made, unless somebody wants them as addends
    work is shared       of the options that move as little, that in which most ranks share the work

So Megatron's and FSDP's plans are what their few lines say, and nothing else is computed twice or cut to send less.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from ...logical import Logical
from ...state import State
from ..formulate import ChoiceNode, Formulated
from ..options import Option
from ..uses import weights

__all__ = ["Changed", "changed", "held", "propagated"]


class Changed(NamedTuple):
    """A choice beside what was propagated: how many ops run otherwise, of how many, and the module of the first; and
    the seconds that all take on a rank, as chosen and as propagated."""

    ops: int
    of: int
    first: str
    seconds: float
    propagated: float

    def __str__(self) -> str:
        work = f"ops take {self.seconds:.3g} s on a rank, {self.propagated:.3g} s by the lines alone"
        where = f", first in {self.first}" if self.first else ""
        return (
            f"{self.ops} of {self.of} ops run otherwise than the lines alone say{where}: {work}; `hold **` keeps them"
        )


def changed(made: Formulated, logical: Logical, choice: Sequence[int]) -> Changed | None:
    """The ops that a choice changed; none where all are what was propagated. What is made of nothing lies as its users
    want it."""
    kept = {at: k for at, k in propagated(made, logical).items() if logical.ops[made.nodes[at].index].inputs}
    others = [at for at, k in kept.items() if not _alike(made.nodes[at].candidates, choice[at], k)]
    if not others:
        return None
    chosen, plain = (
        sum(made.own(made.nodes[at], k) for at, k in each) for each in (((at, choice[at]) for at in kept), kept.items())
    )
    return Changed(len(others), len(kept), logical.ops[made.nodes[others[0]].index].origin.module, chosen, plain)


def _alike(options: Sequence[Option], one: int, other: int) -> bool:
    """Whether two options lie the same, gradients left out, which follow from what is done before."""
    lies = [[lie.state for lie in (*options[k].inputs, *options[k].outputs)] for k in (one, other)]
    return lies[0] == lies[1]


def held(made: Formulated, logical: Logical, modules: Collection[str]) -> Formulated:
    """The problem in which ops of these modules, and of what is in them, take the option that was propagated."""
    kept = propagated(made, logical)
    costs = list(made.problem.costs)
    for at, node in enumerate(made.nodes):
        if at in kept and any(_inside(logical.ops[node.index].origin.module, path) for path in modules):
            costs[at] = np.where(np.arange(len(costs[at])) == kept[at], costs[at], inf)
    return replace(made, problem=replace(made.problem, costs=tuple(costs)))


def propagated(made: Formulated, logical: Logical) -> dict[int, int]:
    """The candidate of each node that is an op."""
    known = _Propagation(made, logical)
    return {at: known.taken(node) for at, node in enumerate(made.nodes) if node.kind == "op"}


class _Moved(NamedTuple):
    """The axes along which inputs of an option do not lie as they come, counted by what they are."""

    out_of_place: int  # what is computed along the arguments' axes, weights along others, addends that stay
    computed: int
    weights: int
    addends: int  # what is whole as the one addend of a sum, which moves nothing


class _Propagation:
    """How values lie so far. Of a source that may lie in several ways it is the first, in which it is whole."""

    def __init__(self, made: Formulated, logical: Logical) -> None:
        self.logical, self.weights = logical, weights(logical)
        self.states: dict[int, State] = {}
        self.axes: set[int] = set()  # along which arguments are cut
        self.known: dict[Hashable, int] = {}  # layers that are alike share their candidates
        for node in made.nodes:
            if node.kind == "source":
                lies = [lie.state for lie in node.slots[0].each]
                state = min(lies, key=lambda state: (len(state.split), any(f < 0 for of in state.dims for f in of)))
                self.states[node.index] = state
                if logical.sources[node.index].kind == "input":
                    self.axes |= state.split

    def taken(self, node: ChoiceNode) -> int:
        """The candidate of the next op, from which its results lie as they do."""
        op = self.logical.ops[node.index]
        have = [self.states[n] for n in op.inputs]
        key = id(node.candidates), node.cost.tobytes(), tuple(have), tuple(n in self.weights for n in op.inputs)
        if key not in self.known:
            self.known[key] = self._chosen(node, op.inputs, have)
        found = self.known[key]
        for number, lie in zip(op.numbers, node.candidates[found].outputs, strict=True):
            self.states[number] = lie.state
        return found

    def _chosen(self, node: ChoiceNode, numbers: Sequence[int], have: Sequence[State]) -> int:
        allowed = [k for k in range(len(node.candidates)) if node.cost[k] < inf]
        options: Sequence[Option] = node.candidates

        def rank(k: int) -> tuple[float, ...]:
            option = options[k]
            moved = self._moved(numbers, have, option)
            share = -option.share if numbers else option.share  # what is made of nothing is whole
            sums = sum(len(lie.grads) for lie in option.outputs)
            return moved.out_of_place, moved.computed, share, moved.weights, moved.addends, sums, float(node.cost[k])

        return min(allowed or range(len(options)), key=rank)

    def _moved(self, numbers: Sequence[int], have: Sequence[State], option: Option) -> _Moved:
        out_of_place = computed = weighed = addends = 0
        for number, before, lie in zip(numbers, have, option.inputs, strict=True):
            after = lie.state
            axes = before.split | after.split | {*before.partial} | {*after.partial}
            free = {*after.partial} - before.split - {*before.partial}  # one rank has it, and the others zeros
            changed = {a for a in axes if _entry(before, a) != _entry(after, a)} - free
            added_up = changed & {*before.partial}
            if number in self.weights:
                weighed += len(changed & self.axes)
                out_of_place += len(changed - self.axes)
            else:
                computed += len(changed)
                out_of_place += len(changed & self.axes - added_up)
            out_of_place += len({*before.partial} & {*after.partial})
            addends += len(free)
        return _Moved(out_of_place, computed, weighed, addends)


def _entry(state: State, axis: int) -> object:
    """The work of an axis: the dim that it cuts and all that cuts it before, or how it adds up."""
    if axis in state.partial:
        return state.reduction
    return next(((dim, of[: of.index(axis)]) for dim, of in enumerate(state.dims) if axis in of), None)


def _inside(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")
