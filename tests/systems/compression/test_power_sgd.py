"""PowerSGD: gradients of matrices as products of thin ones, beside torch's own hook for DDP."""

from typing import Any

import pytest
import torch
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as theirs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sbpflow as flow
from sbpflow import B, P
from sbpflow.boxing.encoders.low_rank import LowRankEncoder, orthogonal
from tests.ranks import Ranks
from tests.systems.compression.runs import DATA, batch, exact_sum, loss_fn, net, sent_bytes, step_of, trained, weights

RANK, PLAIN, STEPS = 2, 2, 7


def by_torch() -> tuple[list[Tensor], list[Tensor]]:
    """The weights after steps under DDP with torch's hook, which begins with the encoder's factors; and its errors."""
    flow.init()
    rank, model = torch.distributed.get_rank(), net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=25)
    state: Any = theirs.PowerSGDState(
        None, matrix_approximation_rank=RANK, start_powerSGD_iter=PLAIN, min_compression_rate=2, warm_start=True
    )
    ddp.register_comm_hook(state, theirs.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in range(STEPS):
        if at == PLAIN:
            begin_alike(state, model)
        loss = loss_fn(ddp, *(x.chunk(4)[rank] for x in batch(at)))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], [x / 4 for x in state.error_dict.values()]


def begin_alike(state: Any, model: nn.Module) -> None:
    """The hook goes on from factors as from those of an earlier step: here from the encoder's first ones. A bucket has
    the tensors in reverse, and those of one shape together."""
    encoder = LowRankEncoder(rank=RANK)
    shapes = [tuple(p.shape) for p in reversed([*model.parameters()]) if p.ndim > 1]
    pairs = [(n, m) for n, m in shapes if (n + m) * min(n, m, RANK) * 2 < n * m]
    rights = [encoder.begin(m, RANK, torch.empty(0)) for _, m in pairs]
    state.p_memory_dict[0] = torch.zeros(sum(n * RANK for n, _ in pairs))
    state.q_memory_dict[0] = torch.cat([q.reshape(-1) for q in rights])


def by_steps() -> tuple[list[Tensor], list[Tensor]]:
    model = net()
    encoder = flow.encoders.later(steps=PLAIN, of=flow.encoders.low_rank(rank=RANK))
    step = step_of(model, {"*": encoder})
    trained(step, STEPS)
    names = [name for name, p in model.named_parameters() if name == "2.weight"]
    return [p.to_local().detach().clone() for p in weights(model).values()], [
        step.kept.error(n).to_local() for n in names
    ]


def test_weights_and_errors_are_those_of_torchs_hook_under_ddp(ranks4: Ranks) -> None:
    for (want, wrong), (got, left) in zip(ranks4(by_torch), ranks4(by_steps), strict=True):
        assert max((x - y).abs().max().item() for x, y in zip(want, got, strict=True)) < 1e-5
        bucket = wrong[0]
        others = [p.numel() for p in reversed([*net().parameters()])]
        at = others[0] + others[1] + others[2]  # behind the bias and weight of the last layer, and a bias
        assert torch.allclose(bucket[at : at + 32 * 32].view(32, 32), left[0], atol=1e-5)


def test_sums_that_were_sent_and_errors_are_the_sums_of_gradients() -> None:
    encoder, errors = flow.encoders.low_rank(rank=2), flow.encoders.KeptErrors()
    rounds = [[torch.randn(24, 16) for _ in DATA] for _ in range(6)]
    sent = torch.zeros(24, 16, dtype=torch.float64)
    for addends in rounds:
        x = flow.from_local([a.clone() for a in addends], placement=DATA, sbp=P)
        come = x.to_global(sbp=B, encoder=encoder, kept=errors["w"]).full_tensor()
        assert torch.linalg.matrix_rank(come) == 2
        sent += come
    rows = errors.rows_of("w")
    assert rows is not None
    kept = sum((each["error"].double() for each in rows.ranks), torch.zeros(24, 16, dtype=torch.float64))
    assert (sent + kept - exact_sum(rounds)).abs().max() < 1e-4
    assert all(torch.equal(each["basis"], rows.ranks[0]["basis"]) for each in rows.ranks)


def test_a_warm_start_finds_the_largest_factors_of_a_gradient_that_stays() -> None:
    """Power iteration: of one matrix again and again, without errors, what is sent becomes its best approximation."""
    matrix = torch.randn(20, 3) @ torch.diag(torch.tensor([9.0, 3.0, 0.5])) @ torch.randn(3, 12)
    left, sizes, right = torch.linalg.svd(matrix)
    best = left[:, :2] * sizes[:2] @ right[:2]
    far = []
    for warm in (True, False):
        errors, encoder = flow.encoders.KeptErrors(), flow.encoders.low_rank(rank=2, warm=warm, feedback=False)
        for _ in range(12):
            x = flow.from_local([matrix / 4 for _ in DATA], placement=DATA, sbp=P)
            come = x.to_global(sbp=B, encoder=encoder, kept=errors["w"]).full_tensor()
        far.append((come - best).norm() / best.norm())
    assert far[0] < 1e-3 < far[1]


def test_the_bytes_are_those_of_the_factors_and_of_what_is_no_matrix() -> None:
    step = step_of(net(64), {"*": flow.encoders.low_rank(rank=RANK)})
    step(*batch(0))
    with flow.record() as moves:
        sent_bytes(step)
    whole = {n: p.numel() for n, p in net(64).named_parameters() if n not in ("0.weight", "2.weight")}
    thin = (64 + 64) * RANK + (64 + 8) * RANK
    elements = sum(move.boxing.src.shape[0] for move in moves if move.op == "encoded")
    assert elements == sum(whole.values()) + thin
    assert {move.boxing.src.dtype for move in moves if move.op == "encoded"} == {torch.float32}


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_columns_are_made_orthogonal_and_zeros_stay(rank: int) -> None:
    made = orthogonal(torch.randn(9, rank))
    assert torch.allclose(made.T @ made, torch.eye(rank), atol=1e-5)
    assert not orthogonal(torch.zeros(9, min(rank, 2))).any()


def test_it_converges_as_float32_does() -> None:
    plain, coded = (
        trained(step_of(net(), None if encoder is None else {"*": encoder}), 50)
        for encoder in (None, flow.encoders.low_rank(rank=2))
    )
    assert abs(sum(coded[-20:]) / sum(plain[-20:]) - 1) < 0.1
