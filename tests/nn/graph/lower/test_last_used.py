"""Of values by their keys those that were used last are kept."""

from sbpflow.nn.graph.lower.last_used import LastUsed


def test_the_value_that_was_used_longest_ago_is_the_first_to_go() -> None:
    made: list[str] = []
    known = LastUsed[str](2)

    def value(key: str) -> str:
        return known.of(key, lambda: made.append(key) or key.upper())  # type: ignore[func-returns-value]

    assert [value(key) for key in "abacab"] == [*"ABACAB"]
    assert made == [*"abcb"]  # c took the place of b
