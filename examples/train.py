"""A run of training under any plan, from its first step to text that the model writes; stopped, it goes on there.

    python examples/train.py                            # about two minutes on two cores
    python examples/train.py --plan my.plan --save out/run
    torchrun --nproc-per-node 4 examples/train.py       # data parallel; a plan may say stages and all else
    python examples/train.py --check                    # a few seconds: it learns, and resumes to the same losses
    torchrun --nnodes 1:2 --nproc-per-node 4 --max-restarts 9 ... examples/train.py --plan auto --save out/run

A GPT (training/gpt.py, whose modules a plan names) learns the text of this repository, as examples/tokens.py writes it
in tokens. The arguments of its step are text and following. --metrics file.jsonl gets each line that is printed.

Started again, it goes on from the newest checkpoint in --save, on as many ranks as there are then: where a plan says
data=*, or the planner is asked by --plan auto. Its losses are those of a run that nothing has stopped.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokens import make, texts, vocabulary_of
from torch import Tensor
from training.gpt import GPT
from training.measures import entropy, matmul_peak, memory, waiting

import sbpflow as flow
from sbpflow import S

ROWS = {"data": S(0), "replica": S(0), "context": S(1)}  # how axes of these names cut batches of (samples, tokens)


def arguments(said: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
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
    add("--metrics", type=Path, help="a file of JSON lines")
    add("--peak", type=float, help="TFLOP/s of all ranks, for MFU; measured if it is not said")
    add("--check", action="store_true", help="a quick run that must learn, and resume to the same losses")
    return parser.parse_args(said)


def train(given: argparse.Namespace) -> list[float]:
    """The losses of the steps that it ran, one for each line that it printed."""
    first = (flow.init().rank or 0) == 0
    if first and not given.data.with_suffix(".json").exists():  # which is written last
        make(given.data, texts(), 1024)
    wait_for(given.data.with_suffix(".json"))
    sets = [flow.data.TokenFile(given.data, given.length, share=share) for share in ((0.0, 0.95), (0.95, 1.0))]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):  # no process has it whole: each draws, or reads, its part at the first step
        model = GPT(sets[0].facts["size"], given.width, given.layers, given.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, weight_decay=0.1, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: rate(at, given.warmup, given.steps))

    def loss_fn(model: GPT, text: Tensor, following: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=given.bf16):
            loss: Tensor = model(text, following)
        return loss

    plan = Path(given.plan).read_text() if given.plan not in (None, "auto") else "grid (data=*)"
    if given.plan == "auto":
        plan = planned(model, loss_fn, optimizer, (given.batch, given.length))
    parts: dict[str, Any] = {} if "pipe " in plan else {"micro_batches": given.accumulate}
    step = flow.compile(model, loss_fn, optimizer, plan=plan, clip_grad_norm=given.clip, skip_nonfinite=True, **parts)
    grid = step.placement
    assert grid is not None
    lie = {name: ROWS[name] for name in grid.names or () if name in ROWS}
    how: dict[str, Any] = {"batch_size": given.batch, "drop_last": True, "seed": given.seed}
    data = flow.data.shards(sets[0], grid, lie, shuffle=True, micro_batches=step.micro_batches, **how)
    held_out = flow.data.shards(sets[1], grid, lie, **how)
    scores = flow.compile(model, placement=grid)
    extra, start, saving = {"scheduler": scheduler, "data": data}, 0, None
    peak = (given.peak or matmul_peak(device) * (flow.init().size or 1)) * 1e12
    torch.manual_seed(given.seed)
    found = flow.newest(given.save) if given.resume == "auto" and given.save else None
    place = found.path if found else given.resume if given.resume != "auto" else None
    if place:
        flow.load(place, model, optimizer=optimizer, extra=extra)
        start = scheduler.last_epoch
        say(first, f"goes on at step {start}, from {place}")
    many = sum(weight.numel() for weight in model.parameters())
    work = 6 * many + 12 * given.layers * given.width * given.length  # of a token, forward and backward
    tokens, losses, clock = given.batch * given.length, list[float](), time.perf_counter()
    say(first, f"{many / 1e6:.2f} million weights on {grid}; guessing by frequency alone loses {entropy(sets[0]):.3f}")
    metrics = given.metrics.open("a") if given.metrics and first else None
    batches = endless(data)
    for at in range(start + 1, given.steps + 1):
        loss = step(*next(batches))
        scheduler.step()
        if at % given.report == 0 or at == given.steps:
            losses.append(loss.item())
            seconds, clock = (time.perf_counter() - clock) / min(given.report, at - start), time.perf_counter()
            line = {"step": at, "loss": losses[-1], "norm": float(step.grad_norm), "lr": scheduler.get_last_lr()[0]}
            line |= {"tokens_per_second": tokens / seconds, "mfu": tokens / seconds * work / peak}
            line |= waiting(step, seconds) | {"gib": memory(device), "skipped": step.skipped.count}
            if metrics:
                print(json.dumps(line), file=metrics, flush=True)
            say(first, "  ".join(f"{name} {value:.4g}" for name, value in line.items()))
        elif first and sys.stdout.isatty():
            print(f"\r|{'#' * (40 * at // given.steps):40}| {at}/{given.steps}", end="", flush=True)
        if given.save and (at % given.every == 0 or at == given.steps):
            saving = flow.save(
                given.save / f"step-{at}", model, optimizer=optimizer, plan=step, step=at, extra=extra, keep=given.keep,
                asynchronous=True,
            )  # fmt: skip
    if saving:
        saving.wait()
    model.eval()
    with torch.no_grad():
        held = [scores(*batch).item() for batch in held_out]
        say(first, f"loss of text that it has not seen: {sum(held) / len(held):.4f}")
        say(first, f"it writes: {written(scores, vocabulary_of(sets[0]), given.length)!r}")
    return losses


def planned(model: GPT, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: tuple[int, int]) -> str:
    """The planner's answer for as many ranks as there are now, found by one of them for all."""
    size, said = flow.init().size or 1, [""]
    if not flow.init().rank:
        text = torch.empty(batch, dtype=torch.int64, device="meta")
        found = flow.plan(model, (text, text), plan="grid (data=*)", loss_fn=loss_fn, optimizer=optimizer, ranks=size)
        print(found)
        said = [str(found)]
    if size > 1:
        torch.distributed.broadcast_object_list(said)
    return said[0]


