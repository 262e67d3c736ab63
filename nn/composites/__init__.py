"""Composites: ways to compute an op along some axes that no rule book can know, since ranks talk while they compute.

registry                    how composites are added, by users too; written_calls: those of one in an op's place
axis                        the values on axes that a composite is written with, and calls of them
attention_call              the arguments of attention, however they were passed; row_product: rows times a weight
ring_attention, chunked     those over one axis that send pieces round, or piece by piece
window_attention            attention with a mask that is a band, so that neighbours have all that a rank's queries see
heads_and_ring              attention by splitting heads in the place of the sequence, and with the ring
merged_attention            attention of few queries, merged from that of each rank's keys
summa                       products of matrices in blocks over two axes and three
dropless, capacity          experts to whom tokens are sent as they choose: all of them, or as many as there is room for
"""

from ..composites import (
    capacity,
    chunked,
    dropless,
    heads_and_ring,
    merged_attention,
    ring_attention,
    summa,
    window_attention,
)

__all__ = [
    "capacity",
    "chunked",
    "dropless",
    "heads_and_ring",
    "merged_attention",
    "ring_attention",
    "summa",
    "window_attention",
]
