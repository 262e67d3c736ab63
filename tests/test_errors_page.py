"""docs/reference/errors.md: each wrong input of the page is run, and its error is what the page says."""

import re
from pathlib import Path

import pytest

from sbpflow.placement.errors import SbpflowError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "errors.md"
WRONG = re.compile(r"^\*\*([^\n]+)\*\*\n\n```py\n(.*?)^```\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HEAD = re.compile(r"^```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TEXT = PAGE.read_text(encoding="utf-8")
CASES = WRONG.findall(TEXT)


def test_the_page_has_the_wrong_inputs_and_nothing_that_is_not_run() -> None:
    assert len(CASES) >= 53
    assert TEXT.count("```py\n") == len(CASES) + 1
    assert len({title for title, _, _ in CASES}) == len(CASES)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.compile loads it
@pytest.mark.parametrize(("code", "said"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_wrong_input_says_what_is_wrong_and_what_to_write(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page calls the user's file mine.py, and the folder /home/me."""
    monkeypatch.chdir(tmp_path)
    head = HEAD.search(TEXT)
    assert head
    with pytest.raises(SbpflowError) as found:
        exec(compile(head[1] + code, "mine.py", "exec"), {"__name__": "mine"})
    text = f"{type(found.value).__name__}: {found.value}\n".replace(str(tmp_path.resolve()), "/home/me")
    assert text == said
    assert len(text.splitlines()) > 1
