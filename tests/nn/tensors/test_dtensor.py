"""DTensor and back, on real ranks: the same shards, the same values, gradients both ways."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.nn.tensors.dtensor import placement_of
from tests.ranks import Ranks

LINE = flow.placement("cpu", range(4))
GRID = flow.placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))
WHOLE = torch.arange(64.0).reshape(8, 8)
LIES: list[tuple[flow.Placement, Any, tuple[Any, ...]]] = [
    (LINE, S(0), (Shard(0),)),
    (LINE, S(1), (Shard(1),)),
    (LINE, B, (Replicate(),)),
    (LINE, P, (Partial(),)),
    (LINE, P("max"), (Partial("max"),)),
    (LINE, P("min"), (Partial("min"),)),
    (GRID, (S(0), S(1)), (Shard(0), Shard(1))),
    (GRID, (S(0), S(0)), (Shard(0), Shard(0))),
    (GRID, (B, S(1)), (Replicate(), Shard(1))),
    (GRID, (P, S(0)), (Partial(), Shard(0))),
]


def there_and_back() -> list[tuple[bool, ...]]:
    """Of every layout: whether DTensor says what it should, has the value, moved nothing, and comes back as it was."""
    found: list[tuple[bool, ...]] = []
    for p, sbp, placements in LIES:
        x = flow.tensor(WHOLE, placement=p, sbp=B).to_global(sbp=sbp)
        with flow.record() as moves:
            d = flow.to_dtensor(x)
            back = flow.from_dtensor(d)
        same = back.layout_ is x.layout_ and back.to_local().data_ptr() == x.to_local().data_ptr()
        found.append((d.placements == placements, torch.equal(d.full_tensor(), WHOLE), same, not moves.bytes))
    return found


def test_every_layout_goes_there_and_back(ranks4: Ranks) -> None:
    for run in ranks4(there_and_back):
        assert run == [(True,) * 4] * len(LIES)


def meshes() -> tuple[bool, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = flow.from_dtensor(distribute_tensor(WHOLE, mesh, [Shard(0), Replicate()]))
    again = flow.to_dtensor(x + x)
    return (
        x.placement is placement_of(mesh),
        x.placement.names == ("dp", "tp"),
        again.device_mesh is mesh,
        flow.to_dtensor(x).device_mesh is again.device_mesh,
        torch.equal(again.full_tensor(), 2 * WHOLE),
    )


def test_a_mesh_is_a_placement_and_comes_back_as_itself(ranks4: Ranks) -> None:
    assert all(map(all, ranks4(meshes)))


def gradients(ours: bool) -> list[torch.Tensor]:
    """Through both, from a leaf of either kind; `backward` is called on a global tensor, or on a DTensor."""
    weight = torch.linspace(-1, 1, 64).reshape(8, 8)
    found = []
    for sbp in (S(0), S(1), B):
        x = flow.tensor(WHOLE, placement=LINE, sbp=sbp).requires_grad_()
        w = distribute_tensor(weight, flow.to_dtensor(x).device_mesh, [Replicate()]).requires_grad_()
        y = flow.to_dtensor(x * x) @ w  # global, then DTensor
        z = flow.from_dtensor(y).square()  # and global again
        if ours:
            z.sum().backward()  # type: ignore[no-untyped-call]
        else:
            flow.to_dtensor(z).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert isinstance(w.grad, DTensor)
        found += [x.grad.full_tensor(), w.grad.full_tensor()]
    return found


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "theirs"])
def test_gradients_flow_through(ranks4: Ranks, ours: bool) -> None:
    x, w = WHOLE.clone().requires_grad_(), torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
    (x * x @ w).square().sum().backward()  # type: ignore[no-untyped-call]
    for run in ranks4(gradients, ours):
        for at, mine in enumerate(run):
            wanted = (x.grad, w.grad)[at % 2]
            assert wanted is not None
            assert torch.allclose(mine, wanted, rtol=1e-4)  # sums are reordered


def refused() -> list[str]:
    mesh = init_device_mesh("cpu", (4,))
    nested = flow.tensor(WHOLE, placement=GRID, sbp=(S(0), S(1)))
    tries = [
        lambda: flow.to_dtensor(flow.tensor(torch.ones(5, 2), placement=LINE, sbp=S(0))),
        lambda: flow.to_dtensor(nested.reshape(64)),
        lambda: flow.from_dtensor(distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])),
        lambda: flow.from_dtensor(DTensor.from_local(torch.ones(2), mesh, [Partial("avg")])),
    ]
    said = []
    for attempt in tries:
        try:
            said.append(repr(attempt()))  # type: ignore[no-untyped-call]
        except flow.SbpflowError as error:
            said.append(str(error))
    return said


def test_what_has_no_word_there_is_an_error_with_a_fix(ranks4: Ranks) -> None:
    for run in ranks4(refused):
        assert "ranks hold [2, 1, 1, 1] in sbpflow and [2, 2, 1, 0] as a DTensor" in run[0]
        assert "first: x.to_global(sbp=(B,)): all_gather of 32 bytes a rank" in run[0]
        assert "dim 0 is not cut axis by axis" in run[1]
        assert "first: d.redistribute(placements=[Replicate()])" in run[2]
        assert "Partial(avg) has no signature" in run[3]


def uneven_alike() -> tuple[bool, ...]:
    """Seven over four are 2, 2, 2, 1 by either rule, and three leave one rank without any."""
    values = [torch.arange(7.0), torch.arange(3.0)]
    laid = [flow.to_dtensor(flow.tensor(value, placement=LINE, sbp=S(0))) for value in values]
    return tuple(torch.equal(d.full_tensor(), value) for d, value in zip(laid, values, strict=True))


def test_uneven_pieces_pass_where_both_cut_alike(ranks4: Ranks) -> None:
    assert all(map(all, ranks4(uneven_alike)))


def test_one_process_of_all_ranks_has_no_dtensor() -> None:
    with pytest.raises(flow.SbpflowError, match="torchrun"):
        flow.to_dtensor(flow.ones(4, placement=LINE, sbp=S(0)))
