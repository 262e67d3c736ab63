"""Shortage: the text of an error where no plan fits, with the largest shares of the leanest one, and fixes."""

from collections.abc import Sequence

from ....boxing.figures import volume
from ....boxing.graph.measures import Held
from .posed_graph import Decided

__all__ = ["kept_most", "shortage"]

LARGEST = 3  # kept values that an error names


def kept_most(of: Decided, rank: int) -> str:
    """Values that take most of what the backward keeps on a rank."""
    held = zip(of.formulated.nodes, of.formulated.problem.memory, of.solution.choice, strict=True)
    ops = ((node.index, float(memory[k])) for node, memory, k in held if node.kind == "op")
    large = sorted(((size, at) for at, size in ops if size and rank in of.asked.where.ops[at]), reverse=True)
    return ", ".join(f"{of.made_by(at)} {volume(size)}" for size, at in large[:LARGEST])


def shortage(head: str, limit: float, worst: Held, kept: str, pieces: int = 1, more: Sequence[str] = ()) -> str:
    """`head` says what does not fit, `kept` what takes most of what the backward keeps, and `more` what would help
    besides; a batch is in so many pieces, or 0 where smaller ones would not help."""
    kinds = {kind: getattr(worst, kind) for kind in ("parameters", "gradients", "states", "activations")}
    step = worst.total - sum(kinds.values())  # beside activations, which are gone by then
    if step > 0:
        kinds["the optimizer's step"] = step + worst.activations
    said = ", ".join(f"{kind} {volume(size)}" for kind, size in sorted(kinds.items(), key=lambda kind: -kind[1]))
    rest = worst.total - worst.activations
    if rest >= limit or step > 0:
        helps = [
            "parameters, gradients and states are in pieces already: use more ranks, or an optimizer that keeps less"
        ]
    else:
        parts = pieces * max(2, -(-worst.activations // max(1, int(limit - rest))))
        smaller = f"as {parts} micro-batches (micro_batches={parts}), " if parts else ""
        helps = [f"activations may fit {smaller}where layers are recomputed (torch.utils.checkpoint), or on more ranks"]
    helps = [*more, *helps, f"or take a memory= of {volume(worst.total)}"]
    return "\n  ".join(
        [
            head,
            f"the leanest plan found takes {volume(worst.total)}: {said}",
            *([f"most of what its backward keeps: {kept}"] if kept else []),
            *([f"most is live where {worst.moment[-1]} is computed, or its gradient"] if worst.moment else []),
            *helps,
        ]
    )
