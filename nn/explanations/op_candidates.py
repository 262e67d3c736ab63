"""Candidates of ops: every signature that each could have had, with its seconds and those of the moves around it."""

from math import isfinite

from ...boxing.graph.report.walked import Candidates, CandidateSeconds
from ...sbp.joint.pins import is_pin_alone
from ...sbp.joint.solver.local_search import Nearby
from ..graph.choose.choose import Decided
from ..graph.passes import said

__all__ = ["candidates_of"]


def candidates_of(decided: Decided) -> dict[str, Candidates]:
    """Those of every op, by the value that it makes first; in micro-batches, seconds are of one. What is forbidden as
    its neighbours lie is left out."""
    posed, choice = decided.formulated, decided.solution.choice
    nearby = Nearby(posed.problem.priced(decided.solution.share))
    found: dict[str, Candidates] = {}
    for at, node in enumerate(posed.nodes):
        if node.kind != "op" or is_pin_alone(decided.logical.ops[node.index]):
            continue
        name, own = decided.made_by(node.index), choice[at]
        axes = len(decided.graph.layout(name).placement.shape)
        seconds = nearby.seconds(at, choice)
        kept = [k for k in range(len(node.candidates)) if k == own or isfinite(seconds[k])]
        rows = []
        for k in kept:
            alone = posed.own(node, k)
            more = float(seconds[k] - seconds[own]) / posed.rounds.times
            rows.append(
                CandidateSeconds(said(node.candidates[k], axes), alone, more - (alone - posed.own(node, own)))
            )
        found[name] = Candidates(tuple(rows), kept.index(own))
    return found
