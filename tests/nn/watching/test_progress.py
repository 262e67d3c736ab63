"""Progress: a bar on a terminal, lines elsewhere."""

import io
import sys

import pytest

from sbpflow.nn.watching.progress import progress_of, words

LINE = {"step": 4, "loss": 2.5, "tokens_per_second": 1000.0, "mfu": 0.25, "predicted_seconds": 1.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_a_line_is_a_line_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress_of(8, 0)
    shown.step()
    shown.line(LINE)
    shown.end()
    assert capsys.readouterr().out == "step 4/8  loss 2.5000  1,000 tokens/s  mfu 25.0%\n"


def test_on_a_terminal_there_is_a_bar_that_begins_where_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    shown = progress_of(8, 3)
    shown.step()
    shown.line(LINE)
    shown.end()
    assert "4/8" in terminal.getvalue()
    assert "loss 2.5000" in terminal.getvalue()


def test_without_tqdm_a_terminal_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setitem(sys.modules, "tqdm", None)
    progress_of(None, 0).line(LINE)
    assert capsys.readouterr().out == "step 4  loss 2.5000  1,000 tokens/s  mfu 25.0%\n"


def test_what_was_predicted_is_for_files() -> None:
    assert words({"step": 1, "predicted_gib": 2.0, "seconds": 1.0}) == ""
