"""Compression: notes on a model that say which gradients are summed in fewer bytes, and which hops between stages are
made so.

    flow.nn.compress(model.blocks, flow.encoders.sign(), over="data")                gradients, along `data`
    flow.nn.compress(model, {"blocks.4": flow.encoders.int8()}, kind="hops")         what comes to blocks.4

They are notes like those of `place` and `shard`: a graph reads them, and nothing else changes, eager code either.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal, TypeAlias, TypeVar, get_args

from torch import nn

from ...boxing.encoding import MoveEncoder
from ...boxing.graph.encode import SaidEncoder
from ...placement.errors import SbpError
from .annotate import note
from .paths import PathPattern, meant_path
from .slots import joined_path, module_notes, parameter_notes, parameters

__all__ = ["CompressKind", "compress", "compressed_grads", "compressed_hops", "meant_by"]

CompressKind: TypeAlias = Literal["grads", "hops"]
Model = TypeVar("Model", bound=nn.Module)

GRADS = "_sbpflow_compress"  # of the parameters that the module itself holds, by their short names
HOPS = "_sbpflow_compress_hops"  # of the module itself


def compress(
    model: Model,
    encoders: MoveEncoder | Mapping[str, MoveEncoder | None] | None,
    *,
    over: str | Sequence[str] | None = None,
    kind: CompressKind = "grads",
) -> Model:
    """Say by which encoder gradients of parameters are added up over ranks, or how values hop. The model is returned.

    Of kind "grads": where a gradient is a sum over ranks, as those of data parallelism are, each rank encodes its
    addend, and all decode and add up the same bytes. With `over` that is done along these axes, and others are summed
    as they are; else along all. What an encoder leaves out is kept, and added to the next gradient: `graph.kept`.

    Of kind "hops": what comes to a module from layers on other ranks, and the gradient that goes back, are encoded by
    themselves. Nothing is kept of them, and what is left out is lost.

    An encoder is meant for all of the model. A pattern names parameters, or modules with all that is in them; `*` is
    any part of a name, with its dots. Of the patterns of one dict the first that fits counts, of several calls the
    last; None takes it back. Parameters without a gradient are passed by.
    """
    if kind not in get_args(CompressKind):
        raise SbpError(f"compress: kind={kind!r}\n  known are 'grads' and 'hops'")
    if kind == "hops" and over is not None:
        raise SbpError(
            f"compress: over={over!r} of hops\n  a hop goes from ranks to others, along no axis: leave it out"
        )
    axes = (over,) if isinstance(over, str) else None if over is None else tuple(over)
    said = encoders if isinstance(encoders, Mapping) else {"*": encoders}
    if kind == "grads":
        found = meant_by({"": model}, said, axes)
        for slot in parameters({"": model}):
            if id(slot.value) in found:
                kept = {**slot.module.__dict__.get(GRADS, {}), slot.name: found[id(slot.value)]}
                note(slot.module, GRADS, {name: one for name, one in kept.items() if one is not None} or None)
        return model
    modules = dict(model.named_modules(remove_duplicate=False))
    met: set[int] = set()
    for pattern, encoder in _checked(said).items():
        meets = PathPattern.of(pattern, dots=True).regex(modules).fullmatch
        inside = {path for path in modules if meets(path)}
        if not inside:
            raise _nothing_called(pattern, model, list(filter(None, modules)))
        for path, module in modules.items():
            if id(module) not in met and (path in inside or not inside.isdisjoint(_around(path))):
                met.add(id(module))
                note(module, HOPS, None if encoder is None else SaidEncoder(encoder, None, pattern))
    return model


def meant_by(
    modules: Mapping[str, nn.Module], encoders: Mapping[str, MoveEncoder | None], over: tuple[str, ...] | None = None
) -> dict[int, SaidEncoder | None]:
    """The encoders that patterns mean, by ids of parameters."""
    known = parameters(modules)
    paths = [
        path
        for prefix, root in modules.items()
        for path, _ in root.named_modules(prefix=prefix, remove_duplicate=False)
    ]
    found: dict[int, SaidEncoder | None] = {}
    for pattern, encoder in _checked(encoders).items():
        meets = PathPattern.of(pattern, dots=True).regex([*paths, *(slot.full for slot in known)]).fullmatch
        inside = {path for path in paths if meets(path)}
        fits = [s for s in known if meets(s.full) or inside.intersection(["", *_around(s.full)])]
        if not fits:
            root = next(iter(modules.values()))
            raise _nothing_called(pattern, root, [*(slot.full for slot in known), *filter(None, paths)])
        for slot in fits:
            found.setdefault(id(slot.value), None if encoder is None else SaidEncoder(encoder, over, pattern))
    return found


def _checked(encoders: Mapping[str, MoveEncoder | None]) -> Mapping[str, MoveEncoder | None]:
    for pattern, encoder in encoders.items():
        if not (encoder is None or isinstance(encoder, MoveEncoder)):
            raise SbpError(
                f"compress: {pattern!r} by {encoder!r}\n"
                "  give it an encoder, as flow.encoders.sign(), or None to take one back"
            )
    return encoders


def _around(full: str) -> list[str]:
    """The paths of the modules that a name is in."""
    return list(accumulate(full.split(".")[:-1], joined_path))


def _nothing_called(pattern: str, model: nn.Module, names: Sequence[str]) -> SbpError:
    return SbpError(
        f"compress: {type(model).__name__} has no parameter or module called {pattern!r}\n"
        f"  {meant_path(pattern, names)}"
    )


def compressed_grads(
    modules: Mapping[str, nn.Module], given: Mapping[str, MoveEncoder] | None = None
) -> dict[str, SaidEncoder]:
    """The encoders of parameters that have one, by full name; a tied one has each of its own. Those given by patterns
    count before notes."""
    first = meant_by(modules, given) if given else {}
    known = parameters(modules)
    said: dict[int, SaidEncoder] = parameter_notes(known, GRADS, "encoders", show=lambda one: str(one.encoder))
    all_said = {**said, **{key: one for key, one in first.items() if one is not None}}
    return {slot.full: all_said[id(slot.value)] for slot in known if id(slot.value) in all_said}


def compressed_hops(modules: Mapping[str, nn.Module]) -> dict[str, SaidEncoder]:
    """The encoders of what comes to modules, by the paths of those that have one."""
    return module_notes(modules, HOPS)
