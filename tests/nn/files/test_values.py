"""Values put together from tensors of files: a region of one is that region of what torch would have made."""

import random

import pytest
import torch
from torch import Tensor

from sbpflow.nn.files.values import (
    Concatenated,
    FileTensor,
    FileValue,
    Narrowed,
    Pieced,
    Region,
    Transposed,
    Unsqueezed,
    whole,
)
from sbpflow.placement.errors import DtypeError


class Memory:
    """Files that are tensors in memory, and how many elements were read of them."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.read_elements = 0

    def file_tensor(self, value: Tensor) -> FileTensor:
        name = f"t{len(self.held)}"
        self.held[name] = value
        return FileTensor("memory", name, tuple(value.shape), value.dtype)

    def fill_pieces(self, of: Pieced, out: Tensor, region: Region) -> None:
        raise AssertionError("nothing here is in pieces")

    def read(self, of: FileTensor, region: Region) -> Tensor:
        part = self.held[of.name][tuple(slice(lo, hi) for lo, hi in region)]
        self.read_elements += part.numel()
        return part


def grown(files: Memory, draw: random.Random, shape: tuple[int, ...], depth: int) -> tuple[FileValue, Tensor]:
    """A random tree of this shape, and the tensor that it stands for."""
    kind = draw.choice(["cat", "narrow", "transpose", "unsqueeze"]) if depth else "leaf"
    dim = draw.randrange(len(shape))
    if kind == "cat" and shape[dim] > 1:
        cut = draw.randrange(1, shape[dim])
        parts = [grown(files, draw, (*shape[:dim], n, *shape[dim + 1 :]), depth - 1) for n in (cut, shape[dim] - cut)]
        return Concatenated(tuple(v for v, _ in parts), dim), torch.cat([t for _, t in parts], dim)
    if kind == "narrow":
        value, tensor = grown(files, draw, (*shape[:dim], shape[dim] + 3, *shape[dim + 1 :]), depth - 1)
        return Narrowed(value, dim, 2, shape[dim]), tensor.narrow(dim, 2, shape[dim])
    if kind == "transpose" and len(shape) > 1:
        other = (dim + 1) % len(shape)
        swapped = list(shape)
        swapped[dim], swapped[other] = shape[other], shape[dim]
        value, tensor = grown(files, draw, tuple(swapped), depth - 1)
        return Transposed(value, (dim, other)), tensor.transpose(dim, other)
    if kind == "unsqueeze" and shape[dim] == 1 and len(shape) > 1:
        value, tensor = grown(files, draw, shape[:dim] + shape[dim + 1 :], depth - 1)
        return Unsqueezed(value, dim), tensor.unsqueeze(dim)
    tensor = torch.randint(10**6, shape)
    return files.file_tensor(tensor), tensor


@pytest.mark.parametrize("seed", range(40))
def test_a_region_is_that_of_the_tensor_and_nothing_else_is_read(seed: int) -> None:
    draw, files = random.Random(seed), Memory()
    torch.manual_seed(seed)
    shape = tuple(draw.choice([1, 3, 4, 6]) for _ in range(draw.choice([1, 2, 3])))
    value, tensor = grown(files, draw, shape, 4)
    assert value.shape == tuple(tensor.shape) == shape
    for _ in range(5):
        region = tuple(tuple(sorted(draw.choices(range(n + 1), k=2))) for n in shape)
        wanted = tensor[tuple(slice(lo, hi) for lo, hi in region)]
        out, before = torch.full(wanted.shape, -1), files.read_elements
        value.fill(out, region, files)  # type: ignore[arg-type]
        assert torch.equal(out, wanted)
        assert files.read_elements - before == wanted.numel()


@pytest.mark.parametrize(("given", "to"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64)])
def test_numbers_are_converted_as_torch_does(given: torch.dtype, to: torch.dtype) -> None:
    files, tensor = Memory(), torch.randn(4, 5).to(given)
    out = torch.empty(4, 5, dtype=to)
    files.file_tensor(tensor).fill(out, whole((4, 5)), files)
    assert torch.equal(out, tensor.to(to))


@pytest.mark.parametrize(
    ("given", "to", "large"),
    [
        (torch.float32, torch.float16, 1e5),
        (torch.bfloat16, torch.float16, -1e5),
        (torch.float64, torch.float32, 1e300),
        (torch.float32, torch.float8_e4m3fn, 1e6),  # torch makes it the largest
        (torch.float8_e5m2, torch.float8_e4m3fn, 1024.0),
    ],
)
def test_a_number_that_the_dtype_does_not_hold_is_an_error_and_infinity_is_none(
    given: torch.dtype, to: torch.dtype, large: float
) -> None:
    files, out = Memory(), torch.empty(3, dtype=to)
    files.file_tensor(torch.tensor([1.0, torch.inf, torch.nan]).to(given)).fill(out, ((0, 3),), files)
    assert out[0].item() == 1.0
    with pytest.raises(DtypeError, match=rf"^flow.load: t1 has numbers that {to} does not hold\n"):
        files.file_tensor(torch.tensor([1.0, large, torch.nan], dtype=torch.float64).to(given)).fill(
            out, ((0, 3),), files
        )
