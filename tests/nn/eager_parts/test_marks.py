"""Marks of eager parts change nothing of eager code, are taken back, and go along with copies."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.eager_parts.marks import EagerForward, EagerFunction, eager_of
from sbpflow.placement.errors import PlacementError, SbpError


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2

    @flow.nn.eager
    def tripled(self, x: Tensor) -> Tensor:
        return x * 3


def test_a_module_is_marked_in_place_and_computes_what_it_did() -> None:
    module = Doubles()
    assert flow.nn.eager(module) is module
    assert module(torch.ones(2)).tolist() == [2, 2]
    assert eager_of({"": nn.Sequential(nn.Tanh(), module)}) == {"1": "eager"}


def test_a_mark_is_taken_back() -> None:
    module = flow.nn.eager(flow.nn.eager(Doubles()))
    assert "forward" not in vars(flow.nn.eager(module, None))
    own = Doubles()
    own.forward = lambda x: x * 5  # type: ignore[method-assign]
    assert flow.nn.eager(own)(torch.ones(1)).tolist() == [5]
    assert flow.nn.eager(own, None)(torch.ones(1)).tolist() == [5]


def test_a_copy_is_marked_too_and_calls_itself() -> None:
    module = flow.nn.eager(nn.Linear(2, 2))
    for other in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(vars(other)["forward"], EagerForward)
        assert torch.equal(other(torch.ones(1, 2)), module(torch.ones(1, 2)))


def test_a_function_is_returned_marked() -> None:
    @flow.nn.eager
    def half(x: Tensor) -> Tensor:
        """Half of it."""
        return x / 2

    assert isinstance(half, EagerFunction)
    assert (half.__name__, half.__doc__) == ("half", "Half of it.")
    assert half(torch.ones(1)).item() == 0.5
    assert flow.nn.eager(half) is half
    assert not isinstance(flow.nn.eager(half, None), EagerFunction)


def test_a_marked_method_is_called_with_its_object() -> None:
    assert Doubles().tripled(torch.ones(1)).item() == 3


def test_annotations_tell_of_marks() -> None:
    assert "eager" in str(flow.nn.annotations(nn.Sequential(flow.nn.eager(nn.Linear(2, 2)))))


def test_what_is_no_module_or_is_never_called_cannot_be_marked() -> None:
    with pytest.raises(PlacementError, match=r"expected a module.*found str"):
        flow.nn.eager(["criterion"])  # type: ignore[type-var]
    with pytest.raises(SbpError, match=r"ModuleList is never called"):
        flow.nn.eager(nn.ModuleList([nn.Linear(2, 2)]))
