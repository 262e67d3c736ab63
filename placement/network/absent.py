"""Ranks that did not come to where all of a run meet: who they are, and what is likely to keep them."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from .interface import is_here, resolves

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["absent"]


def absent(base: "tuple[Store, int, int] | None", came: Callable[[int], str], said: str) -> str:
    """Ranks that did not come, as far as the store that they meet at can tell.

    `base` is that store, this rank and their number, once it was found; under the key `came` a rank says that it is
    there; and `said` is the word of torch.distributed.
    """
    if base is None:
        if "EADDRINUSE" in said:
            return "another program has this port of rank 0's host: choose another MASTER_PORT, the same on all hosts"
        return _unmet(os.environ["RANK"], os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
    meeting, _, size = base
    # Rank 0 holds the store, where torchrun does not; it says that it came when it has seen all others there.
    first = 0 if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 1
    try:
        late = [str(rank) for rank in range(first, size) if not meeting.check([came(rank)])]
        told = {rank: meeting.get(came(rank)).decode() for rank in range(size) if meeting.check([came(rank)])}
    except RuntimeError:
        return "the store that they meet at is gone: rank 0 has ended"
    other = next((rank for rank in told if told[rank] != str(size)), None)
    if other is not None:
        return (
            f"rank {other} was told that there are {told[other]} ranks, this one {size}\n"
            "  all hosts must be started with the same WORLD_SIZE (torchrun: --nnodes and --nproc-per-node)"
        )
    if not late:
        return (
            "all were started, and one has ended since or cannot be reached by the others\n"
            "  a firewall must leave all ports open between hosts; GLOO_SOCKET_IFNAME names the interface to them"
        )
    names = f"rank{'s' * (len(late) > 1)} {', '.join(late[:8])}{' and others' * (len(late) > 8)}"
    return f"{names} did not come: not started, ended before, or still at what stands before flow.init()"


def _unmet(rank: str, address: str, port: str) -> str:
    """Why a process did not come to the address where all meet, or nobody came to it there."""
    where = f"{address}:{port}"
    if not resolves(address):
        return f"this host does not know the name MASTER_ADDR={address}: give the address of rank 0's host instead"
    if rank != "0":
        return (
            f"nobody answered at {where}, where rank 0 lets all meet: it was not started, or cannot be reached\n"
            "  MASTER_ADDR is rank 0's host as this one knows it, MASTER_PORT the same on all and open between hosts"
        )
    if not is_here(address):
        return f"MASTER_ADDR={address} is another host: it must be the one that rank 0 is on, which is this"
    return f"others did not come to {where}: not started, ended before, or they cannot reach this host"
