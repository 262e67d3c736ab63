"""Checksums that add up: whatever boxes a tensor is read in, and by whomever, the sums make that of the whole."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from sbpflow.nn.files.checksums import checksum
from sbpflow.nn.files.headers import DTYPES


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel()
    draw = torch.randint(2 if dtype is torch.bool else 256, (size * dtype.itemsize,), dtype=torch.uint8)
    return draw.view(dtype).reshape(shape)


def by_hand(part: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    places = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for d, (lo, size) in enumerate(zip(offsets, part.shape, strict=True)):
        places = places.narrow(d, lo, size)
    raw, width = part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), min(part.dtype.itemsize, 4)
    words = part.dtype.itemsize // width
    bits = [int.from_bytes(raw[at : at + width], "little", signed=True) for at in range(0, len(raw), width)]
    indices = [words * int(at) + word for at in places.reshape(-1).tolist() for word in range(words)]
    return sum(b * (at * (at + 1) + 1) for b, at in zip(bits, indices, strict=True)) % 2**64


SHAPES = [(), (1,), (7,), (3, 5), (1, 600), (5, 300), (70000,), (2, 40000), (2, 3, 4, 5), (0, 3), (2000, 3)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_by_hand(dtype: torch.dtype) -> None:
    x = numbers((4, 9), dtype)
    assert checksum(x[1:, 2:7], (1, 2), (4, 9)) == by_hand(x[1:, 2:7], (1, 2), (4, 9))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_add_up(shape: tuple[int, ...]) -> None:
    draw, x = random.Random(str(shape)), numbers(shape, torch.float32)
    whole, parts = checksum(x, (0,) * len(shape), shape), [(x, (0,) * len(shape))]
    assert whole == by_hand(x, (0,) * len(shape), shape)
    for _ in range(6):
        part, at = parts.pop(draw.randrange(len(parts)))
        if part.numel() < 2:
            parts.append((part, at))
            continue
        d = draw.choice([d for d, size in enumerate(part.shape) if size > 1])
        cut = draw.randrange(1, part.shape[d])
        parts.append((part.narrow(d, 0, cut), at))
        parts.append((part.narrow(d, cut, part.shape[d] - cut), (*at[:d], at[d] + cut, *at[d + 1 :])))
    assert sum(checksum(part, at, shape) for part, at in parts) % 2**64 == whole


def test_memory_in_another_order_has_the_same() -> None:
    x = numbers((6, 4, 5), torch.int16)
    for order in ((0, 2, 1), (2, 1, 0)):
        y = x.permute(order).contiguous().permute([order.index(d) for d in range(3)])
        assert y.stride() != x.stride()
        assert checksum(y, (0, 0, 0), (6, 4, 5)) == checksum(x, (0, 0, 0), (6, 4, 5))


def test_any_one_bit_and_any_swap_shows() -> None:
    x = numbers((40,), torch.int32)
    whole = checksum(x, (0,), (40,))
    for at in range(40):
        for bit in (0, 13, 31):
            y = x.clone()
            y[at] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            assert checksum(y, (0,), (40,)) != whole
    y = x.clone()
    y[3], y[17] = x[17], x[3]
    assert checksum(y, (0,), (40,)) != whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_wrong_everywhere_alike_shows(dtype: torch.dtype) -> None:
    """Signs of all elements, and zeros for a constant, in sizes that are powers of two."""
    for many in (2**10, 2**17, 2**21):
        x = torch.ones(many, dtype=dtype)
        sums = {checksum(y, (0,), (many,)) for y in (x, -x, 0 * x, 2 * x)}
        assert len(sums) == 4, many


def test_a_thread_that_begins_under_another_default_dtype() -> None:
    x = numbers((600,), torch.float32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(checksum, x, (600,), (1200,)).result()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == by_hand(x, (600,), (1200,))
