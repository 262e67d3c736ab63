"""A small task and its step, data parallel over four ranks of one process: what the rows of compression train."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.boxing.exchange.execute import transport

__all__ = [
    "DATA", "batch", "encoded_sums", "exact_sum", "loss_fn", "net", "sent_bytes", "step_of", "trained", "weights",
]  # fmt: skip

DATA = flow.placement("cpu:[0-3] as (data=4)")
ROWS = {"x": {"data": S(0)}, "y": {"data": S(0)}}


def net(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def batch(seed: int, rows: int = 32) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sin().sum(1, keepdim=True)


def step_of(
    model: nn.Module, encoders: Mapping[str, Any] | None, optimizer: torch.optim.Optimizer | None = None, **more: Any
) -> Any:
    """The step of a model whose gradients are compressed, by SGD if nothing is said."""
    steps = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"placement": DATA, "inputs": ROWS, "compress": encoders, **more}
    return flow.compile(model, loss_fn, steps, **options)


def trained(step: Any, steps: int, first: int = 0) -> list[float]:
    """The losses of so many steps, each on a batch of its own."""
    return [step(*batch(at)).item() for at in range(first, first + steps)]


def sent_bytes(step: Any, at: int = 0) -> int:
    """The bytes that all ranks were made to send in a step, by the transport's own count."""
    before = transport().sent.bytes.total()
    step(*batch(at))
    return transport().sent.bytes.total() - before


def encoded_sums(
    rounds: list[list[Tensor]], encoder: flow.encoders.Encoder, sbp: Any = B, *, start: Any = P, on: Any = DATA
) -> tuple[Tensor, Tensor]:
    """The sum of all that was sent of addends, and of what is kept of them in the end, in double precision."""
    errors, sent = flow.encoders.KeptErrors(), torch.zeros(1, dtype=torch.float64)
    for addends in rounds:
        x = flow.from_local([a.clone() for a in addends], placement=on, sbp=start)
        sent = sent + x.to_global(sbp=sbp, encoder=encoder, kept=errors["w"]).full_tensor()
    rows = errors.rows_of("w")
    assert rows is not None
    kept = torch.stack([each["error"].double() for each in rows.ranks])
    if "share" in rows.ranks[0]:
        shares = torch.cat([each["share"].double() for each in rows.ranks])
        kept[0] += shares[: kept[0].numel()].view(kept[0].shape)
    return sent, kept


def exact_sum(rounds: list[list[Tensor]]) -> Tensor:
    """The sum of all addends of all rounds, in double precision."""
    return torch.stack([x.double() for addends in rounds for x in addends]).sum(0)


def weights(model: nn.Module) -> dict[str, Any]:
    """The parameters by their names, which are global tensors once a step has run."""
    return dict(model.named_parameters())
