"""Times of kernels on one device: products by size, fused attention, sums, GELU, updates, empty kernels and copies.

All ranks of a host run the same kernel at once, again and again for a while, as cores, caches and memory are shared in
a step too. On a card the quickest of several runs counts, since other work only ever adds time. On a CPU one thread's
own time is looked at, to which other work on the machine adds little, and where there are fewer cores than ranks, as
many times of it as ranks share a core.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from math import inf, prod
from statistics import median
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from ..device import DeviceFamily, family, usable_cores

__all__ = ["KernelTime", "kernel_times"]

aten = torch.ops.aten
Kind = Literal["product", "attention", "pointwise", "function", "update", "launch", "call", "host", "copy"]
WHILE, RUNS = 0.05, 3  # seconds of a run, and how many
AHEAD = 10  # calls that a host is ahead of its card where the host is timed: a card's queue has room for their kernels
SHORT, MANY = 0.005, 15  # the same where a thread's own time is looked at, of which the middle counts


class KernelTime(NamedTuple):
    """A kernel, and its mean seconds in a run: FLOPs, bytes read and written, and bytes of the elements of which it
    evaluates a function, read and written, as often as it does."""

    kind: Kind
    dtype: str
    flops: float
    bytes: float
    seconds: float
    evaluated: float = 0.0


Make = Callable[[], Callable[[], object]]  # a kernel, with its tensors


class _Case(NamedTuple):
    kind: Kind
    dtype: torch.dtype
    flops: float
    bytes: float
    make: Make
    evaluated: float = 0.0
    kernels: float = 1.0  # of one call


# Rows, columns and what is summed over. Squares tell the rate, and the others that of layers.
PRODUCTS = {
    False: [
        *((64, 64, 64), (128, 128, 128), (256, 256, 256), (32, 512, 512), (256, 512, 128)),
        *((384, 384, 384), (64, 1024, 512), (512, 512, 512), (1024, 256, 256), (512, 128, 1024)),
    ],
    True: [
        *((256, 256, 256), (1024, 1024, 1024), (2048, 2048, 2048), (512, 4096, 4096), (4096, 4096, 1024)),
        *((4096, 4096, 4096), (64, 8192, 8192), (2048, 8192, 2048), (8192, 8192, 8192), (4096, 14336, 4096)),
    ],
}
DTYPES = {
    False: (torch.float32, torch.float64, torch.bfloat16),
    True: (torch.bfloat16, torch.float16, torch.float32),
}
# Samples, heads, words and features of a head.
ATTENTIONS = {
    False: [(1, 4, 128, 32), (2, 4, 128, 64), (1, 4, 256, 64), (2, 8, 256, 32)],
    True: [(2, 16, 1024, 64), (4, 16, 1024, 128), (1, 32, 4096, 128), (2, 16, 2048, 128)],
}
ELEMENTS = {
    False: [2**14, 2**16, 2**18, 2**19, 2**20, 2**21, 2**22, 2**23],
    True: [2**20, 2**22, 2**24, 2**25, 2**26, 2**27],
}
FUNCTIONS = 2**20  # elements: of more a CPU reads and writes so slowly that it evaluates functions meanwhile
UPDATES = {False: [2**14, 2**16, 2**18, 2**20], True: [2**20, 2**22, 2**24]}
# A step seldom reads what it has just read: bytes of inputs that are read in turn, more than caches hold, and how many.
COLD, MOST = {False: 2**26, True: 2**28}, 256
COPIED = {False: 2**23, True: 2**26}  # bytes


def kernel_times(device: torch.device, together: Callable[[], None], ranks: int = 1) -> list[KernelTime]:
    """The times of all kernels on a device; every rank of so many of this host calls it, and `together` returns once
    all are there."""
    found = []
    own = not family(device.type).card and torch.get_num_threads() == 1
    crowd = max(1.0, ranks / usable_cores()) if own else 1.0
    with torch.no_grad():
        for case in _cases(device):
            run = case.make()
            run()  # what comes first only
            if case.kind == "host":
                seconds = _quickest(partial(_launched, run, device), together, RUNS * AHEAD)
            elif own:
                seconds = crowd * _own(run, together)
            else:
                seconds = _quickest(partial(_mean, run, device), together)
            seconds /= case.kernels
            name = str(case.dtype).removeprefix("torch.")
            found.append(KernelTime(case.kind, name, case.flops, case.bytes, seconds, case.evaluated))
    return found


def _own(run: Callable[[], object], together: Callable[[], None]) -> float:
    """The thread's own seconds, in the middle of many runs: for one alone ranks would wait longer than it takes."""
    together()
    return median(_repeated(run, SHORT, time.thread_time) for _ in range(MANY))


