"""Optimizers of a graph: theirs are the graph's parameters, or, where their state lies in pieces, pieces of these."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Optimizer, SparseAdam

from ....boxing import box
from ....boxing.record import user_line
from ....placement import Placement
from ....placement.errors import SbpError
from ....sbp import B, Layout, State
from ...model.values.noted_states import taken_states
from ...owners.balance import owners
from ...owners.kinds import by_tensor
from ...tensors.factories import whole_everywhere
from ...tensors.tensor import GlobalTensor, wrap
from ..choose.parameters import became
from ..reads.watch import building
from .late_mean import carry_mean
from .on_shards import ALONE, forget
from .settle import settle
from .trained import Trained, alike, lies_beside

__all__ = [
    "adopt", "clip", "hand_over", "has_hooks", "owned_by", "owner_of", "refuse_closures", "served", "states_at_rest",
    "states_of", "stepped_whole", "unknown_parameter",
]  # fmt: skip

# The number of tensors of a parameter's size that an optimizer keeps; all others are taken to keep two, as Adam does.
KEPT = {
    "SGD": 0, "RMSprop": 1, "Adagrad": 1, "Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "Adadelta": 2,
    "Rprop": 2, "ASGD": 1, "Lion": 1, "Muon": 1, "Adafactor": 0,
}  # fmt: skip
MORE = "momentum", "amsgrad", "centered"  # settings of which each has one more kept


def states_of(optimizers: Sequence[Optimizer]) -> int:
    """Tensors that an optimizer keeps for each parameter, for the price of its step and its memory."""
    return max((_kept(each) for each in optimizers), default=0)


def _kept(optimizer: Optimizer) -> int:
    name = type(optimizer).__name__
    more = MORE if name in ("SGD", "RMSprop", "Adam", "AdamW") else ()
    groups = optimizer.param_groups
    return KEPT.get(name, 2) + max((sum(bool(group.get(each)) for each in more) for group in groups), default=0)


def stepped_whole(optimizers: Sequence[Optimizer], values: Mapping[str, Tensor]) -> dict[str, int]:
    """The parameters of these that optimizers step whole, by name, and how many tensors of its size they keep."""
    names: dict[int, str] = {}
    for name, value in values.items():
        names.setdefault(id(value), name)
    found: dict[str, int] = {}
    for optimizer in optimizers:
        if type(optimizer) not in ALONE:
            for name in _called(optimizer, names):
                vector = type(optimizer) is Adafactor and values[name].ndim < 2  # vectors have no states by rows
                found[name] = _kept(optimizer) + vector
    return found


def owned_by(
    optimizers: Sequence[Optimizer], values: Mapping[str, Tensor], homes: Mapping[str, Placement]
) -> dict[str, int]:
    """The ranks that have parameters whole for steps tensor by tensor, by the names of those that are in `homes`."""
    names: dict[int, str] = {}
    for name, value in values.items():
        names.setdefault(id(value), name)
    found: dict[str, int] = {}
    for optimizer in filter(by_tensor, optimizers):
        called = [name for name in _called(optimizer, names) if name in homes]
        ranks = owners(tuple((homes[name], tuple(values[name].shape)) for name in called))
        found.update(zip(called, ranks, strict=True))
    return found


def _called(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[str]:
    """The names of what an optimizer has, in its order."""
    for value in (value for group in optimizer.param_groups for value in group["params"]):
        now = owner_of(value)
        if id(now) in names:
            yield names[id(now)]


def owner_of(value: Tensor) -> Tensor:
    """A model's parameter that an optimizer holds by a piece of it, or as it was before it was global."""
    now: Tensor = became[value]() if value in became else getattr(value, "_piece_of", value)
    return now


