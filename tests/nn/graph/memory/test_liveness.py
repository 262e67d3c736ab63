"""The peak that is worked out is the peak that is measured."""

import weakref
from collections.abc import Callable
from threading import RLock
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sbpflow import B, P, S
from sbpflow.boxing.graph.buckets import bucketed
from sbpflow.boxing.graph.physical import Physical
from sbpflow.nn.graph.run.program import Program
from sbpflow.placement.world import owned
from sbpflow.sbp.call import tensors_in
from tests.ranks import Ranks

from ..graphs import GRID, LINE, Build, aten, sharded_parameters, shards_of, total, wholes


class Bytes:
    """The bytes of storages that are counted, until they are gone; by any thread."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.known: set[int] = set()
        self.lock = RLock()  # a storage may go while another is counted

    def made(self, storage: torch.UntypedStorage) -> None:
        with self.lock:
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())

    def there(self, storage: torch.UntypedStorage) -> None:
        """Not to be counted; once it is gone, another may come to lie where it was."""
        with self.lock:
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                weakref.finalize(storage, self.gone, storage._cdata, 0)

    def gone(self, key: int, nbytes: int) -> None:
        with self.lock:
            self.known.discard(key)
            self.live -= nbytes


class Live(TorchDispatchMode):
    """Counts the bytes of storages that ops make, until they are gone; in one thread, but for `beside`."""

    def __init__(self, count: Bytes | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = count or Bytes()

    @property
    def known(self) -> set[int]:
        return self.count.known

    @property
    def peak(self) -> int:
        return self.count.peak

    def beside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with what it makes counted too, whichever thread calls it."""

        def counted(*args: Any) -> Any:
            with Live(self.count):
                return function(*args)

        return counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What was there before, as the mailboxes of a host's ranks, is not the step's.
        for x in tensors_in((args, kwargs)):
            self.count.there(x.untyped_storage())
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(out):
            self.count.made(x.untyped_storage())
        return out


def measured(graph: Physical, program: Program) -> int:
    """Bytes of the sources held here, and of all that a step makes at its peak."""
    shards = shards_of(graph, wholes(graph))
    held = [x for each in shards.values() for x in each]
    program(shards)
    live = Live()
    live.known.update(x.untyped_storage()._cdata for x in held)
    with live:
        outcome = program(shards)
    assert outcome.values
    return live.peak + sum(x.untyped_storage().nbytes() for x in held)


def gpt(layers: int = 4, width: int = 32, rows: int = 8, length: int = 16) -> Physical:
    """Blocks of attention and an MLP, tensor parallel on one axis and data parallel on the other."""
    b = Build(GRID)
    lie, both = (S(0), B), (S(0), S(2))
    at = b.input("at", (rows, length), (S(0), B), torch.int64)
    table = b.source("table", (64, width), (B, B), (P, B))
    x = b.op(aten.embedding.default, table, at, out=lie)
    for layer in range(layers):
        b.block = f"blocks.{layer}"
        for half in ("attention", "mlp"):
            g = b.source(f"g{layer}{half}", (width,), (B, B), (P, B))
            y = b.box(b.op(aten.layer_norm.default, x, [width], g, out=lie), lie, (S(0), P))
            if half == "attention":
                heads = []
                for kind in "qkv":
                    w = b.source(f"{kind}{layer}", (width, width), (B, S(0)), (P, S(0)))
                    h = b.op(aten.linear.default, y, w, out=both)
                    h = b.op(aten.view.default, h, [rows, length, 4, width // 4], out=both)
                    heads.append(b.op(aten.transpose.int, h, 1, 2, out=(S(0), S(1))))
                z = b.op(aten.scaled_dot_product_attention.default, *heads, None, 0.0, True, out=(S(0), S(1)))
                z = b.op(aten.transpose.int, z, 1, 2, out=both)
                z, inner = b.op(aten.reshape.default, z, [rows, length, width], out=both), width
            else:
                w = b.source(f"up{layer}", (4 * width, width), (B, S(0)), (P, S(0)))
                z, inner = b.op(aten.gelu.default, b.op(aten.linear.default, y, w, out=both), out=both), 4 * width
            w = b.source(f"down{layer}{half}", (width, inner), (B, S(1)), (P, S(1)))
            z = b.box(b.op(aten.linear.default, z, w, out=(S(0), P)), lie)
            x = b.op(aten.add.Tensor, x, z, out=lie)
    b.block = ""
    return b.graph(total(b, x, (P, B)))


GRAPHS: dict[str, Callable[[], Physical]] = {
    "GPT": gpt,
    "GPT in buckets": lambda: bucketed(gpt()),
    "ZeRO-3": lambda: sharded_parameters(6, size=64),
}


def peaks(name: str) -> tuple[int, int]:
    graph = GRAPHS[name]()
    program = Program(graph)
    (rank,) = owned(LINE)
    return measured(graph, program), program.memory()[rank].total


@pytest.mark.parametrize("name", GRAPHS)
def test_the_peak_of_a_real_rank_is_known(ranks4: Ranks, name: str) -> None:
    for found, known in ranks4(peaks, name):
        assert known == pytest.approx(found, rel=0.15)


def test_the_peak_of_simulated_ranks_is_that_of_all() -> None:
    graph = gpt()
    program = Program(graph)
    assert sum(of.total for of in program.memory().values()) == pytest.approx(measured(graph, program), rel=0.15)


def test_its_parts_are_what_they_are_called() -> None:
    graph = sharded_parameters(6, size=64)
    memory = Program(graph).memory()[0]
    assert memory.parameters == memory.gradients == 6 * (64 * 64 + 64) * 8 // 4
    whole = Program(graph, backend="autograd").memory()[0]  # which keeps what it gathered for the backward
    assert whole.activations > memory.activations + 3 * 64 * 64 * 8
    assert memory.total == memory.parameters + memory.gradients + memory.activations
