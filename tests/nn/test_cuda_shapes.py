"""Where tensors on CUDA placements live and of what dtype they are, by tensors without values: no card is needed."""

import sys
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.placement.world import device

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
CARD = torch.device("cuda", 0)
RANKS = range(40, 44)  # which no other test has: tensors of these layouts stay without values
KINDS: list[flow.sbp.Sbp] = [S(0), S(1), B, P]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Every rank of a CUDA placement is on one card that is not there."""

    def where(placement: flow.Placement, rank: int) -> torch.device:
        return CARD if placement.type == "cuda" else torch.device("cpu")

    for name, module in list(sys.modules.items()):
        if name.startswith("sbpflow") and getattr(module, "device", None) is device:
            monkeypatch.setattr(module, "device", where)
    monkeypatch.setattr("sbpflow.nn.tensors.shell._shells", {})
    monkeypatch.setattr(
        "sbpflow.nn.tensors.shell.device", lambda placement, rank: torch.device("meta")
    )  # no card, no shell
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    with FakeTensorMode() as mode:
        yield mode


def copied(into: torch.Tensor, value: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """torch's own asks for the card itself, to make it the current one."""
    assert into.device == value.device
    assert value.expand(into.shape).shape == into.shape
    return into


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dst", KINDS, ids=str)
@pytest.mark.parametrize("src", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_move_stays_on_the_card(
    fake: FakeTensorMode, src: flow.sbp.Sbp, dst: flow.sbp.Sbp, dtype: torch.dtype
) -> None:
    p = flow.placement("cuda", RANKS)
    a, b = flow.layout(p, src, (7, 6), dtype), flow.layout(p, dst, (7, 6), dtype)
    moved = flow.box([torch.empty(a.local_shape(rank), dtype=dtype, device=CARD) for rank in p.flat], a, b)
    assert [(x.device, x.dtype, tuple(x.shape)) for x in moved] == [(CARD, dtype, b.local_shape(r)) for r in p.flat]


@pytest.mark.parametrize("sbp", KINDS, ids=str)
def test_what_goes_between_host_and_card_is_on_the_other_side(fake: FakeTensorMode, sbp: flow.sbp.Sbp) -> None:
    host, card = flow.placement("cpu", RANKS), flow.placement("cuda", RANKS)
    a, b = flow.layout(host, sbp, (7, 6)), flow.layout(card, B, (7, 6))
    there = flow.box([torch.empty(a.local_shape(rank)) for rank in host.flat], a, b)
    assert {x.device for x in there} == {CARD}
    back = flow.box(there, b, a)
    assert {x.device for x in back} == {torch.device("cpu")}


def test_ops_and_factories_make_tensors_on_the_card_and_in_the_dtype_of_plain_torch(fake: FakeTensorMode) -> None:
    p = flow.placement("cuda", RANKS)
    x = flow.tensor(torch.empty(8, 6), placement=p, sbp=S(0)).bfloat16()  # from the host
    w, v = (flow.empty(5, 6, placement=p, sbp=sbp, dtype=torch.bfloat16) for sbp in (S(0), B))
    made = [torch.relu(F.linear(x, v)), x.float() @ w.float().T, torch.cat([x, x]), torch.zeros_like(x), x.sum(0)]
    for y in made:
        assert isinstance(y, flow.GlobalTensor)
        assert {shard.device for shard in y._shards} == {CARD}
        assert {shard.dtype for shard in y._shards} == {y.dtype}
    assert [y.dtype for y in made] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 3]
