"""Trees: what is put away comes back, of the same types, and what cannot be put away is named."""

import json
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sbpflow.nn.checkpoint.trees import decoded, encoded
from sbpflow.placement.errors import SbpError

VALUES: list[Any] = [
    None, True, 3, -(2**70), 2.5, float("inf"), "text", 1 + 2j, (1, (2, [])), [None, {"a": {}}], {"$tensor": 1},
    {3: "x"},
    {(1, 2): [3]}, {1, 2}, frozenset({"a"}), Counter({5: 2}), deque([1, 2]), OrderedDict(b=1, a=2), torch.bfloat16,
    torch.device("cpu"), b"\x00\xff", b"", np.float32(0.1), np.int64(7), torch.Size([2, 3]),
]  # fmt: skip


def back(value: Any) -> Any:
    held: dict[str, Tensor] = {}
    text = json.dumps(encoded(value, "x", held.__setitem__), allow_nan=False)
    return decoded(json.loads(text), held.__getitem__)


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_comes_back(value: Any) -> None:
    found = back({"here": [value]})["here"][0]
    assert found == (list(value) if isinstance(value, torch.Size) else value)
    assert type(found) is (list if isinstance(value, torch.Size) else type(value))


def test_nan_arrays_and_tensors_come_back() -> None:
    x = torch.randn(3)
    found = back({"a": x, "b": np.arange(6).reshape(2, 3), "c": float("nan")})
    assert found["a"] is x
    assert np.array_equal(found["b"], np.arange(6).reshape(2, 3))
    assert found["c"] != found["c"]


def test_what_is_no_number_or_text_is_named() -> None:
    with pytest.raises(SbpError, match=r"extra\.loop\.at\.1 is a function(.|\n)*no pickle is written"):
        encoded({"at": [1, len.__class__ and test_a_value_comes_back]}, "extra.loop", lambda name, value: None)


def test_states_of_every_scheduler_come_back() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    S = torch.optim.lr_scheduler
    made = [
        S.StepLR(optimizer, 2), S.MultiStepLR(optimizer, [1, 4, 4]), S.CosineAnnealingLR(optimizer, 10),
        S.OneCycleLR(optimizer, 1.0, total_steps=20), S.ReduceLROnPlateau(optimizer), S.CyclicLR(optimizer, 0.1, 1.0),
        S.LambdaLR(optimizer, lambda at: 0.9**at), S.LinearLR(optimizer), S.CosineAnnealingWarmRestarts(optimizer, 3),
        S.SequentialLR(optimizer, [S.ConstantLR(optimizer), S.ExponentialLR(optimizer, 0.9)], [2]),
    ]  # fmt: skip
    for each in made:
        state = each.state_dict()
        found = back(state)
        assert found == state, type(each)
        each.load_state_dict(found)
