"""Dispatch: what happens when a torch function meets a global tensor.

The layouts of the tensors and the other arguments are the key to a *recipe*: how the inputs must lie, what each rank
runs, how the outputs lie. A known key costs one look-up; `first` makes a recipe for a new one.

    recipe       runs                                              when
    Single       the function itself on the shards, once a rank    it is one ATen call that a rule covers
    CallSequence the captured calls one by one, each by dispatch   it is several
    Whole        the function itself on gathered tensors           nothing is known of it
    Handler      a function of ours on the global tensors          see handlers and formulas
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...placement.errors import SbpError, SbpflowError
from ...placement.structure import ATOMS, leaves
from ...sbp.call import map_tensors
from ..tensors.factories import whole_everywhere
from ..tensors.meeting import adopt, looks, meeting, name_of
from ..tensors.moves import describe
from ..tensors.tensor import GlobalTensor
from ..transforms.stand_in import StandIn, lowered
from .capture import autocast_state
from .gathered import Whole
from .handlers import handler
from .moved_views import keep
from .prepare import first
from .recipe import ByGrad, Recipe, Single, WrongRule, wants_grad

__all__ = ["dispatch", "forget"]


_recipes: dict[Any, Recipe] = {}
# Pointwise functions, whose numbers decide nothing: an optimizer's steps have another one each time.
_any_float: set[Any] = set()
_MOST = 1 << 16
_make = torch.Tensor._make_subclass
_swap = torch.utils.swap_tensors  # as it is before `refusals` closes it
_autocast = torch._C._is_any_autocast_enabled


def dispatch(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Answer a torch function with global tensors among its arguments: `GlobalTensor.__torch_function__`."""
    # This function is what every op costs; it is written for time, and nothing in it is there without need.
    key = [func]
    every = args
    if kwargs:
        key.append(tuple(kwargs))
        every = (*args, *kwargs.values())
    for a in every:
        kind = a.__class__
        if kind is GlobalTensor:
            key.append(a._layout)
        elif a is None or kind is int:
            key.append(a)
        elif kind is tuple or kind is list:
            key.append(len(a))
            for part in a:
                if part.__class__ is GlobalTensor:
                    key.append(part._layout)
                else:
                    _note(part, key, func)
        elif kind in ATOMS:  # 1, 1.0 and True are equal as keys, so are 0.0 and -0.0; a NaN is no other's equal
            key.append(kind)
            if kind is not float or func not in _any_float:
                key.append(a if a and a == a else str(a))
        else:
            _note(a, key, func)
    if _autocast():
        key.append(autocast_state())
    token = tuple(key)
    try:
        recipe = _recipes.get(token)
    except TypeError:  # something in it cannot be a key
        return _prepared(func, args, kwargs or {}, None)
    if recipe is None:
        return _prepared(func, args, kwargs or {}, token)
    out_layout = recipe.only
    if out_layout is None:
        return recipe.run(func, args, kwargs or {}, collected(args, kwargs))
    mine: list[Any] = list(recipe.template or args)
    for place, at in recipe.tensors:
        mine[at] = every[place]._shards[0]
    for at in recipe.unless_grad:
        if mine[at].requires_grad:
            return recipe.run(func, args, kwargs or {}, collected(args, kwargs))
    for at in recipe.lists:
        mine[at] = [x._shards[0] for x in args[at]]
    run = recipe.call or func
    out = run(*mine, **kwargs) if kwargs and run is func else run(*mine)
    made = _make(GlobalTensor, recipe.base)
    made._shards = (out,)
    made._layout = out_layout
    if recipe.view_of >= 0 and args[recipe.view_of]._torn is not None:
        keep(made, args[recipe.view_of])
    return made


def collected(args: Any, kwargs: Any) -> list[GlobalTensor]:
    """The global tensors among the arguments, in order."""
    # Asked of the arguments of every call, so not by `leaves`, as far as they are plain.
    found: list[GlobalTensor] = []
    for a in args if not kwargs else (*args, *kwargs.values()):
        kind = a.__class__
        if kind is GlobalTensor:
            found.append(a)
        elif kind is tuple or kind is list:
            found += collected(a, None)
        elif kind is dict:
            found += collected(a.values(), None)
        elif kind not in ATOMS:
            found += leaves(a, GlobalTensor)
    return found