def refuse_closures(optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that computes the loss several times a step, because a graph does so once. One of sparse
    gradients is refused too, because those of graphs are dense."""
    for each in optimizers:
        if isinstance(each, SparseAdam):
            raise SbpError(
                f"{type(each).__name__} steps by sparse gradients, and those of a graph are dense\n"
                "  take torch.optim.Adam, or step by SparseAdam in a loop of your own, without a graph"
            )
        if isinstance(each, LBFGS):
            raise SbpError(
                f"{type(each).__name__} computes the loss several times in a step, and a graph once\n"
                "  compile the loss without an optimizer, and call the graph in the closure:"
                " it leaves gradients on the parameters"
            )


class _Served(NamedTuple):
    """An optimizer's parameters as it trains them now: a graph's, by their ids, and of these what is cut in pieces."""

    graph: Mapping[int, Trained]
    all: dict[int, Trained]
    pieces: list[Trained]
    mapped: list[Trained]  # those of them that are in files
    sizes: list[int]  # of its groups as they were then
    held: list[Tensor]  # in all of them

    def told(self, optimizer: Optimizer) -> bool:
        """Whether its groups are those that it had when they were adopted."""
        groups = [group["params"] for group in optimizer.param_groups]
        return list(map(len, groups)) == self.sizes and all(map(operator.is_, chain(*groups), self.held))


_now: "WeakKeyDictionary[Optimizer, _Served]" = WeakKeyDictionary()


def adopt(optimizers: Sequence[Optimizer], known: Mapping[int, Trained], changed: Mapping[int, Tensor]) -> None:
    """Put the graph's parameters in the place of those that optimizers were made with, unless they are there.

    `known` has what the graph trains by ids of parameters, `changed` parameters by ids of what they were before.
    Graphs of other shapes may cut other pieces: each takes over at its step. An optimizer that could go through its
    parameters one by one or all at once, and was not told, does the latter. It keeps parameters that modules had before
    and have no more, without gradients; where no optimizer holds those that replaced them, this is an error.
    """
    for optimizer in optimizers:
        before = _now.get(optimizer)
        if before is not None and before.graph is known and before.told(optimizer):
            continue
        found: dict[int, Trained] = {}
        gone = []
        for group in optimizer.param_groups:
            held, mapped = [], False
            for value in group["params"]:
                owner = changed.get(id(getattr(value, "_piece_of", value)))
                if owner is None and value in became:
                    owner = changed.get(id(became[value]()))
                if not isinstance(owner, GlobalTensor):
                    gone.append(value)
                    held.append(value)
                    continue
                trained = known.get(id(owner)) or (before and before.all.get(id(owner))) or Trained(owner)
                found[id(owner)] = trained
                carry_mean(value, owner)
                held.append(_adopted(optimizer, value, trained))
                mapped = mapped or trained.mapped
                if before is not None and id(owner) in before.all:
                    trained.follow(before.all[id(owner)])
            group["params"] = held
            said = group.get("fused") or group.get("differentiable") or isinstance(group["lr"], Tensor)
            if "foreach" in group and group["foreach"] is None and not said:
                alike = len({getattr(x, "placement", None) for x in held}) == 1
                # All at once would bring the pages of all files in.
                group["foreach"] = False if mapped else alike or None
        if gone and (before is None or not known.keys() <= {*found, *before.graph, *_held(optimizers)}):
            raise unknown_parameter(optimizer, gone[0])
        if before is None:
            optimizer.register_step_pre_hook(_gather)
            optimizer.register_step_post_hook(_settle)
            optimizer.register_load_state_dict_post_hook(_loaded)
        forget(optimizer)
        pieces = [each for each in found.values() if each.master is not each.parameter]
        groups = [group["params"] for group in optimizer.param_groups]
        files = [each for each in pieces if each.mapped]
        _now[optimizer] = _Served(known, found, pieces, files, list(map(len, groups)), list(chain(*groups)))
        waiting = taken_states(optimizer)
        if waiting is not None:
            waiting.give(optimizer)


def _held(optimizers: Iterable[Optimizer]) -> Iterator[int]:
    """The ids of all parameters that optimizers hold by now."""
    for value in (x for each in optimizers for group in each.param_groups for x in group["params"]):
        yield id(owner_of(value))


def served(optimizer: Optimizer) -> Mapping[int, Trained]:
    """The parameters that it trains now, by their ids; none before a graph has adopted it."""
    now = _now.get(optimizer)
    return {} if now is None else now.all


def hand_over(optimizer: Optimizer, all: dict[int, Trained]) -> None:
    """Its parameters have moved, and are trained so from now on: by their ids, for the graph that adopts it next."""
    before = _now.get(optimizer)
    if before is not None:
        _now[optimizer] = before._replace(graph={}, all=all, pieces=[], mapped=[])
    forget(optimizer)


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody else is called before or behind its steps."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any(hook not in (_gather, _settle) for hook in (*before.values(), *after.values()))


def _gather(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    now = _now.get(optimizer)
    if (
        now is not None and not building()
    ):  # an owner's stand-in has whole tensors, and calls it where a step calls super
        for each in now.pieces:
            each.gather()
        if now.mapped:
            held = {id(x) for group in optimizer.param_groups for x in group["params"]}
            for each in now.mapped:  # not where it steps on shards, which have states of their own meanwhile
                if each.host and id(each.master) in held and not optimizer.state.get(each.master):
                    optimizer.state[each.master] = each.host.kept({})


def _settle(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    now = _now.get(optimizer)
    if now is not None and not building():
        settle(now.pieces)


def _loaded(optimizer: Optimizer) -> None:
    """Bring a loaded state to its place: it may be whole, because one device saved it, or lie otherwise."""
    forget(optimizer)
    for each in _now[optimizer].all.values():
        state = optimizer.state.get(each.master)
        if state:
            optimizer.state[each.master] = states_at_rest(state, each)


def unknown_parameter(optimizer: Optimizer, value: Tensor) -> SbpError:
    """The error for a parameter that an optimizer of a graph holds, and none of its modules."""
    return SbpError(
        f"{type(optimizer).__name__} holds a parameter {tuple(value.shape)} that no module of the graph has, "
        f"at {user_line()}\n  make the optimizer of the graph's own modules, as in AdamW(self.model.parameters()), and "
        "tell it of new ones: optimizer.add_param_group"
    )


def _adopted(optimizer: Optimizer, value: Tensor, trained: Trained) -> Tensor:
    if value is trained.master:
        return value
    if isinstance(value, GlobalTensor) and value is not trained.parameter and _lies_as(value, trained):
        host = vars(value).get("_host")
        if (host and host.to) == (trained.host and trained.host.to):
            trained.master, trained.host = value, host  # another graph has cut it alike
            trained.begin()
            return value
        with torch.no_grad():  # a copy of one that is on the host, or what was there before
            for mine, other in zip(trained.master._shards, value._shards, strict=True):
                mine.detach().copy_(other)
    state = optimizer.state.pop(value, None)
    if state:
        optimizer.state[trained.master] = states_at_rest(state, trained)
    return trained.master


def _lies_as(value: GlobalTensor, trained: Trained) -> bool:
    return value.placement is trained.held.placement and alike(value._layout, trained.rest)


def states_at_rest(state: Mapping[str, Any], trained: Trained) -> Mapping[str, Any]:
    """All that an optimizer keeps for a parameter, as it lies from now on."""
    made = {name: _state(name, part, trained) for name, part in state.items()}
    return made if trained.host is None else trained.host.kept(made)


def _state(name: str, part: Any, trained: Trained) -> Any:
    """The state that an optimizer keeps for a parameter, as it lies from now on."""
    of = trained.held
    like = isinstance(part, Tensor) and lies_beside(name, part.shape, of.shape)  # else Adafactor's, by rows and columns
    if not isinstance(part, Tensor) or not (part.ndim or like):
        return part
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

    Returned is the norm that they had, if there are any."""
    groups: dict[Placement, list[Tensor]] = {}
    for each in trained:
        if each.master.grad is not None:
            groups.setdefault(each.held.placement, []).append(each.master)
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
