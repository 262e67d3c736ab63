"""Explanations: the one kind of thing that `explain` returns, whether it was asked about calls or about a graph.

print(said)              the summary
print(said.full())       all of it
said.dict()              the same for a program
said.save("said.html")   a page of its own; .json for a program, .txt for readers
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ..placement.errors import SbpError, SbpflowError

__all__ = ["Explanation", "unsaved"]


def unsaved(path: object) -> None:
    """Refuse a path for the page: it was once written so."""
    if path is not None:
        raise SbpflowError(f"html() gives the page as text, and writes nothing\n  .save({str(path)!r}) writes it")


class Explanation(ABC):
    """Choices and what they cost, to be printed, shown in a notebook, or saved."""

    @abstractmethod
    def full(self) -> str:
        """All of it, as text."""

    @abstractmethod
    def dict(self) -> dict[str, Any]:
        """All of it in lists, dicts, numbers and text, as json has them."""

    def html(self, path: None = None) -> str:
        """A page that needs nothing from elsewhere."""
        unsaved(path)
        return f'<!DOCTYPE html>\n<html><head><meta charset="utf-8"/></head><body>{self._repr_html_()}</body></html>\n'

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def save(self, path: str | Path) -> Path:
        """Write it as a page, as data or as text: .html, .json or .txt, by the suffix of the path."""
        path = Path(path)
        forms: Mapping[str, Callable[[], str]] = {
            ".html": self.html,
            ".json": lambda: json.dumps(self.dict(), indent=1),
            ".txt": lambda: self.full() + "\n",
        }
        if path.suffix not in forms:
            raise SbpError(
                f"cannot save {path.name!r}: an explanation is {', '.join(forms)}, by the suffix of the path\n"
                "  pictures are drawn: step.draw(path), step.draw_map(path)"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(forms[path.suffix](), encoding="utf-8")
        return path
