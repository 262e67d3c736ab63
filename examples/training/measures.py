"""The measures of a run: how good a guess is, what the machine can do, and what ranks wait for."""

import resource
import time
from typing import Any

import torch

import sbpflow as flow

__all__ = ["entropy", "matmul_peak", "memory", "waiting"]


def entropy(data: flow.data.TokenFile) -> float:
    """The loss of who knows how frequent each token is, and nothing else."""
    counts = torch.stack([text for text, _ in map(data.__getitem__, range(len(data)))]).flatten().bincount().double()
    return float(torch.special.entr(counts / counts.sum()).sum())


def waiting(step: Any, seconds: float) -> dict[str, float]:
    """The shares of a step in which ranks stand still: stages for each other or what is sent, all for others."""
    found: dict[str, float] = {}
    timeline = step.timeline() if step.micro_batches > 1 else None  # all ranks ask, and the first is told
    if timeline is not None:
        of, ranks = timeline.step, timeline.ranks
        exposed = max(of.exposed(rank) for rank in ranks) / (of.end - of.start)
        found = {"bubble": max(of.bubble(rank) for rank in ranks), "exposed": exposed}
    times = step.rank_times()  # likewise, and all are told
    if times is not None:
        found |= {"waits": max(0.0, 1 - times.median / seconds), "slowest": times.slowest}
    return found


def memory(device: torch.device) -> float:
    """The most that this process has taken, in GiB."""
    used = (
        torch.cuda.max_memory_allocated()
        if device.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF)[2] << 10
    )
    return used / 2**30


def matmul_peak(device: torch.device) -> float:
    """TFLOP/s of products of squares, the best of several."""
    a, took = torch.randn(512, 512, device=device), list[float]()
    for _ in range(20):
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        took.append(time.perf_counter() - start)
    return 2 * 512**3 / min(took) / 1e12
