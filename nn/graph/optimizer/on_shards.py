"""An optimizer's step on plain shards, where it treats every element alone: then a shard is as good as a parameter.

No other optimizer steps so. A subclass of one of these does not either, because nothing is known of its step.

For the time of the step the optimizer holds shards in the place of global tensors, so that it is torch's own step, at
once over as many parameters as fill half a gigabyte, and costs what it costs on one device. Its state lies on the
shards; between steps users see it as global tensors made of the same memory.
"""

import operator
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from ....placement.world import owned
from ....sbp import Layout
from ...tensors.tensor import GlobalTensor, wrap
from ..memory.account import AT_ONCE
from .trained import lies_beside

__all__ = ["ALONE", "forget", "known_shards", "step_on_shards"]

# Those that change each element by itself, by what else than its own gradients and its value; all change their state
# in place. Not here: Adafactor (means of rows and columns, norms), Muon (products of matrices), LBFGS, SparseAdam.
ALONE: Mapping[type[Optimizer], str] = {
    SGD: "momentum",
    Adam: "two moments, and the number of steps",
    AdamW: "two moments, and the number of steps",
    RMSprop: "moments, momentum",
    Adagrad: "a sum of squares, and the number of steps",
    Adadelta: "two means of squares",
    Adamax: "a mean, a maximum, and the number of steps",
    NAdam: "two moments, the number of steps, and a product of rates that goes by it",
    RAdam: "two moments, and the number of steps",
    ASGD: "a mean of values, and rates that go by the number of steps",
    Rprop: "a step size, and the sign of the last gradient",
}
_shards_of = operator.attrgetter("_shards")
_known: "WeakKeyDictionary[Optimizer, _Shards]" = WeakKeyDictionary()


def forget(optimizer: Optimizer) -> None:
    """Its parameters or its state are others now."""
    _known.pop(optimizer, None)


def known_shards(optimizer: Optimizer) -> "_Shards | None":
    """The shards of its parameters and states on which it stepped last, unless one of them is another now."""
    return _known.get(optimizer)


def step_on_shards(optimizer: Optimizer, grads: Mapping[int, tuple[Tensor, ...]]) -> bool:
    """One step with these gradients, by the ids of parameters; False if the optimizer has to see whole tensors."""
    if type(optimizer) not in ALONE:
        return False
    shards = _known.get(optimizer)
    if shards is None or not shards.fresh(optimizer):
        made = _Shards.of(optimizer)
        if made is None:
            return False
        shards = _known[optimizer] = made
    if shards.left():
        return False
    if any(group.get("fused") for group in optimizer.param_groups) and not shards.dense(grads):
        return False  # fused kernels read memory as it lies, without asking for strides
    shards.step(optimizer, grads)
    return True


