"""Cards by their names: every preset of cards is one, and counts are whole nodes."""

from dataclasses import replace
from itertools import pairwise

import pytest

import sbpflow as flow
from sbpflow.nn.plan.commands.cards import card_kinds, cards_of
from sbpflow.placement.cluster import presets


def test_every_preset_of_cards_has_a_name_and_those_for_tests_have_none() -> None:
    known = {kind.nodes.name for kind in card_kinds().values()}
    assert known == {*presets()} - {"cpu", "flat", "two_level"}
    assert all(kind.nodes.device.name == name for name, kind in card_kinds().items())


def test_a_new_preset_is_a_kind_of_cards_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    known = flow.cluster("h100x8")
    nodes = (replace(known.levels[0], size=4), known.levels[1])
    more = replace(known, name="x1000x4", levels=nodes, device=replace(known.device, name="X1000"))
    monkeypatch.setitem(presets(), "x1000x4", more)
    count, kind = cards_of("8xX1000")
    assert (count, kind.in_node, kind.cluster(8)) == (8, 4, "x1000x4*2")


@pytest.mark.parametrize("name", card_kinds())
def test_doubled_counts_are_what_can_be_rented(name: str) -> None:
    kind = card_kinds()[name]
    counts = list(kind.doubled(1, 1000))
    assert counts[:4] == [1, 2, 4, 8]
    assert all(cards_of(f"{count}x{name}")[0] == count for count in counts)
    assert all(2 * a <= b < 2 * a + kind.in_node for a, b in pairwise(counts))


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("12xH100", "take 8 or 16"),
        ("100000xH100", "has 32768 cards at most"),
        ("100xGB200", "take 72 or 144"),
        ("-8xH100", "as in 8xH100; known are"),
        ("8xB20", "as in 8xB200; known are"),
    ],
)
def test_an_error_says_what_to_write(said: str, text: str) -> None:
    with pytest.raises(flow.SbpError, match=text):
        cards_of(said)


def test_no_number_is_left_to_who_asks() -> None:
    count, kind = cards_of("xb200")
    assert (count, kind.name) == (None, "B200")
