"""The kernels of an optimizer's step are those that torch runs."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer, RMSprop

from sbpflow.nn.graph.optimizer.adopt import states_of
from sbpflow.nn.graph.optimizer.on_shards import ALONE
from sbpflow.sbp.kernels.update_kernels import ONE_KERNEL, UpdateKernels, update_kernels


def of(kind: type[Optimizer], **settings: Any) -> tuple[UpdateKernels, Optimizer]:
    made = kind([nn.Parameter(torch.ones(3, 5))], **settings)
    return update_kernels([made], states_of([made]), ALONE), made


@pytest.mark.parametrize(
    ("kind", "settings", "launches", "passes"),
    [
        (AdamW, {"fused": True}, 1, 7),
        # p *= d (2), m lerps to g (3), v *= b (2), v += g g (3), roots (2), by the bias (2), + eps (2), p += m / r (4)
        (AdamW, {}, 8, 20),
        (AdamW, {"foreach": True}, 8, 20),
        (AdamW, {"lr": torch.tensor(0.1)}, 8, 20),
        (SGD, {}, 1, 3),
        (SGD, {"momentum": 0.9}, 3, 8),
        (SGD, {"momentum": 0.9, "weight_decay": 0.1}, 4, 11),
        (RMSprop, {}, 5, 13),
        (Adagrad, {}, 4, 11),
    ],
)
def test_each_kernel_counts_with_what_it_reads_and_writes(
    kind: type[Optimizer], settings: dict[str, Any], launches: int, passes: int
) -> None:
    found, made = of(kind, **settings)
    assert (found.launches, found.more) == (launches, passes - (2 * states_of([made]) + 3))
    assert found.together


def test_one_kernel_a_parameter_is_said_by_who_asks_for_it() -> None:
    assert not of(AdamW, foreach=False)[0].together


def test_the_optimizer_that_is_asked_about_stays_as_it_is() -> None:
    made = AdamW([nn.Parameter(torch.ones(2))])
    made.register_step_pre_hook(lambda *_: pytest.fail("a step of it"))
    update_kernels([made], 2, ALONE)
    assert not made.state


def test_others_are_taken_for_one_kernel() -> None:
    assert of(Adafactor)[0] == ONE_KERNEL == update_kernels([], 0, ALONE)
