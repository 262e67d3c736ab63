"""A cache of what frozen layers make of each sample, so that later epochs do not compute it again (AutoCache).

epoch 1    x  ->  frozen layers  ->  kept by sample  ->  layers that train
epoch 2                              kept by sample  ->  layers that train
more are frozen:   kept by sample  ->  these alone  ->  kept by sample
"""

from collections.abc import Sequence
from typing import Any, Unpack
from zlib import crc32

import torch
from torch import Tensor, nn

from ...boxing.graph.physical import Op
from ...placement.errors import SbpError
from ...placement.structure import ByIdentity
from ..tensors.moves import version
from ..tensors.tensor import GlobalTensor
from .compiled import CompiledGraph
from .lower.segments import draws
from .options import GivenOptions

__all__ = ["FrozenCache"]


class FrozenCache:
    """The first layers of a model, all frozen: `cache(samples, x)` is what they make of a batch, whose samples have
    these numbers. They run where one of them is not kept yet.

    Each process keeps all, whole, in its host's memory. `extend` adds layers that are frozen later: they go on from
    what is kept. Refused are layers that train, draw random numbers, write buffers or mix samples, and a number that
    comes with another sample; where frozen weights changed, nothing is kept any more. `forwards` counts the runs of
    each part. With `limit` no more bytes are kept than that: what was kept first goes first, and `dropped` counts it.
    """

    def __init__(self, layers: nn.Module, *, limit: int | None = None, **options: Unpack[GivenOptions]) -> None:
        if limit is not None and (type(limit) is not int or limit < 0):
            raise SbpError(f"FrozenCache: limit={limit!r}\n  give it in bytes, as limit=8 * 2**30, or leave it out")
        self.options, self.limit = options, limit
        self.nbytes = self.dropped = 0  # bytes that are kept, in each process; and samples that were, and had to go
        self.parts: list[CompiledGraph[Any, ..., Tensor]] = []
        self.forwards: list[int] = []
        self._kept: dict[int, tuple[int, int, Tensor]] = {}  # by sample: its checksum, through how many parts, of that
        self._checked: set[Any] = set()
        self._seen: list[Any] = []  # the weights that this was computed with
        self.extend(layers)

    def extend(self, layers: nn.Module) -> None:
        """More layers, behind those there are."""
        _check_frozen(layers)
        self.parts.append(CompiledGraph(layers, None, None, {**self.options}))
        self.forwards.append(0)

    def __call__(self, samples: Sequence[int] | Tensor, x: Tensor) -> Tensor:
        """The results of the layers for a batch; every process calls it with the same."""
        numbers = [int(each) for each in samples]
        if x.ndim == 0 or len(numbers) != x.shape[0]:
            raise SbpError(
                f"FrozenCache: {len(numbers)} numbers of samples for a batch {tuple(x.shape)}\n"
                "  give one for each, with the samples along the first dim"
            )
        whole = x.full_tensor() if isinstance(x, GlobalTensor) else x
        sums = [crc32(row.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()) for row in _lines(whole)]
        self._check_weights()
        for number, mine in zip(numbers, sums, strict=True):
            if number in self._kept and self._kept[number][0] != mine:
                raise SbpError(
                    f"FrozenCache: sample {number} came with other values than before\n"
                    "  a number stands for one sample: number them by their place in the data set, and leave out what "
                    "changes them at random; or run the layers without a cache"
                )
        depths = {self._kept[number][1] if number in self._kept else 0 for number in numbers}
        first = depths.pop() if len(depths) == 1 else 0
        value = torch.stack([self._kept[n][2] for n in numbers]).to(x.device) if first else whole
        for at in range(first, len(self.parts)):
            value = self._run(at, value)
        if first < len(self.parts):
            for number in numbers:  # before any of them is kept anew, so that these make room for no other
                self._forget(number)
            for number, mine, row in zip(numbers, sums, value.cpu(), strict=True):
                self._keep(number, mine, row)
        return value

    def _keep(self, number: int, mine: int, row: Tensor) -> None:
        """One sample more, or anew, in the place of the first ones where there is no room for all."""
        self._forget(number)
        self._kept[number] = mine, len(self.parts), row.clone()
        self.nbytes += row.nbytes
        while self.limit is not None and self.nbytes > self.limit:
            self._forget(next(iter(self._kept)))
            self.dropped += 1

    def _forget(self, number: int) -> None:
        if number in self._kept:
            self.nbytes -= self._kept.pop(number)[2].nbytes

    def _run(self, at: int, x: Tensor) -> Tensor:
        part = self.parts[at]
        with torch.no_grad():
            self._check(at, x)
            made = part(x)
        self.forwards[at] += 1
        if not isinstance(made, GlobalTensor) or made.shape[:1] != x.shape[:1]:
            raise SbpError(
                f"FrozenCache: {type(part.model).__name__} does not return a tensor with a row for each sample\n"
                "  give it layers that take and return one tensor, with samples along the first dim"
            )
        return made.full_tensor().to(x.device)

    def _check(self, at: int, x: Tensor) -> None:
        """Refuse what is not the same each time, of a sample by itself."""
        part = self.parts[at]
        _check_frozen(part.model)
        key = at, tuple(x.shape), x.dtype, tuple(module.training for module in part.model.modules())
        if key in self._checked:
            return
        graph = part.step_for(x).graph
        drawn = next((op for op in graph.steps if isinstance(op, Op) and draws(op)), None)
        if drawn is not None:
            raise SbpError(
                f"FrozenCache: {drawn.op} at {drawn.origin.line or 'no line'} draws random numbers, others each time\n"
                "  kept results would have those of the first time; have frozen layers evaluate: layers.eval()"
            )
        if graph.writes:
            raise SbpError(
                f"FrozenCache: the buffer {next(iter(graph.writes))} is changed by each run of frozen layers\n"
                "  it would stay as it is where these are not run; have them evaluate: layers.eval()"
            )
        if x.shape[0] > 1:  # planned in two halves, which is refused where samples are mixed
            halves: GivenOptions = {**self.options, "micro_batches": 2}
            pieces = CompiledGraph(part.model, None, None, halves).step_for(x).plan.pieces
            assert pieces is not None
            micros = [each.micro for each in pieces.sized.values()]
            mixed = any(micro.shares or any(not known.constant for known in micro.known) for micro in micros)
            if mixed or pieces.late is not None:
                raise SbpError(
                    f"FrozenCache: {type(part.model).__name__} makes something of a whole batch, which the next may "
                    "have other samples in\n  give it layers that treat every sample by itself"
                )
        self._checked.add(key)

    def _check_weights(self) -> None:
        """Forget all where a frozen weight or buffer has other values; that it lies elsewhere is no change."""
        held = [x for part in self.parts for x in (*part.model.parameters(), *part.model.buffers())]
        now = [_stamp(x) for x in held]
        if [stamp for stamp, _ in self._seen[: len(now)]] == now:
            return
        sums = [_sum(x) for x in held]
        common = min(len(sums), len(self._seen))
        if [each for _, each in self._seen[:common]] != sums[:common]:
            self._kept.clear()
            self.nbytes = 0
        self._seen = list(zip(now, sums, strict=True))


def _check_frozen(layers: nn.Module) -> None:
    trains = next((name for name, x in layers.named_parameters() if x.requires_grad), None)
    if trains is not None:
        raise SbpError(
            f"FrozenCache: {trains} of {type(layers).__name__} is not frozen, so kept results would be of old weights\n"
            "  freeze it first: layers.requires_grad_(False)"
        )


def _lines(x: Tensor) -> Sequence[Tensor]:
    return x.reshape(x.shape[0], -1).unbind()


def _stamp(x: Tensor) -> tuple[Any, ...]:
    """Tensors and their memory with versions; all of it is held, so that no other comes to lie where it did."""
    shards = x._shards if isinstance(x, GlobalTensor) else (x,)
    held = [(shard, shard.untyped_storage()) for shard in shards]
    return tuple([(ByIdentity(of), ByIdentity(memory), of.data_ptr(), version(of)) for of, memory in held])


def _sum(x: Tensor) -> int:
    whole = x.detach().full_tensor() if isinstance(x, GlobalTensor) else x.detach()
    return crc32(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
