"""Plans over played cards learn what the host learns: shards of states, gradients and weights, recomputation, copies on
the host, micro-batches, owners.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow

from .host import as_on_host, batch, cross_entropy, net, steps

PLANS = {
    "data": "grid (data=4)",
    "ZeRO-1": "grid (data=4)\nstates **: data=S(0)",
    "ZeRO-2": "grid (data=4)\n{grads,states} **: data=S(0)",
    "ZeRO-3": "grid (data=4)\n**: data=S(0)",
    "tensor": "grid (tensor=2)\nlayers.*.up.weight: tensor=S(0)\nlayers.*.down.weight: tensor=S(1)",
    "tensor and ZeRO-3": "grid (data=2, tensor=2)\nlayers.*.up.weight: tensor=S(0)\n**: data=S(0)",
    "accumulates": "grid (data=2)\n4 micro-batches",
    "accumulates, ZeRO-2": "grid (data=2)\n4 micro-batches\n{grads,states} **: data=S(0)",
    "recomputes": "grid (data=2)\nrecompute layers.*",
    "recomputes, ZeRO-3": "grid (data=2)\n**: data=S(0)\nrecompute layers.* keep mm",
    "states on the host": "grid (data=2)\noffload states ** to cpu",
    "states on the host, ZeRO-1": "grid (data=4)\nstates **: data=S(0)\noffload states ** to cpu",
    "states on the host, ahead": "grid (data=2)\nstates **: data=S(0)\noffload states ** to cpu ahead 2",
    "states on disk": "grid (data=2)\noffload states ** to disk",
    "saved on the host": "grid (data=2)\noffload saved layers.* to cpu",
    "saved on the host, ahead": "grid (data=2)\noffload saved layers.* to cpu ahead 2",
    "saved on disk": "grid (data=2)\noffload saved layers.* to disk",
    "saved in a pipeline": "grid (pipe=2)\npipe layers over pipe by 1f1b, 4 micro-batches\n"
    "offload saved layers.* to cpu",
    "states of a pipeline": "grid (pipe=2, data=2)\npipe layers over pipe by zb_h1, 4 micro-batches\n"
    "states **: data=S(0)\noffload states ** to cpu",
    "ZeRO-3 in a pipeline": "grid (pipe=2, data=2)\npipe layers over pipe by 1f1b, 2 micro-batches\n**: data=S(0)",
    "recomputes in a pipeline": "grid (pipe=2)\npipe layers over pipe by 1f1b, 2 micro-batches\nrecompute layers.*",
}
USUAL = ["ZeRO-3", "states on the host", "saved on the host, ahead", "saved on disk", "accumulates, ZeRO-2"]
EVERY = [*USUAL, *(pytest.param(name, marks=pytest.mark.sweep) for name in PLANS if name not in USUAL)]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
}


def trained(plan: str, kind: str, make: str = "AdamW", **options: Any) -> list[Tensor]:
    model = net()
    said = plan.replace("grid (", f"grid {kind} (", 1)
    step = flow.compile(model, cross_entropy, OPTIMIZERS[make](model.parameters()), plan=said, **options)
    found = steps(model, step, kind)
    with torch.no_grad():
        found.append(step(*batch(9, kind)).full_tensor())
    return found


@pytest.mark.parametrize("name", EVERY)
def test_a_plan_learns_as_on_the_host(name: str) -> None:
    as_on_host(lambda kind: trained(PLANS[name], kind), 1e-11)


@pytest.mark.sweep
@pytest.mark.parametrize("make", ["SGD", "Adafactor"])
@pytest.mark.parametrize("name", ["ZeRO-1", "ZeRO-3", "states on the host", "states of a pipeline", "accumulates"])
def test_optimizers_learn_as_on_the_host(name: str, make: str) -> None:
    as_on_host(lambda kind: trained(PLANS[name], kind, make), 1e-11)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["ZeRO-3", "states on the host", "accumulates"])
def test_a_backward_by_autograd_learns_as_on_the_host(name: str) -> None:
    as_on_host(lambda kind: trained(PLANS[name], kind, backend="autograd"), 1e-11)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["ZeRO-3", "states on the host", "saved on the host", "accumulates"])
def test_clipped_gradients_learn_as_on_the_host(name: str) -> None:
    as_on_host(lambda kind: trained(PLANS[name], kind, clip_grad_norm=0.3), 1e-11)


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.head = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        made: Tensor = self.head(x)
        return made


@pytest.mark.parametrize(
    "plan",
    [
        "grid (data=4)\nstates **: data=S(0)",
        pytest.param("grid (data=2)\n**: data=S(0)", marks=pytest.mark.sweep),
        pytest.param(
            "grid (pipe=2, data=2)\npipe layers over pipe by 1f1b, 2 micro-batches\nstates **: data=S(0)",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_owners_step_whole_matrices_as_on_the_host(plan: str) -> None:
    def program(kind: str) -> list[Tensor]:
        torch.manual_seed(1)
        with torch.device("cpu"):
            model = Matrices().double()
        muon = torch.optim.Muon(model.parameters(), 0.02)
        step = flow.compile(model, cross_entropy, muon, plan=plan.replace("grid (", f"grid {kind} (", 1))
        return steps(model, step, kind)

    as_on_host(program, 1e-6)  # its products are of bfloat16


def test_eager_steps_learn_as_on_the_host() -> None:
    def program(kind: str) -> list[Tensor]:
        model = flow.nn.to_global(net(), flow.placement(kind, range(4)), flow.B)
        adam = torch.optim.AdamW(model.parameters(), 0.01)
        placement = flow.placement(kind, range(4))

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = cross_entropy(model, *(flow.tensor(v, placement=placement, sbp=flow.S(0)) for v in (x, y)))
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            adam.zero_grad()
            return loss.detach()

        return steps(model, step, kind)

    as_on_host(program, 1e-11)
