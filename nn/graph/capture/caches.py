"""Caches of transformers in a step: objects that hold keys, values and states, which a forward reads and writes.

    before a step     a cache among the arguments is taken apart: tensors by path, and a form that the step is made for
    in its capture    a stand-in of the same class holds the captured tensors, and the forward writes to that
    behind each step  the cache that was passed becomes what the stand-in became, and is in the result where that was

So a cache is state of whoever calls: between steps its tensors are global and lie as the step left them. One that grows
with each token would need a step for each, and is refused.
"""

import copy
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem, is_
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from ....placement.errors import SbpError
from ....placement.structure import ATOMS, mapped, part_at
from ....sbp.call import frozen
from ....sbp.layout import memory_gaps, memory_order
from ....sbp.text import Pin
from ...model.slots import joined_path
from ...tensors.tensor import GlobalTensor

__all__ = [
    "CacheArgument",
    "CacheStandIn",
    "GivenCache",
    "ResultWithCaches",
    "are_plain",
    "cache_parts",
    "copied_by",
    "opened",
    "with_stand_ins",
]


class CacheForm:
    """All of a cache but its tensors, as something to compare."""

    __slots__ = ("content", "number")

    def __init__(self, content: Hashable) -> None:
        self.content, self.number = content, hash(content)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, CacheForm) and self.content == other.content)

    def __hash__(self) -> int:
        return self.number


class CacheArgument(dict[str, Tensor]):
    """A cache as a step takes it: its tensors by path, beside the form and the cache itself.

    `counters` has the numbers of tokens that a stand-in holds in the place of the cache's own, by path. `pins` says how
    a tensor is to lie that the step puts at a path.
    """

    cache: Any
    form: CacheForm
    counters: Mapping[str, int]
    pins: Callable[[str, Tensor], Pin | None] | None = None

    @property
    def key(self) -> Hashable:
        """The kind of cache that a step is made for. However tensors lie, they are brought to where that has them."""
        return (CacheArgument, self.form, *[(path, x.shape, x.dtype, *_memory(x)) for path, x in self.items()])


@dataclass(frozen=True, eq=False)
class GivenCache:
    """In a result: the cache that was passed stands here, by its number among these."""

    number: int


@dataclass(frozen=True, eq=False)
class CacheStandIn:
    """A stand-in while a forward runs, and the argument that it was made of."""

    argument: CacheArgument
    cache: Any


@dataclass(frozen=True, eq=False)
class ResultWithCaches:
    """The result of a captured function, and the stand-ins that it was given."""

    result: Any
    caches: Sequence[CacheStandIn]


