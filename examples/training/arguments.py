"""The arguments of examples/train.py."""

import argparse
import tempfile
from pathlib import Path

import sbpflow as flow

__all__ = ["arguments"]


def arguments(about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    add = parser.add_argument
    add("--plan", help="a file with a plan, or 'auto', the planner's; data parallel over all ranks if none is given")
    add("--data", type=Path, default=Path("out/tokens.bin"), help="as examples/tokens.py makes it, or this does")
    for name, default, what in (
        ("steps", 500, "updates in all"), ("batch", 16, "samples of an update"), ("length", 64, "tokens of a sample"),
        ("accumulate", 1, "micro-batches of an update; a plan with stages says how many"), ("warmup", 20, "steps"),
        ("every", 250, "steps between checkpoints"), ("keep", 2, "so many"), ("report", 10, "steps between lines"),
        ("width", 128, "of the model"), ("layers", 4, "of the model"), ("seed", 0, "of weights and order"),
    ):  # fmt: skip
        add(f"--{name}", type=int, default=default, help=f"{what} ({default})")
    add("--lr", type=float, default=2e-3, help="the highest (2e-3)")
    add("--clip", type=float, default=1.0, help="the norm of gradients, at most (1.0)")
    add("--bf16", action="store_true", help="products in bfloat16")
    add("--save", type=Path, help="a folder for checkpoints")
    add("--resume", default="auto", help="the folder of a checkpoint, or '' for none (the newest in --save)")
    add("--to", nargs="*", default=[], help="where lines go: run.jsonl, tensorboard:FOLDER, wandb:PROJECT")
    add("--peak", type=float, help="FLOP/s of one device, for MFU, such as 989e12; a card that is known needs none")
    add("--check", action="store_true", help="a quick run that must learn, and resume to the same losses")
    given = parser.parse_args()
    if given.check:
        folder = Path(tempfile.gettempdir()) / f"sbpflow-train-{flow.init().size or 1}"
        vars(given).update(steps=24, every=12, keep=9, report=1, width=32, layers=2, length=32, warmup=4, lr=2e-2)
        vars(given).update(save=folder, resume="", data=folder / "tokens.bin")
    return given
