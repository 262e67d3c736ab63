"""From a logical graph to the problem of choosing: a node for each source, op, and tensor of several users.

A tensor with several users has a node of its own between them, whose choice is how it is moved: once for all that want
it so. Its gradient comes back the same way. Equal calls share their options and equal pairs their matrix, so that a
model of a hundred layers takes little longer than one of three.
Weights are gathered, and their gradients reduced, beside what is computed where the runtime has that so; such moves
cost what there is no room for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from ...placement import Cluster, Placement
from ...placement.links import Links
from ..call import Call, refs_in
from ..kernels.fused import FusedOp, fused_ops
from ..kernels.kernels import is_view
from ..logical import Logical, LogicalOp
from ..state import Factors, Lie, State
from .along_split import Spread, spreads
from .demands import Demands, EncodedGrads, RestPins, Rounds
from .edge_cost import Carried, EdgeCosts, EdgeSeconds, EdgeTensor, Lies, bytes_at_once
from .fixed import asked_cuts, options_of
from .known_options import KnownOptions
from .move_cost import local_bytes
from .op_cost import NOTHING, OpSeconds, option_seconds
from .options import Cut, Reach
from .pins import cut_over, is_pin_alone, pinned, pins_by_op
from .placements import Homes
from .preferred_cuts import plain_cuts, wishes
from .problem import Edge, Problem, Vector, rooms
from .repeated_blocks import ties
from .source_options import stored
from .uses import let_go, returns, saves, static, users, weights

__all__ = ["ChoiceNode", "Formulated", "formulate"]


@dataclass
class ChoiceNode:
    """A node under construction."""

    kind: str  # source, op, copy, result
    index: int  # of the source, of the op, or the value's number
    candidates: Sequence[Any]  # Stored, Option, or Lie
    cost: Vector
    memory: Vector
    slots: dict[int, Lies] = field(default_factory=dict)  # input slot -> lies; nodes that are no ops have one, 0
    moves: Vector | None = None  # in sources: the part of `cost` in which an optimizer's gradients and weights move
    back: Vector | None = None  # in ops: the part of `cost` that is spent in the backward
    host: OpSeconds = NOTHING  # in ops: of one micro-batch, those in which the host launches its kernels


@dataclass(frozen=True, eq=False)
class Formulated:
    problem: Problem
    nodes: tuple[ChoiceNode, ...]
    copy_homes: Mapping[int, Placement]  # value with several users -> the placement of its copy
    producers: Mapping[int, tuple[int, int]]  # value -> the node that makes it, and which of its outputs it is
    spreads: Mapping[tuple[int, int], Spread]  # (op, candidate) -> how it is taken apart where its dim is split
    tensors: tuple[EdgeTensor, ...]  # of the problem's edges
    costs: EdgeCosts

    @property
    def rounds(self) -> Rounds:
        return self.costs.rounds

    @property
    def piped(self) -> bool:
        """Whether it is of one of the micro-batches of a step."""
        return self.costs.demands.rounds is not None

    def own(self, node: ChoiceNode, k: int) -> float:
        """Seconds of a node by itself: an op's for one micro-batch, a source's for a step."""
        return float(node.cost[k]) / (self.rounds.times if node.kind == "op" else 1.0)

    def back(self, node: ChoiceNode, k: int) -> float:
        """The part of an op's own seconds that is spent in the backward."""
        return 0.0 if node.back is None else float(node.back[k]) / self.rounds.times

    def moving(self, node: ChoiceNode, k: int) -> float:
        """Seconds of moves inside of a node: those of a source's update, or those inside of an op."""
        if node.kind == "op":
            spread = self.spreads.get((node.index, k))
            return 0.0 if spread is None else spread.moving
        return 0.0 if node.moves is None else float(node.moves[k])

    def spent(self, at: int, choice: Sequence[int]) -> EdgeSeconds:
        """The seconds along an edge."""
        edge, (_, have, need, of) = self.problem.edges[at], self.tensors[at]
        return self.costs.chosen(have, need, of, choice[edge.i], choice[edge.j])