def are_plain(args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether arguments are plain tensors, atoms and caches alone, in which nothing else has to be looked for."""
    kinds = {type(x) for x in (*args, *kwargs.values())} - _PLAIN
    return all(issubclass(kind, _kinds().caches) for kind in kinds)


_PLAIN = frozenset({*ATOMS, Tensor})  # a global tensor may be a parameter


def opened(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments of a step with caches taken apart."""
    kinds = _kinds().caches
    if not kinds or not any(isinstance(x, kinds) for x in (*args, *kwargs.values())):
        return args, kwargs
    tokens = _tokens(args, kwargs)

    def taken(value: Any) -> Any:
        return _argument(value, tokens) if isinstance(value, kinds) else value

    return [taken(x) for x in args], {name: taken(x) for name, x in kwargs.items()}


def with_stand_ins(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a function, called with stand-ins for the caches among its arguments."""
    arguments = [x for x in (*args, *kwargs.values()) if isinstance(x, CacheArgument)]
    if not arguments:
        return function(*args, **kwargs)
    made = [CacheStandIn(each, _stand_in(each)) for each in arguments]
    known = {id(each.argument): each.cache for each in made}
    given = [known.get(id(x), x) for x in args]
    named = {name: known.get(id(x), x) for name, x in kwargs.items()}
    counting = [_layer(each.cache, path) for each in made for path in each.argument.counters]
    for layer in counting:
        vars(layer).update(get_seq_length=_refuse_length, get_mask_sizes=_refuse_length)
    result = function(*given, **named)
    for layer in counting:
        del layer.get_seq_length, layer.get_mask_sizes
    numbers = {id(each.cache): number for number, each in enumerate(made)}

    def marked(cache: Any) -> Any:
        return GivenCache(numbers[id(cache)]) if id(cache) in numbers else cache

    return ResultWithCaches(mapped(result, _kinds().caches, marked), made)


def cache_parts(value: Any) -> dict[Any, Any] | None:
    """The parts of a cache, a layer of one, or a container in these; None of all else."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value
    return vars(value) if isinstance(value, _kinds().layers) else None


def copied_by(value: Any, path: str, change: Callable[[str, Any], Any], kind: type = Tensor) -> Any:
    """A copy of a cache or a part with other things in the places of all of a kind, such as tensors."""
    if isinstance(value, kind):
        return change(path, value)
    inside = cache_parts(value)
    if inside is None:
        return value
    made = {key: copied_by(part, joined_path(path, str(key)), change, kind) for key, part in inside.items()}
    if isinstance(value, list | tuple):
        return type(value)(made.values())
    copied = copy.copy(value)
    (copied if isinstance(copied, dict) else vars(copied)).update(made)
    return copied


# Taking a cache apart


@dataclass(frozen=True)
class _Kinds:
    """Classes of transformers: caches, and the layers in them."""

    caches: tuple[type, ...] = ()
    layers: tuple[type, ...] = ()
    grows: tuple[type, ...] = ()
    slides: tuple[type, ...] = ()


_NONE = _Kinds()
_found: list[_Kinds] = []


def _kinds() -> _Kinds:
    """The classes, where a program has loaded them: there is no cache else."""
    if not _found:
        module: Any = sys.modules.get("transformers.cache_utils")
        if module is None:
            return _NONE

        def named(*names: str) -> tuple[type, ...]:
            """Those of them that this version of transformers has."""
            return tuple(getattr(module, name) for name in names if hasattr(module, name))

        layers = named("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
        _found.append(_Kinds(named("Cache"), layers, named("DynamicLayer"), named("StaticSlidingWindowLayer")))
    return _found[0]


class _Look:
    """One look at a cache. As long as it `stands` only tensors are others, and numbers of tokens."""

    def __init__(self, cache: Any, tokens: int | None) -> None:
        self.tokens = tokens
        self.tensors: dict[str, tuple[Any, Any]] = {}  # by path: what holds each, and under which key
        self.counters: dict[str, int] = {}
        self.counting: list[Any] = []  # layers
        self.tables: list[Any] = []  # what holds all else, its key, and the value
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.holders: list[Any] = []
        self.form = CacheForm(self._form(cache, ""))
        self.sizes = list(map(len, self.holders))

    def stands(self, tokens: int | None) -> bool:
        return (
            self.tokens == tokens
            and list(map(len, self.holders)) == self.sizes
            and all(map(is_, map(getitem, self.tables, self.keys), self.values))
            and all(isinstance(table[key], Tensor) for table, key in self.tensors.values())
            and [_counter(layer, tokens) for layer in self.counting] == [*self.counters.values()]
        )

    def argument(self, cache: Any) -> CacheArgument:
        made = CacheArgument({path: table[key] for path, (table, key) in self.tensors.items()})
        made.cache, made.form, made.counters = cache, self.form, self.counters
        return made

    def _form(self, value: Any, path: str) -> Any:
        inside = cache_parts(value)
        if inside is None:
            return frozen(value)
        held = value if isinstance(value, list | tuple | dict) else vars(value)
        self.holders.append(held)
        counted = _counter(value, self.tokens) if isinstance(value, _kinds().slides) else None
        if isinstance(value, _kinds().slides):
            self.counting.append(value)
        return type(value), tuple([(key, self._part(part, held, key, path, counted)) for key, part in inside.items()])

    def _part(self, part: Any, held: Any, key: Any, path: str, counted: int | None) -> Any:
        at = joined_path(path, str(key))
        if isinstance(part, Tensor):
            self.tensors[at] = held, key
            return Tensor
        if key == _COUNTER and counted is not None:
            self.counters[at] = counted
            return "tokens", counted
        self.tables.append(held)
        self.keys.append(key)
        self.values.append(part)
        return self._form(part, at)


_COUNTER = "cumulative_length_int"
_looks: WeakKeyDictionary[Any, _Look] = WeakKeyDictionary()


def _argument(cache: Any, tokens: int | None) -> CacheArgument:
    look = _looks.get(cache)
    if look is None or not look.stands(tokens):
        _check(cache, tokens)
        look = _looks[cache] = _Look(cache, tokens)
    return look.argument(cache)


def _counter(layer: Any, tokens: int | None) -> int | None:
    """The number of tokens that stands for that of a sliding layer: all with which it does the same, once a mask is
    made, are one. None where the layer's own has to count."""
    number, most = layer.cumulative_length_int, layer.max_cache_len
    if tokens is None or not (number >= most or 0 < number <= most - tokens):
        return None
    return int(most) if number >= most else 1


def _stand_in(argument: CacheArgument) -> Any:
    """A stand-in for a cache: the argument's tensors and counters in the places of its own."""
    made = copied_by(argument.cache, "", lambda path, _: argument[path])
    for at, number in argument.counters.items():
        setattr(_layer(made, at), _COUNTER, number)
    return made


def _layer(cache: Any, path: str) -> Any:
    """The object that holds the part at a path."""
    held = cache
    for key in path.split(".")[:-1]:
        held = held[int(key)] if isinstance(held, list) else part_at(held, key)
    return held


def _memory(x: Tensor) -> tuple[Any, Any]:
    if isinstance(x, GlobalTensor):
        return x._layout.order, x._layout.gaps
    return memory_order(x), memory_gaps(x)


def _tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """How many tokens come, if their mask says already what they see; None if it is to be made of the cache."""
    masks = [kwargs.get(name) for name in ("attention_mask", "decoder_attention_mask")]
    if not any(mask.ndim == 4 if isinstance(mask, Tensor) else isinstance(mask, dict) for mask in masks):
        return None
    for x in (*[kwargs.get(name) for name in _TOKENS], *args):
        if isinstance(x, Tensor) and x.ndim > 1:
            return x.shape[1]
    return None


_TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


def _check(cache: Any, tokens: int | None) -> None:
    """Refuse a cache of which each token would make another kind."""
    own = getattr(cache, "self_attention_cache", cache)  # that of an encoder's result does not grow
    sliding: list[Any] = [layer for layer in getattr(own, "layers", ()) if isinstance(layer, _kinds().slides)]
    if tokens is None and any(layer.cumulative_length_int for layer in sliding):
        raise SbpError(
            f"a graph was given a {type(own).__name__} with a sliding layer of {sliding[0].cumulative_length_int} "
            "tokens, and no mask of four dims: it would be made of that number, and each token captured anew\n"
            "  pass what model.prepare_inputs_for_generation(ids, cache=cache, position_ids=places) makes, as generate "
            "does"
        )
    growing: list[Any] = [layer for layer in getattr(own, "layers", ()) if isinstance(layer, _kinds().grows)]
    for layer in growing:
        tokens = layer.get_seq_length()
        if tokens:
            raise SbpError(
                f"a graph was given a {type(own).__name__} of {tokens} tokens, which grows with each "
                "more: every token would be captured and planned anew\n"
                "  give it a cache of one size, as in StaticCache(config=model.config, max_cache_len=64), or have one "
                'made by model.generate(..., cache_implementation="static")'
            )
    if getattr(own, "offloading", False):
        raise SbpError(
            f"a graph was given a {type(own).__name__} that is offloaded layer by layer\n"
            "  leave offloading= out: a step holds its cache where its ranks compute"
        )


def _refuse_length(*_: Any, **__: Any) -> Any:
    raise SbpError(
        "capture: the model asks how many tokens a sliding cache holds, though its mask was passed ready made: that "
        "number is another at each step\n"
        "  pass position_ids too, as generate does, or a mask of two dims"
    )
