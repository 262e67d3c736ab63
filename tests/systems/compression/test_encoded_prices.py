"""Prices of encoded gradients in the choice of signatures: those of their payloads' moves."""

from typing import Any

import numpy as np
import pytest
import torch

import sbpflow as flow
from sbpflow.boxing.boxing import between
from sbpflow.boxing.encoding import Encoding, encoded_boxings
from sbpflow.boxing.graph.encode import SaidEncoder
from sbpflow.placement import default_cluster
from sbpflow.placement.links import Links
from sbpflow.sbp import layout
from sbpflow.sbp.joint.move_cost import encoded_seconds, moved
from tests.systems.compression.runs import DATA, batch, net, step_of

E = flow.encoders
LINKS = Links.of(DATA, default_cluster(DATA))
ENCODERS = [
    E.sign(), E.sign(rows=True, twice=True), E.int8(), E.topk(fraction=0.01), E.low_rank(rank=2),
    E.later(steps=3, of=E.int4()),
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("to", ["B", "S(0)", "S(1)"])
@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
def test_the_price_of_an_encoded_move_is_that_of_its_plans(encoder: E.Encoder, to: str) -> None:
    src, dst = (layout(DATA, sbp, (256, 128)) for sbp in ("P", to))
    states = [src.state], [dst.state]
    plain = moved(*states, src.shape, 4, LINKS)
    found = encoded_seconds(plain, SaidEncoder(encoder), src.dtype, *states, src.shape, DATA, LINKS)
    ways = encoded_boxings([(src, dst)], [Encoding(encoder, (0,))])
    assert found[0, 0] == pytest.approx(sum(way.price.time for way in ways), rel=1e-9)
    assert plain[0, 0] == pytest.approx(between(src, dst).price.time, rel=1e-9)


def test_a_move_that_is_not_encoded_keeps_its_price() -> None:
    """No sum, or none along an axis that is meant, or of pieces that differ in size."""
    grid = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
    links = Links.of(grid, default_cluster(grid))
    src = [layout(grid, sbp, (9, 8)).state for sbp in ("(B, P)", "(P, S(0))", "(B, S(0))", "(B, B)")]
    dst = [layout(grid, "(B, B)", (9, 8)).state]
    plain = moved(src, dst, (9, 8), 4, links)
    said = SaidEncoder(E.int8(), ("data",))
    found = encoded_seconds(plain, said, torch.float32, src, dst, (9, 8), grid, links)
    assert np.array_equal(found, plain)


def lies(encoder: E.Encoder | None, rows: int = 512) -> tuple[str, Any]:
    """How the large weight of a model lies, of which nothing is said but the encoder of its gradient."""
    step = step_of(net(512), {"2.weight": encoder} if encoder else None, inputs=None).plan_for(*batch(0, rows))
    (weight,) = [s.value for s in step.physical.sources if s.value.name == "2.weight"]
    return str(weight.layout.lie), step


@pytest.mark.parametrize("encoder", [E.topk(fraction=0.01), E.sign(twice=True), E.low_rank(rank=2)], ids=str)
def test_a_cheap_sum_is_a_reason_for_data_parallelism(encoder: E.Encoder) -> None:
    """By the price of a plain sum the weight was cut, and then the encoder refused: there was no sum to encode."""
    alone, plain = lies(None)
    there, coded = lies(encoder)
    assert (alone, there) == ("(S(0),)", "(B,)")
    assert coded.explain().solution.optimum < plain.explain().solution.optimum
    assert [str(back.encoding.encoder) for back in coded.physical.backs if back.encoding] == [str(encoder)]


def test_moves_that_are_told_take_less_than_half() -> None:
    told = [step_of(net(512), by).plan_for(*batch(0, 2048)).explain() for by in (None, {"*": E.topk(fraction=0.01)})]
    spent = [each.exposed + each.hidden for each in told]
    assert spent[1] < 0.5 * spent[0]


def test_a_step_whose_plan_an_encoder_changed_learns() -> None:
    step = step_of(net(128), {"2.weight": E.int4()}, inputs={"x": {"data": flow.S(0)}})
    losses = [step(*batch(at, 2048)).item() for at in range(20)]
    assert losses[-1] < losses[0]
