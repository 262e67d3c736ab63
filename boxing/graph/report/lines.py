"""Lines and tables of text that the summary, the whole and the page of a report share."""

from collections.abc import Iterator, Sequence

from ....sbp import Layout
from ...figures import duration, user_path, volume
from ..move_table import MoveRow
from ..physical import Op
from ..picture.scene import lie, some
from .facts import GraphFacts

__all__ = ["change", "changes", "headline", "table", "table_of_moves", "time_line"]


def change(src: Layout, dst: Layout) -> str:
    """From which signature to which, and where to if that is elsewhere."""
    here, place = src.placement, dst.placement
    turn = None if here is place else here.turn_to(place)
    if turn is not None:
        axis, by = turn
        name, n = (here.names or range(here.ndim))[axis], here.shape[axis]
        return f"{lie(src)} -> {lie(dst)} {f'{by} on' if 2 * by <= n else f'{n - by} back'} over {name}"
    return f"{lie(src)} -> {lie(dst)}{'' if here is place else f' on {place}'}"


def changes(row: MoveRow) -> str:
    """The changes of a move; of a bucket those of what is in it, each once."""
    return " or ".join(dict.fromkeys(change(src, dst) for src, dst in row.changes))


def headline(facts: GraphFacts) -> str:
    ops, places = sum(isinstance(step, Op) for step in facts.graph.steps), facts.placements
    again, regions = facts.recomputed
    many = f" ({again} of them again in the backward, in {some(regions, 'region')})" if again else ""
    where = ", ".join(places) if len(places) < 5 else f"{len(places)} placements, {places[0]} to {places[-1]}"
    return f"{facts.graph.name}: {ops} ops{many}, {len(facts.graph.boxes)} moves on {where}"


def time_line(facts: GraphFacts) -> str:
    """Seconds of a step in words."""
    beside = facts.moving - facts.exposed if facts.hidden is None and facts.exposed is not None else facts.hidden
    hidden = "what is hidden of them unknown" if beside is None else f"of which hidden {duration(beside)}"
    moves = f"moves {duration(facts.moving)}, {hidden}"
    if facts.copying:
        gone = duration(2 * facts.copying - facts.waiting)
        moves += f", to the host and back {duration(2 * facts.copying)}, of which hidden {gone}"
    if facts.launching:
        moves += f", waiting for the host's launches {duration(facts.launching)}"
    if facts.compute is None or facts.predicted is None:
        return f"compute unknown; {moves}"
    update = f"optimizer {duration(facts.update)}, " if facts.update else ""
    parts = f"compute {duration(facts.compute)}, {update}{moves}"
    cut = f"\n          cut in {facts.cut}" if facts.cut else ""
    if facts.course is not None:
        once = f"once a step, {update}moves {duration(facts.once)}"
        every = ", of all stages together" if len(facts.course.stages) > 1 else ""
        parts = f"of one micro-batch{every}, compute {duration(facts.compute)}, {moves}\n          {once}"
        return f"{duration(facts.predicted)} predicted: {facts.course}{cut}\n          {parts}"
    return f"{duration(facts.predicted)} predicted: {parts}{cut}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """Rows in columns; the first ones to the right where `sides` says r. Columns without anything are left out."""
    if not rows:
        yield "  none"
        return
    kept = [c for c in range(len(heads)) if any(row[c] for row in rows)]
    wide = {c: max(len(row[c]) for row in [heads, *rows]) for c in kept}
    for row in [heads, *rows]:
        cells = (row[c].rjust(wide[c]) if sides[c : c + 1] == "r" else row[c].ljust(wide[c]) for c in kept)
        yield ("  " + "  ".join(cells)).rstrip()


def table_of_moves(moves: Sequence[MoveRow]) -> Iterator[str]:
    """Moves in a table of text, a row each."""
    rows = [
        (duration(r.spent), volume(r.bytes * r.count), f"x {r.count}" if r.count > 1 else "",
         r.direction + ", once" * r.once, r.name,
         changes(r), r.route, user_path(r.line))
        for r in moves
    ]  # fmt: skip
    yield from table(("time", "a rank", "", "", "value", "from -> to", "route", "line"), rows, "rr")
