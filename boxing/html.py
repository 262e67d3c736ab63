"""HTML that notebooks show: tables and text. All words are escaped, because names, lines and plans are the user's."""

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["code", "paragraph", "table"]

CELL = "text-align:{};white-space:pre;font-variant-numeric:tabular-nums"
MOST = 200  # rows


def paragraph(words: str, *, strong: bool = False) -> str:
    """Words in a paragraph of their own.

    >>> paragraph("a < b")
    '<p>a &lt; b</p>'
    """
    inside = escape(words)
    return f"<p><b>{inside}</b></p>" if strong else f"<p>{inside}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A table; columns of the numbers `right` are to the right. Of very many rows the first are shown.

    >>> table(["a"], [["<b>"]]).count("&lt;b&gt;")
    1
    """
    listed, sides = list(rows), {*right}
    lines = [_row("th", head, sides), *(_row("td", row, sides) for row in listed[:MOST])]
    more = paragraph(f"and {len(listed) - MOST} more") if len(listed) > MOST else ""
    return f"<table>{''.join(lines)}</table>{more}"


def code(text: str, comment: str = "#") -> str:
    """Lines as they are written, with comments in another colour."""
    lines = []
    for line in text.splitlines():
        said, mark, rest = line.partition(comment)
        lines.append(escape(said) + (f"<span style='color:#7d8590'>{escape(mark + rest)}</span>" if mark else ""))
    return "<pre>" + "\n".join(lines) + "</pre>"


def _row(tag: str, cells: Sequence[str], right: set[int]) -> str:
    looks = [CELL.format("right" if at in right else "left") for at in range(len(cells))]
    made = (f'<{tag} style="{look}">{escape(cell)}</{tag}>' for look, cell in zip(looks, cells, strict=True))
    return f"<tr>{''.join(made)}</tr>"