def formulate(
    logical: Logical,
    where: Homes,
    cluster: Callable[[Placement], Cluster],
    demands: Demands,
    parts: Callable[[LogicalOp], Logical | None] = lambda op: None,
    known: KnownOptions | None = None,
) -> Formulated:
    """The problem of a graph whose sources and ops live where `where` says; `known` is of others on this cluster."""
    return _Formulation(logical, where, cluster, demands, parts, known or KnownOptions()).made()


class _Formulation:
    def __init__(
        self,
        logical: Logical,
        where: Homes,
        cluster: Callable[[Placement], Cluster],
        demands: Demands,
        parts: Callable[[LogicalOp], Logical | None],
        known: KnownOptions,
    ) -> None:
        self.logical, self.where, self.demands, self.parts = logical, where, demands, parts
        self.cluster = cluster
        self.costs = EdgeCosts(cluster, demands, bytes_at_once(logical, where, demands))
        self.fused: list[FusedOp | None] = []
        self.nodes: list[ChoiceNode] = []
        self.edges: list[Edge] = []
        self.tensors: list[EdgeTensor] = []
        self.carried: dict[Placement, bool] = {}
        self.made_by: dict[int, tuple[int, Lies]] = {}
        self.producers: dict[int, tuple[int, int]] = {}
        self.copies: dict[int, int] = {}
        self.spread: dict[tuple[int, int], Spread] = {}
        self.known, self.matrices = known.options, known.matrices
        self.states: dict[int, tuple[State, ...]] = {}
        self.partial: set[int] = set()
        self.pinned = pins_by_op(logical, where.ops)
        self.pieces = {n for op in logical.ops if is_pin_alone(op) for n in op.numbers}
        self.users, self.weights = users(logical), weights(logical)
        kept = {n for n, source in enumerate(logical.sources) if source.kind != "input"}
        self.lasting = kept if demands.rounds is not None else set[int]()  # in micro-batches, what is the same for all
        self.let_go = let_go(logical)
        self.begins = {loss.number for loss in logical.losses if loss.gradient is None}  # there gradients begin, whole

    def beside(self, there: Placement) -> bool:
        """Whether moves on a placement go on beside what is computed."""
        if there not in self.carried:  # every node asks, and a placement may have thousands of ranks
            self.carried[there] = self.cluster(there).beside((there.type,), there.flat)
        return self.carried[there]

    def links(self, placement: Placement) -> Links:
        return Links.of(placement, self.cluster(placement))

    def home(self, value: int) -> Placement:
        node = self.nodes[self.producers[value][0]]
        return (self.where.sources if node.kind == "source" else self.where.ops)[node.index]

    def made(self) -> Formulated:
        calls = [
            (replace(self.logical.call(op), sizes=there.shape), op.inputs, op.numbers)
            for op, there in zip(self.logical.ops, self.where.ops, strict=True)
        ]
        wished = wishes(calls, asked_cuts(self.logical.ops, [call for call, _, _ in calls], self.pinned))
        for number in range(len(self.logical.sources)):
            self._source(number, wished.get(number, {}))
        if self.demands.compiled:
            self.fused = fused_ops(self.logical, [call for call, _, _ in calls])
        for index, (call, _, numbers) in enumerate(calls):
            self._op(index, call, [plain_cuts(wished.get(n, {})) for n in numbers])
        self._ends()
        kinds = [(n.kind, n.index, id(n.candidates), self._stage(n)) for n in self.nodes]
        tied, block = ties(self.logical, kinds, self.producers, short=self.demands.sharded)
        problem = Problem(
            tuple(n.cost for n in self.nodes),
            tuple(self.edges),
            tuple(n.memory for n in self.nodes),
            tied,
            block,
            rooms(self.edges, [(n.cost, n.kind == "op" and self.beside(self.where.ops[n.index])) for n in self.nodes]),
        )
        homes = {number: self.copy_home(number) for number in self.copies}
        ends = tuple(self.tensors), self.costs
        return Formulated(problem, tuple(self.nodes), homes, self.producers, self.spread, *ends)

    def _stage(self, node: ChoiceNode) -> Placement | None:
        homes = {"source": self.where.sources, "op": self.where.ops}
        return homes[node.kind][node.index] if node.kind in homes else None

    def _source(self, number: int, wished: Mapping[tuple[int, Factors], None]) -> None:
        source, there = self.logical.sources[number], self.where.sources[number]
        pinned, rest = self.demands.pins.get(source.name), self.demands.rests.get(source.name, RestPins())
        shape = tuple(source.fake.shape)
        trained = source.kind == "parameter" and source.requires_grad
        types = source.fake.dtype, source.grads, source.states
        by = self.demands.encoders.get(source.name) if trained else None
        reached = number in self.logical.reached
        together = self.costs.together.get(there, inf)
        asked = tuple(wished), reached, pinned, rest, source.offload, by, *self.demands.optimizer
        key = "source", shape, types, self.costs.alike(there), trained, source.kind, together, *asked
        if key not in self.known:
            where = self.cluster(there).device_of(there), self.links(there)
            said = wished, pinned, rest, self.demands.states, self.demands.sharded
            made = stored(source, *said, *where, reached=reached, together=together, update=self.demands.update)
            summed = by is not None and not all(cut_over(pinned, axis) for axis in by.axes(there))
            encoded = EncodedGrads(by, source.grads or source.fake.dtype, summed) if by is not None else None
            ends = tuple(c.lie for c in made.candidates), tuple(c.grads for c in made.candidates)
            late = tuple(c.once for c in made.candidates)
            lying = Lies(*ends, source.grads.itemsize if source.grads is not None else 0, encoded, once=late)
            self.known[key] = made, lying
        found, lies = self.known[key]
        node = ChoiceNode("source", number, found.candidates, found.cost, found.memory, {0: lies}, found.moves)
        at = self._add(node)
        self.states[number] = found.states
        self._makes(number, at, 0, lies)

    def _op(self, index: int, call: Call, asked: Sequence[tuple[Cut, ...]]) -> None:
        op, there = self.logical.ops[index], self.where.ops[index]
        grads = [n in self.logical.wants_grad for n in op.numbers]
        reach = [Reach(self._states_on(n, there), n in self.partial, n in self.logical.wants_grad) for n in op.inputs]
        saved = tuple(self._is_saved(n) for n in op.numbers)
        flags = tuple(grads), saved, bool(op.origin.recompute)
        comes = tuple((id(r.states), r.partial, r.grad) for r in reach)
        wanted = tuple(asked) if any(asked) else ()
        fused = self.fused[index] if there.type in self.demands.compiled else None
        key = static(op, call), comes, flags, self.costs.alike(there), self.costs.rounds.times, wanted, fused
        if key not in self.known:
            self.known[key] = self._candidates(index, call, reach, grads, saved, asked, fused)
        candidates, cost, back, memory, ins, outs, states, partial, apart, host = self.known[key]
        for slot in (k for k, n in enumerate(op.numbers) if self.demands.real_sums and n in self.begins):
            axes = self.demands.summed_over(there)
            cost = np.where([axes.isdisjoint(o.outputs[slot].grads) for o in candidates], cost, inf)
        at = self._add(ChoiceNode("op", index, candidates, cost, memory, dict(enumerate(ins)), back=back, host=host))
        self.spread.update({(index, k): how for k, how in apart.items()})
        for slot, number in enumerate(op.inputs):
            self._uses(at, slot, number, ins[slot], op.place(slot, there))
        for slot, number in enumerate(op.numbers):
            self.states[number] = states[slot]
            if partial[slot]:
                self.partial.add(number)
            self._makes(number, at, slot, outs[slot])

    def _candidates(
        self,
        index: int,
        call: Call,
        reach: Sequence[Reach],
        grads: Sequence[bool],
        saved: Sequence[bool],
        asked: Sequence[tuple[Cut, ...]],
        fused: FusedOp | None,
    ) -> tuple[Any, ...]:
        op, there = self.logical.ops[index], self.where.ops[index]
        found = options_of(op, call, reach, grads, asked)
        if index in self.pinned:
            found = pinned(found, self.pinned[index], call, op)
        device = self.cluster(there).device_of(there)
        view, trains = is_view(call), any(grads)
        wants, again = [each.grad and trains for each in reach], trains and bool(op.origin.recompute)
        cost, back, host = option_seconds(call, found, wants, device, fused=fused, again=again)
        apart: dict[int, Spread] = {}
        inside = self.parts(op)
        if inside is not None:
            taken = {o.inputs[0].state for o in found}
            for option, how in spreads(call, inside, taken, reach, self.links(there), device):
                apart[len(found)] = how
                found.append(option)
                cost.append(how.seconds)
                back.append(how.backward)
        memory = np.zeros(len(found))
        for slot, y in enumerate(call.outputs):
            if saved[slot] and (not view or is_pin_alone(op)):  # that value is kept as it was moved
                lying = [o.outputs[slot].state for o in found]
                memory += local_bytes(lying, tuple(y.shape), y.dtype.itemsize, call.sizes)
        ins = tuple(Lies(tuple(o.inputs[i] for o in found), ()) for i in range(len(call.inputs)))
        outs = tuple(Lies(tuple(o.outputs[i] for o in found), ()) for i in range(len(call.outputs)))
        states = tuple(
            self._shared(tuple(dict.fromkeys(lie.state._replace(partial=(), reduction="sum") for lie in y.each)))
            for y in outs
        )
        partial = tuple(any(lie.state.partial for lie in y.each) for y in outs)
        both = self.costs.rounds.times * np.array([cost, back])
        return tuple(found), *both, memory, ins, outs, states, partial, apart, host

    def _shared(self, states: tuple[State, ...]) -> tuple[State, ...]:
        """One object for equal sets, since they are told apart by identity."""
        return self.known.setdefault(("states", states), states)  # type: ignore[no-any-return]

    def _is_saved(self, number: int) -> bool:
        """Whether a backward pass looks at this value, so that it is kept until then."""
        users = [self.logical.ops[at] for at in self.users.get(number, ()) if at < len(self.logical.ops)]
        return number in self.logical.wants_grad and saves(users, self.let_go.get(number))

    def _add(self, node: ChoiceNode) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _makes(self, number: int, at: int, slot: int, lies: Lies) -> None:
        self.producers[number] = at, slot
        self.made_by[number] = at, lies

    def _uses(self, at: int, slot: int, number: int, lies: Lies, there: Placement) -> None:
        """An edge from where the value comes from; through its copy where it has several users."""
        if len(self.users[number]) == 1:
            source, have = self.made_by[number]
            self._edge(source, at, number, have, lies, self.home(number), there)
            return
        if number not in self.copies:
            self.copies[number] = self._copy(number, lies)
        copy = self.copies[number]
        have = self.nodes[copy].slots[0]
        self._edge(copy, at, number, have, lies, self.copy_home(number), there)

    def copy_home(self, number: int) -> Placement:
        """Copies lie where most users are: all of them, unless a value crosses placements."""
        first, ops = self.users[number][0], self.logical.ops
        if first == len(ops):
            return self.home(number)
        return ops[first].place(ops[first].inputs.index(number), self.where.ops[first])

    def _copy(self, number: int, first: Lies) -> int:
        """The node of a tensor with several users. It may lie as it is made; if pinned, also as the first wants it."""
        source, have = self.made_by[number]
        made = self.nodes[source]
        asked = first.each if made.kind == "op" and made.index in self.pinned else ()
        there = self.copy_home(number)
        wanted = dict.fromkeys(have.each) if there is self.home(number) else {}
        grad, lasts = number in self.logical.wants_grad, number in self.lasting
        key = "copy", id(have), id(asked), there.shape, grad, lasts
        lies = self.known.get(key)
        if lies is None:
            lies = self.known[key] = self._copy_lies(number, wanted, asked, there)
        zero = np.zeros(len(lies.each))
        at = self._add(ChoiceNode("copy", number, lies.each, zero, zero, {0: lies}))
        self._edge(source, at, number, have, lies, self.home(number), there)
        return at

    def _copy_lies(self, number: int, wanted: dict[Lie, None], asked: Sequence[Lie], there: Placement) -> Lies:
        """Without addends it may lie in every way; addends and their gradients only as it comes."""
        grad = number in self.logical.wants_grad
        axes = [a for a, n in enumerate(there.shape) if n > 1]
        states = *self._states_on(number, there), *(lie.state for lie in asked if not lie.state.partial)
        for state in dict.fromkeys(states):
            free = [a for a in axes if a not in state.split]
            for bits in range(1 << len(free) if grad else 1):
                wanted[Lie(state, tuple(a for k, a in enumerate(free) if bits >> k & 1))] = None
        if number in self.lasting:  # whether it comes anew with each micro-batch is known to its users
            return Lies((*wanted, *wanted), (), moves=(False,) * len(wanted) + (True,) * len(wanted))
        return Lies(tuple(wanted), ())

    def _states_on(self, number: int, there: Placement) -> tuple[State, ...]:
        """The states in which a value may reach another placement: those of its own that are about axes there, or about
        all axes that one there has merged."""
        states, shape = self.states[number], self.home(number).shape
        if len(shape) <= len(there.shape):
            return states
        key = "on", id(states), shape, there.shape
        if key not in self.known:
            axes = set(range(len(there.shape)))
            fits = [state for state in states if axes.issuperset(state.split)]
            fits += filter(None, (state.merged(shape, there.shape) for state in states))
            self.known[key] = states, tuple(dict.fromkeys([*fits, State(((),) * len(states[0].dims))]))
        found: tuple[State, ...] = self.known[key][1]
        return found

    def _edge(self, i: int, j: int, number: int, have: Lies, need: Lies, here: Placement, there: Placement) -> None:
        fake = self.logical.fakes[number]
        grad, weight = returns(self.logical, self.nodes[j].kind, self.nodes[j].index, number), number in self.weights
        again = (weight or number in self.pieces) and self._is_saved(number)
        hides = weight and grad and here is there and self.beside(here)
        lasts = number in self.lasting
        of = Carried(tuple(fake.shape), fake.dtype, here, there, grad, again, lasts, hides)
        like, together = self.costs.like(of), self.costs.together.get(here)
        key = id(have), id(need), like, self.costs.rounds, together, self.demands.real_sums
        found = self.matrices.get(key)
        if found is None:
            found = self.matrices[key] = self.costs.matrices(have, need, of)
        self.edges.append(Edge(i, j, *found))
        self.tensors.append(EdgeTensor(number, have, need, of))

    def _ends(self) -> None:
        """The ends of a graph: results are not left as addends; a buffer's new value goes to where the buffer lies."""
        for number in dict.fromkeys(refs_in(self.logical.result)):
            self._uses(self._result(number), 0, number, self._result_lies(number), self.home(number))
        names = {s.name: n for n, s in enumerate(self.logical.sources)}
        for name, number in self.logical.writes.items():
            at, lies = self.made_by[names[name]]
            self._uses(at, 0, number, lies, self.where.sources[names[name]])

    def _result(self, number: int) -> int:
        lies = self._result_lies(number)
        zero = np.zeros(len(lies.each))
        return self._add(ChoiceNode("result", number, lies.each, zero, zero, {0: lies}))

    def _result_lies(self, number: int) -> Lies:
        """Single numbers are to be whole; others stay as they are, but are addends only where that was said."""
        node = self.nodes[self.producers[number][0]]
        said = self.pinned.get(node.index) if node.kind == "op" else None
        if isinstance(said, State) and said.partial:
            return self.known.setdefault(("result", said), Lies((Lie(said),), ()))  # type: ignore[no-any-return]
        states = self.states[number]
        lies = Lies(tuple(Lie(state) for state in states), ())
        return self.known.setdefault(("result", id(states)), lies)  # type: ignore[no-any-return]
