"""Models of many families of transformers train as on one device, or are refused as docs/families.md says."""

import pytest

from tests.nn.families import FAMILIES, WAYS, outcome, said, table

# transformers says which kernels of others it does not find, and warns of its own names.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_page_has_every_family() -> None:
    assert table().keys() == {(name, way) for name in FAMILIES for way in WAYS}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_the_page_says(name: str, way: str) -> None:
    assert said(outcome(name, way)) == table()[name, way]


@pytest.mark.parametrize("way", ["graph", "pipeline"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.otherwise])
def test_what_is_refused_is_right_with_what_the_page_says(name: str, way: str) -> None:
    assert "refused" in {table()[name, other] for other in WAYS}
    assert said(outcome(name, way, otherwise=True)) == "right"