class _Shards:
    """The shards of an optimizer's parameters, and its state of each."""

    def __init__(self, optimizer: Optimizer, params: list[list[GlobalTensor]]) -> None:
        self.params = [group["params"] for group in optimizer.param_groups]
        self.all = [x for group in params for x in group]
        self.seen = [x._shards for x in self.all]
        self.groups = [[shard for x in group for shard in x._shards] for group in params]
        self.flat = list(chain.from_iterable(self.groups))
        self.several = [x for x in self.all if len(x._shards) > 1]
        self.nothing = [(id(x), (None,) * len(x._shards)) for x in self.all]
        self.watched = [y for x in self.all for y in (x, vars(x).get("_piece_of")) if y is not None]
        self.mine: dict[Tensor, Any] = defaultdict(dict)
        self.state = optimizer.state
        for x in self.all:
            for name, part in optimizer.state.get(x, {}).items():
                for at, shard in enumerate(x._shards):
                    whole = isinstance(part, GlobalTensor)
                    copy = part.clone() if isinstance(part, Tensor) and not whole and at else part
                    self.mine[shard][name] = part._shards[at].detach() if whole else copy
            host = vars(x).get("_host")
            if host is not None:
                for at, shard in enumerate(x._shards):
                    self.mine[shard] = host.of_shard(at, self.mine[shard])
        self._shown()

    def _shown(self) -> None:
        """The state has been handed out to users, or taken over from them: from here on changes to it are theirs."""
        self.held, self.parts = self._seen_now()
        self.unseen = [x for x in self.all if x not in self.state]
        kept = [part for held in self.mine.values() for part in held.values() if isinstance(part, Tensor)]
        self.memory = [*self.flat, *kept]

    def _seen_now(self) -> tuple[list[Any], list[Any]]:
        held = list(filter(None, map(self.state.get, self.all)))
        return held, list(chain.from_iterable(map(dict.values, held)))

    @classmethod
    def of(cls, optimizer: Optimizer) -> "_Shards | None":
        params = [group["params"] for group in optimizer.param_groups]
        if not all(isinstance(x, GlobalTensor) for group in params for x in group):
            return None
        here = [[x for x in group if owned(x.placement)] for group in params]  # stages of a pipeline are elsewhere
        return cls(optimizer, here) if any(here) else None

    def fresh(self, optimizer: Optimizer) -> bool:
        """Whether its state, its groups of parameters and the memory of these are those that were seen."""
        if not all(map(operator.is_, map(_shards_of, self.all), self.seen)):
            return False
        groups = [group["params"] for group in optimizer.param_groups]
        same = len(groups) == len(self.params) and all(map(operator.is_, groups, self.params))
        if not (same and self.state is optimizer.state):
            return False
        held, parts = self._seen_now()
        if len(held) != len(self.held) or len(parts) != len(self.parts):
            return False
        return all(map(operator.is_, held, self.held)) and all(map(operator.is_, parts, self.parts))

    def left(self) -> bool:
        """Whether an eager backward has left a gradient."""
        for x in self.watched:
            leaf = x._leaf
            if (x._shards[0].grad if leaf is None or leaf.direct else x._grad) is not None:
                return True
        return False

    def dense(self, grads: Mapping[int, tuple[Tensor, ...]]) -> bool:
        """Whether shards, state and these gradients lie row by row, without gaps."""
        return all(map(Tensor.is_contiguous, chain(self.memory, *grads.values())))

    def step(self, optimizer: Optimizer, grads: Mapping[int, tuple[Tensor, ...]]) -> None:
        self._count_alike()
        given = chain.from_iterable([grads.get(key) or nothing for key, nothing in self.nothing])
        for shard, grad in zip(self.flat, given, strict=True):
            shard.grad = grad
        groups = optimizer.param_groups
        for group, shards in zip(groups, self.groups, strict=True):
            group["params"] = shards
        parts = [[run for part in _by_device(group) for run in _in_runs(part)] for group in groups]
        optimizer.param_groups = list(chain.from_iterable(parts))
        optimizer.state = self.mine  # type: ignore[assignment]
        try:
            optimizer.step()
        finally:
            optimizer.state, optimizer.param_groups = self.state, groups
            for group, (first, *_), params in zip(groups, parts, self.params, strict=True):
                _take_numbers(group, first)
                group["params"] = params
            for x in self.all:
                x._moved = None
            for shard in self.flat:
                shard.grad = None
        if any(x._shards[0] in self.mine for x in self.unseen):
            self._show()

    def _count_alike(self) -> None:
        """Steps that users made themselves were counted on the first rank that is owned here."""
        for x in self.several:
            if x._shards[0] in self.mine:
                first, *others = (self.mine[shard] for shard in x._shards)
                for name, part in first.items():
                    if isinstance(part, Tensor) and not part.ndim:
                        for other in others:
                            other[name].copy_(part)

    def _show(self) -> None:
        """The state as global tensors, in the memory of the shards' own."""
        for x in self.unseen:
            held = [self.mine.get(shard) for shard in x._shards]
            if all(held):
                parts = [each for each in held if each is not None]
                self.state[x] = {name: _visible(name, x, [each[name] for each in parts]) for name in parts[0]}
        self._shown()


def _by_device(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A group for each device of its shards, where numbers such as a rate are a card's tensors."""
    numbers = [x for name, x in group.items() if name != "params" and isinstance(x, Tensor) and not x.is_cpu]
    places = dict.fromkeys(shard.device for shard in group["params"]) if numbers else {}
    if all(x.device == place for x in numbers for place in places):
        return [group]
    return [
        {name: x.to(place) if isinstance(x, Tensor) else x for name, x in group.items()}
        | {"params": [shard for shard in group["params"] if shard.device == place]}
        for place in places
    ]


def _in_runs(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A group for each run of shards that steps at once: what Adam's family makes of all of them is no more than that.
    One has to wait for more kernels, which take much longer than their launches."""
    shards: list[Tensor] = group["params"]
    begins, size = [0], 0
    for at, shard in enumerate(shards):
        if size and size + shard.nbytes > AT_ONCE:
            begins.append(at)
            size = 0
        size += shard.nbytes
    if len(begins) == 1:
        return [group]
    return [{**group, "params": shards[a:b]} for a, b in pairwise([*begins, len(shards)])]


def _take_numbers(group: dict[str, Any], part: dict[str, Any]) -> None:
    """Give a group the numbers that hooks of a step have set in its part for a device."""
    for name, x in part.items() if part is not group else ():
        mine = group.get(name)
        if not isinstance(x, Tensor) or not isinstance(mine, Tensor):
            group[name] = x
        elif x is not mine:
            mine.copy_(x)


def _visible(name: str, x: GlobalTensor, parts: list[Any]) -> Any:
    one, of = parts[0], x._layout
    if not isinstance(one, Tensor) or not lies_beside(name, one.shape, x._shards[0].shape):
        return one
    with torch.no_grad():
        return wrap(tuple(parts), Layout(of.placement, of.state, of.shape, one.dtype))
