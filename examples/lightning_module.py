"""A LightningModule whose training step is compiled: the plan has the net, and Lightning all else.

    python examples/lightning_module.py                             # one process plays four ranks
    torchrun --nproc-per-node 4 examples/lightning_module.py        # four, each with its batches of Lightning's loader

Callbacks, logs, rates, accumulation, clipping, validation, checkpoints and resuming are as ever, and so are the losses.
"""

from typing import Any

import pytorch_lightning as lightning
import torch
from accelerate_loop import PLAN, data, net
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sbpflow as flow


class PlanModule(lightning.LightningModule):  # type: ignore[misc]  # its types are not read here
    def __init__(self, net: nn.Module, plan: str) -> None:
        super().__init__()
        self.net, self.plan = net, plan

    def loss_of(self, net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(net(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2)
        optimizer.register_step_post_hook(lambda *of: optimizer.zero_grad())
        part = lambda *given: self.loss_of(*given) / self.trainer.accumulate_grad_batches  # noqa: E731
        self.step = flow.compile(self.net, part, optimizer, plan=self.plan, leave_gradients=True)
        return optimizer

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.step(*flow.data.joined(batch, self.step.placement)).full_tensor()
        loss *= self.trainer.accumulate_grad_batches
        self.log("loss", loss, prog_bar=True)
        return loss

    def backward(self, *of: Any) -> None:
        """The step has been backward, and left gradients, when Lightning asks to clear them, and then for this."""

    optimizer_zero_grad = backward

    def validation_step(self, batch: Any, index: int) -> None:
        loss = self.loss_of(self.net, *flow.data.joined(batch, self.step.placement))
        self.log("validation", flow.data.parted(loss, self.step.placement), prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(apply_to_collection(dict(checkpoint), flow.GlobalTensor, lambda x: x.full_tensor()))


if __name__ == "__main__":
    many, meeting = flow.init().size or 1, lightning.strategies.DDPStrategy()
    meeting.configure_ddp = lambda: None  # processes meet as for DDP, and the step adds gradients up
    how: Any = {"accelerator": "cpu", "devices": many, "strategy": meeting if many > 1 else "auto", "max_epochs": 20}
    trainer = lightning.Trainer(**how, default_root_dir="out", accumulate_grad_batches=2, gradient_clip_val=1.0)
    trainer.fit(PlanModule(net(), PLAN), DataLoader(data(), 16 // many, shuffle=True), DataLoader(data(), 16 // many))
