"""Candidates of ops: every signature that each could have had, with its seconds and those of the moves around it."""

from collections.abc import Callable
from math import isfinite

from ...boxing.graph.report.walked import Candidates, CandidateSeconds
from ...sbp.joint.pins import is_pin_alone
from ...sbp.joint.solver.local_search import Nearby
from ..graph.choose.choose import Decided
from ..graph.passes import said

__all__ = ["candidates_of"]


def candidates_of(decided: Decided) -> Callable[[str], Candidates | None]:
    """A function that gives those of an op, by the value that it makes first: a page asks for one of equal layers. In
    micro-batches, seconds are of one. What is forbidden as its neighbours lie is left out."""
    posed, choice, ops = decided.formulated, decided.solution.choice, decided.logical.ops
    nearby = Nearby(posed.problem.priced(decided.solution.share))
    nodes = [(at, node) for at, node in enumerate(posed.nodes) if node.kind == "op"]
    at_of = {decided.made_by(node.index): at for at, node in nodes if not is_pin_alone(ops[node.index])}

    def found(name: str) -> Candidates | None:
        if name not in at_of:
            return None
        at = at_of[name]
        node, own, seconds = posed.nodes[at], choice[at], nearby.seconds(at, choice)
        axes = len(decided.graph.layout(name).placement.shape)
        kept = [k for k in range(len(node.candidates)) if k == own or isfinite(seconds[k])]
        alone = {k: posed.own(node, k) for k in kept}
        more = {k: float(seconds[k] - seconds[own]) / posed.rounds.times for k in kept}
        rows = (
            CandidateSeconds(said(node.candidates[k], axes), alone[k], more[k] - alone[k] + alone[own]) for k in kept
        )
        return Candidates(tuple(rows), kept.index(own))

    return found
