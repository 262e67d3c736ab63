"""Homes of gradients over micro-batches: those that take less memory there are brought home with each of these.

home smaller    as in pieces: moved with every micro-batch, and the pieces are added up (ZeRO-2)
home as large   as whole: addends are added up where they are made, and brought together once, behind all; so are they
                where nobody said that gradients rest in pieces, and only the update has them so (ZeRO-1)
"""

from collections.abc import Mapping, Sequence

from ....boxing.graph.physical import Back, Box, Physical
from ....sbp import Layout
from ....sbp.state import local_numel
from ..lower.segments import Stage
from .chunks import Chunks

__all__ = ["brought_each_time"]


def brought_each_time(graph: Physical, stages: Sequence[Stage], where: Chunks) -> Mapping[str, tuple[int, ...]]:
    """The values that lie still for a step, but whose gradients come home with every micro-batch, with the chunks that
    read each. There are none where all is brought home once."""
    if where.gathers:
        return {}
    sources = {s.value.name: s for s in graph.sources if s.kind == "parameter"}
    seen = {box.output.name for at in where.once if isinstance(box := stages[at], Box)}  # a weight as its users see it
    chunks: dict[str, dict[int, None]] = {}
    for chunk, stage in zip(where.of, stages, strict=True):
        for name in stage.inputs if chunk is not None else ():
            chunks.setdefault(name, {})[chunk] = None  # type: ignore[index]
    return {
        back.of: tuple(chunks[back.of])
        for back in graph.backs
        if back.into in sources
        and back.dst is sources[back.into].home
        and (back.of == back.into or back.of in seen)
        and back.of in chunks
        and not sources[back.into].once
        and _smaller(back)
    }


def _smaller(back: Back) -> bool:
    return back.src.placement is back.dst.placement and _most(back.dst) < _most(back.src)


def _most(of: Layout) -> int:
    """Elements on the fullest rank; there may be thousands of ranks."""
    return local_numel(of.state.dims, of.shape, of.placement.shape)
