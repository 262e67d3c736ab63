"""A report as one HTML page that needs nothing from elsewhere; it follows the reader into the dark."""

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from ...figures import duration, user_path, volume
from ...picture.palette import families, family
from ..move_table import CollectiveKind, MoveRow
from ..picture.draw import svg
from .facts import GraphFacts, MemoryReport
from .lines import change, headline, time_line
from .map import PARTS, drawn_map
from .step_parts import drawn_bar, step_parts
from .summary import away

__all__ = ["page"]

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--pale:#59636e;--line:#d1d9e0;--soft:#f6f8fa;--over:#a3191f}
@media (prefers-color-scheme:dark){
:root{--paper:#0d1117;--ink:#e6edf3;--pale:#9198a1;--line:#3d444d;--soft:#161b22;--over:#ffb0b0}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1280px;padding:24px;background:var(--paper);color:var(--ink);
font:14px/1.5 Helvetica,Arial,sans-serif}
h1{font-size:22px;margin:0}h2{font-size:16px;margin:32px 0 8px}.pale{color:var(--pale)}
nav a{color:var(--pale);margin-right:14px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;margin:16px 0}
.card{background:var(--soft);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.card b{display:block;font-size:20px}.card span{color:var(--pale);font-size:12px}
.wide{overflow-x:auto;border:1px solid var(--line);border-radius:8px}.wide.plain{border:0}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{padding:4px 10px;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}th{background:var(--soft);cursor:pointer;user-select:none}
th[data-to="1"]::after{content:" \\25B2"}th[data-to="-1"]::after{content:" \\25BC"}
.n{text-align:right;font-variant-numeric:tabular-nums}code{font:12px ui-monospace,Consolas,monospace}
.chip{border-radius:6px;padding:1px 7px;font-size:12px;display:inline-block}
.back{outline:1px dashed currentColor;outline-offset:-1px}
.memory{display:grid;grid-template-columns:max-content 1fr max-content;gap:6px 12px;align-items:center}
.memory .bar{position:relative;display:flex;height:16px;overflow:hidden;background:var(--soft);
border:1px solid var(--line);border-radius:4px}
.memory .limit{position:absolute;top:0;bottom:0;width:2px;background:var(--ink)}
th.n{text-align:right}
.over{color:var(--over);font-weight:600}
.key i{display:inline-block;width:12px;height:12px;border-radius:3px;margin:0 5px 0 14px;vertical-align:-1px}
.picture{overflow:auto;max-height:85vh;border:1px solid var(--line);border-radius:8px;padding:8px}
.picture svg{display:block;margin:auto;max-width:100%;height:auto}
.picture.full svg{max-width:none}
"""
CHIPS = families(lambda name, ink, fill: f".chip.{name}{{background:{fill};color:{ink}}}")
SECTIONS = ("parts", "map", "memory", "moves", "totals", "ops", "picture")
SORT = """
for (const head of document.querySelectorAll("th")) head.onclick = () => {
  const table = head.closest("table"), at = head.cellIndex, to = head.dataset.to === "-1" ? 1 : -1;
  for (const other of table.querySelectorAll("th")) delete other.dataset.to;
  head.dataset.to = to;
  const key = row => row.cells[at].dataset.v ?? row.cells[at].textContent;
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const x = key(a), y = key(b), n = Number(x) - Number(y);
    return to * (Number.isNaN(n) ? x.localeCompare(y) : n);
  });
  table.tBodies[0].append(...rows);
};
const picture = document.querySelector(".picture");
if (picture) picture.ondblclick = () => picture.classList.toggle("full");
"""


class TableCell(NamedTuple):
    """One cell of a table: what it shows, and the number by which it is sorted, if it is one."""

    html: str
    number: float | None = None


def page(facts: GraphFacts) -> str:
    """The whole page."""
    name = escape(facts.graph.name)
    body = [
        f"<h1>{name}</h1>",
        f'<div class="pale">{escape(headline(facts).partition(": ")[2])}</div>',
        *_summary(facts),
        "<nav>" + "".join(f'<a href="#{at}">{at}</a>' for at in SECTIONS) + "</nav>",
        '<h2 id="parts">What a step is spent on</h2>',
        _parts(facts),
        '<h2 id="map">Map: modules, axes, memory</h2>',
        f'<div class="wide">{drawn_map(facts)}</div>',
        '<h2 id="memory">Memory of each rank</h2>',
        *_memory(facts.memory),
        '<h2 id="moves">Moves, the heaviest first</h2>',
        *_moves(facts.moves),
        '<h2 id="totals">Totals by collective and axis</h2>',
        *_totals(facts),
        '<h2 id="ops">Ops</h2>',
        *_ops(facts),
        '<h2 id="picture">Picture</h2>',
        *_picture(facts),
    ]
    head = f'<meta charset="utf-8"/><title>{name}</title><style>{STYLE}{CHIPS}</style>'
    script = f"<script>//<![CDATA[{SORT}//]]></script>"
    return "\n".join(
        ['<!DOCTYPE html>\n<html lang="en"><head>', head, "</head><body>", *body, script, "</body></html>\n"]
    )


def _summary(facts: GraphFacts) -> Iterator[str]:
    chosen = facts.solution
    cards = [
        (_seconds(facts.predicted), "a step, predicted"),
        (_seconds(facts.compute), "computing"),
        (duration(facts.moving), "moving"),
        (_seconds(facts.hidden), "of that hidden"),
    ]
    if facts.course:
        cards[1:] = [(time, f"{of}, of one micro-batch") for time, of in cards[1:3]] + cards[3:]
        cards.append((duration(facts.once), "moving, once a step"))
    if facts.update:
        cards.append((duration(facts.update), "the optimizer"))
    if chosen:
        cards.append((duration(chosen.optimum), f"the choice{', proved best' if chosen.proved else ''}"))
        if chosen.greedy is not None:
            cards.append((duration(chosen.greedy), "choosing op after op"))
        if chosen.bound is not None:
            cards.append((duration(chosen.bound), "no choice is below"))
    yield '<div class="cards">'
    yield from (f'<div class="card"><b>{escape(b)}</b><span>{escape(s)}</span></div>' for b, s in cards)
    yield "</div>"
    by = f"<br/>Devices: {escape(facts.devices)}." if facts.devices else ""
    yield f'<p class="pale">Time: {escape(time_line(facts))}.{by}<br/>Choice: {escape(str(chosen or "unknown"))}.</p>'


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else duration(seconds)


def _parts(facts: GraphFacts) -> str:
    parts = step_parts(facts)
    return f'<div class="wide plain">{drawn_bar(parts)}</div>' if parts else '<p class="pale">Unknown.</p>'


def _memory(memory: MemoryReport | None) -> Iterator[str]:
    """A bar for each rank, in parts, against the limit or the fullest rank."""
    if memory is None:
        yield '<p class="pale">Unknown.</p>'
        return
    full = max(memory.limit or 0, memory.fullest) or 1
    key = "".join(f'<i style="background:{colour}"></i>{part}' for part, colour in PARTS.items())
    yield f'<p class="pale key">Limit: {volume(memory.limit) if memory.limit else "unknown"}.{key}</p>'
    yield '<div class="memory">'
    for rank, held in memory.ranks.items():
        bars = "".join(
            f'<i title="{part}: {volume(getattr(held, part))}" '
            f'style="width:{100 * share / full:.2f}%;background:{PARTS[part]}"></i>'
            for part, share in held.shares.items()
        )
        over = memory.limit is not None and held.total > memory.limit
        if memory.limit is not None and memory.limit < full:
            bars += f'<i class="limit" title="limit" style="left:{100 * memory.limit / full:.2f}%"></i>'
        said = f"{volume(held.total)}" + (f", {held.total / memory.limit:.0%}" if memory.limit else "")
        said += f"; on the host {away(held)}" if held.host or held.disk else ""
        yield f'<span>rank {rank}</span><span class="bar">{bars}</span>'
        yield f'<span class="n{" over" if over else ""}">{said}{", too much" if over else ""}</span>'
    yield "</div>"
    if memory.doubt:
        yield f'<p class="pale">{escape(memory.doubt)}</p>'


def _moves(rows: Sequence[MoveRow]) -> Iterator[str]:
    sent = [row for row in rows if not row.free]
    heads = ("time", "bytes a rank", "all ranks", "count", "direction", "value", "from, to", "route", "line")
    yield from _table(
        heads,
        (
            (
                TableCell(duration(r.spent), r.spent),
                TableCell(volume(r.bytes * r.count), r.bytes * r.count),
                TableCell(volume(r.total * r.count), r.total * r.count),
                TableCell(str(r.count), r.count),
                TableCell(r.direction + ", once" * r.once),
                _code(r.name),
                _code(change(r.src, r.dst)),
                TableCell(_chip(r.ways, r.direction)),
                _code(user_path(r.line)),
            )
            for r in sent
        ),
    )
    free = sum(row.count for row in rows if row.free)
    if free:
        yield f'<p class="pale">{free} more moves send nothing.</p>'


def _chip(ways: Sequence[CollectiveKind], direction: str) -> str:
    back = "" if direction == "forward" else " back"
    return " ".join(f'<span class="chip {family(way.kind)}{back}">{escape(str(way))}</span>' for way in ways)


def _totals(facts: GraphFacts) -> Iterator[str]:
    rows = (
        (
            TableCell(duration(t.seconds), t.seconds),
            TableCell(volume(t.bytes), t.bytes),
            TableCell(volume(t.total), t.total),
            TableCell(str(t.count), t.count),
            TableCell(t.direction),
            TableCell(_chip(t.ways, t.direction)),
        )
        for t in facts.totals
    )
    yield from _table(("time", "bytes a rank", "all ranks", "count", "direction", "route"), rows)


def _ops(facts: GraphFacts) -> Iterator[str]:
    if not facts.costs:
        yield '<p class="pale">What ops cost is unknown.</p>'
    rows = (
        (
            TableCell("?", -1.0)
            if r.seconds is None
            else TableCell(duration(r.seconds * r.count), r.seconds * r.count),
            TableCell(str(r.count), r.count),
            _code(r.module),
            _code(r.op),
            _code(r.signature),
            _code(r.runner_up),
            TableCell(f"+{duration(r.extra)}" if r.runner_up else "", r.extra),
            _code(user_path(r.line)),
        )
        for r in facts.ops
    )
    yield from _table(("time", "count", "module", "op", "signature", "runner-up", "costs more", "line"), rows)


def _picture(facts: GraphFacts) -> Iterator[str]:
    image = svg(facts.graph, prices=facts.prices)
    if image is None:
        yield "<p class=\"pale\">Nothing here can draw; pip install 'sbpflow[draw]', or install Graphviz.</p>"
        return
    # The head before the element is for pictures in files of their own.
    inside = re.sub(r"<!--.*?-->", "", image[image.index("<svg") :], flags=re.DOTALL)
    yield '<p class="pale">A double click changes its size; a pointer shows what a node is.</p>'
    yield f'<div class="picture">{inside}</div>'


def _code(text: str) -> TableCell:
    return TableCell(f"<code>{escape(text)}</code>" if text else "")


def _table(heads: Sequence[str], rows: Iterable[Sequence[TableCell]]) -> Iterator[str]:
    listed = list(rows)
    if not listed:
        yield '<p class="pale">None.</p>'
        return
    numbers = (cell.number is not None for cell in listed[0])
    sides = ('<th class="n">' if number else "<th>" for number in numbers)
    named = "".join(f"{side}{escape(head)}</th>" for side, head in zip(sides, heads, strict=True))
    yield f'<div class="wide"><table><thead><tr>{named}</tr></thead><tbody>'
    yield from ("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in listed)
    yield "</tbody></table></div>"


def _cell(cell: TableCell) -> str:
    return (
        f"<td>{cell.html}</td>" if cell.number is None else f'<td class="n" data-v="{cell.number:g}">{cell.html}</td>'
    )
