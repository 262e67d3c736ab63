"""The arguments of a step: their tensors by path, what of them a compiled step depends on, and how they are cut."""

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from ....boxing import box
from ....placement.errors import SbpError, did_you_mean
from ....placement.structure import ATOMS, parts, replaced, walk
from ....placement.world import device, owned
from ....sbp import Layout
from ....sbp.call import frozen
from ....sbp.layout import memory_gaps, memory_order
from ....sbp.text import Pin
from ...model.flows import FlowError
from ...model.paths import met
from ...tensors.factories import check_dense
from ...tensors.moves import shards_as
from ...tensors.tensor import GlobalTensor
from .caches import CacheArgument, with_stand_ins
from .calls.strides import part_of_memory
from .packed import repacked, unpacked

__all__ = [
    "StepCall",
    "WrittenArguments",
    "cache_flows",
    "cutter",
    "flat",
    "input_flows",
    "input_titles",
    "key_of",
    "own_parameters",
    "parameter_names",
    "tensors_by_path",
]


def tensors_by_path(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of arguments by where they stand: `0`, `1.mask`, `labels`."""
    found: dict[str, Tensor] = {}
    for name, value in (*zip(map(str, range(len(args))), args, strict=True), *kwargs.items()):
        if type(value) is Tensor:  # most are: one call less
            found[name] = value
        elif type(value) is CacheArgument:
            found.update({f"{name}.{path}": x for path, x in value.items()})
        elif type(value) not in ATOMS:
            found.update({".".join(map(str, keys)): x for keys, x in walk(value, Tensor, (name,))})
    return found


@dataclass(frozen=True, eq=False)
class StepCall:
    """The call of a step: its function with arguments, which the user calls by these `names`."""

    build: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    names: Sequence[str] = ()

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors in the arguments by their paths."""
        return tensors_by_path(self.args, self.kwargs)

    @cached_property
    def caches(self) -> dict[str, CacheArgument]:
        """The caches among the arguments by their paths."""
        given = (*((str(at), x) for at, x in enumerate(self.args)), *self.kwargs.items())
        return {path: x for path, x in given if isinstance(x, CacheArgument)}

    def is_cached(self, path: str) -> bool:
        """Whether a tensor is a cache's."""
        return any(path.startswith(f"{name}.") for name in self.caches)


class OwnParameter:
    """In arguments: a parameter of the graph's own modules stands here. It is no argument of the step, which has it."""

    __slots__ = ("module", "name", "path")

    def __init__(self, path: str, module: nn.Module, name: str) -> None:
        self.path, self.module, self.name = path, module, name

    @property
    def value(self) -> Tensor | None:
        """The module's own now: while it is captured, a stand-in without values."""
        return self.module._parameters[self.name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnParameter) and (self.path, self.module) == (other.path, other.module)

    def __hash__(self) -> int:
        return hash((self.path, self.module))


def own_parameters(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: Callable[[], Mapping[str, nn.Module]],
    now: Callable[[Tensor], Tensor],
) -> tuple[Any, Any]:
    """The arguments with notes in the place of the modules' parameters, because copies would get no gradient and not be
    trained. `now` says what a tensor is that was a parameter before."""
    found = tensors_by_path(args, kwargs).values()
    if not any(type(x) is not Tensor and isinstance(x, nn.Parameter) for x in found):  # that asks a class of Python
        return args, kwargs
    held: dict[int, OwnParameter] = {}
    for prefix, root in modules().items():
        for path, module in root.named_modules(prefix=prefix):
            for name, value in module._parameters.items():
                held.setdefault(id(value), OwnParameter(f"{path}.{name}", module, name))

    def put(_: str, x: Tensor) -> Any:
        return held.get(id(now(x)), x) if isinstance(x, nn.Parameter) else x

    given: tuple[Any, Any] = replaced((tuple(args), dict(kwargs)), put, objects=True)
    return given


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names under which a function takes arguments by position, up to where it takes any number."""
    try:
        known = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one of C has none
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in takewhile(lambda p: p.kind in kinds, known))


def input_titles(paths: Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """Paths of tensors in arguments as a reader says them.

    >>> input_titles(["0", "1.mask", "labels"], ["tokens", "batch"])
    {'0': 'tokens', '1.mask': 'batch.mask'}
    """
    found = {}
    for path in paths:
        first, dot, rest = path.partition(".")
        if first.isdigit() and int(first) < len(names):
            found[path] = f"{names[int(first)]}{dot}{rest}"
    return found


def _parts(title: str) -> Iterator[str]:
    """The parts that a name is put together of, from the left."""
    first, *more = title.split(".")
    yield first
    yield from (f".{part}" for part in more)


def cache_flows(said: Mapping[str, Pin], call: StepCall) -> None:
    """Have caches among the arguments know the pins of tensors that a step adds to them."""

    def pins(title: str) -> Callable[[str, Tensor], Pin | None]:
        def pin(path: str, x: Tensor) -> Pin | None:
            around = list(accumulate(_parts(f"{title}.{path}")))
            fits = [
                pin
                for name, pin in said.items()
                if (name in around or met(name, around)) and all(-x.ndim <= d < x.ndim for d in pin.dims)
            ]
            return fits[-1] if fits else None

        return pin

    for path, cache in call.caches.items():
        cache.pins = pins(input_titles([path], call.names).get(path, path))


def input_flows(
    said: Mapping[str, Pin],
    inputs: Mapping[str, Tensor],
    names: Sequence[str],
    graph: str,
    caches: Iterable[str] = (),
) -> dict[str, Pin]:
    """The pins of tensors in arguments, by path. A pin of an argument with several tensors holds for those that have
    its dims. A name may be a pattern: `*` is all of them. One of `caches` may have no such tensor yet."""
    titles = {path: path for path in inputs} | input_titles(inputs, names)
    held = [input_titles([path], names).get(path, path) for path in caches]
    found: dict[str, Pin] = {}
    for name, pin in said.items():
        named = {*met(name, list(titles.values())), name}
        inside = [p for p, title in titles.items() if p == name or not named.isdisjoint(accumulate(_parts(title)))]
        fits = [path for path in inside if all(-inputs[path].ndim <= d < inputs[path].ndim for d in pin.dims)]
        if not fits and any(name == path or name.startswith(f"{path}.") or met(name, [path]) for path in held):
            continue
        if not inside:
            raise FlowError(
                f"{graph}: inputs= says how {name} lies, and there is no such argument\n"
                f"  its tensors are {', '.join(titles.values()) or 'none'}\n"
                f"  {did_you_mean(name, titles.values(), 'say it of one of these')}",
                of=name,
                side="argument",
            )
        if not fits:
            said_of = ", ".join(f"{titles[path]} {tuple(inputs[path].shape)}" for path in inside)
            raise FlowError(
                f"{graph}: inputs= says that {name} lies as {pin}\n  it is {said_of}, without these dims\n"
                f"  give it dims that it has, as in inputs={{{name!r}: {{axis: S(0)}}}}",
                of=name,
                side="argument",
            )
        found.update(dict.fromkeys(fits, pin))
    return found


def flat(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The function of tensors by path alone: they are put into arguments like these."""

    def call(**tensors: Tensor) -> Any:
        def put(path: str, x: Tensor) -> Tensor:
            return tensors.get(path, x)  # one that no path leads to is refused where it is used

        given = [replaced(value, put, str(at), objects=True) for at, value in enumerate(args)]
        named = {name: replaced(value, put, name, objects=True) for name, value in kwargs.items()}
        given, named = replaced((given, named), lambda _, of: of.value, objects=True, kind=OwnParameter)
        return unpacked(with_stand_ins(function, repacked(given), repacked(named)))

    return call


def key_of(args: Sequence[Any], kwargs: Mapping[str, Any], *, starts: bool = False) -> Hashable:
    """The kind of a step's arguments: shapes, dtypes and strides of tensors, and all other values. With `starts` it
    also says which tensors start elsewhere than their memory."""
    kind = tuple(map(_key, args)), tuple([(name, _key(value)) for name, value in kwargs.items()])
    if not starts:
        return kind
    inside = [path for path, x in tensors_by_path(args, kwargs).items() if part_of_memory(x)]
    return *kind, tuple(inside)


def _key(value: Any) -> Hashable:
    if isinstance(value, GlobalTensor):
        of = value._layout
        return "global", of.state, of.placement, of.shape, of.dtype, of.order, of.gaps, value.requires_grad
    if isinstance(value, Tensor):
        check_dense(value, "an argument of a graph")
        return "tensor", value.shape, value.dtype, memory_order(value), memory_gaps(value), value.requires_grad
    if isinstance(value, list | tuple):
        return (type(value), *map(_key, value))
    if isinstance(value, CacheArgument):
        return value.key
    if (inside := parts(value)) is not None:
        return (type(value), *[(frozen(name), _key(part)) for name, part in inside])
    try:
        hash(value)
    except TypeError:
        raise SbpError(
            f"a graph cannot take a {type(value).__name__} as an argument, because its value could change unnoticed "
            f"after compilation\n  pass tensors{_hint(value)}, numbers, strings, and lists, tuples, dicts or "
            "dataclasses of them"
        ) from None
    return frozen(value)


def _hint(value: Any) -> str:
    return ", as in torch.from_numpy(x)," if hasattr(value, "__array__") else ""


def cutter(layout: Layout) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """A function that brings an argument to a layout. Each process has a plain tensor whole, and takes its part."""
    whole = Layout(layout.placement, type(layout.state)(((),) * len(layout.shape)), layout.shape, layout.dtype)
    here = [device(layout.placement, rank) for rank in owned(layout.placement)]

    def cut(value: Tensor) -> tuple[Tensor, ...]:
        if isinstance(value, GlobalTensor):
            if value._layout is layout and not value.requires_grad:  # what a step before has left
                return tuple(map(Tensor.detach, value._shards))
            with torch.no_grad():
                return tuple(shard.detach() for shard in shards_as(value, layout, "input"))
        if value.device.type == "meta":
            raise SbpError(
                f"a step was given a tensor {tuple(value.shape)} on meta, which has no values\n"
                "  it is enough for graph.plan_for(...); to run, pass one with values"
            )
        copies = [value.detach().to(where) for where in here] or [value.new_empty(0)]
        return tuple(copies) if whole is layout else box(copies, whole, layout, op="input")

    return cut


class WrittenArguments:
    """The result of a step that writes to its arguments: what it returns, and their new values by path."""

    def __init__(self, rebuild: Callable[[Any], Any], paths: Sequence[str]) -> None:
        self.rebuild, self.paths = rebuild, tuple(paths)

    def __call__(self, returned: tuple[Any, Mapping[str, Tensor]]) -> tuple[Any, Mapping[str, Tensor]]:
        result, values = returned
        return self.rebuild(result), values

    def check(self, given: Mapping[str, Tensor]) -> None:
        """Refuse arguments that share memory with a written one: the step has a value of its own for each."""
        for path in self.paths:
            here = _memory(given[path])
            also = next((other for other, x in given.items() if other != path and here & _memory(x)), None)
            if also is not None:
                raise SbpError(
                    f"the step writes to its argument {path}, and {also} lies in the same memory\n"
                    f"  in the step {also} would stay what it was; pass {also}.clone()"
                )

    def put_back(self, given: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Write the new values to what was passed, in its own memory and as it lies."""
        with torch.no_grad():
            for path in self.paths:
                target, value = given[path], values[path]
                if isinstance(value, GlobalTensor) and not isinstance(target, GlobalTensor):
                    value = value.full_tensor()
                target.copy_(value)


def _memory(x: Tensor) -> set[int]:
    pieces = x._shards if isinstance(x, GlobalTensor) else (x,)
    return {piece.untyped_storage().data_ptr() for piece in pieces if piece.layout is torch.strided and piece.numel()}
