"""Functions that are not captured: they ask for values, act on autograd, draw random numbers, or take lists."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function
from torch.utils._foreach_utils import _foreach_supported_types

from ...placement import Placement
from ...placement.device import FAMILIES
from ...placement.errors import PlacementError, SbpError
from ...placement.world import owned
from ...sbp import Layout
from ...sbp.call import map_tensors, refilled, tensors_in
from ...sbp.recurrent import KINDS
from ...sbp.state import State
from ..tensors import autograd, seeds
from ..tensors.factories import whole_everywhere
from ..tensors.handle import TensorMemory
from ..tensors.meeting import adopt, meeting
from ..tensors.moves import describe, flat, shards_as, whole
from ..tensors.shell import shell
from ..tensors.tensor import GlobalTensor, wrap
from ..transforms.gradients import grad
from .formulas import random_like
from .gathered import strided, strided_copy, strided_scatter
from .moved_views import bring_back
from .norms import norms
from .recipe import Recipe, each_rank
from .recurrent import FORMULAS
from .refusals import refuse_sending

__all__ = ["handler"]

# So that clipping takes all gradients at once: torch goes by the class of what it is given, and DTensor is there too.
_foreach_supported_types.append(GlobalTensor)
_handlers: dict[Any, Recipe] = {}


class Answer(Recipe):
    """A function of ours in the place of torch's, with the same arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        return self.function(*args, **kwargs)


class Foreach(Recipe):
    """An elementwise function of lists: each rank runs it on its shards, once the lists lie alike."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        where = tensors[0].placement
        if any(x.placement is not where for x in tensors):
            return _by_placement(func, args, kwargs, tensors)
        rows = _rows(args, kwargs)
        homes = [_adopted(next((x for x in row if isinstance(x, GlobalTensor)), row[0]), where) for row in rows]
        if _is_written(func) and not all(isinstance(row[0], GlobalTensor) for row in rows):
            raise SbpError(
                f"{func.__name__} would write global tensors into plain ones, once for every rank\n"
                "  make the plain ones global by flow.tensor, or the global ones plain by x.full_tensor()"
            )
        if not owned(where):
            return None if _is_written(func) else [wrap(home._shards, home._layout) for home in homes]
        # Few functions of addends are the addends of the function; and what broadcasts has no pieces of its own.
        odd = any(x.ndim and x.shape != home.shape for row, home in zip(rows, homes, strict=True) for x in row)
        if odd or any(x._layout.state.partial for x in homes):
            return _gathered(func, args, kwargs, where)

        def lie(x: Tensor, home: GlobalTensor) -> tuple[Tensor, ...]:
            if not isinstance(x, GlobalTensor) and x.shape != home.shape:  # a step count, the same everywhere
                return (x,) * len(home._shards)
            x = _adopted(x, where)
            if x.shape != home.shape:
                return shards_as(x, flat(x._layout), func.__name__, implicit=True)
            there = home._layout
            same = x._layout.state == there.state and x.dtype is there.dtype
            to = x._layout if same else Layout(there.placement, there.state, there.shape, x.dtype)
            return shards_as(x, to, func.__name__, implicit=True)

        shards: list[tuple[Tensor, ...]] = []
        for a in (*args, *kwargs.values()):
            alike = isinstance(a, list | tuple) and len(a) == len(homes)
            shards += map(lie, tensors_in(a), homes if alike else [homes[0]] * len(tensors_in(a)))
        run = partial(_dense, func) if func.__name__.startswith("_fused_") else func
        results = [run(*a, **k) for a, k in each_rank(args, kwargs, shards)]
        if results[0] is None:
            return None
        per_rank = [tensors_in(result) for result in results]
        return refilled(results[0], map(_as_home, zip(*per_rank, strict=True), homes))


def _dense(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that reads and writes memory as it lies, whatever the strides: of tensors without gaps."""
    loose = {id(t): (t, t.contiguous()) for t in tensors_in((args, kwargs)) if not t.is_contiguous()}
    args, kwargs = map_tensors((args, kwargs), lambda t: loose[id(t)][1] if id(t) in loose else t)
    result = func(*args, **kwargs)
    for t, copy in loose.values():
        t.copy_(copy)
    return result


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The tensors of lists that stand for each other, those of the first list first."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    return list(zip(*(a for a in lists if len(a) == len(lists[0])), strict=True))


