"""Direct links between ranks, together with the plan of the model: each is looked for in turn. Nothing runs.

    python examples/clusters/topology.py             # 16 cards, each with four ports of 100 Gb/s
    python examples/clusters/topology.py --rounds    # also what each round found

Optical links that are patched once for a job cost less than switches, but join few ranks. The planner finds the plan
that is best on the links there are; then links are laid where that plan sends most: rings for what goes round in rings,
by strides of their own, and single links for the rest. That goes on as long as a step takes less time. Beside it, a
fat tree for the same money.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.placement.hardware import Level
from sbpflow.placement.network.link_graph import LinkGraph, strides

RANKS, PORTS = 16, 4
GRID = "grid cuda (data=4, tensor=4)"
LINE = 12.5e9  # bytes a second of a port
LATENCY = 5e-6
PORT, PATCH, SWITCH = 400.0, 100.0, 500.0  # a card's port with its optics, a port of a patch panel, one of a switch
TIERS = 5  # ports of switches that a fat tree of three tiers needs for each port of a card
ROUNDS = 5
Links: TypeAlias = tuple[tuple[int, int], ...]
Traffic: TypeAlias = dict[tuple[tuple[tuple[int, ...], ...], str], float]  # bytes, by groups that are at work at once


class Net(nn.Module):
    """Wide layers over features that are looked up in large tables."""

    def __init__(self, width: int = 4096, rows: int = 200_000) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x).relu()
        return torch.as_tensor(x.square().mean())


def joined(links: Links) -> flow.Cluster:
    """Cards that are joined by these links alone."""
    one = flow.cluster("a100x8")
    level = Level("patched", RANKS, LATENCY, LINE)
    return replace(one, name="patched", levels=(level,), graph=LinkGraph(links, LATENCY, LINE))


def fat_tree() -> flow.Cluster:
    """Cards on switches for the money that ports and patch panels cost."""
    money = PORTS * (PORT + PATCH)
    ports = money / (PORT + TIERS * SWITCH)
    one = flow.cluster("a100x8")
    return replace(one, name="fat tree", levels=(Level("switches", RANKS, LATENCY, ports * LINE),))


def planned(where: flow.Cluster) -> tuple[float, Traffic]:
    """Seconds of a step by the best plan there, and what this plan sends."""
    with torch.device("meta"):
        net, ids = Net(), torch.zeros(8192, dtype=torch.long)
    found = flow.find_plan(net, ids, plan=GRID, cluster=where)
    sent: Traffic = {}
    for row in found.checked.report.moves:
        for move in row.boxing.moves:
            if move.axes and move.price.bytes:
                groups = tuple(map(tuple, move.src.placement.groups(move.axes)))
                ring = move.kind in ("all_reduce", "all_gather", "reduce_scatter")
                key = groups, "ring" if ring else "pairs"
                sent[key] = sent.get(key, 0.0) + move.price.bytes * row.count
    return found.checked.seconds, sent


def laid(sent: Traffic) -> Links:
    """Links for what is sent: a ring over all, so that every rank is reached, and then one by one what helps most."""
    return min(
        (_added_to(around(range(RANKS), stride), sent) for stride in strides(RANKS)),
        key=lambda links: took(sent, links),
    )


def took(sent: Traffic, links: Links) -> float:
    """Seconds of all that is sent, one after the other."""
    graph = joined(links).graph
    assert graph is not None
    return sum(size / graph.together(groups, ways)[1] for (groups, ways), size in sent.items())


def around(members: Sequence[int], stride: int) -> Links:
    """A ring by this stride; of two members it is one link."""
    size = len(members)
    return tuple((members[k], members[(k + stride) % size]) for k in range(size if size > 2 else 1))


def _added_to(links: Links, sent: Traffic) -> Links:
    while True:
        used = Counter(rank for link in links for rank in link)
        fit = [more for more in _offers(sent) if all(used[r] + n <= PORTS for r, n in Counter(sum(more, ())).items())]
        if not fit:
            return links
        links += min(fit, key=lambda more: took(sent, links + more))


def _offers(sent: Traffic) -> Iterator[Links]:
    """Links that may help: rings over each group, and single links between members so far apart."""
    for groups in {groups: None for groups, _ in sent}:
        size = len(groups[0])
        for stride in strides(size)[: (len(strides(size)) + 1) // 2]:  # the others are the same links the other way
            yield sum((around(group, stride) for group in groups), ())
        for apart in range(1, size // 2 + 1):
            if size % (2 * apart) == 0:
                yield tuple((g[k], g[k + apart]) for g in groups for k in range(size) if k % (2 * apart) < apart)


def searched() -> tuple[list[float], Links]:
    """Seconds of a step in each round, and the links of the last."""
    links = around(range(RANKS), 1) * (PORTS // 2)
    seconds, sent = planned(joined(links))
    found, best = [seconds], links
    for _ in range(ROUNDS):
        links = laid(sent)
        seconds, sent = planned(joined(links))
        if seconds >= found[-1]:
            break
        found, best = [*found, seconds], links
    return found, best


def main() -> None:
    rounds, links = searched()
    switched, _ = planned(fat_tree())
    if "--rounds" in sys.argv:
        print("  ".join(f"{1e3 * seconds:.2f} ms" for seconds in rounds))
    quicker = f"{rounds[0] / rounds[-1]:.2f} times as quick as two rings"
    print(f"{len(links)} links, patched: {1e3 * rounds[-1]:.2f} ms a step; {quicker}")
    print(f"a fat tree for the same money: {1e3 * switched:.2f} ms, {switched / rounds[-1]:.2f} times as long")


if __name__ == "__main__":
    main()
