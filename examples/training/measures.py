"""The parts of a run that are no loop: batches without end, the planner's answer, and what a model is held to."""

from collections.abc import Iterator
from typing import Any

import torch
from tokens import vocabulary_of
from torch import nn

import sbpflow as flow

__all__ = ["endless", "entropy", "planned", "written"]


def endless(data: flow.data.ShardedData) -> Iterator[Any]:
    while True:
        yield from data


def entropy(data: flow.data.TokenFile) -> float:
    """The loss of who knows how frequent each token is, and nothing else."""
    counts = torch.stack([text for text, _ in map(data.__getitem__, range(len(data)))]).flatten().bincount().double()
    return float(torch.special.entr(counts / counts.sum()).sum())


def planned(model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: tuple[int, int]) -> str:
    """The planner's answer for as many ranks as there are now, found by one of them for all."""
    size, said = flow.init().size or 1, [""]
    if not flow.init().rank:
        text = torch.empty(batch, dtype=torch.int64, device="meta")
        found = flow.find_plan(
            model, (text, text), plan="grid (data=*)", loss_fn=loss_fn, optimizer=optimizer, ranks=size
        )
        print(found)
        said = [str(found)]
    if size > 1:
        torch.distributed.broadcast_object_list(said)
    return said[0]


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
