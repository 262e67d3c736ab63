"""Counts of values: each rank counts its own, so that what they have adds up."""

from ..call import Call, Match
from ..rule import register
from .labels import labelled

__all__: list[str] = []


@register("histc")
def histc(call: Call) -> Match | None:
    """Bins are those of all values where it says the least and the most; else they depend on these."""
    if call.bound["min"] == call.bound["max"]:
        return None
    labels = list(range(call.inputs[0].dim()))
    return labelled(call, [labels], [[None]], reduced=dict.fromkeys(labels, "sum"), hollow=True)
