"""Recipes: how a call is answered once it is known, and what is held against the first answer.

A recipe says how the inputs must lie, what each rank runs, and how the results lie. The first run is looked at: shards
of a shape or dtype that their layout does not give mean a wrong rule, and a view that shares no memory is none.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...placement.errors import SbpError
from ...placement.structure import ATOMS
from ...placement.world import owned
from ...sbp import Layout
from ...sbp.call import map_tensors, refilled, tensors_in
from ..tensors.memory_formats import in_order, is_in_order, shares_memory
from ..tensors.moves import shards_as
from ..tensors.shell import shell
from ..tensors.tensor import GlobalTensor, wrap
from ..tensors.tokens import pass_tokens
from .moved_views import Torn, after_write, any_severed, keep, sever

__all__ = ["ByGrad", "Outputs", "Recipe", "Single", "WrongRule", "assembled", "each_rank", "own_memory", "wants_grad"]


class Outputs(NamedTuple):
    """The layouts of a recipe's results, in order; `same` numbers the inputs that come back as themselves.

    `alone` are copies on one device, though what ranks run may give them a view: of a piece, which lies otherwise than
    the whole, or of what it was given. `relaid` are those that ranks lay out otherwise than one device.
    """

    layouts: tuple[Layout | None, ...]
    same: tuple[int | None, ...]
    severed: tuple[bool, ...]
    alone: tuple[bool, ...]
    relaid: tuple[bool, ...]


class Recipe:
    """A way to answer a call. `any_float`: it does not depend on the values of floats among the arguments."""

    any_float = False
    bookish = False  # by a rule of the book, not by one of the user's
    by_grad = False  # another recipe answers where other tensors require grad
    writes: tuple[int, ...] = ()  # which inputs are written to
    # Where a process owns one rank, nothing moves and one tensor comes out, that is all there is to know: its layout,
    # the shell it is made on, and which inputs would have to be taken for others if they required grad.
    only: Layout | None = None
    base: Tensor
    unless_grad: tuple[int, ...] = ()
    lists: tuple[int, ...] = ()  # arguments that are lists of tensors
    tensors: tuple[tuple[int, int], ...] = ()  # where each stands among the arguments, and where in what is called
    # Where ranks make another call than the one that was made: what they call, and with what.
    call: Callable[..., Any] | None = None
    template: Sequence[Any] = ()
    view_of = -1  # which argument what comes out is a view of

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        raise NotImplementedError

    def tried(self, name: str, result: Any, tensors: Sequence[GlobalTensor]) -> None:
        """Look at what the first run gave, before the recipe is kept."""

    def place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[GlobalTensor]) -> None:
        """Note where among the arguments the tensors stand."""

    def known_now(
        self, result: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[GlobalTensor]
    ) -> None:
        """All that can only be said of the first result once it was looked at."""


class ByGrad(Recipe):
    """A recipe chosen by which inputs require grad, because their gradients' moves are part of the price."""

    def __init__(self, make: Callable[..., tuple[Recipe, Any]]) -> None:
        self.make = make
        self.known: dict[tuple[bool, ...], Recipe] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        case = wants_grad(tensors)
        found = self.known.get(case)
        if found is None:
            self.known[case], result = self.make(func, args, kwargs, tensors)
            return result
        return found.run(func, args, kwargs, tensors)


def wants_grad(tensors: Sequence[GlobalTensor]) -> tuple[bool, ...]:
    """The tensors that take part in autograd now."""
    if not torch.is_grad_enabled():
        return ()
    return tuple(x.requires_grad for x in tensors)


