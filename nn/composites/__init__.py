"""Composites: ways to compute an op along one axis that no rule book can know, since ranks talk while they compute.

registry                  composites by name, and how users add theirs
axis                      what a composite is written with: values that lie on an axis, and calls of them
ring_attention, chunked   those that are there
window_attention          of a mask that is a band, so that neighbours have all that a rank's queries see
attention_blocks          attention of a block of queries and one of keys, forward and backward
"""

from ..composites import chunked, ring_attention, window_attention

__all__ = ["chunked", "ring_attention", "window_attention"]
