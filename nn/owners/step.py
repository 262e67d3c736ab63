"""A step of an optimizer that needs whole matrices: each is boxed to its owner, computed there, once, and boxed back.

    gradient, value   ->   owner: torch's own step on what it owns   ->   value where it lies
                           state: stays with the owner

Torch's step runs on a stand-in, an optimizer of the same class and settings that holds the whole tensors that this
process owns. So it does what it does on one device, to the digit, where gradients are the same to the digit.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...boxing.bundle import refilling
from ...boxing.exchange.execute import token
from ...boxing.exchange.refill import Filling, refill
from ...placement import Placement
from ...placement.world import device, owned, world
from ...sbp import Layout, State
from ..tensors.tensor import GlobalTensor, wrap
from .balance import owners, whole_on
from .kinds import by_tensor
from .states import described, dtype_of, heard

__all__ = ["OwnedTensor", "steps_owned"]

LIMIT = 25 * 2**20  # bytes of a rank on their way at a time


class OwnedTensor:
    """A parameter and its owner; where this process has that rank, all of its value, gradient and state too."""

    def __init__(self, number: int, x: GlobalTensor, rank: int) -> None:
        self.number, self.x, self.rank = number, x, rank
        of = x._layout
        self.lies = Layout(of.placement, of.state, of.shape, of.dtype)
        self.here = rank in owned(of.placement)
        self.value: nn.Parameter | None = None

    def whole(self, part: GlobalTensor, *, own: bool) -> tuple[Filling | None, Tensor | None]:
        """All of a tensor for the owner, and how that is filled; with `own` in memory of its own."""
        src = Layout(part._layout.placement, part._layout.state, part._layout.shape, part._layout.dtype)
        if src.state.partial:
            part = part.to_global(sbp=State(src.state.dims).sbp(src.placement.ndim))
            src = src.with_state(State(src.state.dims))
        shards = {rank: shard.detach() for rank, shard in zip(owned(src.placement), part._shards, strict=False)}
        held = shards.get(self.rank)
        if src.local_shape(self.rank) == src.shape if self.rank in src.placement else False:
            return None, held if held is None or not own else held.clone()
        dst = whole_on(self.rank, src)
        made = torch.empty(src.shape, dtype=src.dtype, device=device(dst.placement, self.rank)) if self.here else None
        return Filling(refilling(src, dst), shards, {} if made is None else {self.rank: made}), made

    def back(self) -> Filling:
        """The way of its value to where it lies."""
        value = self.value
        source = {} if value is None else {self.rank: value.detach()}
        target = {r: s.detach() for r, s in zip(owned(self.lies.placement), self.x._shards, strict=False)}
        return Filling(refilling(whole_on(self.rank, self.lies), self.lies), source, target)


def steps_owned(optimizer: Optimizer) -> bool:
    """Whether owners step for the optimizer: it steps tensor by tensor, and has global tensors, none on a device's
    host."""
    if not by_tensor(optimizer):
        return False
    held = [x for group in optimizer.param_groups for x in group["params"] if isinstance(x, GlobalTensor)]
    return bool(held) and not any(vars(x).get("_host") is not None for x in held)


class _Steps:
    """The steps of one optimizer: its own hooks, behind the others' before a step, and before theirs behind it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.before = optimizer.register_step_pre_hook(_begin)
        self.after = optimizer.register_step_post_hook(_end)
        self.said: dict[Placement, list[list[int]]] = {}
        self.told: dict[int, dict[Any, Any]] = {}  # states as they were left, by numbers; others were loaded meanwhile
        self.owned: list[OwnedTensor] = []

    def first(self, optimizer: Optimizer) -> None:
        optimizer._optimizer_step_pre_hooks.move_to_end(self.before.id)  # type: ignore[attr-defined]
        optimizer._optimizer_step_post_hooks.move_to_end(self.after.id, last=False)  # type: ignore[attr-defined]


_steps: "WeakKeyDictionary[Optimizer, _Steps]" = WeakKeyDictionary()


