"""Of values by their keys those that were used last are kept."""

from sbpflow.nn.graph.lower.last_used import LastUsed


def test_the_value_that_was_used_longest_ago_is_the_first_to_go() -> None:
    known = LastUsed[str](2)
    known.put(1, "a")
    known.put(2, "b")
    assert known.get(1) == "a"
    assert known.put(3, "c") == "c"
    assert [known.get(key) for key in (1, 2, 3)] == ["a", None, "c"]
