"""README counts what there is, and its links lead somewhere, in a checkout and on a package index."""

import re
from pathlib import Path

import pytest

import sbpflow as flow
from sbpflow.actors import PUBLISHED, published
from sbpflow.placement.errors import ScheduleError
from tests.test_readme import blocks
from tools.release import LINK, absolute, versions

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EVIDENCE = ROOT / "docs" / "evidence"
SOURCE = "https://forge.example/owner/sbpflow"


def counts(pattern: str, text: str = README) -> tuple[int, ...]:
    found = re.search(pattern, text.replace("\n", " "))
    assert found, pattern
    return tuple(map(int, found.groups()))


def rows(page: str) -> int:
    """Rows of the tables of a page of evidence, without their heads."""
    lines = (EVIDENCE / page).read_text().splitlines()
    return sum(line.startswith("|") for line in lines) - 2 * sum(
        bool(re.match(r"\|[ :-]*-\|?", line)) for line in lines
    )


def test_schedules_are_counted_as_the_command_line_lists_them() -> None:
    with pytest.raises(ScheduleError) as error:
        published("none of them")
    listed = str(error.value).partition("there are ")[2].split(", ")
    assert counts(r"(\d+) published schedules .*? under (\d+) names") == (len(PUBLISHED), len(listed))


def test_operators_are_counted_as_their_page_does() -> None:
    told = counts(r"Of (\d+) ops (\d+) are right forward, (\d+) forward and backward, (\d+) stay", text("ops.md"))
    right, ops, split = counts(r"(\d+) of the (\d+) applicable operators .*? and (\d+) stay split")
    assert (ops, right, right, split) == told


def test_families_and_systems_are_counted_as_their_pages_have_rows() -> None:
    families, under_plans = counts(r"(\d+) families of models .*? and (\d+) of them under six plans")
    assert (families, under_plans) == (rows("families.md"), rows("plan_families.md"))
    assert counts(r"(\d+) rows of \[systems") == (rows("systems.md"),)


def test_the_table_of_what_to_use_has_a_row_for_each_way() -> None:
    table = README.partition("## Which do I use")[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()
    ways = ["eager", "graph", "plan", "pipeline", "planner"]
    assert [re.findall(r"\*\*(\w+)\*\*", row) for row in table[2:]] == [[way] for way in ways]
    code = [name for row in table for name in re.findall(r"flow\.(\w+)\(", row)]
    assert code
    assert all(hasattr(flow, name) for name in code)


def test_the_first_screen_trains_a_model_by_a_plan_of_four_lines() -> None:
    (plan,) = re.findall(r'plan="""\n(.*?)"""', blocks(ROOT / "README.md")[0], re.DOTALL)
    assert len(flow.Plan.read(plan).statements) == 4
    assert len(README.partition("## Which do I use")[0].splitlines()) < 60


def test_links_lead_to_what_is_in_the_tree_on_an_index_too() -> None:
    turned = absolute(README, ROOT, SOURCE, "v1")
    links = [(hit[1], hit[3]) for hit in LINK.finditer(turned)]
    assert len(links) > 20
    for picture, link in links:
        kind, _, path = link.removeprefix(f"{SOURCE}/").partition("/v1/")
        there = ROOT / path.partition("#")[0]
        assert kind == ("raw" if picture else "tree" if there.is_dir() else "blob"), link
        assert there.exists(), link


def test_a_link_to_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"links to docs/none\.md"):
        absolute("[a](docs/none.md)", tmp_path, SOURCE, "v1")


def test_every_file_says_the_same_version() -> None:
    assert len(set(versions(ROOT).values())) == 1, versions(ROOT)


def text(page: str) -> str:
    return (EVIDENCE / page).read_text()
