"""Encoders: sums and hops in fewer bytes, with what is left out kept for the next time.

course         how a tensor is written and read, and how a sum comes of that; packing: payloads as bytes
encoded_sum    how a sum comes, whole or in pieces, and in how many bytes
encoded_move   the move of a bucket; hop: of a value that goes to other ranks
encoder        the class of all of them; boxing/encoding.py has what moves ask it, boxing/kept.py what they leave out
bits, sparse, quantised, low_rank, phases     those that are shipped; named: by their texts
"""

from ..kept import KeptErrors, KeptTensors
from .course import Dealt, EncoderCourse, GatheredPayloads, Payload, PieceCuts, PlaceAmong, Summed, SummedPieces
from .encoder import Encoder
from .named import int4, int8, later, low_rank, momentum, sign, topk

__all__ = [
    "Dealt", "Encoder", "EncoderCourse", "GatheredPayloads", "KeptErrors", "KeptTensors", "Payload", "PieceCuts",
    "PlaceAmong", "Summed", "SummedPieces", "int4", "int8", "later", "low_rank", "momentum", "sign", "topk",
]  # fmt: skip
