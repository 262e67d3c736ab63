"""Bytes inside a segment: what running its traced graph makes, or an estimate where it cannot be traced."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

from torch import Tensor, fx

from ....sbp.call import refs_in, renumbered, tensors_in
from ..lower.localise import Local, LocalCall, Spec
from .joint import Untraceable, traced
from .recorder import Recording

__all__ = ["Estimate", "SegmentBytes", "Insides", "estimated", "inside_of", "insides"]

MOST = 1024  # segments whose bytes are remembered


class SegmentBytes(NamedTuple):
    """Memory that a traced graph makes as it runs: bytes at the peak, and the storage of each result.

    A storage is the number of the input that the result is a view of, or None; a name by which a new one is known; and
    its bytes."""

    peak: int
    results: tuple[tuple[int | None, int, int], ...]


class Insides(NamedTuple):
    """The bytes of a segment's forward and backward, and the inputs that the backward takes again."""

    forward: SegmentBytes
    backward: SegmentBytes | None
    again: tuple[int, ...]


@lru_cache(MOST)
def insides(local: Local) -> "Insides | Estimate":
    """The bytes of a segment."""
    try:
        made = traced(local)
    except Untraceable as error:  # it runs by autograd
        return estimated(local, str(error))
    return Insides(inside_of(made.forward), inside_of(made.backward) if made.backward else None, made.again)


def inside_of(calls: Recording) -> SegmentBytes:
    nodes = list(calls.graph.nodes)
    (result,) = calls.graph.output_node().args
    ends: list[fx.Node] = []
    fx.map_arg(result, ends.append)
    last = {source: at for at, node in enumerate(nodes) for source in node.all_input_nodes}
    last.update(dict.fromkeys(ends, len(nodes)))
    given: dict[int, int] = {}
    size: dict[int, int] = {}
    until: dict[int, int] = {}
    made: list[list[int]] = []
    for at, node in enumerate(nodes):
        found = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in _tensors(node)}
        made.append([])
        for storage, nbytes in found.items():
            if node.op == "placeholder":
                given.setdefault(storage, len([n for n in nodes[:at] if n.op == "placeholder"]))
            elif storage not in given:
                if storage not in size:
                    made[at].append(storage)
                    size[storage] = nbytes
                until[storage] = max(until.get(storage, at), last.get(node, at))
    live = peak = 0
    gone: dict[int, list[int]] = {}
    for storage, at in until.items():
        gone.setdefault(at, []).append(storage)
    for at in range(len(nodes)):
        live += sum(size[storage] for storage in made[at])
        peak = max(peak, live)
        live -= sum(size[storage] for storage in gone.get(at, ()))
    results = []
    for node in ends:
        (value,) = _tensors(node)
        storage = value.untyped_storage()
        results.append((given.get(storage._cdata), storage._cdata, storage.nbytes()))
    return SegmentBytes(peak, tuple(results))


def _tensors(node: fx.Node) -> list[Tensor]:
    return tensors_in(node.meta.get("val"))


@dataclass(frozen=True)
class Estimate:
    """Bytes of a segment that autograd runs: at most those that its forward and its backward make on the way, and those
    kept between them beside inputs and outputs."""

    forward: int
    kept: int
    backward: int
    reason: str  # that it could not be traced


class _Call(NamedTuple):
    """The bytes of one call: at its peaks, of each result that is no view, and of what else its backward keeps."""

    forward: int
    backward: int
    own: tuple[int, ...]
    saved: int
    reason: str = ""


def estimated(local: Local, reason: str) -> Estimate:
    """An upper bound, call by call: as if all that a backward may read stayed until the last has ended."""
    wires = [*local.inputs]
    trained = set(local.wants)
    own = [0] * len(wires)
    forward = live = 0
    done: list[tuple[list[int], list[int], range, _Call]] = []
    for call in local.calls:
        taken = list(dict.fromkeys(refs_in((call.args, call.kwargs))))
        made = range(len(wires), len(wires) + len(call.makes))
        wants = [n for n in taken if call.grad and n in trained]
        one = _one(call, [wires[n] for n in taken], taken, wants)
        forward, live = max(forward, live + one.forward), live + sum(one.own) + one.saved
        wires += call.makes
        own += one.own
        if wants:
            trained.update(n for n in made if wires[n].dtype.is_floating_point or wires[n].dtype.is_complex)
        done.append((taken, wants, made, one))
    backward, grads = 0, set[int]()
    read = {n for taken, _, made, one in done for n in (*taken, *made) if one.backward} - set(local.outputs)
    for _, wants, made, one in reversed(done):
        if wants:
            backward = max(backward, _size([wires[n] for n in grads]) + one.backward)
            grads = (grads | set(wants)) - set(made)
    reasons = dict.fromkeys(one.reason for *_, one in done if one.reason)
    kept = sum(own[n] for n in read) + sum(one.saved for *_, one in done)
    return Estimate(forward, kept, backward, "; ".join(reasons) or reason)


def _one(call: LocalCall, given: Sequence[Spec], taken: Sequence[int], wants: Sequence[int]) -> _Call:
    """A call as a segment of its own; where it cannot be traced, it counts twice its inputs and outputs."""
    args, kwargs = renumbered((call.args, call.kwargs), {n: at for at, n in enumerate(taken)})
    alone = call._replace(args=args, kwargs=kwargs)
    results = range(len(call.makes))
    returns = [at for at in results if call.makes[at].dtype.is_floating_point or call.makes[at].dtype.is_complex]
    outputs = tuple(len(given) + at for at in results)
    local = Local((alone,), tuple(given), outputs, tuple(returns) if wants else (), tuple(map(taken.index, wants)))
    try:
        made = traced(local)
    except Untraceable as error:
        both, own = _size([*given, *call.makes]), tuple(_size([x]) for x in call.makes)
        backward, saved = (2 * both, both) if wants else (0, 0)
        return _Call(2 * both, backward, own, saved, _said(call, error))
    inside = inside_of(made.forward)
    new = {name: nbytes for view_of, name, nbytes in inside.results if view_of is None}
    mine = tuple(new.pop(name, 0) if view_of is None else 0 for view_of, name, _ in inside.results[: len(results)])
    backward = inside_of(made.backward).peak if made.backward else 0
    return _Call(inside.peak, backward, mine, sum(new.values()))


def _size(specs: Sequence[Spec]) -> int:
    return sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def _said(call: LocalCall, error: Untraceable) -> str:
    function = call.function.func if isinstance(call.function, partial) else call.function
    return f"{getattr(function, '__name__', function)}: {str(error).partition('. ')[0]}"
