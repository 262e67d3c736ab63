"""Decisions that a picture of a graph and its page share: what is out of sight, and which values stand on top.

constants      values that are made of no input and of no parameter, such as rotary angles: out of sight in an overview
on top         inputs of a graph on several placements stand above all of them, in the order in which they are read
"""

import torch

from ...sbp.logical import PART
from .physical import Box, Physical, vars_in

__all__ = ["constants", "inputs_on_top", "several_placements"]


def constants(graph: Physical) -> set[str]:
    """The values that are the same in every step: buffers that no step writes, what is made of these or of nothing,
    and their copies. Numbers that are drawn are none, nor are results."""
    found = {s.value.name for s in graph.sources if s.kind in ("buffer", "constant")} - set(graph.writes)
    for step in graph.steps:
        drawn = not isinstance(step, Box) and (
            torch.Tag.nondeterministic_seeded in step.op.tags or step.op.namespace == PART
        )
        if not drawn and found.issuperset(step.inputs):
            found.update(y.name for y in step.outputs)
    kept = {*vars_in(graph.result), *(name for name, _ in graph.losses), *graph.writes.values()}
    made = {y.name for step in graph.steps for y in step.outputs}
    return set() if found >= made else found - kept  # a graph of constants alone is drawn


def inputs_on_top(graph: Physical) -> list[str]:
    """The inputs that are read, in the order of their uses; none where a graph is on one placement, and an input stands
    above what reads it."""
    if not several_placements(graph):
        return []
    given = {source.value.name for source in graph.sources if source.kind == "input"}
    return list(dict.fromkeys(name for step in graph.steps for name in step.inputs if name in given))


def several_placements(graph: Physical) -> bool:
    """Whether its ops run on more than one group of ranks, such as the stages of a pipeline."""
    return len({frozenset(step.outputs[0].layout.placement.flat) for step in graph.steps}) > 1
