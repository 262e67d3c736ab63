"""The code in README.md and docs/ runs and prints what they say: the python blocks of a page are one program."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Most of the time of all pages. What those of systems say is held by tests/systems, that of trainers by
# tests/test_trainers.py; that they print it, by the sweep.
LONG = {
    "train_llama.md", "reference/trainers.md",
    *(f"evidence/systems/{name}.md" for name in (
        "asynchronous", "changing", "compression", "experts", "orders", "overlap", "plans"
    )),
}  # fmt: skip
# The picture that README draws is the one that it shows.
DRAWN = (ROOT / "README.md", "map.svg", ROOT / "docs" / "pictures" / "plans" / "llama.svg")


def blocks(page: Path) -> list[str]:
    """The code of each block behind as many empty lines as lie above it, so a traceback names the line."""
    text = page.read_text()
    return ["\n" * text.count("\n", 0, hit.start(1)) + hit[1] for hit in BLOCK.finditer(text)]


def test_the_readme_has_code() -> None:
    assert blocks(ROOT / "README.md")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT)).removeprefix("docs/")


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch itself uses it for forward-mode derivatives
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=[pytest.mark.sweep] if name(page) in LONG else [])
        for page in PAGES
        if blocks(page)
    ],
)
def test_the_code_of_a_page_runs_and_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The comments that begin a line of a block are its output."""
    monkeypatch.chdir(tmp_path)  # a block may write pictures
    program = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", program)  # dataclasses and pickle look it up
    for source in blocks(page):
        exec(compile(source, page, "exec"), program.__dict__)
        said = [line.removeprefix("#").removeprefix(" ") for line in source.splitlines() if line.startswith("#")]
        assert not said or capsys.readouterr().out.splitlines() == said
    page_of, drawn, shown = DRAWN
    if page == page_of:
        assert Path(drawn).read_text() == shown.read_text(), f"README shows another picture: take {tmp_path / drawn}"
