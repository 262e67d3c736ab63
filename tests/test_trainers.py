"""Trainers around a compiled step go as around plain torch: losses, norms, rates, scores, checkpoints and weights."""

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from tests.ranks import Answer, Fresh

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PLANS = {
    "ZeRO-3": "grid cpu (data=4)\n**: data=S(0)",
    "stages": "grid cpu (pipe=2, data=2)\npipe {} over pipe by 1f1b, 2 micro-batches",
}
CLOSE = 2e-5  # float32, sums in another order


@contextlib.contextmanager
def libraries() -> Iterator[None]:
    """Imported from examples, without their warnings, in a process that no launcher has started."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    sys.path.insert(0, str(EXAMPLES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def alone(fresh: Fresh, package: str, check: Any, *args: Any) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed, whose trainer this is about")
    (end,) = fresh(1, check, *args, timeout=120.0, freed=True)
    assert (end.answer, end.code) == (Answer(), 0), f"{end.answer and end.answer.error}\n{end.stderr}"


def close(mine: Any, plain: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(plain), rtol=CLOSE, atol=CLOSE)


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [x.detach().full_tensor() if isinstance(x, flow.GlobalTensor) else x.detach() for x in model.parameters()]


# accelerate


def test_a_loop_of_accelerate(fresh: Fresh) -> None:
    alone(fresh, "accelerate", accelerated)


def accelerated() -> None:
    with libraries():
        example = importlib.import_module("accelerate_loop")
        mine = example.train(epochs=3, parts=2)
        made = flow.compile
        flow.compile = stepped  # type: ignore[assignment]
        plain = example.train(epochs=3, parts=2)
        flow.compile = made
    close(mine, plain)


def stepped(model: nn.Module, loss_fn: Any, optimizer: Any, **how: Any) -> Any:
    """A step in plain torch."""

    def step(*batch: Any) -> torch.Tensor:
        loss: torch.Tensor = loss_fn(model, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    step.placement = None  # type: ignore[attr-defined]
    return step


# transformers


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        ("ZeRO-3", {"gradient_accumulation_steps": 2}),
        pytest.param("stages", {}, marks=pytest.mark.sweep),
        pytest.param("ZeRO-3", {"lora": True, "gradient_checkpointing": True}, marks=pytest.mark.sweep),
    ],
    ids=["accumulation", "stages", "LoRA"],
)
def test_trainer_of_transformers(plan: str, how: dict[str, Any], fresh: Fresh, tmp_path: Path) -> None:
    alone(fresh, "accelerate", trained, PLANS[plan].format("model.layers"), how, str(tmp_path))


def rows_of_words() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 64, (26, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def tiny_llama(hub: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = hub.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    return hub.LlamaForCausalLM(config)


def trained(plan: str, how: dict[str, Any], folder: str) -> None:
    """Six steps of both, with evaluation, and the last three once more from a checkpoint."""
    with libraries():
        hub: Any = importlib.import_module("transformers")
        example = importlib.import_module("hf_trainer")
        lora = how.pop("lora", False)
        rows = rows_of_words()

        def run(kind: Any, name: str, resume: str | None = None, **more: Any) -> Any:
            model = tiny_llama(hub)
            if lora:
                peft: Any = importlib.import_module("peft")
                model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
            args = hub.TrainingArguments(
                f"{folder}/{name}", max_steps=6, per_device_train_batch_size=4, logging_steps=1, save_steps=3,
                eval_strategy="steps", eval_steps=3, use_cpu=True, learning_rate=1e-2, warmup_steps=2, seed=1,
                lr_scheduler_type="cosine", disable_tqdm=True, report_to=[], **how,
            )  # fmt: skip
            trainer = kind(model, args, train_dataset=rows, eval_dataset=rows[:6], compute_metrics=scored, **more)
            trainer.train(resume_from_checkpoint=resume)
            return trainer

        plain = run(hub.Trainer, "plain")
        mine = run(example.PlanTrainer, "mine", plan=plan)
        again = run(example.PlanTrainer, "mine", f"{folder}/mine/checkpoint-3", plan=plan)
    assert isinstance(next(mine.model.parameters()), flow.GlobalTensor)
    for one in (mine, again):
        close(told(one), told(plain))
        for x, y in zip(whole(one.model), whole(plain.model), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)  # Adam turns roundings of tiny gradients into steps


def scored(given: Any) -> dict[str, float]:
    return {"right": float((given.predictions.argmax(-1) == given.label_ids).mean()), "rows": len(given.label_ids)}


def told(trainer: Any) -> list[float]:
    """All numbers that Trainer has logged, but for times."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right", "eval_rows")
    return [row[name] for row in trainer.state.log_history for name in names if name in row]


# Lightning


def plain_module(lightning: Any) -> Any:
    """The module as Lightning's users write it, without a plan."""

    class Plain(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, net: nn.Module, plan: str) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=2e-2)

    return Plain


@pytest.mark.sweep
def test_trainer_of_lightning(fresh: Fresh, tmp_path: Path) -> None:
    alone(fresh, "pytorch_lightning", lightened, str(tmp_path))


