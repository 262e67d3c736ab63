"""A machine with cards, as it is told, measured, planned and drawn for, beside its host."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.placement.compute import timing
from sbpflow.placement.compute.hosts import devices_of
from sbpflow.placement.compute.timing import KernelTime, kernel_times
from sbpflow.placement.device import family
from sbpflow.placement.doctor import findings
from sbpflow.placement.measure import measure_run
from sbpflow.placement.network.hosts import Hosts
from tests.gpu.shared_card import answers, nccl_hosts
from tests.ranks import Fresh

from .host import as_on_host, batch, cross_entropy, net


def test_the_doctor_names_cards_and_prices_by_them() -> None:
    found = {each.thing: each.found for each in findings({})}
    assert found["gpu 3"] == "NVIDIA H100 80GB HBM3, 80.0 GiB"
    assert "h100" in found["cluster"]


def test_the_doctor_says_what_is_lacked_where_torch_sees_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (gpu,) = (each for each in findings({}) if each.thing == "gpu")
    assert not gpu.ok
    assert "needs a CUDA build of torch" in gpu.fix


def test_a_plan_for_nothing_in_particular_is_for_the_cards_here() -> None:
    found = flow.find_plan(net(), batch(0, "cuda"), loss_fn=cross_entropy)
    assert "grid cuda (data=4)" in str(found.text)
    assert "H100" in str(found)


def test_products_of_8_bits_are_refused_on_a_card_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    model = flow.nn.cast(nn.Linear(32, 32, device="cuda"), {"*": "fp8"})
    step = flow.compile(model, lambda model, x: model(x).sum(), placement=flow.placement("cuda", 1))
    with pytest.raises(flow.SbpError, match=r"compute capability 8\.0, and such products take 8\.9"):
        step(torch.ones(16, 32, device="cuda"))


@pytest.mark.parametrize("type", ["cpu", "cuda"])
def test_the_numbers_of_a_card_are_not_those_of_the_host(type: str) -> None:
    """A state that is set again gives the same numbers there, and leaves the other's generator alone."""
    kind, other = family(type), family("cpu" if type == "cuda" else "cuda")
    device = kind.device(0)
    torch.manual_seed(5)
    assert kind.seed() == kind.generator(device).initial_seed() == 5
    state, left = kind.random_state(), other.random_state()
    first = torch.rand(3, device=device)
    kind.set_random_state(state)
    assert torch.equal(torch.rand(3, device=device), first)
    assert torch.equal(other.random_state(), left)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).chunk(3, -1)
        made: Tensor = F.dropout((q @ k.mT).softmax(-1), 0.5) @ v
        return made


def test_a_core_that_draws_draws_the_same_when_it_runs_again() -> None:
    found = []
    for again in (False, True):
        torch.manual_seed(1)
        model = Attention().to("cuda", torch.float64)
        if again:
            flow.nn.recompute(model, only="attention")
        x = torch.linspace(-1, 1, 96, dtype=torch.float64, device="cuda").view(2, 6, 8).requires_grad_()
        torch.manual_seed(2)
        torch.autograd.backward(model(x).square().sum())
        assert x.grad is not None
        found.append((x.grad, torch.rand(1, device="cuda")))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("device", "threads"), [("cpu", 1), ("cpu", 2), ("cuda:0", 1)])
def test_kernels_are_timed_by_the_clock_of_their_device(
    device: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sizes as on the host; those of a card take a card, and have another time of Python's."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for name in ("PRODUCTS", "ATTENTIONS", "ELEMENTS", "UPDATES", "COPIED"):
        least: Any = getattr(timing, name)[False]
        monkeypatch.setattr(timing, name, {True: least[:1] if isinstance(least, list) else least, False: least})
    monkeypatch.setattr(timing, "WHILE", 1e-4)
    monkeypatch.setattr(timing, "RUNS", 1)
    times = kernel_times(torch.device(device), lambda: None)
    kinds = {"launch", "product", "attention", "pointwise", "function", "update", "copy"}
    assert {each.kind for each in times} == kinds | {"call" if device == "cpu" else "host"}


def of_a_card() -> list[KernelTime]:
    """Times as a card of 500 TFLOP/s and 2 TB/s has them."""
    sizes = [(2.0 * n**3, 6.0 * n * n) for n in (512, 1024, 2048, 4096)]
    products = [KernelTime("product", "bfloat16", many, size, 4e-6 + many / 5e14) for many, size in sizes]
    launch = [KernelTime("launch", "float32", 0.0, 0.0, 4e-6)] * 2
    points = [KernelTime("pointwise", "float32", 0.0, 12.0 * n, 4e-6 + 12.0 * n / 2e12) for n in (2**20, 2**24, 2**26)]
    return [*launch, *products, *points, KernelTime("copy", "uint8", 0.0, 2.0**26, 2**26 / 5e10)]


def test_a_device_that_was_timed_says_on_which_card() -> None:
    (found,) = devices_of(Hosts((0, 0)), ("a",), [of_a_card()] * 2, "cuda", "today")
    assert found.fitted is not None
    assert "NVIDIA H100 80GB HBM3 of a" in found.fitted.source


def links() -> list[str]:
    torch.cuda.set_device(int(flow.init(timeout=60).rank or 0))
    found = measure_run()
    return [found.type, *(str(link.hosts) for link in found.links)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_links_between_cards_are_measured_over_nccl(fresh: Fresh, ranks: int) -> None:
    """Of three ranks one has no peer in the first round, in which the others make the communicator of all."""
    one, *others = answers(fresh(ranks, links, environment=nccl_hosts, timeout=120.0))
    assert all(each == one for each in others)
    assert one[0] == "cuda"


def test_tensors_go_between_cards_and_the_host() -> None:
    def program(kind: str) -> list[Tensor]:
        here, there = flow.placement(kind, range(2)), flow.placement("cpu", [2, 3])
        x: Any = flow.tensor(torch.arange(12.0).view(4, 3).to(kind), placement=here, sbp=flow.S(0))
        y = x.to_global(there, flow.S(1))
        return [y.full_tensor(), y.to_global(here, flow.B).full_tensor()]

    as_on_host(program)
