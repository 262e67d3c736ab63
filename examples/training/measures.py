"""The parts of a run that are no loop: its tokens, batches without end, its plan, and what a model is held to."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokens import make, texts, vocabulary_of
from torch import nn

import sbpflow as flow

__all__ = ["endless", "entropy", "planned", "rate", "tokens_at", "written"]


def tokens_at(path: Path) -> Path:
    """The file of tokens, which the first process makes where it is not there."""
    facts = path.with_suffix(".json")  # which is written last
    if not flow.init().rank and not facts.exists():
        make(path, texts(), 1024)
    while not facts.exists():
        time.sleep(0.05)
    return path


def rate(at: int, warmup: int, steps: int) -> float:
    """The share of the learning rate: up in a line, down in half a cosine to a tenth."""
    return min(1.0, (at + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, at / steps)))


def endless(data: flow.data.ShardedData) -> Iterator[Any]:
    while True:
        yield from data


def entropy(data: flow.data.TokenFile) -> float:
    """The loss of who knows how frequent each token is, and nothing else."""
    counts = torch.stack([text for text, _ in map(data.__getitem__, range(len(data)))]).flatten().bincount().double()
    return float(torch.special.entr(counts / counts.sum()).sum())


def planned(
    said: str | None, model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: tuple[int, int]
) -> str:
    """The plan of a file, or data parallel; of 'auto' the planner's answer for as many ranks as there are now, found by
    one of them for all."""
    if said != "auto":
        return str(flow.Plan.load(said)) if said else "grid (data=*)"
    size, answer = flow.init().size or 1, [""]
    if not flow.init().rank:
        text = torch.empty(batch, dtype=torch.int64, device="meta")
        found = flow.find_plan(
            model, (text, text), plan="grid (data=*)", loss_fn=loss_fn, optimizer=optimizer, ranks=size
        )
        print(found)
        answer = [str(found)]
    if size > 1:
        torch.distributed.broadcast_object_list(answer)
    return answer[0]


def written(scores: Any, data: flow.data.TokenFile, length: int) -> str:
    """Text that follows a beginning, drawn token by token: generate() is of models of transformers, as the Llama of
    docs/train_llama.md, and this one is plain torch."""
    names = vocabulary_of(data)
    ids = names.encode("A placement is").ids
    draw = torch.Generator().manual_seed(0)
    for _ in range(length - len(ids)):
        padded = torch.tensor([ids + [0] * (length - len(ids))])
        likely = scores(padded).full_tensor()[0, len(ids) - 1].float().cpu().div(0.8).softmax(0)
        ids.append(int(torch.multinomial(likely, 1, generator=draw)))
    return str(names.decode(ids))
