"""A trained parameter: where its gradient comes, where its optimizer changes it, and how the two get together.

    gradient  ->  home  ->  rest: the optimizer's step on the master  ->  where the parameter lies

Of these only the ends that differ are moved: where all are alike, the master is the parameter itself. A master that is
offloaded rests on the hosts of its devices.
"""

from collections.abc import Sequence
from functools import lru_cache
from weakref import ref

import torch
from torch import Tensor

from ....boxing import box
from ....boxing.graph.physical import in_narrower
from ....placement import Placement
from ....placement.world import owned
from ....sbp import Layout
from ...tensors.autograd import accumulate
from ...tensors.moves import version
from ...tensors.tensor import GlobalTensor, wrap
from ..choose.parameters import taken_exact
from ..host.states import StateMemory

__all__ = ["Trained", "alike", "lies_beside", "on_host"]

COUNTS = {"step", "mu_product", "eta", "mu"}  # without dims, whatever dims the parameter has


class Trained:
    """A parameter, and what its optimizer changes: itself, or a piece of it on each rank (ZeRO), or one of another
    dtype. Its gradient comes as `home` says; `rest` is how the optimizer has it, and keeps its state. With `host`
    that is memory of the host, `held` there."""

    def __init__(
        self,
        parameter: GlobalTensor,
        home: Layout | None = None,
        rest: Layout | None = None,
        host: StateMemory | None = None,
    ) -> None:
        self.parameter, self.host = parameter, host
        self.lies = parameter._layout.with_state(parameter._layout.state)
        self.home, self.rest = home or self.lies, rest or self.lies
        self.held = self.rest if host is None else on_host(self.rest)
        self.comes_there = alike(self.home, self.rest)
        self.master = parameter if host is None and alike(self.lies, self.rest) else self._pieces()
        self._seen = self._stamp()
        self.idle = False  # in an update of other parameters, such as those of another stage

    def _pieces(self) -> GlobalTensor:
        """Views into the parameter where its pieces are contiguous, so that the step changes it in place. Other pieces,
        those of another dtype and those on the host have memory of their own."""
        shards = self._cut()
        made = wrap(shards if self.host is None else self.host.put("master", shards), self.held)
        made._is_param = True
        vars(made).update(_piece_of=self.parameter, _host=self.host)  # which copies keep
        return made.requires_grad_()

    def _cut(self) -> tuple[Tensor, ...]:
        mine = tuple([shard.detach() for shard in self.parameter._shards])
        exact = taken_exact(self.parameter) if self.wide else None
        if exact is None:
            return _as(mine, self.lies, self.rest, "optimizer pieces")
        wide = self.lies.with_dtype(exact.dtype)
        held = _as(exact._shards, exact._layout, wide, "optimizer pieces")
        # Digits that the cast has left out; where others have written to the parameter meanwhile, that counts.
        with torch.no_grad():
            known = [torch.where(e.to(x.dtype) == x, e, x.to(e.dtype)) for e, x in zip(held, mine, strict=True)]
        return tuple(map(_alone, _as(tuple(known), wide, self.rest, "optimizer pieces")))

    def stamped(self) -> None:
        """The parameter is what the master made of it."""
        self._seen = self._stamp()

    def _stamp(self) -> list[tuple[ref[Tensor], int, int]]:
        # Weakly: what a user has replaced is not to stay, and other memory may lie where it was (`x.data = y`).
        return [(ref(shard), shard.data_ptr(), version(shard)) for shard in self.parameter._shards]

    @property
    def fresh(self) -> bool:
        """Whether nobody has changed the parameter since the master made it."""
        shards = self.parameter._shards
        return len(shards) == len(self._seen) and all(
            of() is shard and at == shard.data_ptr() and count == version(shard)
            for shard, (of, at, count) in zip(shards, self._seen, strict=True)
        )

    @property
    def wide(self) -> bool:
        """Whether the master has digits that the parameter has not."""
        return self.rest.dtype is not self.lies.dtype

    @property
    def both(self) -> tuple[GlobalTensor, GlobalTensor]:
        """The parameter and its master, which may be one: gradients are left on either."""
        return self.parameter, self.master

    @property
    def mapped(self) -> bool:
        """Whether the optimizer has it in files."""
        return self.host is not None and self.host.to == "disk"

    def brought(self, shards: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A gradient that has come home, as the optimizer wants it; on the host it may still be on its way."""
        if not self.comes_there:
            windows = _windows(self.home, self.rest)
            if windows is None:
                shards = _as(shards, self.home, self.rest, "gradient")
            else:
                shards = tuple([shard[window].contiguous() for shard, window in zip(shards, windows, strict=True)])
        return shards if self.host is None else self.host.brought(shards)

    def give(self, shards: tuple[Tensor, ...], *, keep: bool) -> None:
        """Add the gradient of a step to the one that is there, as `backward` does; for the optimizer, or to `keep`.

        A kept one lies as it comes home, unless the parameter is such that its gradient can lie in one way only.
        """
        hooked = self.parameter._hooks is not None  # these are called with the parameter's own gradient
        if self.host is not None and not (keep or hooked):
            shards = self.brought(shards)
            self.host.arrive()
            return self.take(shards)
        of, where = (self.parameter, self.lies) if keep or hooked else (self.master, self.rest)
        if keep and not hooked and self.parameter._leaf is not None and not self.parameter._leaf.direct:
            where = self.home.with_dtype(self.lies.dtype)
        shards = shards if alike(self.home, where) else _as(shards, self.home, where, "gradient")
        if not hooked:
            _add(of, shards, where)
            return
        with torch.no_grad():
            accumulate(of, wrap(shards, where))
        if not keep:
            self.gather()

    def take(self, shards: tuple[Tensor, ...]) -> None:
        """The gradient of a step as the optimizer wants it, added to what is there."""
        _add(self.master, shards, self.held)

    def gather(self) -> None:
        """Before a step of the optimizer: what others did to the parameter counts for its pieces.

        It may have been loaded or trained by another graph, and an eager backward leaves its gradient there.
        """
        if self.master is self.parameter or self.idle:
            return
        with torch.no_grad():
            if not self.fresh:
                for mine, new in zip(self.master._shards, self._cut(), strict=True):
                    mine.copy_(self._written(mine, new.to(mine.device)))
            eager = self.parameter.grad
            if eager is not None:
                shards = _as(eager._shards, eager._layout, self.rest, "gradient")
                new = wrap(shards if self.host is None else tuple([x.to("cpu") for x in shards]), self.held)
                held = self.master.grad
                self.master.grad = new if held is None else held + new  # type: ignore[assignment]
                self.parameter.grad = None

    def _written(self, mine: Tensor, new: Tensor) -> Tensor:
        """A shard of the master with what others wrote to the parameter; where digits alone differ, it stays."""
        narrow = self.lies.dtype
        return torch.where(mine.to(narrow) == new.to(narrow), mine, new) if self.wide else new

    def follow(self, other: "Trained") -> None:
        """Take what another graph has trained meanwhile: digits that the parameter does not have are only there."""
        wide = self.wide and other.rest.dtype is self.rest.dtype
        if other is self or not wide or not other.fresh:
            return
        if other.master is not self.master:
            there = _as(tuple([s.detach() for s in other.master._shards]), other.held, self.held, "optimizer pieces")
            with torch.no_grad():
                for mine, new in zip(self.master._shards, there, strict=True):
                    mine.copy_(new)
        self._seen = self._stamp()

    def begin(self) -> None:
        """Take a master over from another graph, since whose last step the parameter may have changed."""
        if not self.wide:
            self._seen = []

    @property
    def goes(self) -> tuple[Layout, Layout]:
        """The ends of the way from the master to the parameter, in the narrower of their dtypes."""
        return in_narrower(self.rest, self.lies)

    def changed(self) -> tuple[Tensor, ...]:
        """After a step of the optimizer: its pieces, in the dtype in which they go."""
        there = tuple([shard.detach() for shard in self.master._shards])
        if self.host is not None:
            there = self.host.sent(there, self.parameter._shards)
        if self.rest.state == self.lies.state:  # writing casts
            return there
        dtype = self.goes[0].dtype
        return tuple([shard.to(dtype) for shard in there])

    def settled(self) -> None:
        """Know that the parameter has what was changed."""
        self.parameter._moved = None
        self._seen = self._stamp()


def on_host(of: Layout) -> Layout:
    """The same on the hosts of its devices."""
    there = of.placement
    if there.type == "cpu":
        return of
    return Layout(Placement("cpu", there.flat, there.shape, there.names), of.state, of.shape, of.dtype)


def _add(of: GlobalTensor, shards: tuple[Tensor, ...], where: Layout) -> None:
    """A gradient added to what a tensor has."""
    if of._leaf is not None and of._leaf.direct:  # it would be put on the shards anyway
        for shard, grad in zip(of._shards, shards, strict=True):
            shard.grad = grad if shard.grad is None else shard.grad + grad
        return
    new, held = wrap(shards, where), of.grad
    of.grad = new if held is None else held + new  # type: ignore[assignment]


def _as(shards: tuple[Tensor, ...], src: Layout, dst: Layout, what: str) -> tuple[Tensor, ...]:
    """Moved to another layout, and cast before or behind the move."""
    if src is dst:
        return shards
    with torch.no_grad():
        a, b = in_narrower(src, dst)
        moved = tuple([shard.to(a.dtype) for shard in shards])
        moved = moved if a is b else tuple(box(moved, a, b, op=what))
        return tuple([shard.to(dst.dtype) for shard in moved])


def _alone(shard: Tensor) -> Tensor:
    """A piece without the memory of the whole."""
    return shard.clone() if shard.untyped_storage().nbytes() > shard.nbytes else shard


@lru_cache(4096)
def _windows(src: Layout, dst: Layout) -> list[tuple[slice, ...]] | None:
    """The window of each rank's shard in the shard it has already, if all have one: a view, and nothing is moved."""
    if src.placement is not dst.placement or src.dtype is not dst.dtype or src.state.partial or dst.state.partial:
        return None
    found = []
    for rank in owned(src.placement):
        held, wanted = src.spans(rank), dst.spans(rank)
        if any(len(spans) != 1 for spans in (*held, *wanted)):
            return None
        if any(a[0][0] > b[0][0] or a[0][1] < b[0][1] for a, b in zip(held, wanted, strict=True)):
            return None
        found.append(tuple(slice(b[0][0] - a[0][0], b[0][1] - a[0][0]) for a, b in zip(held, wanted, strict=True)))
    return found or None  # a process that owns none has a token in the place of shards


def lies_beside(name: object, kept: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a state of this name and sizes lies as its parameter does, because it has an element for each there.
    Counts are plain numbers; beside a parameter without dims only their names tell them apart.

    >>> lies_beside("exp_avg", (3, 4), (3, 4)), lies_beside("exp_avg", (), ()), lies_beside("step", (), ())
    (True, True, False)
    """
    return tuple(kept) == tuple(shape) and (bool(shape) or name not in COUNTS)


def alike(a: Layout, b: Layout) -> bool:
    """Whether a tensor lies in one way and is of one dtype."""
    return (a.state, a.dtype) == (b.state, b.dtype)