class Single(Recipe):
    """One ATen call under the chosen way: the function itself on the shards, or the rule's local function."""

    def __init__(
        self,
        name: str,
        targets: tuple[Layout, ...] | None,
        outputs: Outputs,
        views: tuple[int | None, ...],
        local: Callable[..., Any] | None = None,
    ) -> None:
        self.views = views  # for each output, the input that it is a view of
        self.name, self.targets, self.outputs, self.local = name, targets, outputs, local
        one = outputs.layouts[0] if outputs.layouts else None
        self.result: Any = None  # what the function returns, with some tensor for each
        self.elsewhere = one is not None and not owned(one.placement)
        # What each rank owned here calls instead, and where the tensors go in it.
        self.calls: Sequence[tuple[Callable[..., Any], list[Any]]] = ()
        self.slots: tuple[int, ...] | None = None
        self.single = False  # whether one new tensor comes out and no more; known once it was tried
        self.mends = False  # whether results have to be looked at; the first are anyway

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[GlobalTensor]) -> Any:
        if self.elsewhere:
            return self.pass_on(tensors)
        if self.targets is None:
            shards = [x._shards for x in tensors]
        else:
            shards = [
                x._shards if x._layout is to else shards_as(x, to, self.name, implicit=True)
                for x, to in zip(tensors, self.targets, strict=True)
            ]
        if self.slots is not None:
            results = [self._made_call(i, shards) for i in range(len(self.calls))]
        else:
            results = [func(*a, **k) for a, k in each_rank(args, kwargs, shards)]
        if self.mends:
            results = [self._mended(result, [held[i] for held in shards]) for i, result in enumerate(results)]
        if self.single:
            made = wrap(tuple(results), self.outputs.layouts[0])  # type: ignore[arg-type]
            base = self.views[0]
            if base is not None and tensors[base]._torn is not None:
                keep(made, tensors[base])
            return made
        return self.finished(assembled(results, self.outputs, tensors), func, args, kwargs, tensors)

    def _mended(self, result: Any, given: Sequence[Tensor]) -> Any:
        """A rank's results, in memory of their own where one device would make a copy, and laid out as there."""
        outputs, made = self.outputs, []
        for y, of, alone, relaid in zip(
            tensors_in(result), outputs.layouts, outputs.alone, outputs.relaid, strict=True
        ):
            y = own_memory(y, given) if alone else y
            made.append(in_order(y, of) if relaid and of is not None else y)
        return refilled(result, made)

    def finished(
        self, result: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[GlobalTensor]
    ) -> Any:
        """Carry over what was written, and let views that are none know what they are views of."""
        written = [tensors[number] for number in self.writes]
        if written and any_severed(written):
            for x in written:
                after_write(x)
        self.known_now(result, func, args, kwargs, tensors)
        return result

    def known_now(
        self, result: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[GlobalTensor]
    ) -> None:
        if any(self.outputs.severed) or any(b is not None and tensors[b]._torn is not None for b in self.views):
            for at, (y, base) in enumerate(zip(tensors_in(result), self.views, strict=True)):
                if base is None:
                    continue
                assert isinstance(y, GlobalTensor)
                if self.outputs.severed[at]:
                    sever(y, Torn(tensors[base], func, args, kwargs, at))
                else:
                    keep(y, tensors[base])

    def moves(self, tensors: Sequence[GlobalTensor]) -> bool:
        """Whether an input has to lie otherwise than it does."""
        return any(x._layout.state != to.state for x, to in zip(tensors, self.targets or (), strict=False))

    def _made_call(self, i: int, shards: Sequence[tuple[Tensor, ...]]) -> Any:
        function, template = self.calls[i]
        mine = list(template)
        for at, held in zip(self.slots or (), shards, strict=True):
            mine[at] = held[i]
        return function(*mine)

    def pass_on(self, tensors: Sequence[GlobalTensor]) -> Any:
        """The results on a process that owns no rank of the placement: tokens with the same edges."""
        dtypes = [of.dtype for of in self.outputs.layouts if of is not None]
        made = pass_tokens([x._shards[0] for x in tensors], dtypes)
        return assembled([refilled(self.result, made)], self.outputs, tensors)

    def place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[GlobalTensor]) -> None:
        """See whether this is one of the calls that `dispatch` handles by itself."""
        one = self.outputs.layouts[0] if self.outputs.layouts else None
        if not self.single or one is None or self.elsewhere or len(tensors[0]._shards) > 1:
            return
        if any(self.outputs.relaid) or (self.mends and kwargs):
            return
        lists: tuple[int, ...] = ()
        if self.slots is not None:
            stand = [i for i, a in enumerate((*args, *kwargs.values())) if isinstance(a, GlobalTensor)]
            places = list(self.slots)
            self.call, self.template = self.calls[0]
            inside = 0
        else:
            stand = places = [i for i, a in enumerate(args) if isinstance(a, GlobalTensor)]
            lists = tuple(i for i, a in enumerate(args) if _is_list(a))
            inside = sum(len(args[i]) for i in lists)
        if len(stand) + inside != len(tensors) or (lists and self.targets is not None):
            return
        self.tensors = tuple(zip(stand, places, strict=True))
        odd = [i for i, (x, to) in enumerate(zip(tensors, self.targets or (), strict=False)) if x._layout is not to]
        if all(tensors[i]._layout.state == self.targets[i].state and not tensors[i].requires_grad for i in odd):  # type: ignore[index]
            self.only, self.base, self.lists = one, shell(one), lists
            self.unless_grad = tuple(places[i] for i in odd)
            if self.views[0] is not None:
                self.view_of = next((i for i, a in enumerate(args) if a is tensors[self.views[0]]), -1)
                if self.view_of < 0:
                    self.only = None
            if self.mends:
                self.call = _apart(self.call or func)

    def tried(self, name: str, result: Any, tensors: Sequence[GlobalTensor]) -> None:
        """The shards must be what their layouts say, and a view that is none must be known for it."""
        if self.elsewhere:  # tokens tell nothing
            return
        severed, layouts, alone, relaid = [], [], [], []
        for y, of, same, base, copied in zip(
            tensors_in(result), self.outputs.layouts, self.outputs.same, self.views, self.outputs.alone, strict=True
        ):
            assert isinstance(y, GlobalTensor)
            assert of is not None
            if not of.state.split and same is None:  # about some shapes torch's fakes are wrong: embedding_bag's
                y._layout = of = _resized(of, tuple(y._shards[0].shape))
            layouts.append(of)
            check_shards(name, y)
            severed.append(same is None and base is not None and self._severs(y, tensors, base))
            owns = same is None and (base is None or severed[-1]) and "unsafe_" not in name
            shared = owns and any(_overlaps(y, x) for x in tensors)
            # Pieces of what has no gaps lie alike in each call; where it has some a copy has none, and one is a view.
            alone.append(shared or (copied and any(x._layout.gaps for x in tensors)))
            relaid.append(same is None and not all(is_in_order(shard, of) for shard in y._shards))
            if shared:
                y._shards = tuple(shard.clone() for shard in y._shards)
            if relaid[-1]:
                y._shards = tuple(in_order(shard, of) for shard in y._shards)
        self.outputs = Outputs(tuple(layouts), self.outputs.same, tuple(severed), tuple(alone), tuple(relaid))
        self.mends = any(alone) or any(relaid)
        self.single = (
            isinstance(result, GlobalTensor)
            and all(same is None for same in self.outputs.same)
            and not any(severed)
            and self.local is None
        )

    def _severs(self, y: GlobalTensor, tensors: Sequence[GlobalTensor], base: int) -> bool:
        """Whether a view is a copy of its base. All ranks must say the same, also one that has all of it or nothing."""
        x = tensors[base]._layout
        to = x if self.targets is None else self.targets[base]
        return to.state != x.state or y._layout.state.partial != to.state.partial or not _shares(y, tensors[base])