def _by_placement(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
    """The function of what each placement has of the lists; single numbers come along to each."""
    rows = _rows(args, kwargs)
    count = len(rows)
    places = [meeting(func, [x for x in row if isinstance(x, GlobalTensor)] or tensors) for row in rows]
    made: list[Any] = [None] * count
    for where in dict.fromkeys(places):
        mine = [at for at, place in enumerate(places) if place is where]

        def part(a: Any, where: Placement = where, mine: list[int] = mine) -> Any:
            a = [a[at] for at in mine] if isinstance(a, list | tuple) and len(a) == count else a
            return map_tensors(a, lambda t: adopt(func, t, where) if isinstance(t, GlobalTensor) else t)

        results = func(*map(part, args), **{name: part(a) for name, a in kwargs.items()})
        if results is None:
            continue
        for at, result in zip(mine, results, strict=True):
            made[at] = result
    return None if results is None else type(results)(made)


def _is_written(func: Any) -> bool:
    return bool(func.__name__.partition(".")[0].endswith("_"))


def _adopted(t: Tensor, where: Placement) -> GlobalTensor:
    return t if isinstance(t, GlobalTensor) else whole_everywhere(t, where)


def _gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: Placement) -> Any:
    """The function of whole tensors, and what it may have written brought back."""
    args, kwargs = map_tensors((args, kwargs), lambda t: _adopted(t, where))
    tensors: list[Any] = tensors_in((args, kwargs))
    moved = [shards_as(x, flat(x._layout), func.__name__, implicit=True) for x in tensors]
    held = [tuple(s.clone() for s in shards) for shards in moved]
    results = [func(*a, **k) for a, k in each_rank(args, kwargs, held)]
    if _is_written(func):  # torch does not tell which: fused steps count as no write
        for x, shards in zip(tensors, held, strict=True):
            bring_back(x, shards, ())
        return None if results[0] is None else type(results[0])(args[0])
    made = [wrap(pieces, whole(pieces[0], where)) for pieces in zip(*results, strict=True)]
    return type(results[0])(made)


def _as_home(held: tuple[Tensor, ...], home: GlobalTensor) -> GlobalTensor:
    if any(a is b for a, b in zip(held, home._shards, strict=True)):
        return home
    return wrap(held, home._layout.with_dtype(held[0].dtype))


def handler(func: Any) -> Recipe | None:
    """The handler of this function, if it has one."""
    known = _handlers.get(func)
    if known is None:
        refuse_sending(func)
        name = getattr(func, "__name__", "").partition(".")[0]  # of an overload too
        if name in _REDUCED:
            return Reduced(_REDUCED[name])
        if name.startswith(("_foreach_", "_fused_")):
            return Foreach()
    return known


class Reduced(Recipe):
    """A function of lists that makes one number of each tensor: norms together, the rest one by one."""

    def __init__(self, function: Callable[..., list[Tensor]]) -> None:
        self.function = function

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        (xs, *rest), where = args, tensors[0].placement
        made = self.function([_adopted(x, where) for x in xs], *rest, **kwargs)
        is_op = isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
        return made if is_op else tuple(made)


def _powsum(x: Tensor, ord: float = 2, dtype: Any = None) -> Tensor:
    return torch.sum(x.abs().pow(ord), dtype=dtype)


