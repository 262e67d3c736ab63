"""MegaScale: tensor-, pipeline- and data-parallel communication, each taken off the devices' queues, on its 175B model.

The model, its cut and Megatron-LM's seconds a step are of the paper's table of strong scaling; rates of links are those
of such machines: 235 GB/s of a collective inside a node, 25 GB/s of a card between nodes.
"""

from dataclasses import dataclass
from functools import lru_cache

import pytest

from sbpflow.actors import Costs, Folding, network_of, published, simulate

HIDDEN, LAYERS, SEQUENCE = 12288, 96, 2048
TENSOR, STAGES, CHUNKS = 8, 8, 6  # ranks of tensor and pipeline parallelism, and chunks a stage
FLOPS, INSIDE, BETWEEN = 312e12 * 0.62, 235e9, 25e9  # of a card at its matrices; bytes a second
TABLE = {256: (768, 40.0), 768: (768, 15.2)}  # cards: samples a step, seconds of Megatron-LM


@dataclass(frozen=True)
class Machine:
    """A step of so many cards; what is overlapped is on no device's queue."""

    cards: int

    @property
    def micro_batches(self) -> int:
        samples, _ = TABLE[self.cards]
        return samples * TENSOR * STAGES // self.cards

    @lru_cache  # noqa: B019 few of them
    def seconds(self, overlapped: frozenset[str]) -> float:
        of_chunk = LAYERS // STAGES // CHUNKS
        compute = of_chunk * 24 * SEQUENCE * HIDDEN**2 * (1 + SEQUENCE / (6 * HIDDEN)) / TENSOR / FLOPS
        inside = of_chunk * 4 * 2 * SEQUENCE * HIDDEN * (TENSOR - 1) / TENSOR / INSIDE  # two of each before and behind
        hop = 2 * SEQUENCE * HIDDEN / TENSOR / BETWEEN
        weights = 2 * 12 * HIDDEN**2 * of_chunk / TENSOR / BETWEEN  # as each rank gathers, and brings home
        forward, backward = compute, 2 * compute
        if "tensor" not in overlapped:
            forward, backward = forward + inside, backward + inside
        if "pipeline" not in overlapped:
            forward, backward = forward + 2 * hop, backward + 2 * hop  # received and sent by who computes
        half = backward / 2
        costs = Costs(forward, half, half, hop if "pipeline" in overlapped else 0.0, gather=weights, reduce=weights)
        schedule = published("interleaved")
        shape = schedule.shape(STAGES, self.micro_batches, v=CHUNKS)
        return simulate(network_of(schedule, shape, costs, Folding(beside="data" in overlapped))).end


ALL = ("tensor", "pipeline", "data")


def gains(cards: int) -> dict[str, float]:
    """The share of a step that each overlap saves, one after the other."""
    found, so_far, before = {}, frozenset[str](), Machine(cards).seconds(frozenset())
    for each in ALL:
        so_far |= {each}
        now = Machine(cards).seconds(so_far)
        found[each], before = (before - now) / Machine(cards).seconds(frozenset()), now
    return found


@pytest.mark.parametrize("cards", [768])
def test_every_overlap_saves_something_and_tensor_parallel_most(cards: int) -> None:
    found = gains(cards)
    assert sorted(found, key=lambda each: -found[each]) == ["tensor", "pipeline", "data"]
    assert all(share > 0.002 for share in found.values())


def test_a_step_is_of_the_length_that_was_measured() -> None:
    """Without any overlap, within an eighth of the seconds of Megatron-LM, which overlaps some."""
    _, measured = TABLE[768]
    assert Machine(768).seconds(frozenset()) == pytest.approx(measured, rel=0.12)


def test_all_but_the_first_chunk_is_folded() -> None:
    """Of the data-parallel exchange one chunk's of six on the way home is exposed, and one's gather."""
    pair = frozenset({"tensor", "pipeline"})
    usual, folded = (Machine(768).seconds(of) for of in (pair, pair | {"data"}))
    weights = 2 * 12 * HIDDEN**2 * 2 / TENSOR / BETWEEN
    assert usual - folded == pytest.approx(2 * (CHUNKS - 1) * weights, rel=0.12)
