"""Real sums: whether gradients that are said to be summed encoded have an addend on more than one rank.

A gradient that all ranks have whole may be taken for the one addend of a sum, which is free:

    loss   B      all ranks compute the same
    x      B -> P rank 0 has the gradient, and the others zeros
    w      P -> B and that is encoded, sent and added up for nothing
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ....sbp.joint.demands import EncodedWay
from ....sbp.joint.formulate import Formulated
from ....sbp.logical import Logical

__all__ = ["has_hollow_sums"]


def has_hollow_sums(
    logical: Logical, posed: Formulated, choice: Sequence[int], encoders: Mapping[str, EncodedWay]
) -> bool:
    """Whether the gradient of a parameter is encoded as a sum of which one rank alone has an addend."""
    asked: dict[int, set[int]] = defaultdict(set)  # by nodes: the axes on which gradients of what they make are addends
    given: dict[int, set[int]] = defaultdict(set)  # and those of which several ranks have one
    for loss in (of.number for of in logical.losses if of.gradient is None):  # where gradients begin, whole
        number, slot = posed.producers[loss]
        if posed.nodes[number].kind == "op":
            asked[number].update(posed.nodes[number].candidates[choice[number]].outputs[slot].grads)
    for at in reversed(range(len(posed.tensors))):  # an edge comes after those to the node where it begins
        edge, (_, have, need, of) = posed.problem.edges[at], posed.tensors[at]
        if not of.grad:
            continue
        i, j = choice[edge.i], choice[edge.j]
        home = (have.back[i] if have.back else have.each[i].dual).state
        comes = need.each[j].dual.state
        real = {a for a in comes.partial if a not in asked[edge.j] or a in given[edge.j]} | comes.split
        if of.here is not of.there:
            real.update(home.partial)
        asked[edge.i].update(home.partial)
        given[edge.i].update(real.intersection(home.partial))
        node = posed.nodes[edge.i]
        by = encoders.get(logical.sources[node.index].name) if node.kind == "source" else None
        if by is not None and of.here is of.there:
            summed = set(comes.partial).difference(home.partial).intersection(by.axes(of.here))
            if summed and summed.isdisjoint(real):
                return True
    return False
