"""Values of registers that nobody planned arrive as they were: whatever they are made of."""

import threading
from collections import deque
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sbpflow.actors.added.value_link import ValueLink
from sbpflow.actors.runtime.channel import UnderWay
from sbpflow.actors.runtime.progress import waits_inside
from sbpflow.placement.errors import ScheduleError


class Pair(NamedTuple):
    left: Tensor
    right: object


class Over:
    def wait(self) -> None:
        return None


class Box:
    """A line within a process: what was sent lies by its tag, until it is asked for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], deque[Tensor]] = {}

    def send(self, peer: int, tag: int, tensor: Tensor) -> UnderWay:
        self.sent.setdefault((peer, tag), deque()).append(tensor.clone())
        return Over()

    def receive(self, peer: int, tag: int, tensor: Tensor) -> UnderWay:
        tensor.copy_(self.sent[1, tag].popleft())
        return Over()


class Seen(Box):
    """A line that knows whether who waits for it is known to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[bool] = []

    def send(self, peer: int, tag: int, tensor: Tensor) -> UnderWay:
        return self

    def wait(self) -> None:
        self.known.append(waits_inside(threading.current_thread()))


def carried(*values: Any) -> list[Any]:
    box = Box()
    here, there = ValueLink(box, 3, to=[1]), ValueLink(box, 3, of=0)
    for label, value in enumerate(values):
        here.send(label, value)
    found = []
    for label, _ in enumerate(values):
        works, value = there.receive(label)
        for work in works:
            work.wait()
        found.append(value())
    assert not any(box.sent.values())
    return found


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (2, 0, 3)], ids=str)
def test_a_tensor_arrives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64).mul(9).to(dtype)
    (y,) = carried(x)
    assert y.dtype is dtype
    assert torch.equal(x, y)


def test_what_is_put_together_arrives_so() -> None:
    a, b = torch.randn(3, 5), torch.arange(7).to(torch.uint8)
    ((one, (two, none), said), pair, nothing, named) = carried((a, (b, None), "words"), Pair(a.T, 4), None, {"b": [b]})
    assert torch.equal(one, a)
    assert torch.equal(two, b)
    assert none is None
    assert said == "words"
    assert isinstance(pair, Pair)
    assert torch.equal(pair.left, a.T)
    assert pair.right == 4
    assert nothing is None
    assert torch.equal(named["b"][0], b)


def test_who_hands_a_value_over_waits_for_another_meanwhile() -> None:
    """Else a stage that sleeps is blamed on the one whose value it does not take."""
    line = Seen()
    ValueLink(line, 3, to=[1], handed=True).hand(0, torch.ones(2))
    assert line.known == [True, True]
    assert not waits_inside(threading.current_thread())


def test_each_micro_batch_may_have_another_size() -> None:
    for n, x in enumerate(carried(*(torch.full((n, 2), n) for n in range(5)))):
        assert torch.equal(x, torch.full((n, 2), n))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2, requires_grad=True), r"history of autograd(.|\n)*x.detach\(\)"),
        (torch.ones(2, device="meta"), "on meta"),
    ],
)
def test_what_cannot_follow_is_refused(value: Tensor, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        carried((value,))
