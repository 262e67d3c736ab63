"""How the protocol looks: its table drawn as a graph, and written as rows."""

from .protocol import NEXT, Kind, Phase

__all__ = ["diagram", "table"]

FONT = "Helvetica,Arial,sans-serif"
FILLS: dict[Phase, str] = {"waiting": "#eef1f4", "ready": "#fff3b8", "running": "#d3f3d0", "ended": "#e3d8ff"}


def diagram() -> str:
    """The table `NEXT` in Graphviz' language: phases, and for each way between two the messages that lead there."""
    ways: dict[tuple[Phase, Phase], list[Kind]] = {}
    for (phase, kind), led in NEXT.items():
        for to in led:
            ways.setdefault((phase, to), []).append(kind)
    node = f'shape=box, style="rounded,filled", color="#7d8590", fontname="{FONT}", fontsize=13, fontcolor="#1f2328"'
    edge = f'color="#7d8590", fontname="{FONT}", fontsize=11, fontcolor="#7d8590", arrowsize=0.8'
    return "\n".join(
        [
            "digraph {",
            "  graph [layout=dot, rankdir=LR, bgcolor=transparent, pad=0.2, nodesep=0.7, ranksep=1.1]",
            f"  node [{node}, width=1.1]",
            f"  edge [{edge}]",
            *(f'  {phase} [fillcolor="{FILLS[phase]}"]' for phase in dict.fromkeys(phase for phase, _ in NEXT)),
            *(f'  {a} -> {b} [label="{", ".join(kinds)}"]' for (a, b), kinds in ways.items()),
            "}",
            "",
        ]
    )


def table() -> str:
    """The table `NEXT` as lines of text: a phase, a message, and where it can lead."""
    return "\n".join(f"{phase:8} {kind:7} -> {' or '.join(led)}" for (phase, kind), led in NEXT.items())
