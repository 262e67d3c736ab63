"""Candidates of the planner: open plans, which say only how gradients and states rest, and plans that people write.

Each open plan stands for some of the others: a plan that says more costs no less, so that those that a bound rules out
need not be planned.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch import nn

from ....placement.errors import SbpError
from ....sbp import Broadcast
from ...graph.capture.repeats.likeness import blocks_of
from ..assignment import Assignment
from ..language.statements import Cast, Grid, Kind, Limit, Offload, Rest, TakePlan
from ..plan import Plan
from .estimates.degrees import OPEN

__all__ = ["Candidate", "body", "candidates", "layers_of", "leaves_all", "opened", "resting", "within_limit"]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan to try: `opened` has all others as cases."""

    name: str
    plan: Plan
    opened: bool = False


def candidates(given: Plan, model: nn.Module) -> Iterator[Candidate]:
    """The given plan with the rest left open, and, if it says nothing of weights, plans that people write."""
    text = body(given)
    yield Candidate("chosen" if leaves_all(given) else "as said", Plan.read(opened(given)), opened=leaves_all(given))
    for name, lines in _by_hand(given, model):
        yield Candidate(name, Plan.read(f"{text}\n{lines}"))


def within_limit(given: Plan, model: nn.Module, limit: float) -> Iterator[Candidate]:
    """The plans beside these where the first one takes too much: one within the limit, and blocks that run again."""
    text, layers = body(given), layers_of(model)
    name, lines = ("chosen", "\n**: ?") if leaves_all(given) else ("as said", "")
    yield Candidate(f"{name} within the limit", Plan.read(f"{text}{lines}\n{Limit(int(limit))}"))
    for name, lines in _by_hand(given, model) if layers else ():
        yield Candidate(f"{name}, blocks run again", Plan.read(f"{text}\n{lines}\nrecompute {layers}"))


def leaves_all(given: Plan) -> bool:
    """Whether a plan says nothing of weights, so that all of these are the planner's."""
    return not any(isinstance(line, Rest | TakePlan) for line in given.statements)


def opened(given: Plan) -> str:
    """The lines of a plan, with all weights left open where it says nothing of them."""
    return f"{body(given)}\n{OPEN}" if leaves_all(given) else body(given)


def body(given: Plan) -> str:
    """The lines of a plan but for its limit."""
    return "\n".join(line.text for line in given.lines if not isinstance(line.statement, Limit))


ALL = "ZeRO-3"
KINDS = {"ZeRO-1": "states", "ZeRO-2": "{grads,states}"}


def _by_hand(given: Plan, model: nn.Module) -> Iterator[tuple[str, str]]:
    """The lines of plans that people write, by names."""
    if not leaves_all(given):
        return
    axes = [axis.name for s in given.statements if isinstance(s, Grid) for axis in s.axes if axis.folds is None]
    inner, outer, takes, norms = axes[-1], axes[:-1], _takes(model, axes), _norms(model, layers_of(model))
    yield "data parallel", ""
    yield from _zeros("", "", axes)
    if outer:
        yield "HSDP", f"**: {_cut([inner])}"
    take, between = f"take tp_plan over {inner}", f"{norms} -> {inner}=S(1)"
    for name, more in (("tensor parallel by its config", ""), ("the same and sequence parallel", between)):
        if takes and (norms or not more):
            yield name, f"{take}\n{more}"
            if outer:
                yield from _zeros(f"{name}, ", f"{take}\n{more}\n", outer)


def _zeros(name: str, lines: str, over: list[str]) -> Iterator[tuple[str, str]]:
    """A plan with states in pieces over some axes, with gradients too, and with weights too."""
    cut = ", ".join(f"{axis}=S(0)" for axis in over)
    for zero, kind in KINDS.items():
        yield f"{name}{zero}", f"{lines}{kind} **: {cut}"
    yield f"{name}{ALL}", f"**: {cut}\n{lines}"


def _cut(over: list[str]) -> str:
    return ", ".join(f"{axis}=S(0)" for axis in over)


def _takes(model: nn.Module, axes: list[str]) -> bool:
    """Whether the model's config brings a plan that fits it."""
    if not (getattr(model, "_tp_plan", None) or getattr(getattr(model, "config", None), "base_model_tp_plan", None)):
        return False
    try:
        Plan.taken(model, axes[-1])
    except SbpError:
        return False
    return True


def layers_of(model: nn.Module) -> str:
    """The pattern of the outermost repeated layers, if there are some."""
    held = list(model.modules())
    paths = {id(part): path for path, part in model.named_modules()}
    found = sorted(dict.fromkeys(blocks_of(paths, held).values()), key=lambda path: path.count("."))
    outer = [path for at, path in enumerate(found) if not any(path.startswith(f"{up}.") for up in found[:at])]
    families = dict.fromkeys(path.rpartition(".")[0] for path in outer)
    return f"{{{','.join(families)}}}.*" if len(families) > 1 else "".join(f"{family}.*" for family in families)


def _norms(model: nn.Module, layers: str) -> str:
    """The norms between which Megatron's sequence parallelism cuts tokens, by their names in transformers; none under
    other names."""
    names = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    known = {"input_layernorm", "post_attention_layernorm"} <= names and "{" not in layers
    return f"{layers}.{{input,post_attention}}_layernorm" if known and layers else ""


def resting(made: Assignment, model: nn.Module, kept: int, trained: Container[str]) -> int:
    """A lower bound of a rank's bytes of weights, and of gradients and so many states of those trained, by a plan.

    It is 0 where the plan casts or offloads any of them."""
    if any(isinstance(s, Cast | Offload) for s in made.plan.statements):
        return 0
    sizes = {axis: made.grids.size(axis) for axis in made.grids.axes}
    total = 0
    for name, value in model.named_parameters():
        cut = {kind: _axes(made, kind, name) for kind in made.rests}
        here = cut["weights"]
        if name not in made.rests["grads"]:  # in a step without micro-batches gradients lie in pieces, like the states
            cut["grads"] = cut["states"]
        parts = [(here, 1)]
        if name in trained:
            parts += [(here | cut["grads"], 1), (here | cut["states"], kept)]
        total += sum(n * value.nbytes // prod(sizes[axis] for axis in over) for over, n in parts)
    return total


def _axes(made: Assignment, kind: Kind, name: str) -> frozenset[str]:
    """The axes that may cut a parameter: named ones, and those that are left open."""
    axes: Mapping[str, object] = made.rests[kind].get(name, {})
    if name in made.free:
        return frozenset(made.grids.axes)
    return frozenset(axis for axis in axes if not isinstance(made.rests[kind][name][axis].entry, Broadcast))
