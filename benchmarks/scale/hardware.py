"""The clusters of the published tables, by their headers."""

from dataclasses import replace
from math import ceil

import sbpflow as flow
from sbpflow.placement import Cluster

from .setting import Run

__all__ = ["cluster_of"]

SLOW_HOST = 64e-6  # seconds of Python for a kernel of Megatron-DeepSpeed, published
# Shares of moves inside a node and between nodes that nothing hides, published for H100.
EXPOSED = {"all": (0.40, 0.23), "between nodes": (1.0, 0.23)}


def cluster_of(run: Run) -> Cluster:
    """The cluster of a run; a node has 8 cards."""
    base, _, kind = run.hardware.partition(" ")
    nodes = max(1, ceil(run.gpus / 8))
    found = flow.cluster(f"{base}x8*{nodes}" if nodes > 1 else f"{base}x8")
    if run.hides:  # what is left takes as long as by quicker links
        shares = zip(found.levels, EXPOSED[run.hides], strict=False)
        found = replace(found, levels=tuple(replace(at, bandwidth=at.bandwidth / share) for at, share in shares))
    if kind == "one adapter":  # 100 Gb/s a node, of which each of its 8 cards has its share while all send
        node, network = found.levels
        return replace(found, levels=(node, replace(network, bandwidth=0.8 * 12.5e9 / 8)))
    if kind == "waits for Python":  # vTrain's: 800 Gb/s a node, half of the preset's
        fitted = found.device.fitted
        later = fitted and replace(fitted, host=SLOW_HOST)
        node, *others = found.levels
        levels = node, *(replace(at, bandwidth=at.bandwidth / 2) for at in others)
        return replace(found, levels=levels, device=replace(found.device, fitted=later))
    if kind == "slow memory":  # the H100 of torchtitan's notes: HBM2e, 96 GB, 500 W
        fitted = found.device.fitted
        slower = fitted and replace(fitted, attention=0.2)  # as published work has it for these cards
        return replace(found, device=replace(found.device, memory=102e9, memory_bandwidth=2.4e12, fitted=slower))
    return found
