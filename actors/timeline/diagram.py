"""Diagrams of actors: the protocol's table and networks as Graphviz graphs."""

from pathlib import Path

from ...boxing.picture.draw import picture
from ...boxing.picture.palette import FONT, INK, LINE
from ..protocol.network import Network
from ..protocol.protocol import NEXT, MessageKind, Phase
from .preview_chart import KINDS, SHADES

__all__ = ["diagram", "draw", "drawn", "table"]

NODE = f'shape=box, style="rounded,filled", color="{LINE}", fontname="{FONT}", fontcolor="{INK}"'
PLAIN = ("#eef1f4",)  # what is of no kind
FILLS: dict[Phase, str] = {"waiting": "#eef1f4", "ready": "#fff3b8", "running": "#d3f3d0", "ended": "#e3d8ff"}


def diagram() -> str:
    """The table `NEXT` in Graphviz' language: phases, and for each way between two the messages that lead there."""
    ways: dict[tuple[Phase, Phase], list[MessageKind]] = {}
    for (phase, kind), led in NEXT.items():
        for to in led:
            ways.setdefault((phase, to), []).append(kind)
    edge = f'color="{LINE}", fontname="{FONT}", fontsize=11, fontcolor="{LINE}", arrowsize=0.8'
    return "\n".join(
        [
            "digraph {",
            "  graph [layout=dot, rankdir=LR, bgcolor=transparent, pad=0.2, nodesep=0.7, ranksep=1.1]",
            f"  node [{NODE}, fontsize=13, width=1.1]",
            f"  edge [{edge}]",
            *(f'  {phase} [fillcolor="{FILLS[phase]}"]' for phase in dict.fromkeys(phase for phase, _ in NEXT)),
            *(f'  {a} -> {b} [label="{", ".join(kinds)}"]' for (a, b), kinds in ways.items()),
            "}",
            "",
        ]
    )


def drawn(network: Network) -> str:
    """A network: queues as frames, actors in them, and registers as arrows with their marks; a legend says the rest."""
    edge = f'color="{LINE}", fontname="{FONT}", fontsize=9, fontcolor="#57606a", arrowsize=0.7'
    lines = [
        "digraph {",
        f'  graph [layout=dot, rankdir=LR, bgcolor=transparent, pad=0.2, fontname="{FONT}", fontsize=11]',
        f'  node [{NODE}, fontsize=12, fillcolor="#eef1f4"]',
        f"  edge [{edge}]",
    ]
    for number, queue in enumerate(network.queues):
        lines.append(f'  subgraph cluster_{number} {{ label="{queue}"; color="#d0d7de"; style=rounded')
        for actor in network.actors:
            if actor.queue == queue:
                fill = SHADES.get(actor.name[0], PLAIN)[0]
                said = f"{actor.name}\\n{', '.join(actor.cases)}" if actor.sequence else actor.name
                lines.append(f'    "{actor.name}" [label="{said}", fillcolor="{fill}"]')
        lines.append("  }")
    lines.append(
        '  subgraph cluster_legend { label="what is what"; color="#d0d7de"; style="rounded,dashed"; fontsize=10'
    )
    known = [kind for kind in KINDS if any(actor.name[0] == kind for actor in network.actors)]
    lines += [
        f'    "what {kind}" [label="{KINDS[kind]}", fillcolor="{SHADES[kind][0]}", fontsize=10]' for kind in known
    ]
    arrows = "arrow: register (slots, low: stays behind)\\ndashed: without a value, a token"
    lines += [f'    "what arrows" [label="{arrows}", shape=plaintext, style="", fontsize=9]', "  }"]
    for actor in network.actors:
        for take in dict.fromkeys((take.register, take.low) for take in actor.takes):
            register = network.register(take[0])
            marks = f"{register.high}" + (f", low {take[1]}" if take[1] else "")
            marks += f", {register.initial} filled" if register.initial else ""
            producer = network.producers.get(register.name)
            style = "" if register.bytes or producer is None else ", style=dashed"
            if producer is not None:
                label = f"{register.name} ({marks})"
                lines.append(f'  "{producer}" -> "{actor.name}" [label="{label}"{style}]')
    return "\n".join([*lines, "}", ""])


def draw(network: Network, path: Path | str) -> Path:
    """Write a network as a picture: queues, registers and their marks; the suffix says svg, png, pdf or dot."""
    return picture(drawn(network), path)


def table() -> str:
    """The table `NEXT` as lines of text: a phase, a message, and where it can lead."""
    return "\n".join(f"{phase:8} {kind:7} -> {' or '.join(led)}" for (phase, kind), led in NEXT.items())