def _each(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    return lambda xs, *args, **kwargs: [function(x, *args, **kwargs) for x in xs]


_REDUCED = {"_foreach_norm": norms, "_foreach_max": _each(torch.max), "_foreach_powsum": _each(_powsum)}


def _overloads(name: str) -> list[Any]:
    """An ATen op of this name, called as such: its overloads."""
    op = getattr(torch.ops.aten, name)
    return [getattr(op, overload) for overload in op.overloads()]


def answers(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        for func in functions:
            _handlers[func] = Answer(function)
        return function

    return put


answers(torch.autograd.grad)(grad)


@answers(torch.autograd.backward)
def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    ys = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    given = grad_tensors if isinstance(grad_tensors, list | tuple) else (grad_tensors,) * len(ys)
    autograd.backward(ys, given, retain_graph, create_graph, inputs)


@answers(torch.Tensor.__setstate__, torch.Tensor.storage, torch.Tensor.storage_type)
@answers(torch.Tensor.share_memory_)
def _no_memory(x: Any, *args: Any, **kwargs: Any) -> Any:
    raise SbpError(f"a global tensor has no single memory\n  {describe(x)}\n  use x.to_local() for a shard's")


@answers(torch.Tensor.untyped_storage)
def _memory(x: GlobalTensor) -> TensorMemory:
    if x._memory is None or x._memory.of is None or x._memory.of._shards is not x._shards:
        x._memory = TensorMemory(x.nbytes, device=x.device, of=x.detach())
        x._memory.of._shards = x._shards  # type: ignore[union-attr]
    return x._memory


def _by_element(name: str) -> Callable[..., GlobalTensor]:
    """Python functions of single numbers: torch would look for them in a fake's memory, which has none."""

    def change(x: GlobalTensor, *args: Any) -> GlobalTensor:
        if x.requires_grad:
            raise TypeError(f"can't call {name} on Variable that requires grad. Use var.detach().{name}() instead.")
        full = x.full_tensor().clone()
        getattr(full, name)(*(a.full_tensor() if isinstance(a, GlobalTensor) else a for a in args))
        return x.copy_(whole_everywhere(full, x.placement))  # type: ignore[return-value]

    return change


for _name in ("apply_", "map_", "map2_"):
    answers(getattr(torch.Tensor, _name))(_by_element(_name))


@answers(torch._amp_foreach_non_finite_check_and_unscale_)
def _unscale(grads: Sequence[GlobalTensor], found_inf: Tensor, factor: Tensor) -> None:
    """A GradScaler's work on gradients: an infinity in one rank's piece skips the step on all of them."""
    by_placement: dict[Placement, list[GlobalTensor]] = {}
    for g in grads:
        by_placement.setdefault(g.placement, []).append(g)
    for where, group in by_placement.items():
        flags = []
        for shards in zip(*(g._shards for g in group), strict=True):
            flag = torch.zeros_like(found_inf, device=shards[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(list(shards), flag, factor.to(flag.device))
            flags.append(flag)
        axes = tuple(a for a in range(where.ndim) if where.shape[a] > 1)
        of = Layout(where, State((), axes, "max" if axes else "sum"), (), found_inf.dtype)
        found_inf.copy_(torch.maximum(found_inf, wrap(tuple(flags), of).full_tensor().to(found_inf.device)))
        for g in group:
            g._moved = None  # torch's function does not count as a write


for _function in (strided, strided_copy, strided_scatter):
    _name = _function.__name__.replace("strided", "as_strided")
    answers(*filter(None, (getattr(torch, _name), getattr(torch.Tensor, _name, None))), *_overloads(_name))(_function)


@answers(torch.result_type)
def _result_type(*tensors: Any, **named: Any) -> torch.dtype:
    """It depends on which are single numbers, and on nothing else of a shape."""
    given = (*tensors, *named.values())
    metas = [torch.empty((1,) * t.ndim, dtype=t.dtype, device="meta") if isinstance(t, Tensor) else t for t in given]
    return torch.result_type(*metas)


def _recurrent(kind: str) -> Callable[..., Any]:
    """LSTM and its kin by their formula at once: to capture one takes as long as its sequences are."""
    ops = getattr(torch.ops.aten, kind)

    def run(*args: Any, **kwargs: Any) -> Any:
        packed = len(args) > 3 and isinstance(args[3], list | tuple)  # behind the sizes of batches
        return ops.data(*args, **kwargs) if packed else FORMULAS[ops.input](*args, **kwargs)

    return run


for _name in KINDS:
    answers(getattr(torch, _name))(_recurrent(_name))


def _random(name: str) -> Callable[..., GlobalTensor]:
    def fill(x: GlobalTensor, *args: Any, **kwargs: Any) -> GlobalTensor:
        if kwargs.get("generator") is None:
            seeds.agree(x.placement)
        if any(isinstance(a, Tensor) for a in args):  # bernoulli_(p) with a tensor of probabilities
            args = tuple(a.full_tensor() if isinstance(a, GlobalTensor) else a for a in args)
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)  # gaps change normal numbers
        with torch.no_grad():
            drawn = getattr(like, name)(*args, **kwargs)
        return x.copy_(whole_everywhere(drawn, x.placement))  # type: ignore[return-value]

    return fill


for _name in ("uniform_", "normal_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"):
    answers(getattr(torch.Tensor, _name), *_overloads(_name))(_random(_name))


def _random_like(name: str) -> Callable[..., Tensor]:
    def draw(x: GlobalTensor, *args: Any, dtype: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("layout", "device", "pin_memory")}
        like = x if dtype is None or dtype is x.dtype else wrap(x._shards, x._layout.with_dtype(dtype))
        with torch.no_grad():
            made = random_like(like, lambda full: getattr(torch, name)(full, *args, **kwargs))
        return made.requires_grad_() if requires_grad else made

    return draw


for _name in ("rand_like", "randn_like", "randint_like"):
    answers(getattr(torch, _name), *_overloads(_name))(_random_like(_name))


def _moved_to(x: GlobalTensor, type_: str) -> GlobalTensor:
    if type_ == x.placement.type:
        return x
    if type_ not in FAMILIES:
        raise PlacementError(
            f"a global tensor cannot go to {type_!r}\n  {describe(x)}\n  placements are on {' or '.join(FAMILIES)}; "
            "x.full_tensor() is a plain tensor that may go there"
        )
    there = type(x.placement)(type_, x.placement.flat, x.placement.shape, x.placement.names)
    return x.to_global(placement=there)


if hasattr(torch._C.TensorBase, "const_data_ptr"):  # of torch 2.13; 2.11 has no such name

    @answers(torch._C.TensorBase.const_data_ptr)  # type: ignore[attr-defined]
    def _const_data_ptr(x: GlobalTensor) -> int:
        return x.data_ptr()


@answers(torch.Tensor.type)
def _type(x: GlobalTensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    """The name of its kind, such as torch.FloatTensor, or the tensor as another kind."""
    one = shell(x._layout)
    if dtype is None:
        return one.type()
    like = one.type(dtype)
    return _to(x, like.device, like.dtype)


def _moves_to(type_: str) -> Any:
    return lambda x, device=None, non_blocking=False, memory_format=None: _moved_to(x, type_)


for _name in filter(partial(hasattr, torch.Tensor), FAMILIES):
    answers(getattr(torch.Tensor, _name))(_moves_to(_name))


@answers(torch.Tensor.to)
def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Devices are the placement's matter; dtypes go on to the rule book."""
    if not isinstance(x, GlobalTensor):
        raise SbpError("x.to(other) of a plain tensor and a global one\n  use x.to(other.dtype)")
    dtype, device, copy = kwargs.get("dtype"), kwargs.get("device"), kwargs.get("copy", False)
    for a in args:
        if isinstance(a, torch.dtype):
            dtype = a
        elif isinstance(a, str | torch.device | int) and not isinstance(a, bool):
            device = a
        elif isinstance(a, Tensor):
            dtype = a.dtype
    if device is not None:
        x = _moved_to(x, torch.device(device).type)
    form = kwargs.get("memory_format", torch.preserve_format)
    if (dtype is not None and dtype is not x.dtype) or copy or form is not torch.preserve_format:
        # As torch's own functions do, so that modes see it too.
        more = {} if form is torch.preserve_format else {"memory_format": form}
        return handle_torch_function(torch.ops.aten.to.dtype, (x,), x, dtype or x.dtype, False, copy, **more)
    return x
