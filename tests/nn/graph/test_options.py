"""Options are checked once, where a graph is made."""

from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow.actors import Schedule, published
from sbpflow.nn.graph.options import Options


def test_an_option_that_there_is_not_is_an_error_with_the_one_that_was_meant() -> None:
    options: dict[str, Any] = {"micro_batch": 4}
    with pytest.raises(
        flow.SbpError, match=r"Linear: there is no option micro_batch=\n  did you mean 'micro_batches='\?"
    ):
        flow.compile(torch.nn.Linear(2, 2), **options)
    options = {"zzz": 1}
    with pytest.raises(flow.SbpError, match=r"there are placement=, backend=, memory=, "):
        flow.compile(torch.nn.Linear(2, 2), **options)


@pytest.mark.parametrize("given", ["zb_h1", "schedule mine\nact p-s", published("zb_h1"), None], ids=repr)
def test_a_schedule_is_read_once(given: str | Schedule | None) -> None:
    options = Options(micro_batches=4, schedule=given)
    assert options.policy is options.policy
    assert isinstance(options.policy, Schedule)
    assert options.piped


def test_slices_go_by_terapipe() -> None:
    assert Options(slices=2).policy.name == "terapipe"
    assert not Options().piped
