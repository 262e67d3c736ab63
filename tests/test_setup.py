"""`make`'s environment takes a CPU build of torch where there is one, whatever else the indexes hold."""

import tomllib
from pathlib import Path

import pytest

from tools.setup_env import newest_marked, torchvision_of

ROOT = Path(__file__).resolve().parent.parent
NEED = "torch>=2.11,<2.16"


@pytest.mark.parametrize(
    ("listed", "taken"),
    [
        ("2.15.0, 2.14.1, 2.13.0+cpu, 2.12.0+cpu", "torch==2.13.0+cpu"),
        ("2.16.0+cpu, 2.15.1+cpu, 2.15.0+cpu", "torch==2.15.1+cpu"),
        ("2.15.0, 2.14.1", None),
        ("2.10.0+cpu, 2.9.1+cpu", None),
        ("2.11.0+cpu, 2.16.0rc1+cpu", "torch==2.11.0+cpu"),
        ("", None),
    ],
    ids=["behind_one_with_cuda", "within_the_range", "none_is_marked", "too_old", "first_of_the_range", "empty"],
)
def test_the_newest_build_for_the_cpu_is_taken(listed: str, taken: str | None) -> None:
    assert newest_marked(listed.split(","), NEED) == taken


def test_the_range_of_the_project_is_one_that_the_setup_reads() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (need,) = [need for need in project["dependencies"] if need.startswith("torch")]
    assert newest_marked(["2.11.0+cpu"], need) == "torch==2.11.0+cpu"


def test_torchvision_is_the_one_that_was_built_for_the_torch_that_is_here() -> None:
    assert torchvision_of("2.13.0+cpu") == "torchvision==0.28.*"
    assert torchvision_of("2.11.1") == "torchvision==0.26.*"