def rate(at: int, warmup: int, steps: int) -> float:
    """The share of the learning rate: up in a line, down in half a cosine to a tenth."""
    return min(1.0, (at + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, at / steps)))


def endless(data: flow.data.ShardedData) -> Iterator[Any]:
    while True:
        yield from data


def written(scores: Any, names: Any, length: int) -> str:
    """Text that follows a beginning, drawn token by token: generate() is of models of transformers, as the Llama of
    docs/train_llama.md, and this one is plain torch."""
    ids = names.encode("A placement is").ids
    draw = torch.Generator().manual_seed(0)
    for _ in range(length - len(ids)):
        padded = torch.tensor([ids + [0] * (length - len(ids))])
        likely = scores(padded).full_tensor()[0, len(ids) - 1].float().cpu().div(0.8).softmax(0)
        ids.append(int(torch.multinomial(likely, 1, generator=draw)))
    return str(names.decode(ids))


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


def say(first: bool, text: str) -> None:
    if first:
        print(f"\r{text}" if sys.stdout.isatty() else text)  # over a bar


if __name__ == "__main__":
    given = arguments()
    if given.check:
        folder = Path(tempfile.gettempdir()) / f"sbpflow-train-{flow.init().size or 1}"
        vars(given).update(steps=24, every=12, keep=9, report=1, width=32, layers=2, length=32, warmup=4, lr=2e-2)
        vars(given).update(save=folder, resume="", data=folder / "tokens.bin")
        whole = train(given)
        given.resume = str(folder / "step-12")
        again = train(given)
        print(f"from {whole[0]:.3f} to {whole[-1]:.3f}; resumed to {again[-1]:.3f}")
        if not (whole[-1] < whole[0] - 1 and again == whole[12:]):
            sys.exit("it did not learn, or went on to other losses")
    else:
        train(given)
