"""SVG that is written without any program: elements, and what charts share: a frame, rows, bars, an axis, a legend."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from .palette import FONT, IDLE, INK, LINE

__all__ = ["LETTER", "axis", "bar", "drawing", "element", "legend", "rect", "row", "text", "tipped"]

LETTER = 7  # pixels that a letter of 12 takes at most


def element(tag: str, inside: str = "", /, **look: str | float) -> str:
    """One element; a fraction of a pixel is written to a tenth.

    >>> element("rect", x=2, width=1 / 3, stroke_width=0.5, class_="op")
    '<rect x="2" width="0.3" stroke-width="0.5" class="op"/>'
    """
    said = "".join(f' {name.rstrip("_").replace("_", "-")}="{_written(value)}"' for name, value in look.items())
    return f"<{tag}{said}>{inside}</{tag}>" if inside else f"<{tag}{said}/>"


def _written(value: str | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))


def drawing(width: int, height: int, *body: str, **look: str | float) -> str:
    """A whole picture."""
    look = {"width": width, "height": height, "font_family": FONT, "font_size": 12, **look}
    inside = "\n".join(("", *body, ""))
    return element("svg", inside, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", **look)


def text(x: float, y: float, words: str, **look: str | float) -> str:
    return element("text", escape(words), x=x, y=y, **look)


def rect(x: float, y: float, width: float, height: float, tip: str = "", /, **look: str | float) -> str:
    """A rectangle, and what a pointer is told there."""
    inside = element("title", escape(tip)) if tip else ""
    return element("rect", inside, x=x, y=y, width=width, height=height, **look)


def tipped(tip: str, *parts: str) -> str:
    """Elements that tell a pointer the same."""
    return element("g", element("title", escape(tip)) + "".join(parts))


def row(name: str, x: float, y: float, width: float, height: int) -> Iterator[str]:
    """The name of a row and its ground, on which bars stand."""
    yield text(6, y + height // 2 + 4, name, fill=LINE)
    yield rect(x, y, width, height, fill=IDLE)


def bar(x: float, y: float, width: float, height: int, tip: str, label: str, fill: str) -> str:
    """A bar of a row, with its label where there is room for it."""
    shown = rect(x, y, width, height, fill=fill, stroke=LINE, stroke_width=0.5)
    if width > LETTER * len(label):
        shown += text(x + width / 2, y + height // 2 + 4, label, text_anchor="middle", fill=INK)
    return tipped(tip, shown)


def axis(marks: Iterable[tuple[float, str]], y: float) -> Iterator[str]:
    """Marks below the rows, each at its place."""
    for x, words in marks:
        yield element("path", d=f"M{x:.1f} {y}v4", stroke=LINE)
        yield text(x, y + 15, words, text_anchor="middle", fill=LINE, font_size=10)


def legend(
    entries: Iterable[tuple[Sequence[str], str]],
    x: int,
    y: int,
    words: dict[str, str | float],
    *,
    by: str = "fill",
    size: int = 12,
    letter: float = LETTER,
    **look: str | float,
) -> Iterator[str]:
    """Colours and their words behind each other; the colours are fills, or what else `by` names."""
    for colours, said in entries:
        for colour in colours:
            yield rect(x, y, size, size, **{by: colour}, **look)
            x += size + 4
        yield text(x, y + round(0.8 * size), said, **words)
        x += round(letter * len(said)) + 16