def _look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before any step of any optimizer: those that need it get hooks of their own."""
    if steps_owned(optimizer):
        if optimizer not in _steps:
            _steps[optimizer] = _Steps(optimizer)
        _steps[optimizer].first(optimizer)


register_optimizer_step_pre_hook(_look)


def _begin(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """The stand-in, with all that it is to step on, in the place of the optimizer."""
    if args[0] is not optimizer or not steps_owned(optimizer):
        return None  # a graph is being captured, and steps nothing
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    steps = _steps[optimizer]
    with torch.no_grad():
        steps.owned = _owned(optimizer)
        made = _stand_in(optimizer, steps.owned)
    return (made,) if closure is None else (made, lambda: loss), {}


def _owned(optimizer: Optimizer) -> list[OwnedTensor]:
    """The parameters that are stepped now, on ranks of this process; each has the same owner at every step."""
    all_ = [x for group in optimizer.param_groups for x in group["params"] if isinstance(x, GlobalTensor)]
    ranks = owners(tuple((x.placement, tuple(x.shape)) for x in all_))
    return [
        OwnedTensor(number, x, rank)
        for number, (x, rank) in enumerate(zip(all_, ranks, strict=True))
        if owned(x.placement) and x.grad is not None
    ]


def _stand_in(optimizer: Optimizer, held: Sequence[OwnedTensor]) -> Optimizer:
    fillings: list[Filling] = []
    state: dict[Any, Any] = defaultdict(dict)
    state.update({x: kept for x, kept in optimizer.state.items() if not isinstance(x, GlobalTensor)})
    for one in held:
        assert isinstance(one.x.grad, GlobalTensor)
        filling, value = one.whole(_exact(one.x, one.rank), own=False)
        fillings += [] if filling is None else [filling]
        filling, grad = one.whole(one.x.grad, own=True)
        fillings += [] if filling is None else [filling]
        parts: dict[Any, Any] = {}
        for name, part in optimizer.state.get(one.x, {}).items():
            parts[name] = part.clone() if isinstance(part, Tensor) and not isinstance(part, GlobalTensor) else part
            if isinstance(part, GlobalTensor):
                filling, parts[name] = one.whole(part, own=False)
                fillings += [] if filling is None else [filling]
        if value is not None and one.here:
            one.value = nn.Parameter(value)
            one.value.grad = grad
            if parts:
                state[one.value] = parts
    if fillings:
        refill(fillings, LIMIT, "optimizer whole")
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    whole = {id(one.x): one.value for one in held}
    made.param_groups = [
        group | {"params": [y for x in group["params"] if (y := _stepped(x, whole)) is not None]}
        for group in optimizer.param_groups
    ]
    made.state = state  # type: ignore[assignment]
    return made


def _exact(x: GlobalTensor, rank: int) -> GlobalTensor:
    """The tensor, or the one that it is a piece of, if a rank has all its digits: then nothing is sent."""
    of = vars(x).get("_piece_of")
    if not isinstance(of, GlobalTensor) or of.dtype is not x.dtype or rank not in of.placement:
        return x
    return of if of._layout.local_shape(rank) == of._layout.shape and not of._layout.state.partial else x


def _stepped(x: Tensor, whole: dict[int, nn.Parameter | None]) -> Tensor | None:
    return whole.get(id(x)) if isinstance(x, GlobalTensor) else x


def _end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Values back to where they lie, states known to all, and what the step noted of itself."""
    made = args[0]
    if made is optimizer:
        return
    steps = _steps[optimizer]
    held, steps.owned = steps.owned, []
    with torch.no_grad():
        if held:
            refill([one.back() for one in held], LIMIT, "optimizer whole")
        for one in held:
            one.x._moved = None
        _keep(optimizer, made, held, steps)
    for group, new in zip(optimizer.param_groups, made.param_groups, strict=True):
        group.update({name: value for name, value in new.items() if name != "params"})
    ours = {name: value for name, value in vars(made).items() if name not in ("param_groups", "state")}
    vars(optimizer).update(ours)
    plain = {x for group in optimizer.param_groups for x in group["params"] if not isinstance(x, GlobalTensor)}
    optimizer.state.update({x: s for x, s in made.state.items() if x in plain or not isinstance(x, Tensor)})


def _keep(optimizer: Optimizer, made: Optimizer, held: Sequence[OwnedTensor], steps: _Steps) -> None:
    """The states: tensors on the ranks that own them, numbers everywhere."""
    mine = {one.number: made.state.get(one.value, {}) for one in held if one.value is not None}
    new: dict[int, dict[Any, Any]] = {}
    for where in dict.fromkeys(one.x.placement for one in held if world().rank is not None):
        here = {one.number: one for one in held if one.x.placement is where}
        as_told = all(optimizer.state.get(one.x) is steps.told.get(n) for n, one in here.items())
        words = heard(described({n: s for n, s in mine.items() if n in here}), where, steps.said, as_told=as_told)
        for number, parts in (words or {}).items():
            new[number] = {each[0]: _elsewhere(here[number], each[1:]) for each in parts}
    for one in held:
        if one.number in mine:
            new[one.number] = {name: _of_owner(one, part) for name, part in mine[one.number].items()}
        if one.number in new:
            optimizer.state[one.x] = steps.told[one.number] = new[one.number]


def _of_owner(one: OwnedTensor, part: Any) -> Any:
    if not isinstance(part, Tensor):
        return part
    of = whole_on(one.rank, one.lies.with_dtype(part.dtype), part.shape)
    return wrap((part.detach(),), of)


def _elsewhere(one: OwnedTensor, said: Sequence[Any]) -> Any:
    """The state of another process as it is known here."""
    if len(said) == 1:
        return said[0]
    shape, dtype = said
    of = whole_on(one.rank, one.lies.with_dtype(dtype_of(dtype)), shape)
    return wrap((token(of),), of)
