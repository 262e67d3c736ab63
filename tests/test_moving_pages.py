"""Pages of moving from other systems: what their tables tell to write into a plan is what plans say."""

import re
from pathlib import Path

import pytest

import sbpflow as flow

PAGES = sorted((Path(__file__).resolve().parent.parent / "docs" / "moving").glob("*.md"))
# How a line of a plan begins: by a word of its statement, or by a path and how it lies or flows.
LINE = re.compile(
    r"(grid|input|take|pipe|place|recompute|offload|cast|inside|compress|hold|limit|states|\{grads,states\}) .+"
    r"|\d+ micro-batches|[\w.*{},\[\]]+(: | -> | <- )\w+=.+"
)


def lines(page: Path) -> list[str]:
    """The code in the last column of its tables that is a line of a plan."""
    last = [row.rstrip(" |").rpartition(" | ")[2] for row in page.read_text().splitlines() if row.startswith("| ")]
    code = [code for cell in last for code in re.findall(r"`([^`]+)`", cell)]
    return [each for each in code if LINE.fullmatch(each) and not each.endswith("...")]


@pytest.mark.parametrize("page", [page for page in PAGES if lines(page)], ids=lambda page: page.stem)
def test_lines_of_a_table_are_lines_of_a_plan(page: Path) -> None:
    told = lines(page)
    assert len(told) > 5
    for line in told:
        grid = (
            [] if line.startswith("grid") else ["grid cpu (pipe=1, data=1, tensor=1, context=1, expert=1, replica=1)"]
        )
        assert len(flow.Plan.read("\n".join([*grid, line])).statements) == len(grid) + 1


def test_there_is_a_page_for_each_system() -> None:
    assert [page.stem for page in PAGES] == ["deepspeed", "dtensor", "fsdp", "megatron", "oneflow"]
