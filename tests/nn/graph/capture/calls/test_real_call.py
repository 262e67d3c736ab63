"""A batch of the wrong dtype or size is torch's own error, as without a graph, with the user's line and a way out."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from tests.nn.graph.alike import LINE

Loss = Callable[..., Tensor]


class Image(nn.Sequential):
    """Layers of images, each of which checks dtypes in its own words."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def square(model: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = model(x)
    return made.square().mean()


def classes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def chances(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(x), y)


def normed(model: Any, x: Tensor) -> Tensor:
    made: Tensor = model[1](x)
    return made.sum()


def attended(model: nn.Module, x: Tensor) -> Tensor:
    q = model(x)[None]
    return F.scaled_dot_product_attention(q, q, x[None, :, :4].double()).sum()


IMAGES = torch.ones(2, 3, 4, 4)
WRONG: dict[str, tuple[Callable[[], nn.Module], Loss, tuple[Tensor, ...]]] = {
    "int": (mlp, square, (torch.ones(4, 6, dtype=torch.int32),)),
    "int of 3 dims": (mlp, square, (torch.ones(2, 3, 6, dtype=torch.int64),)),
    "bool": (mlp, square, (torch.ones(4, 6, dtype=torch.bool),)),
    "float64": (mlp, square, (torch.ones(4, 6, dtype=torch.float64),)),
    "bfloat16": (mlp, square, (torch.ones(4, 6, dtype=torch.bfloat16),)),
    "width": (mlp, square, (torch.ones(4, 7),)),
    "norm of float64": (mlp, normed, (torch.ones(4, 8, dtype=torch.float64),)),
    "norm of a width": (mlp, normed, (torch.ones(4, 6),)),
    "attention of float64": (mlp, attended, (torch.ones(4, 6),)),
    "images of float64": (Image, square, (IMAGES.double(),)),
    "images of bytes": (Image, square, (IMAGES.to(torch.uint8),)),
    "channels": (Image, square, (torch.ones(2, 4, 4, 4),)),
    "tokens of floats": (lambda: nn.Embedding(9, 4), square, (torch.ones(2, 3),)),
    "classes of int32": (mlp, classes, (torch.ones(4, 6), torch.ones(4, dtype=torch.int32))),
    "classes of floats": (mlp, classes, (torch.ones(4, 6), torch.ones(4))),
    "fewer classes than samples": (mlp, classes, (torch.ones(8, 6), torch.ones(6, dtype=torch.int64))),
    "chances of ints": (mlp, chances, (torch.ones(4, 6), torch.ones(4, 4, dtype=torch.int64))),
}


@pytest.mark.parametrize("many", [1, 2], ids=["straight", "micro_batches"])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_batch_is_torchs_own_error_with_the_line(case: str, many: int) -> None:
    made, loss, batch = WRONG[case]
    with pytest.raises((RuntimeError, ValueError)) as plain:
        torch.autograd.backward(loss(made(), *batch))
    model = made()
    step = flow.compile(model, loss, torch.optim.SGD(model.parameters()), placement=LINE, micro_batches=many)
    with pytest.raises(plain.type, match=re.escape(str(plain.value))) as caught:
        step(*batch)
    assert re.search(r"captured: aten\.\w+\.\w+ at .*test_real_call\.py:\d+", "".join(caught.value.__notes__))


@pytest.mark.parametrize(
    ("case", "way_out"),
    [("int", r"input.to\(torch.float32\)"), ("float64", r"input.to\(torch.float32\)"),
     ("classes of int32", r"target.to\(torch.int64\)"), ("chances of ints", r"target.to\(torch.float32\)")],
)  # fmt: skip
def test_the_way_out_of_a_wrong_dtype_was_tried(case: str, way_out: str) -> None:
    made, loss, batch = WRONG[case]
    with pytest.raises(RuntimeError) as caught:
        flow.compile(made(), loss, placement=LINE)(*batch)
    assert re.search(rf"\n  of \w+ \(4, \d\).*\n  with {way_out} it runs$", caught.value.__notes__[0])


def test_dtypes_that_go_together_are_captured_as_before() -> None:
    model = nn.Embedding(9, 4)
    tokens, values = torch.ones(4, dtype=torch.int32), torch.ones(4, 4, dtype=torch.float64)
    step = flow.compile(model, lambda model, x, y: (model(x) * y).sum(), placement=LINE)
    with torch.no_grad():
        assert torch.equal(step(tokens, values).full_tensor(), (model(tokens) * values).sum())
