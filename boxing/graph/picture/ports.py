"""Ports of placements: a value that goes from one to another is drawn to the edge of the first, and from that of the
second on, because a wire from the bottom of a stage to the top of the next one would cross the whole page.

    cpu:[0-1]                 cpu:[2-3]
    layers.1                  (from cpu:[0-1])
       | S(0)                    |
    (to cpu:[2-3])            transfer
"""

from .scene import Scene, SceneNode

__all__ = ["with_ports"]


def with_ports(scene: Scene) -> Scene:
    """The same scene, where no edge goes from one placement to another."""
    made = Scene(scene.prices, dict(scene.nodes), {}, scene.titles, scene.ends)
    for (tail, head, back, side), said in scene.ways.items():
        here, there = scene.nodes[tail].place, scene.nodes[head].place
        if not here or not there or here == there:
            made.ways[tail, head, back, side] = said
            continue
        leaves, enters = f"{tail} to {there}", f"{tail} from {here} to {there}"
        last = scene.ends.get(here, here)
        made.add(SceneNode(leaves, (f"to {_short(there)}",), "outside", (), here, tip=f"to {there}"))
        made.add(SceneNode(enters, (f"from {_short(last)}",), "outside", (), there, tip=f"from {last}"))
        for ends, (texts, tips) in (((tail, leaves), said), ((enters, head), ({}, said[1]))):
            made.join(*ends, back=back, side=side)
            known = made.ways[*ends, back, side]
            known[0].update(texts)
            known[1].update(tips)
    return made


def _short(place: str) -> str:
    """A placement by its ranks.

    >>> _short("cpu:[4-7] as (data=2, tensor=2)")
    'cpu:[4-7]'
    """
    return place.partition(" as ")[0]
