"""The picture of a schedule before anything runs: the work of every device, on one axis of time."""

from ...boxing.picture import svg
from ...boxing.picture.draw import written
from ...boxing.picture.palette import LINE
from ..schedules.preview import Preview, first_few, ticks

__all__ = ["KINDS", "SHADES", "install"]

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
    shortest = min((cell.end - cell.start for row in of.rows for cell in row), default=1.0)
    digits = max((len(str(cell.op.number)) for row in of.rows for cell in row), default=1)
    scale = min((10 + 7 * digits) / shortest, WIDE / of.end) if of.end else 1.0
    below = TOP + (HIGH + GAP) * of.device_count
    body = [svg.text(6, 18, of.title, fill=LINE, font_size=13)]
    for device, (cells, links) in enumerate(zip(of.rows, of.links, strict=True)):
        y = TOP + (HIGH + GAP) * device
        body += svg.row(f"device {device}", LEFT, y, scale * of.end, HIGH)
        for cell in cells:
            fills, x, wide = SHADES[cell.op.kind], LEFT + scale * cell.start, scale * (cell.end - cell.start)
            fill, tip = fills[cell.op.chunk % len(fills)], f"{cell.op} {cell.start:g} to {cell.end:g}"
            body.append(svg.bar(x, y, wide, HIGH, tip, str(cell.op.number), fill))
        for cell in links:
            x, wide = LEFT + scale * cell.start, scale * (cell.end - cell.start)
            tip = f"{cell.op} exchanges {cell.start:g} to {cell.end:g}"
            body.append(svg.tipped(tip, svg.rect(x, y + HIGH - 5, wide, 5, fill=LINE)))
    body += svg.axis(((LEFT + scale * tick, f"{tick:g}") for tick in ticks(of.end)), below)
    found = {cell.op.kind for row in of.rows for cell in row}
    kinds = [(fills[: of.chunk_count], KINDS[kind]) for kind, fills in SHADES.items() if kind in found]
    slots = f"slots {first_few(of.slots, ' ')}"
    body += svg.legend([*kinds, ((), slots)], LEFT, below + 26, {"fill": LINE}, stroke=LINE)
    return svg.drawing(round(max(LEFT + scale * of.end + 10, 480)), below + 46, *body)
