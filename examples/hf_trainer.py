"""transformers.Trainer around a compiled step: the plan has the model, and Trainer all else.

    python examples/hf_trainer.py                             # one process plays four ranks
    torchrun --nproc-per-node 4 examples/hf_trainer.py        # four, each with its batches of Trainer's loader

Callbacks, logs, rates, accumulation, clipping, evaluation, checkpoints and resuming are as ever, and so are the losses.
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import sbpflow as flow


class PlanTrainer(Trainer):  # type: ignore[misc]  # its types are not read here
    def __init__(self, *given: Any, plan: str, **more: Any) -> None:
        super().__init__(*given, **more)
        self.rows: Any = lambda batch: flow.data.joined(batch, self.step.placement)  # of all processes
        self.mine: Any = lambda result: flow.data.parted(result, self.step.placement)
        self.plan = plan
        self.step: Any = None
        self.is_distributed_loading_by_transformers = True  # no DDP around the model, and all processes save it
        self.args.average_tokens_across_devices = False  # which is there to undo what DDP does

    _sync_replicated_trainable_parameters = lambda *of: None  # noqa: E731  # the step adds gradients up

    def loss_of(self, model: Any, inputs: Any, items: Any) -> Any:
        loss = self.compute_loss(model, inputs, num_items_in_batch=items)
        return loss if items is not None else loss / self.current_gradient_accumulation_steps

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.step is None:
            self.step = flow.compile(model, self.loss_of, self.optimizer, plan=self.plan, leave_gradients=True)
            self.scores = flow.compile(model, placement=self.step.placement)
        model.train()
        items = None if num_items_in_batch is None else self.accelerator.gather(num_items_in_batch).sum()
        return self.mine(self.step(self.rows(inputs), items))

    def prediction_step(self, model: Any, inputs: Any, *how: Any, **more: Any) -> Any:
        if self.step is not None:  # until then the model is plain
            model = lambda num_items_in_batch=None, **batch: self.mine(self.scores(**self.rows(batch)))  # noqa: E731
        return super().prediction_step(model, inputs, *how, **more)

    def _save_optimizer_and_scheduler(self, folder: str) -> None:
        flow.save(f"{folder}/step", self.model, optimizer=self.optimizer.optimizer, extra={"lr": self.lr_scheduler})

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        if folder:
            flow.load(f"{folder}/step", self.model, optimizer=self.optimizer.optimizer, extra={"lr": self.lr_scheduler})


if __name__ == "__main__":
    rows = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(48)[:, None] + torch.arange(12) * 5) % 64]
    torch.manual_seed(0)  # the model of all processes
    sizes: Any = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
    args = TrainingArguments("out/trainer", num_train_epochs=3, learning_rate=1e-2, logging_steps=6, use_cpu=True)
    PlanTrainer(model, args, train_dataset=rows, plan="grid cpu (data=4)\n**: data=S(0)").train()