def _note(a: Any, key: list[Any], func: Any) -> None:
    """The part of an argument that decides the recipe."""
    kind = a.__class__
    if kind is GlobalTensor:
        key.append(a._layout)
    elif a is None or kind is int:
        key.append(a)
    elif kind in ATOMS:
        key.append(kind)
        if kind is not float or func not in _any_float:
            key.append(a if a and a == a else str(a))
    elif isinstance(a, list | tuple):
        key.append(kind)
        key.append(len(a))
        for part in a:
            _note(part, key, func)
    elif isinstance(a, dict):
        key.append(dict)
        for name, part in a.items():
            key.append(name)
            _note(part, key, func)
    elif isinstance(a, slice):
        key.append(slice)
        for part in (a.start, a.stop, a.step):
            _note(part, key, func)
    elif isinstance(a, Tensor):
        key.append(_Plain)
    else:
        key.append(kind)
        key.append(a)


class _Plain:
    """In a key: a plain tensor stood here, so that the call has to be prepared."""


def _prepared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], token: Any) -> Any:
    """The slow way in: plain tensors made global, every value looked at, a recipe made if there is none."""
    tensors: list[GlobalTensor] = []
    plain: list[Tensor] = []
    map_tensors((args, kwargs), lambda t: tensors.append(t) if isinstance(t, GlobalTensor) else plain.append(t))
    if any(isinstance(t, StandIn) for t in plain):  # a transform has left it, and was over before it was used
        args, kwargs = map_tensors((args, kwargs), lowered)
        return dispatch(None, func, (), args, kwargs)
    if plain and args and args[0] is plain[0] and _writes(func):
        _made_global(func, plain[0], tensors)
        return dispatch(None, func, (), args, kwargs)
    known = handler(func)
    if known is not None:
        recipe: Recipe = known
        if token is not None and not plain:
            _remember(token, recipe)
        return recipe.run(func, args, kwargs, tensors)
    if name_of(func) == "copy_" and len(tensors) == 2 and tensors[0].placement is not tensors[1].placement:
        return dispatch(None, func, (), (args[0], args[1].to_global(placement=args[0].placement), *args[2:]), kwargs)
    where = meeting(func, tensors)
    if plain or any(x.placement is not where for x in tensors):
        seen = looks(func, args)
        args, kwargs = map_tensors((args, kwargs), lambda t: adopt(func, t, where, only_looks=seen))
        return dispatch(None, func, (), args, kwargs)
    try:
        made, result = _made(func, args, kwargs, tensors)
    except SbpflowError:
        raise
    except Exception as error:  # torch's own, which speaks of what a rank has
        if not getattr(error, "__notes__", ()):
            error.add_note("\n  ".join([f"in {name_of(func)} of global tensors", *map(describe, tensors[:8])]))
        raise
    if made.by_grad or (isinstance(made, Single) and made.moves(tensors)):
        cases = ByGrad(_made)
        cases.known[wants_grad(tensors)] = made
        made, cases.any_float = cases, made.any_float
    if made.any_float and func not in _any_float:
        _any_float.add(func)  # from now on keys are made without them
    elif token is not None and (made.any_float or func not in _any_float):
        _remember(token, made)
    return result


def _made_global(func: Any, t: Tensor, tensors: Sequence[GlobalTensor]) -> None:
    """A plain tensor that a global one is written to counts as B, as elsewhere: from now on it is global.

    It is the same object, so that all who hold it see what is written; who shares its memory would not.
    """
    shared = t._is_view() or t._base is not None or torch._C._storage_Use_Count(t.untyped_storage()._cdata) > 2
    if not shared and not t.requires_grad and not isinstance(t, torch.nn.Parameter) and type(t) is Tensor:
        made = whole_everywhere(t, meeting(func, tensors))
        made._shards = tuple(shard.clone() for shard in made._shards)
        with contextlib.suppress(RuntimeError):  # something in torch holds it
            _swap(t, made)  # type: ignore[no-untyped-call]
            return
    raise SbpError(
        f"{name_of(func)} would write a global tensor into a plain one"
        f"{', which shares its memory with another' if shared else ''}\n"
        "  make the plain one global by flow.tensor, or the global one plain by x.full_tensor()"
    )


def _made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> tuple[Recipe, Any]:
    """A new recipe, and what its first run gave."""
    made = first(func, args, kwargs, tensors)
    result = made.run(func, args, kwargs, tensors)
    try:
        made.tried(name_of(func), result, tensors)
    except WrongRule:
        if not made.bookish or made.writes:
            raise
        made = Whole(name_of(func))  # torch's fake was wrong: of dtypes under autocast it is sometimes
        result = made.run(func, args, kwargs, tensors)
    made.place(func, args, kwargs, tensors)
    made.known_now(result, func, args, kwargs, tensors)
    return made, result


def _writes(func: Any) -> bool:
    """Whether a function changes its first argument, by its name."""
    name = name_of(func)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _remember(token: Any, recipe: Recipe) -> None:
    if len(_recipes) >= _MOST:
        _recipes.clear()
    _recipes[token] = recipe


def forget() -> None:
    """Recipes were made by rules that have changed."""
    _recipes.clear()