def lightened(folder: str) -> None:
    """Three epochs of both, with validation, and the last two once more from a checkpoint; plain Lightning reads it."""
    with libraries():
        lightning: Any = importlib.import_module("pytorch_lightning")
        example = importlib.import_module("lightning_module")

        Plain = plain_module(lightning)

        class Noted(lightning.Callback):  # type: ignore[misc]
            def __init__(self) -> None:
                self.losses: list[float] = []

            def on_train_batch_end(self, trainer: Any, *of: Any) -> None:
                self.losses.append(trainer.callback_metrics["loss"].item())

            def on_validation_end(self, trainer: Any, *of: Any) -> None:
                self.losses.append(trainer.callback_metrics["validation"].item())

        def run(kind: Any, name: str, resume: str | None = None) -> tuple[list[float], list[torch.Tensor]]:
            noted, module = Noted(), kind(example.net(), example.PLAN)
            saved = lightning.callbacks.ModelCheckpoint(f"{folder}/{name}", save_top_k=-1, filename="{epoch}")
            trainer = lightning.Trainer(
                accelerator="cpu", max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.1, logger=False,
                callbacks=[noted, saved], enable_progress_bar=False, enable_model_summary=False,
                num_sanity_val_steps=0,
            )  # fmt: skip
            loader = torch.utils.data.DataLoader(example.data(), 16)
            trainer.fit(module, loader, torch.utils.data.DataLoader(example.data(20), 10), ckpt_path=resume)
            return noted.losses, whole(module)

        plain = run(Plain, "plain")
        mine = run(example.PlanModule, "mine")
        close(mine[0], plain[0])
        for kind in (example.PlanModule, Plain):
            again = run(kind, kind.__name__, f"{folder}/mine/epoch=0.ckpt")
            close(again[0], plain[0][-len(again[0]) :])
            torch.testing.assert_close(again[1], plain[1], rtol=1e-3, atol=1e-4)


# A run that stops early, and a second one of the same trainer or module


@pytest.mark.sweep
def test_trainer_of_transformers_stops_early_and_trains_again(fresh: Fresh, tmp_path: Path) -> None:
    alone(fresh, "accelerate", trained_again, str(tmp_path))


def trained_again(folder: str) -> None:
    with libraries():
        hub: Any = importlib.import_module("transformers")
        example = importlib.import_module("hf_trainer")
        rows = rows_of_words()

        def run(kind: Any, name: str, **more: Any) -> list[Any]:
            model = tiny_llama(hub)
            args = hub.TrainingArguments(
                f"{folder}/{name}", max_steps=8, per_device_train_batch_size=4, logging_steps=1, save_steps=2,
                eval_strategy="steps", eval_steps=2, use_cpu=True, learning_rate=3e-2, seed=1, disable_tqdm=True,
                report_to=[], load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
            )  # fmt: skip
            stop = [hub.EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=0.2)]
            trainer = kind(model, args, train_dataset=rows, eval_dataset=rows[:6], callbacks=stop, **more)
            found: list[Any] = []
            for _ in range(2):
                trainer.train()
                best = Path(trainer.state.best_model_checkpoint).name
                found += [(trainer.state.global_step, best), told(trainer), *(x.clone() for x in whole(trainer.model))]
            return found

        plain = run(hub.Trainer, "plain")
        mine = run(example.PlanTrainer, "mine", plan=PLANS["ZeRO-3"])
    assert plain[0][0] < 8
    assert_alike(mine, plain)


@pytest.mark.sweep
def test_trainer_of_lightning_stops_early_and_fits_again(fresh: Fresh) -> None:
    alone(fresh, "pytorch_lightning", fitted_again)


def fitted_again() -> None:
    with libraries():
        lightning: Any = importlib.import_module("pytorch_lightning")
        example = importlib.import_module("lightning_module")

        class Rated:
            """A rate of its own at every step, of the optimizer that is there."""

            def configure_optimizers(self: Any) -> Any:
                optimizer = super().configure_optimizers()  # type: ignore[misc]
                rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-2, total_steps=80)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}

        def run(kind: Any) -> list[Any]:
            module, found = type("Both", (Rated, kind), {})(example.net(), example.PLAN), list[Any]()
            loader = torch.utils.data.DataLoader(example.data(), 16)
            for _ in range(2):
                stop = lightning.callbacks.EarlyStopping("validation", patience=1, min_delta=0.3)
                trainer = lightning.Trainer(
                    accelerator="cpu", max_epochs=8, logger=False, callbacks=[stop], enable_progress_bar=False,
                    enable_model_summary=False, num_sanity_val_steps=0, enable_checkpointing=False,
                )  # fmt: skip
                trainer.fit(module, loader, torch.utils.data.DataLoader(example.data(20), 10))
                found += [(trainer.current_epoch,), trainer.callback_metrics["validation"]]
                found += [x.clone() for x in whole(module)]
            return found

        plain, mine = run(plain_module(lightning)), run(example.PlanModule)
    assert plain[0] < (8,)
    assert_alike(mine, plain)


def assert_alike(mine: list[Any], plain: list[Any]) -> None:
    for x, y in zip(mine, plain, strict=True):
        if isinstance(y, tuple):
            assert x == y
        else:
            close(x, y)
