"""Models of many families of transformers train as on one device, or are refused as docs/families.md says."""

import pytest

from tests.nn.families import FAMILIES, WAYS, outcome, said, table

# transformers says which kernels of others it does not find, and warns of its own names.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_page_has_every_family() -> None:
    assert table().keys() == {(name, way) for name in FAMILIES for way in WAYS}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_the_page_says(name: str, way: str) -> None:
    assert said(outcome(name, way)) == table()[name, way]
