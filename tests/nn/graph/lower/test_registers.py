"""Registers print as they are called, and say what they hold."""

import copy
import pickle
from typing import get_args

import pytest

from sbpflow.nn.graph.lower.registers import Contents, LocalRegister, values_of


@pytest.mark.parametrize("kind", get_args(Contents))
def test_a_copy_of_a_register_holds_the_same(kind: Contents) -> None:
    register = LocalRegister(kind, "x", 3)
    for same in (copy.deepcopy(register), pickle.loads(pickle.dumps(register))):
        assert same == register
        assert (same.kind, same.of, same.number) == (kind, "x", 3)


def test_registers_of_different_contents_are_called_differently() -> None:
    kinds = get_args(Contents)
    assert len({LocalRegister(kind, "x", 3) for kind in kinds}) == len(kinds)


def test_a_value_called_as_a_gradient_is_none() -> None:
    (value,) = values_of(["d x"])
    assert LocalRegister("d", "x").is_gradient
    assert not value.is_gradient
