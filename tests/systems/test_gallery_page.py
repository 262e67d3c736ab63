"""The gallery's front page: every row has a check and a page that there are, and every check a row."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs/evidence/systems.md"
BESIDE = {  # of what rows have in common
    "actors": {"test_added.py", "test_loader.py", "test_routes.py", "test_together.py"},
    "asynchronous": {"test_draining.py", "test_frozen_stages.py"},
    "changing": {"test_lost_rank.py", "test_rebalance.py"},
    "compression": {
        "test_compressed_gradients.py",
        "test_compressed_hops.py",
        "test_compressed_outer_steps.py",
        "test_encoded_prices.py",
    },
    "experts": {"test_without_rooms.py"},
    "neighbours": {"test_diffusers.py", "test_films.py", "test_gspmd.py", "test_sliding_window.py", "test_swin.py"},
    "orders": {"test_pipedream_partition.py"},
    "overlap": {"test_other_steps.py", "test_processes.py"},
}


def checks() -> set[Path]:
    """The files that rows name; of several in a row the later ones leave the folder out."""
    found = set()
    for row in PAGE.read_text().splitlines():
        if row.startswith("| ") and "/test_" in row:
            names = re.findall(r"`((?:\w+/)?test_\w+\.py)`", row)
            folder = next(name.partition("/")[0] for name in names if "/" in name)
            found |= {HERE / (name if "/" in name else f"{folder}/{name}") for name in names}
    return found


def test_every_row_names_a_check_that_there_is() -> None:
    assert len(checks()) > 30
    assert not [path for path in checks() if not path.exists()]


def test_every_check_has_a_row() -> None:
    beside = {HERE / folder / name for folder, names in BESIDE.items() for name in names}
    there = set(HERE.glob("*/test_*.py"))
    assert there - checks() - beside == set()
    assert beside <= there


def test_every_page_of_the_gallery_is_named() -> None:
    pages = {path.name for path in (PAGE.parent / "systems").glob("*.md")}
    assert pages == set(re.findall(r"\(systems/(\w+\.md)\)", PAGE.read_text()))