def _quickest(timed: Callable[[], float], together: Callable[[], None], runs: int = RUNS) -> float:
    seconds = inf
    for _ in range(runs):
        together()
        seconds = min(seconds, timed())
    return seconds


def _launched(run: Callable[[], object], device: torch.device) -> float:
    """The host's mean seconds of a few calls whose kernels nobody waits for."""
    family(device.type).module.synchronize()
    start = time.perf_counter()
    for _ in range(AHEAD):
        run()
    return (time.perf_counter() - start) / AHEAD


def _mean(run: Callable[[], object], device: torch.device) -> float:
    """Mean seconds of a kernel that runs again and again for a while. On a card its own clock tells, of one kernel how
    many are a while, too: the host is done with a kernel long before the card is."""
    kind = family(device.type)
    if not kind.card:
        return _repeated(run, WHILE, time.perf_counter)
    once = _by_card(kind, run, 1)
    return _by_card(kind, run, max(1, int(WHILE / max(once, 1e-6))))


def _by_card(kind: DeviceFamily, run: Callable[[], object], many: int) -> float:
    """Mean seconds of so many kernels, one behind the other, by the clock of the card."""
    kind.module.synchronize()
    first, last = (kind.module.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(many):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3 / many


def _repeated(run: Callable[[], object], least: float, clock: Callable[[], float]) -> float:
    many, each, start = 0, 1, clock()
    while True:
        for _ in range(each):
            run()
        many += each
        spent = clock() - start
        if spent >= least:
            return spent / many
        each = max(1, min(many, 1000))  # so that looking at the clock takes no time beside what is timed


def _cases(device: torch.device) -> Iterator[_Case]:
    card = family(device.type).card
    tiny = torch.zeros(8, device=device)
    yield _Case("launch", torch.float32, 0.0, 0.0, lambda: lambda: torch.add(tiny, tiny))
    small = torch.zeros(4, 4, device=device)
    yield _Case("launch", torch.float32, 0.0, 0.0, lambda: lambda: torch.mm(small, small))
    yield _Case("host" if card else "call", torch.float32, 0.0, 0.0, _block(device), kernels=BLOCK)
    for dtype in DTYPES[card]:
        for rows, columns, inner in PRODUCTS[card]:
            size = (rows * columns + rows * inner + columns * inner) * dtype.itemsize
            make = _product(rows, columns, inner, dtype, device)
            yield _Case("product", dtype, 2.0 * rows * columns * inner, size, make)
    dtype = DTYPES[card][0]
    for shape in ATTENTIONS[card]:
        samples, heads, words, wide = shape
        flops = 0.5 * 4 * samples * heads * words * words * wide  # causal
        size = 4 * samples * heads * words * wide * dtype.itemsize
        yield _Case("attention", dtype, flops, size, _attention(shape, dtype, device))
    for many in ELEMENTS[card]:
        yield _Case("pointwise", torch.float32, 0.0, 3.0 * many * 4, _sum(many, device))
        if card or many <= FUNCTIONS:
            # Forward and backward in turn: two and three tensors, one function and two of each element.
            yield _Case("function", torch.float32, 0.0, 2.5 * many * 4, _function(many, device), 3.0 * many * 4)
    for many in UPDATES[card]:
        yield _Case("update", torch.float32, 0.0, 7.0 * many * 4, _update(many, device))
    yield _Case("copy", torch.uint8, 0.0, COPIED[card], _copy(COPIED[card], device))


def _product(rows: int, columns: int, inner: int, dtype: torch.dtype, device: torch.device) -> Make:
    """The product of a layer, and in turn with it those of its backward."""

    def make() -> Callable[[], object]:
        sizes = (rows, inner), (columns, inner), (rows, columns)
        many = _copies(sum(a * b for a, b in sizes) * dtype.itemsize, device)
        given = [tuple(torch.randn(size, device=device).to(dtype) for size in sizes) for _ in range(many)]
        forms: tuple[Callable[..., object], ...] = (
            lambda x, w, g: F.linear(x, w),
            lambda x, w, g: g @ w,
            lambda x, w, g: g.t() @ x,
        )
        return _in_turn([partial(form, *each) for each in given for form in forms])

    return make


def _attention(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Make:
    return _of(3, shape, dtype, device, partial(F.scaled_dot_product_attention, is_causal=True))


def _sum(many: int, device: torch.device) -> Make:
    return _of(2, (many,), torch.float32, device, torch.add)


def _function(many: int, device: torch.device) -> Make:
    """A GELU, and its backward."""

    def make() -> Callable[[], object]:
        forms: tuple[Callable[..., object], ...] = (lambda x, g: F.gelu(x), lambda x, g: aten.gelu_backward(g, x))
        times = _copies(2 * many * 4, device)
        given = [(torch.randn(many, device=device), torch.randn(many, device=device)) for _ in range(times)]
        return _in_turn([partial(form, *each) for each in given for form in forms])

    return make


def _update(many: int, device: torch.device) -> Make:
    """A step of AdamW, fused, whose parameters and states are read in turn."""

    def make() -> Callable[[], object]:
        one = torch.ones((), device=device)
        numbers = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
        flags = {"amsgrad": False, "maximize": False}
        given = [
            [[torch.randn(many, device=device).abs()] for _ in range(4)] for _ in range(_copies(16 * many, device))
        ]
        step = partial(aten._fused_adamw_, max_exp_avg_sqs=[], state_steps=[one], **numbers, **flags)
        return _in_turn([partial(_stepped, step, *each) for each in given])

    return make


def _stepped(step: Callable[..., object], *given: object) -> None:
    parameters, gradients, means, squares = given
    step(parameters, gradients, means, squares)


# Kernels of a block, forward and backward, as they are priced: two norms (1 and 2 each), six products (1 and 2), two
# sums, attention and a GELU (1 and 1).
BLOCK = 2.0 * 3 + 6 * 3 + 2 * 2 + 2 + 2


def _block(device: torch.device) -> Make:
    """A transformer's block with next to nothing to compute, and its backward: what is left is the host's part of it,
    that of Python, of torch's dispatch and of autograd."""

    def make() -> Callable[[], object]:
        wide, heads = 16, 4
        with torch.enable_grad():
            x, a, b = (
                torch.randn(size, device=device, requires_grad=True) for size in ((1, 4, wide), (wide,), (wide,))
            )
            weights = [torch.randn(wide, wide, device=device, requires_grad=True) for _ in range(6)]
        q, k, v, out, up, down = weights

        def run() -> object:
            with torch.enable_grad():
                h = F.layer_norm(x, (wide,), a, b)
                one, two, three = (F.linear(h, w).view(1, 4, heads, wide // heads).transpose(1, 2) for w in (q, k, v))
                seen = F.scaled_dot_product_attention(one, two, three, is_causal=True)
                y = seen.transpose(1, 2).reshape(1, 4, wide)
                y = x + F.linear(y, out)
                h = F.layer_norm(y, (wide,), a, b)
                y = y + F.linear(F.gelu(F.linear(h, up)), down)
                return torch.autograd.grad(y, [x, a, b, *weights], torch.ones_like(y))

        return run

    return make


def _of(
    inputs: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, kernel: Callable[..., object]
) -> Make:
    def make() -> Callable[[], object]:
        many = _copies(inputs * prod(shape) * dtype.itemsize, device)
        given = [[torch.randn(shape, device=device).to(dtype) for _ in range(inputs)] for _ in range(many)]
        return _in_turn([partial(kernel, *each) for each in given])

    return make


def _copies(size: int, device: torch.device) -> int:
    """How many sets of inputs of so many bytes are read in turn, until the first is in no cache any more."""
    return min(MOST, 1 + COLD[family(device.type).card] // max(size, 1))


def _in_turn(kernels: Sequence[Callable[[], object]]) -> Callable[[], object]:
    each = cycle(kernels)
    return lambda: next(each)()


def _copy(size: int, device: torch.device) -> Make:
    def make() -> Callable[[], object]:
        here = torch.zeros(size, dtype=torch.uint8, device=device)
        host = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu")
        return lambda: host.copy_(here, non_blocking=True)

    return make
