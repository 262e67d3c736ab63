"""A sample of a test's cases: marked where the test stands, the same everywhere, no value of a parameter missing."""

import ast
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.conftest import beyond_the_sample, covering

TESTS = Path(__file__).parent


@pytest.mark.parametrize("seed", range(20))
def test_a_sample_has_every_value_of_each_parameter_where_it_is_large_enough(seed: int) -> None:
    cases = [{("case", a), ("size", b), ("way", c)} for a, b, c in product(range(5), range(2), range(3))]
    sample = covering(cases, 5, seed=str(seed))
    assert len({*sample}) == 5
    assert set[tuple[str, int]]().union(*(cases[at] for at in sample)) == set[tuple[str, int]]().union(*cases)
    assert sample == covering(cases, 5, seed=str(seed))


def test_a_sample_of_more_than_there_are_is_all() -> None:
    assert sorted(covering([{"a"}, {"b"}], 5, seed="")) == [0, 1]


@pytest.mark.parametrize(
    ("sampled", "left"),
    [(pytest.mark.sampled(2), {"sweep": 10}), (pytest.mark.sampled(2, sweep=5), {"sweep": 3, "rest": 7})],
)
def test_every_case_runs_somewhere(
    sampled: pytest.MarkDecorator, left: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def marked(name: str) -> pytest.Mark | None:
        return sampled.mark if name == "sampled" else None

    items: list[Any] = [SimpleNamespace(nodeid=f"a_test[{at}]", get_closest_marker=marked) for at in range(12)]
    monkeypatch.setattr(conftest, "values", lambda item: {item.nodeid})
    found = {item.nodeid: marker.name for item, marker in beyond_the_sample(items)}
    assert Counter(found.values()) == left
    always = covering([{item.nodeid} for item in items], 2, seed="a_test")
    assert found.keys().isdisjoint(items[at].nodeid for at in always)


@pytest.mark.parametrize("size", [(1, 2), (3, 4), (5, 6)], ids=str)
@pytest.mark.parametrize("way", ["one", "other"])
def test_a_value_of_a_parameter_is_the_same_in_all_cases(way: str, size: tuple[int, int], request: Any) -> None:
    name = request.node.nodeid.partition("[")[0]
    mine = [item for item in request.session.items if item.nodeid.partition("[")[0] == name]
    given = {(key, value) for item in mine for key, value in item.callspec.params.items()}
    assert len(set[object]().union(*map(conftest.values, mine))) == len(given)


def test_refusals_are_never_sampled_away() -> None:
    """They are written by hand, cost nothing, and only one of them may know of a mistake."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(word in node.name for word in ("refus", "wrong", "error")):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                assert not [m for m in marks if "sampled" in m or m == "pytest.mark.sweep"], f"{path.name}: {node.name}"
