"""Mistakes in what `flow.compile` is given, or around a step: each works as in torch, or is told with a fix."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpflow as flow
from tests.nn.graph.alike import LINE, batch, loss_fn, net, same, sgd

HERE = "test_misused.py"


def compiled(model: Any, loss: Any = loss_fn, **options: Any) -> Any:
    return flow.compile(model, loss, sgd(model), placement=LINE, **options)


def part_compiled(model: Any) -> Any:
    model[0] = torch.compile(model[0])
    return model


def test_an_optimizer_in_the_place_of_the_loss() -> None:
    model: Any = net()
    with pytest.raises(flow.SbpError, match=r"^compile with SGD for a loss function\n  give it loss_fn\(model"):
        flow.compile(model, sgd(model), placement=LINE)  # type: ignore[call-overload]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (torch.compile, r"the model was compiled by torch\.compile.*_orig_mod"),
        (part_compiled, r"0 was compiled by torch\.compile"),
        (torch.jit.script, r"the model was compiled by torch\.jit.*that it was made of"),
    ],
    ids=["whole", "part", "script"],
)
def test_a_model_that_was_compiled_elsewhere(made: Callable[[Any], Any], said: str) -> None:
    """A bare KeyError 'training', and a TypeError of C++."""
    with pytest.raises(flow.SbpError, match=f"(?s)^{said}"):
        compiled(made(net()))(*batch())


def test_torch_compile_of_a_step_runs_the_step() -> None:
    model = net()
    other = copy.deepcopy(model)
    step: Any = torch.compile(compiled(model))
    same(step(*batch()), loss_fn(other, *batch()))


@pytest.mark.parametrize(
    "draw",
    [lambda x, g: x + torch.rand(x.shape, generator=g), lambda x, g: x.clone().uniform_(generator=g)],
    ids=["rand", "in place"],
)
def test_a_generator_is_told_with_the_line(draw: Any) -> None:
    generator = torch.Generator()
    step = compiled(net(), lambda model, x, y: loss_fn(model, draw(x, generator), y))
    with pytest.raises(flow.SbpError, match=rf"^capture: .* a generator of its own, at .*{HERE}:\d+\n.*manual_seed"):
        step(*batch())


def test_a_step_under_inference_mode_computes_and_the_model_goes_on_training() -> None:
    """It ended in "Inference tensors do not track version counter", with weights that nobody could train."""
    model = net()
    other = copy.deepcopy(model)
    step, optimizer = compiled(model), sgd(other)
    with torch.inference_mode():
        same(step(*batch()), loss_fn(other, *batch()))
    for _ in range(2):
        optimizer.zero_grad()
        want: Any = loss_fn(other, *batch())
        want.backward()
        optimizer.step()
        same(step(*batch()), want)


@pytest.mark.parametrize("labels", [7, -1])
def test_a_label_out_of_range_names_the_line_that_takes_it(labels: int) -> None:
    x, y = batch()
    step = compiled(net(), lambda model, x, y: F.cross_entropy(model(x), y))
    with pytest.raises((RuntimeError, IndexError)) as caught:
        step(x, torch.full_like(y, labels))
    assert re.search(rf"in the step Sequential, .* cross_entropy_loss at .*{HERE}:\d+", caught.value.__notes__[0])


def test_an_index_out_of_range_names_the_line_that_takes_it() -> None:
    model: Any = nn.Embedding(4, 8)
    step: Any = flow.compile(model, lambda model, x: model(x).sum(), sgd(model), placement=LINE)
    with pytest.raises(IndexError) as caught:
        step(torch.tensor([1, 2, 3, 4]))
    assert re.search(rf"embedding at .*{HERE}:\d+", caught.value.__notes__[0])


def test_clip_grad_value_behind_a_step_says_that_there_are_no_gradients() -> None:
    """It ended in "Expected !nested_tensorlist[0].empty()"; without the optimizer in the step it clips."""
    model, other = net(), net()
    compiled(model)(*batch())
    with pytest.raises(RuntimeError, match=rf"^clip_grad_value_ at .*{HERE}:\d+: none .*\n.*leave_gradients=True"):
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    alone = copy.deepcopy(other)
    flow.compile(other, loss_fn, placement=LINE)(*batch())
    loss_fn(alone, *batch()).backward()  # type: ignore[no-untyped-call]
    for each in (other, alone):
        nn.utils.clip_grad_value_(each.parameters(), 0.01)
        sgd(each).step()
    pairs: list[tuple[Any, Any]] = list(zip(other.parameters(), alone.parameters(), strict=True))
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.full_tensor(), theirs.detach())


@pytest.mark.parametrize("scaled", [lambda loss: loss * 2, lambda loss: loss / 4, lambda loss: loss + loss])
def test_backward_of_what_is_made_of_a_loss_says_where_to_scale_it(scaled: Callable[[Any], Tensor]) -> None:
    loss = compiled(net())(*batch())
    with pytest.raises(RuntimeError, match=rf"(?s)^element 0 of tensors .* at .*{HERE}:\d+\n.*own loss function"):
        scaled(loss).backward()  # type: ignore[no-untyped-call]
