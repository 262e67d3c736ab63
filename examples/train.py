"""A run of training under any plan, from its first step to text that the model writes; stopped, it goes on there.

    python examples/train.py                            # about two minutes on two cores
    python examples/train.py --plan my.plan --save out/run --to out/run.jsonl tensorboard:out/board
    torchrun --nproc-per-node 4 examples/train.py       # data parallel; a plan may say stages and all else
    python examples/train.py --check                    # a few seconds: it learns, and resumes to the same losses
    torchrun --nnodes 1:2 --nproc-per-node 4 --max-restarts 9 ... examples/train.py --plan auto --save out/run

A GPT (training/gpt.py, whose modules a plan names) learns the text of this repository, as examples/tokens.py writes it
in tokens. The arguments of its step are text and following. Started again, it goes on from the newest checkpoint in
--save, on as many ranks as there are then: where a plan says data=*, or the planner is asked by --plan auto. Its losses
are those of a run that nothing has stopped.
"""

import sys
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor
from training.arguments import arguments
from training.gpt import GPT
from training.measures import endless, entropy, planned, rate, tokens_at, written

import sbpflow as flow
from sbpflow import S

ROWS = {"data": S(0), "replica": S(0), "context": S(1)}  # how axes of these names cut batches of (samples, tokens)


def train(given: Namespace) -> list[float]:
    """The losses of the steps that it ran, one for each line."""
    first, path = not flow.init().rank, tokens_at(given.data)
    sets = [flow.data.TokenFile(path, given.length, share=share) for share in ((0.0, 0.95), (0.95, 1.0))]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):  # no process has it whole: each draws, or reads, its part at the first step
        model = GPT(sets[0].facts["size"], given.width, given.layers, given.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, weight_decay=0.1, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: rate(at, given.warmup, given.steps))

    def loss_fn(model: GPT, text: Tensor, following: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=given.bf16):
            loss: Tensor = model(text, following)
        return loss

    plan = planned(given.plan, model, loss_fn, optimizer, (given.batch, given.length))
    parts: dict[str, Any] = {} if "pipe " in plan else {"micro_batches": given.accumulate}
    step = flow.compile(model, loss_fn, optimizer, plan=plan, clip_grad_norm=given.clip, skip_nonfinite=True, **parts)
    grid = step.placement
    assert grid is not None
    lie = {name: ROWS[name] for name in grid.names or () if name in ROWS}
    how: dict[str, Any] = {"batch_size": given.batch, "drop_last": True, "seed": given.seed}
    data = flow.data.shards(sets[0], grid, lie, shuffle=True, micro_batches=step.micro_batches, **how)
    torch.manual_seed(given.seed)
    extra, found = {"scheduler": scheduler, "data": data}, flow.newest(given.save) if given.save else None
    place = given.resume if given.resume != "auto" else found.path if found else None
    if place:
        flow.load(place, model, optimizer=optimizer, extra=extra)
    start, losses, saving, batches = scheduler.last_epoch, list[float](), None, endless(data)
    if first:
        print(f"goes on at step {start}, from {place}" if place else f"guessing alone loses {entropy(sets[0]):.3f}")
    with flow.watch(step, to=given.to, steps=given.steps, every=given.report, start=start, peak=given.peak) as watched:
        for at in range(start + 1, given.steps + 1):
            loss = watched(*next(batches))
            scheduler.step()
            if at % given.report == 0 or at == given.steps:
                losses.append(loss.item())
            if given.save and (at % given.every == 0 or at == given.steps):
                saving = flow.save(
                    given.save / f"step-{at}", model, optimizer=optimizer, plan=step, step=at, extra=extra,
                    keep=given.keep, asynchronous=True,
                )  # fmt: skip
    if saving:
        saving.wait()
    model.eval()
    scores = flow.compile(model, placement=grid)
    with torch.no_grad():
        held = [scores(*batch).item() for batch in flow.data.shards(sets[1], grid, lie, **how)]
        text = written(scores, sets[0], given.length)
    if first:
        print(f"loss of text that it has not seen: {sum(held) / len(held):.4f}\nit writes: {text!r}")
    return losses


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    if given.check:
        whole = train(given)
        given.resume = str(given.save / "step-12")
        again = train(given)
        print(f"from {whole[0]:.3f} to {whole[-1]:.3f}; resumed to {again[-1]:.3f}")
        if not (whole[-1] < whole[0] - 1 and again == whole[12:]):
            sys.exit("it did not learn, or went on to other losses")
    else:
        train(given)