def _apart(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """The function whose result is a copy, also where what it is given lies so that it would be a view."""

    def call(*mine: Any) -> Tensor:
        return own_memory(function(*mine), [x for x in mine if isinstance(x, Tensor)])

    return call


def own_memory(y: Tensor, given: Iterable[Tensor]) -> Tensor:
    """A result, or a copy of it where it lies in the memory of what was given."""
    return y.clone() if any(shares_memory(y, x) for x in given) else y


def _resized(of: Layout, shape: tuple[int, ...]) -> Layout:
    if shape == of.shape:
        return of
    return Layout(of.placement, of.state, shape, of.dtype, of.grad_partial)


def _is_list(a: Any) -> bool:
    return isinstance(a, list | tuple) and bool(a) and all(isinstance(part, GlobalTensor) for part in a)


class WrongRule(SbpError):
    """Shards are not what the rule said they would be."""


def check_shards(name: str, y: GlobalTensor) -> None:
    """A rule that is wrong shows here at the latest: shards of another shape or dtype than their layout's."""
    of = y._layout
    for rank, shard in zip(owned(of.placement), y._shards, strict=False):
        if tuple(shard.shape) != of.local_shape(rank) or shard.dtype is not of.dtype:
            raise WrongRule(
                f"the rule of {name} is wrong: rank {rank} made {shard.dtype} {tuple(shard.shape)}\n"
                f"  the rule says {of}, which gives it {of.local_shape(rank)}\n"
                f"  flow.check_rule({name!r}, ...) tells more"
            )


def _shares(y: GlobalTensor, x: GlobalTensor) -> bool:
    """Whether every shard of a view lies in the memory of what it is a view of."""
    # Not by address, as what is empty has none: it is a view too, and what is written to it makes x require a gradient.
    return all(map(shares_memory, y._shards, x._shards))


def _overlaps(y: GlobalTensor, x: GlobalTensor) -> bool:
    """Whether some rank's shard of a result lies in the memory of an input's."""
    return any(map(shares_memory, y._shards, x._shards))


def each_rank(args: Any, kwargs: Any, shards: Sequence[tuple[Tensor, ...]]) -> Any:
    """The arguments of each rank owned here, its shards in the place of global tensors."""
    for i in range(len(shards[0])):
        mine = iter([held[i] for held in shards])
        yield tuple([_put(a, mine) for a in args]), {name: _put(a, mine) for name, a in kwargs.items()}


def _put(value: Any, shards: Iterator[Tensor]) -> Any:
    # Asked of every argument of every call on every rank, so not by `mapped`, as far as it is plain.
    kind = value.__class__
    if kind is GlobalTensor:
        return next(shards)
    if kind is list or kind is tuple:
        return kind([_put(part, shards) for part in value])
    return value if kind in ATOMS else map_tensors(value, lambda _: next(shards))


def assembled(results: Sequence[Any], outputs: Outputs, tensors: Sequence[GlobalTensor]) -> Any:
    """One structure of global tensors from the structures of local ones that the ranks returned."""
    per_rank = [tensors_in(result) for result in results]
    made: list[GlobalTensor] = []
    for at, (of, same) in enumerate(zip(outputs.layouts, outputs.same, strict=True)):
        if same is not None:
            x = tensors[same]
            written = tuple(found[at] for found in per_rank)
            if x._leaf is None and written[0] is not x._shards[0]:
                x._shards = written  # the same memory under another graph: its gradient lies in another way now
            if of is not None and of is not x._layout and x._leaf is None:
                x._layout = of
            made.append(x)
            continue
        assert of is not None
        out = wrap(tuple(found[at] for found in per_rank), of)
        made.append(out)
    whole = iter(made)
    return map_tensors(results[0], lambda _: next(whole))
