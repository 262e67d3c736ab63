"""Lighter plans, for a limit that is not met without: a batch in parts, blocks that run again, or the host's memory.

Parts of a batch come first, because they cost least: as few as bring the peak down. Of what goes to the host,
activations of the first layers do, because they would be kept longest; the number of these layers is read off two
plans, with none and with all. A copy that goes to the host beside the computing costs nothing. One that does not has
the price of the host's link, and a step of the optimizer there has its own.
"""

from collections.abc import Callable, Mapping
from math import ceil
from typing import TypeAlias

from torch import nn

from ....boxing.graph.physical import Op, Physical
from ....sbp.call import Call
from ....sbp.traits import traits
from ...model.paths import met
from ..check import Checked
from ..language.statements import Accumulate, DrawBy, Pipe
from ..plan import Plan
from .candidates import Candidate, body, layers_of, leaves_all, opened

__all__ = ["in_parts", "last_ways", "offloading"]

STATES = "offload states ** to cpu"
MORE = 3  # plans between none and all
LITTLE = 0.05  # of the limit, which random numbers of a batch may take
DOUBLINGS = 4  # of the parts of a batch, from as few as could do

Attempt: TypeAlias = Callable[[Candidate], Checked | None]


def in_parts(given: Plan, model: nn.Module, limit: float, whole: Checked, samples: int, attempt: Attempt) -> None:
    """Try the batch in parts: in as few as fit, or where none do, in as few as fit where blocks run again too."""
    if any(isinstance(line, Accumulate | Pipe) for line in given.statements):
        return
    text, layers = opened(given), layers_of(model)
    said = any(isinstance(line, DrawBy) for line in given.statements)
    first = "chosen" if leaves_all(given) else "as said"
    ways = {"": text, **({", blocks run again": f"{text}\nrecompute {layers}"} if layers else {})}
    for more, lines in ways.items():
        least = 2 if more else whole.memory / limit
        if not said and drawn(whole.report.graph) > LITTLE * limit:
            lines += f"\n{DrawBy(each=True)}"
        for parts in [n for k in range(samples.bit_length()) if least <= (n := 2**k) <= samples][:DOUBLINGS]:
            name = f"{first}, {parts} micro-batches{more}"
            found = attempt(Candidate(name, Plan.read(f"{lines}\n{parts} micro-batches")))
            if found is not None and found.memory <= limit:
                return


def drawn(graph: Physical) -> int:
    """The bytes of random numbers of a batch, which micro-batches hold unless each draws its own."""
    found = 0
    for op in (step for step in graph.steps if isinstance(step, Op)):
        call = Call(op.op, op.args, op.kwargs, ())
        if call.draws:
            size = 1 if "drops" in traits(call.name) else op.outputs[0].layout.dtype.itemsize
            found += size * op.outputs[0].layout.numel
    return found


def offloading(given: Plan, model: nn.Module, limit: float, whole: Checked, attempt: Attempt) -> None:
    """Try plans that offload, because the best one without, `whole`, takes too much. `attempt` returns a plan's
    outcome, or None for one that cannot be the answer."""
    text, layers = opened(given), layers_of(model)
    attempt(Candidate("chosen, states on the host", Plan.read(f"{text}\n{STATES}")))
    many = _most(layers, model)

    def with_saved(n: int) -> int | None:
        where = "all layers" if n == many else f"{n} layers"
        name = f"chosen, activations of {where} on the host"
        found = attempt(Candidate(name, Plan.read(f"{text}\n{_saved(layers, n, many)}")))
        return None if found is None else found.memory

    least = with_saved(many) if many else None
    if least is None:
        return
    if least > limit:
        lines = f"{text}\n{STATES}\n{_saved(layers, many, many)}"
        attempt(Candidate("chosen, states and activations of all layers on the host", Plan.read(lines)))
        return
    full, low, high, there = whole.memory, 0, many, least
    for _ in range(MORE):  # as few as it takes, since what waits for the host has its price
        guess = min(max(ceil(high * (full - limit) / max(full - there, 1)), low + 1), high - 1)
        if not low < guess < high:
            return
        found = with_saved(guess)
        if found is None:
            return
        low, high, there = (low, guess, found) if found <= limit else (guess, high, there)


def last_ways(given: Plan, model: nn.Module, limit: float) -> Mapping[str, str]:
    """Plans within a limit that nothing has met, by names: states go to the host, then all activations too."""
    text, layers = body(given), layers_of(model)
    many = _most(layers, model)
    within = f"{text}\n**: ?\nlimit memory {int(limit)} B\n{STATES}"
    found = {"chosen within the limit, states on the host": within}
    if many:
        found["chosen within the limit, states and activations on the host"] = f"{within}\n{_saved(layers, many, many)}"
    return found


def _saved(layers: str, n: int, many: int) -> str:
    path = layers if n == many else f"{layers.removesuffix('*')}[:{n}]"
    return f"offload saved {path} to cpu"


def _most(layers: str, model: nn.Module) -> int:
    """The layers of the longest list."""
    names = met(layers, dict(model.named_modules())) if layers else []
    return max((int(last) + 1 for name in names if (last := name.rpartition(".")[2]).isdigit()), default=0)
