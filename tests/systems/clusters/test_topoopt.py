"""TopoOpt: links that were looked for with the plan, beside plain rings and switches for the same money."""

import runpy
from collections import Counter
from pathlib import Path

import pytest

from sbpflow.placement.network.link_graph import strides

FILE = Path(__file__).resolve().parents[3] / "examples" / "clusters" / "topology.py"


@pytest.fixture(scope="module")
def topology() -> dict[str, object]:
    return runpy.run_path(str(FILE))


def test_links_for_what_is_sent_are_the_best_of_all_rings(topology: dict) -> None:  # type: ignore[type-arg]
    """Of rings over eight ranks, by permutations of strides, two of which have all ports."""
    topology["laid"].__globals__["RANKS"] = 16
    around, laid, took = topology["around"], topology["laid"], topology["took"]
    inner = tuple(tuple(range(k, k + 4)) for k in range(0, 16, 4))
    outer = tuple(tuple(range(k, 16, 4)) for k in range(4))
    whole = (tuple(range(16)),)
    for sent in (
        Counter({(inner, "ring"): 3e8, (outer, "ring"): 1e8, (whole, "ring"): 1e8}),
        Counter({(outer, "ring"): 3e8, (whole, "pairs"): 1e8}),
        Counter({(whole, "pairs"): 1e8}),
    ):
        links = laid(sent)
        ends = Counter(rank for link in links for rank in link)
        assert max(ends.values()) <= topology["PORTS"]
        rings = [around(range(16), a) + around(range(16), b) for a in strides(16) for b in strides(16)]
        assert took(sent, links) <= min(took(sent, ring) for ring in rings) * (1 + 1e-9)


@pytest.mark.sweep
def test_a_step_takes_less_time_than_on_rings_or_on_a_fat_tree_for_the_same_money(topology: dict) -> None:  # type: ignore[type-arg]
    rounds, links = topology["searched"]()
    switched, _ = topology["planned"](topology["fat_tree"]())
    assert sorted(rounds, reverse=True) == rounds
    assert rounds[-1] < 0.9 * rounds[0]
    assert rounds[-1] < switched
    assert max(Counter(rank for link in links for rank in link).values()) <= topology["PORTS"]
