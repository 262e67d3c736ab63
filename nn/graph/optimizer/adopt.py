"""Optimizers of a graph: theirs are the graph's parameters, or, where their state lies in pieces, pieces of these."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ....boxing import box
from ....placement import Placement
from ....placement.errors import SbpError
from ....sbp import B, Layout, State
from ...tensors.autograd import accumulate
from ...tensors.factories import whole_everywhere
from ...tensors.tensor import GlobalTensor, wrap
from ..choose.parameters import became, building
from .on_shards import forget

__all__ = ["Trained", "adopt", "clip", "refuse_closures", "states_of"]

# How many tensors of a parameter's size an optimizer keeps beside it; what is not here is taken for Adam's two.
KEPT = {"SGD": 0, "RMSprop": 1, "Adagrad": 1, "Rprop": 2, "Adadelta": 2, "Lion": 1, "Muon": 1, "Adafactor": 0}


def states_of(optimizers: Sequence[Optimizer]) -> int:
    """Tensors that an optimizer keeps for each parameter, for the price of its step and its memory."""
    return max((_kept(each) for each in optimizers), default=0)


def _kept(optimizer: Optimizer) -> int:
    name = type(optimizer).__name__
    if name == "SGD":
        return int(any(group.get("momentum") for group in optimizer.param_groups))
    return KEPT.get(name, 2)


def refuse_closures(optimizers: Sequence[Optimizer]) -> None:
    """An optimizer that computes the loss several times a step has no place in a graph, which does so once."""
    for each in optimizers:
        if isinstance(each, LBFGS):
            raise SbpError(
                f"{type(each).__name__} computes the loss several times in a step, and a graph once\n"
                "  compile the loss without an optimizer, and call the graph in the closure:"
                " it leaves gradients on the parameters"
            )


class Trained:
    """A parameter, and what its optimizer changes: itself, or a piece of it on each rank (ZeRO-1)."""

    def __init__(self, parameter: GlobalTensor, home: Layout | None = None) -> None:
        self.parameter = parameter
        self.lies = parameter._layout.with_state(parameter._layout.state)
        self.home = home or self.lies
        self.master = parameter if self.lies.state == self.home.state else self._pieces()
        self._seen = self._stamp()

    def _pieces(self) -> GlobalTensor:
        """Views into the parameter where its pieces are contiguous, so that the step changes it in place."""
        made = wrap(self._cut(), self.home)
        made._is_param = True
        vars(made)["_piece_of"] = self.parameter  # which copies keep
        return made.requires_grad_()

    def _cut(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return box(
                [shard.detach() for shard in self.parameter._shards], self.lies, self.home, op="optimizer pieces"
            )

    def _stamp(self) -> list[tuple[int, int]]:
        return [(shard.data_ptr(), shard._version) for shard in self.parameter._shards]

    def give(self, shards: tuple[Tensor, ...], *, keep: bool) -> None:
        """The gradient of a step, added to what is there, as `backward` does; for the optimizer, or to `keep`."""
        hooked = self.parameter._hooks is not None  # these are called with the parameter's own gradient
        of, where = (self.parameter, self.lies) if keep or hooked else (self.master, self.home)
        if (keep or hooked) and where.state != self.home.state:
            shards = box(shards, self.home, where, op="gradient")
        if of._leaf is not None and of._leaf.direct:  # it would be put on the shards anyway
            for shard, grad in zip(of._shards, shards, strict=True):
                shard.grad = grad if shard.grad is None else shard.grad + grad
            return
        if hooked:
            with torch.no_grad():
                accumulate(of, wrap(shards, where))
            if not keep:
                self.gather()
            return
        new, held = wrap(shards, where), of.grad
        of.grad = new if held is None else held + new  # type: ignore[assignment]

    def gather(self) -> None:
        """Before a step of the optimizer: what others did to the parameter counts for its pieces.

        It may have been loaded or trained by another graph, and an eager backward leaves its gradient there.
        """
        if self.master is self.parameter:
            return
        with torch.no_grad():
            if self._seen != self._stamp():
                for mine, new in zip(self.master._shards, self._cut(), strict=True):
                    mine.copy_(new)
            eager = self.parameter.grad
            if eager is not None:
                new = wrap(box(eager._shards, eager._layout, self.home, op="gradient"), self.home)
                held = self.master.grad
                self.master.grad = new if held is None else held + new  # type: ignore[assignment]
                self.parameter.grad = None

    def settle(self) -> None:
        """After a step of the optimizer: the changed pieces go where the parameter lies."""
        if self.master is self.parameter:
            return
        with torch.no_grad():
            pieces = [shard.detach() for shard in self.master._shards]
            there = box(pieces, self.home, self.lies, op="optimizer pieces")
            for mine, new in zip(self.parameter._shards, there, strict=True):
                mine.detach().copy_(new)
        self.parameter._moved = None
        self._seen = self._stamp()


class _Served(NamedTuple):
    """An optimizer's parameters as it trains them now: a graph's, by their ids, and of these what is cut in pieces."""

    graph: Mapping[int, Trained]
    all: dict[int, Trained]
    pieces: list[Trained]


_now: "WeakKeyDictionary[Optimizer, _Served]" = WeakKeyDictionary()


def adopt(optimizers: Sequence[Optimizer], known: Mapping[int, Trained], changed: Mapping[int, Tensor]) -> None:
    """Put the graph's parameters in the place of those that optimizers were made with, unless they are there.

    `known` has what the graph trains by ids of parameters, `changed` parameters by ids of what they were before.
    Graphs of other shapes may cut other pieces: each takes over at its step. An optimizer that could go through its
    parameters one by one or all at once, and was not told, does the latter.
    """
    for optimizer in optimizers:
        before = _now.get(optimizer)
        if before is not None and before.graph is known:
            continue
        found: dict[int, Trained] = {}
        for group in optimizer.param_groups:
            held = []
            for value in group["params"]:
                owner = changed.get(id(getattr(value, "_piece_of", value)))
                if owner is None and value in became:
                    owner = changed.get(id(became[value]()))
                if not isinstance(owner, GlobalTensor):
                    raise _unknown(optimizer, value)
                trained = known.get(id(owner)) or (before and before.all.get(id(owner))) or Trained(owner)
                found[id(owner)] = trained
                held.append(_adopted(optimizer, value, trained))
            group["params"] = held
            said = group.get("fused") or group.get("differentiable") or isinstance(group["lr"], Tensor)
            if "foreach" in group and group["foreach"] is None and not said:
                alike = len({x.placement for x in held}) == 1  # type: ignore[attr-defined]
                group["foreach"] = alike or None
        if before is None:
            optimizer.register_step_pre_hook(_gather)
            optimizer.register_step_post_hook(_settle)
            optimizer.register_load_state_dict_post_hook(_loaded)
        forget(optimizer)
        _now[optimizer] = _Served(known, found, [t for t in found.values() if t.master is not t.parameter])


def _gather(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not building():
        for each in _now[optimizer].pieces:
            each.gather()


def _settle(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not building():
        for each in _now[optimizer].pieces:
            each.settle()


def _loaded(optimizer: Optimizer) -> None:
    """A loaded state may be whole, as one device saved it, or lie otherwise."""
    forget(optimizer)
    for each in _now[optimizer].all.values():
        state = optimizer.state.get(each.master)
        if state:
            optimizer.state[each.master] = {name: _state(part, each) for name, part in state.items()}


def _unknown(optimizer: Optimizer, value: Tensor) -> SbpError:
    return SbpError(
        f"{type(optimizer).__name__} holds a parameter {tuple(value.shape)} that no module of the graph has\n"
        "  make the optimizer of the graph's own modules, as in AdamW(self.model.parameters())"
    )


def _adopted(optimizer: Optimizer, value: Tensor, trained: Trained) -> Tensor:
    if value is trained.master:
        return value
    if isinstance(value, GlobalTensor) and value is not trained.parameter and value._layout.state == trained.home.state:
        trained.master = value  # another graph has cut it alike
        return value
    state = optimizer.state.pop(value, None)
    if state:
        optimizer.state[trained.master] = {name: _state(part, trained) for name, part in state.items()}
    return trained.master


def _state(part: Any, trained: Trained) -> Any:
    """The state that an optimizer keeps for a parameter, as it lies from now on."""
    of = trained.home
    if not isinstance(part, Tensor) or part.ndim == 0:
        return part
    like = tuple(part.shape) == of.shape  # else as Adafactor's, for rows and columns
    if not like and isinstance(part, GlobalTensor):
        return part
    state = of.state if like else State(((),) * part.ndim)
    there = Layout(of.placement, state, tuple(part.shape), part.dtype)
    if isinstance(part, GlobalTensor):
        held = part._layout
        if (held.state, held.placement) == (there.state, there.placement):
            return part
        shards = [shard.detach() for shard in part._shards]
    else:
        whole = whole_everywhere(part, of.placement)
        held, shards = whole._layout, list(whole._shards)
    with torch.no_grad():
        return wrap(tuple(shard.clone() for shard in box(shards, held, there, op="optimizer state")), there)


def clip(trained: Iterable[Trained], limit: float) -> Tensor | None:
    """Scale gradients to a norm of at most `limit` together, as `clip_grad_norm_` does, on whatever placements.

    Returns what their norm was, if there are any."""
    groups: dict[Placement, list[Tensor]] = {}
    for each in trained:
        if each.master.grad is not None:
            groups.setdefault(each.home.placement, []).append(each.master)
    if len(groups) == 1:
        return nn.utils.clip_grad_norm_(next(iter(groups.values())), limit)
    if not groups:
        return None
    norms = [nn.utils.get_total_norm([x.grad for x in held if x.grad is not None]) for held in groups.values()]
    for where, held in groups.items():
        moved = [norm.to_global(placement=where, sbp=(B,) * where.ndim) for norm in norms]  # type: ignore[attr-defined]
        total: Tensor = torch.stack(moved).norm()
        nn.utils.clip_grads_with_norm_(held, limit, total)
    return total
