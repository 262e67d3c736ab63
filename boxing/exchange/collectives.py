"""An exchange as one collective of the backend: what NCCL is best at, and Gloo for many ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from ...placement.world import process_group
from .buffer import finish, pack, place, plain
from .transport import Exchange, Posting, Sent

__all__ = ["all_reduce", "can_sum", "post"]

# Types that both backends add up themselves. All others travel as bytes, and are added by the rank that gets them.
SUMS = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def can_sum(dtype: torch.dtype) -> bool:
    """Whether the backends reduce this dtype themselves."""
    return dtype in SUMS


def post(sent: Sent, exchange: Exchange) -> Posting:
    """The exchange by the collective that fits: a reduce_scatter, an all_gather, else an all-to-all of any sizes."""
    program = exchange.program
    if program.terms and program.even and can_sum(exchange.buffer.dtype):
        return _reduce_scatter(sent, exchange)
    return _all_gather(sent, exchange) if program.gathers else _all_to_all(sent, exchange)


def all_reduce(sent: Sent, exchange: Exchange) -> Posting:
    """Both halves of an all_reduce in one call; `exchange` is the first half."""
    rank, program, buffer, reduction, _ = exchange
    out = buffer.resolve_neg().clone(memory_format=torch.contiguous_format)
    options = dist.AllreduceOptions()
    options.reduceOp = OPS[reduction]  # type: ignore[assignment]
    work = process_group(program.group).allreduce([out], options)
    own, ranks = program.shape[0], len(program.group)
    sent.add(rank, (out.numel() - own + own * (ranks - 1)) * out.element_size())
    return [work], lambda: out


def _all_to_all(sent: Sent, exchange: Exchange) -> Posting:
    rank, program, buffer, reduction, _ = exchange
    group, unit = sorted(program.group), buffer.element_size()
    outgoing = {peer: plain(pack(buffer, boxes)).reshape(-1) for peer, boxes, _ in program.sends}
    counts = {peer: numel for peer, _, numel in program.receives}
    senders = [q for q in group if q in counts]
    packed = torch.cat([outgoing[q] for q in group if q in outgoing]) if outgoing else buffer.new_empty(0)
    arrived = buffer.new_empty(sum(counts.values()))
    sizes_in = [outgoing[q].nbytes if q in outgoing else 0 for q in group]
    sizes_out = [counts.get(q, 0) * unit for q in group]
    sent.add(rank, packed.nbytes)
    work = process_group(group).alltoall_base(_bytes(arrived), _bytes(packed), sizes_out, sizes_in)
    pieces = dict(zip(senders, torch.split(arrived, [counts[q] for q in senders]), strict=True))
    return [work], lambda: finish(program, rank, buffer, pieces.__getitem__, reduction, None)


def _all_gather(sent: Sent, exchange: Exchange) -> Posting:
    rank, program, buffer, reduction, _ = exchange
    group = sorted(program.group)
    piece = plain(pack(buffer, program.keep)).reshape(-1)
    arrived = piece.new_empty(len(group) * program.even)
    sent.add(rank, piece.nbytes * (len(group) - 1))
    work = process_group(group)._allgather_base(_bytes(arrived), _bytes(piece))
    if program.stacked(rank):
        return [work], lambda: arrived.view(program.shape)
    pieces = dict(zip(group, torch.split(arrived, program.even), strict=True))
    return [work], lambda: finish(program, rank, buffer, pieces.__getitem__, reduction, None)


def _reduce_scatter(sent: Sent, exchange: Exchange) -> Posting:
    rank, program, buffer, reduction, _ = exchange
    group = sorted(program.group)
    boxes = {peer: boxes for peer, boxes, _ in program.sends} | {rank: program.keep}
    packed = torch.cat([pack(buffer, boxes[q]).reshape(-1) for q in group])
    out = buffer.new_empty(program.even)
    options = dist.ReduceScatterOptions()
    options.reduceOp = OPS[reduction]  # type: ignore[assignment]
    sent.add(rank, out.nbytes * (len(group) - 1))
    work = process_group(group)._reduce_scatter_base(out, plain(packed), options)
    return [work], lambda: place(program, out)


def _bytes(flat: Tensor) -> Tensor:
    """The same memory as bytes, because a tensor that is only moved may be of a dtype unknown to the backend."""
    return flat.view(torch.uint8)
