"""Encoders: sums and hops in fewer bytes, with what is left out kept for the next time.

encoder        how a tensor is written and read; bits, sparse, quantised, low_rank and phases are those that are shipped
kept           what is left out, by tensor and rank; packing: payloads as bytes
encoded_sum    how a sum comes, whole or in pieces, and in how many bytes
encoded_move   the move of a bucket; hop: of a value that goes to other ranks
named          encoders by their texts
"""

from .encoder import (
    Dealt,
    Encoder,
    EncoderCourse,
    GatheredPayloads,
    KeptTensors,
    Payload,
    PieceCuts,
    PlaceAmong,
    Summed,
    SummedPieces,
)
from .kept import KeptErrors
from .named import int4, int8, later, low_rank, momentum, sign, topk

__all__ = [
    "Dealt", "Encoder", "EncoderCourse", "GatheredPayloads", "KeptErrors", "KeptTensors", "Payload", "PieceCuts",
    "PlaceAmong", "Summed", "SummedPieces", "int4", "int8", "later", "low_rank", "momentum", "sign", "topk",
]  # fmt: skip
