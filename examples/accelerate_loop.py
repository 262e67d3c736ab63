"""A loop of accelerate around a compiled step: the plan has the model, and accelerate all else.

    python examples/accelerate_loop.py                             # one process plays four ranks
    torchrun --nproc-per-node 4 examples/accelerate_loop.py        # four, each with its batches of accelerate's loader

Prepare all but the model, which the step lays out. The step leaves gradients, so that accumulation, clipping, the
optimizer and its rates go on as ever, and with them the losses of plain torch.
"""

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sbpflow as flow

PLAN = "grid cpu (data=4)\n**: data=S(0)"  # ZeRO-3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))


def data(count: int = 64) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4].argmax(1))  # which of the first four numbers is the largest


def train(plan: str = PLAN, epochs: int = 40, parts: int = 2) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * 2)
    loader = DataLoader(data(), 16 // accelerator.num_processes, shuffle=True)
    optimizer, rates, loader = accelerator.prepare(optimizer, rates, loader)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y) / parts  # as accelerator.backward does

    step = flow.compile(model, loss_fn, optimizer, plan=plan, leave_gradients=True)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                losses.append(step(*flow.data.joined(batch, step.placement)).item() * parts)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
        accelerator.print(f"loss {losses[-1]:.4f}", end="  " if len(losses) % 40 else "\n")
    return losses


if __name__ == "__main__":
    train()
