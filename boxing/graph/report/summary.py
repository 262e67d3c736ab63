"""The summary of a report, on 30 lines at most: its cost, what each kind of module does, and the largest moves."""

from collections.abc import Iterator, Sequence

from ...figures import counted, duration, volume
from ..measures import Held
from .facts import GraphFacts, MemoryReport
from .lines import headline, table, table_of_moves, time_line
from .roles import Role, together

__all__ = ["away", "summary"]

LINES, MOVES, WIDE = 30, 5, 64


def summary(facts: GraphFacts) -> Iterator[str]:
    """Its lines; modules have what room is left by the rest."""
    head = [
        headline(facts),
        f"  time    {time_line(facts)}",
        f"  choice  {facts.solution or 'unknown'}",
        *([f"  devices {facts.devices}"] if facts.devices else ()),
        *([f"  links   {facts.links}"] if facts.links else ()),
        *_memory(facts.memory),
        *([f"  frozen  {facts.frozen}"] if facts.frozen else ()),
        *([f"  CUDA graph  {facts.recorded}"] if facts.recorded else ()),
        *(f"  eager   {line}" for line in _few(facts.eager)),
        *(f"  idle    {line}" for line in facts.idle),
    ]
    moves = [
        *_moves(facts),
        "all of it: print(step.explain().full()), step.explain().save(path), .dict()",
    ]
    yield from head
    yield from _modules(facts.roles, LINES - len("\n".join([*head, *moves]).splitlines()) - 3)
    yield from moves


def _few(lines: Sequence[str]) -> list[str]:
    return [*lines[:3], *([f"and {len(lines) - 3} more run so"] if len(lines) > 3 else ())]


def _memory(memory: MemoryReport | None) -> Iterator[str]:
    """Lines on the memory of the fullest rank, by kind."""
    if memory is None or not memory.ranks:
        yield "  memory  unknown"
        return
    rank, most = max(memory.ranks.items(), key=lambda item: item[1].total)
    least = min(held.total for held in memory.ranks.values())
    of = f" of {volume(memory.limit)}" if memory.limit else ""
    over = ", too much" if memory.limit and most.total > memory.limit else ""
    where = f"on rank {rank}; on others from {volume(least)}" if least < most.total else "on every rank"
    yield f"  memory  {volume(most.total)}{of} at most {where}{over}"
    yield f"          {kinds(most)}"
    if memory.again:
        many = len(memory.again)
        named = ", ".join(memory.again[:3]) + (f" and {many - 3} more" if many > 3 else "")
        yield f"          to fit, {many} block{'s are' if many > 1 else ' is'} run again in the backward: {named}"
    if any(held.host or held.disk for held in memory.ranks.values()):
        yield f"  host    {away(max(memory.ranks.values(), key=lambda held: held.host + held.disk))} at most a rank"
    if memory.doubt:
        yield f"          {memory.doubt}"


def kinds(held: Held) -> str:
    """Parts of the memory that is taken, each with its bytes."""
    parts = ("parameters", "gradients", "states", "activations")
    return ", ".join(f"{part} {volume(getattr(held, part))}" for part in parts)


def away(held: Held) -> str:
    """The bytes that a rank has offloaded."""
    parts = {"of its memory": held.host, "in files": held.disk}
    return ", ".join(f"{volume(size)} {where}" for where, size in parts.items() if size)


def _modules(roles: Sequence[Role], most: int) -> Iterator[str]:
    """A blank line, a head, so many rows at most, and how many there are besides."""
    groups = list(together(roles))
    axes = list(dict.fromkeys(axis for role in roles for axis in role.axes))
    if not groups or not axes:
        return
    many = len({place for role in roles for place in role.placements}) > 1
    rows = []
    for group in groups:
        first = group[0]
        places = f"on {first.placements[0]}" if len(first.placements) == 1 else f"on {len(first.placements)} placements"
        rows.append((
            listed(group),
            f"x {first.count}" if first.count > 1 else "",
            counted(sum(role.numel for role in group)),
            *(first.on(axis) for axis in axes),
            places if many else "",
        ))  # fmt: skip
    # The largest are told, in the order of the model.
    sizes = {
        id(row): sum(role.numel for role in group) * group[0].count for row, group in zip(rows, groups, strict=True)
    }
    told = {id(row) for row in sorted(rows, key=lambda row: -sizes[id(row)])[: max(most, 0)]}
    yield ""
    yield from table(("module", "", "weights", *axes, ""), [row for row in rows if id(row) in told], "   ")
    if len(rows) > len(told):
        yield f"  and {len(rows) - len(told)} more with fewer weights"


def listed(group: Sequence[Role]) -> str:
    """The names of modules in one block.

    >>> listed([Role("layers.*.attn.q", (), ()), Role("layers.*.attn.k", (), ()), Role("layers.*.mlp.up", (), ())])
    'layers.*: attn.q, k, mlp.up'
    """
    names: list[str] = []
    before = ""
    for role in group:
        inside, _, name = role.name.rpartition(".")
        names.append(name if inside == before and names else role.name)
        before = inside
    joined = ", ".join(names)
    if len(joined) > WIDE:
        kept = next(n for n in range(len(names), -1, -1) if len(", ".join(names[:n])) <= WIDE - 14 or n == 1)
        joined = f"{', '.join(names[:kept])}, {len(names) - kept} more" if kept < len(names) else joined
    within = group[0].within
    if not within:
        return joined
    return f"{within}: {joined}" if len(group) > 1 else f"{within}.{joined}"


def _moves(facts: GraphFacts) -> Iterator[str]:
    sent = [row for row in facts.moves if not row.free]
    yield ""
    if not sent:
        yield "nothing is sent"
        return
    of = sum(row.count for row in sent)
    yield f"the largest of {of} moves, which take {duration(facts.moving)}" if len(sent) > MOVES else "moves"
    yield from table_of_moves(sent[:MOVES])
