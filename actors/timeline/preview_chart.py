"""The picture of a schedule before anything runs: the work of every device, on one axis of time."""

from collections.abc import Iterator
from html import escape

from ...boxing.picture.draw import written
from ..schedules.preview import Preview, first_few, ticks

__all__ = ["KINDS", "SHADES", "install"]

INK, LINE, IDLE = "#1f2328", "#7d8590", "#7d859026"
HIGH, GAP, LEFT, TOP = 24, 4, 76, 30  # pixels: a row, between rows, before the first unit, above the first row
WIDE = 1600  # pixels of the rows at most
KINDS = {"F": "forward", "B": "backward", "W": "weight gradients", "U": "update"}  # as an actor's name begins

# By kind, for a device's first chunk and those behind it; text is dark on all of them.
SHADES = {
    "F": ("#cfe3ff", "#8fbcff", "#6da4f5", "#b3cbe8"),
    "B": ("#d3f3d0", "#93d98c", "#74c26c", "#b5d6b2"),
    "W": ("#ffe0bd", "#ffbf80", "#f0a45c", "#e8cfb3"),
    "U": ("#e3d8ff",),
}


def install() -> None:
    """Have previews draw themselves."""
    Preview.svg, Preview.drawn = preview_svg, lambda of, path: written(preview_svg(of) + "\n", path)


def preview_svg(of: Preview) -> str:
    return "\n".join(_svg(of))


def _svg(of: Preview) -> Iterator[str]:
    shortest = min((cell.end - cell.start for row in of.rows for cell in row), default=1.0)
    digits = max((len(str(cell.op.number)) for row in of.rows for cell in row), default=1)
    scale = min((10 + 7 * digits) / shortest, WIDE / of.end) if of.end else 1.0
    below = TOP + (HIGH + GAP) * of.shape.p
    wide, high = LEFT + scale * of.end + 10, below + 46
    kinds = [kind for kind in SHADES if any(cell.op.kind == kind for row in of.rows for cell in row)]
    wide = max(wide, 480.0)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high}" width="{wide:.0f}" '
        f'height="{high}" font-family="Helvetica,Arial,sans-serif" font-size="12">'
    )
    yield f'<text x="6" y="18" fill="{LINE}" font-size="13">{escape(of.title)}</text>'
    for device, row in enumerate(of.rows):
        y = TOP + (HIGH + GAP) * device
        yield f'<text x="6" y="{y + 16}" fill="{LINE}">device {device}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{scale * of.end:.1f}" height="{HIGH}" fill="{IDLE}"/>'
        for cell in row:
            x, width = LEFT + scale * cell.start, scale * (cell.end - cell.start)
            fills = SHADES[cell.op.kind]
            number = str(cell.op.number) if width > 7 * len(str(cell.op.number)) else ""
            yield (
                f'<g><title>{cell.op} {cell.start:g} to {cell.end:g}</title><rect x="{x:.1f}" y="{y}" '
                f'width="{width:.1f}" height="{HIGH}" fill="{fills[cell.op.chunk % len(fills)]}" stroke="{LINE}" '
                f'stroke-width="0.5"/><text x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle" '
                f'fill="{INK}">{number}</text></g>'
            )
        for cell in of.links[device]:
            x, width = LEFT + scale * cell.start, scale * (cell.end - cell.start)
            yield (
                f'<g><title>{cell.op} exchanges {cell.start:g} to {cell.end:g}</title><rect x="{x:.1f}" '
                f'y="{y + HIGH - 5}" width="{width:.1f}" height="5" fill="{LINE}"/></g>'
            )
    for tick in ticks(of.end):
        x, look = LEFT + scale * tick, f'text-anchor="middle" fill="{LINE}" font-size="10"'
        yield f'<path d="M{x:.1f} {below}v4" stroke="{LINE}"/>'
        yield f'<text x="{x:.1f}" y="{below + 15}" {look}>{tick:g}</text>'
    x, y = float(LEFT), high - 20
    for kind in kinds:
        for fill in SHADES[kind][: of.shape.v if kind != "U" else 1]:
            yield f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{fill}" stroke="{LINE}"/>'
            x += 16
        yield f'<text x="{x:.0f}" y="{y + 10}" fill="{LINE}">{KINDS[kind]}</text>'
        x += 7 * len(KINDS[kind]) + 16
    yield f'<text x="{x:.0f}" y="{y + 10}" fill="{LINE}">slots {first_few(of.slots, " ")}</text>'
    yield "</svg>"
