"""The world: which ranks this process owns, and how it reaches the others.

Under torchrun (RANK and WORLD_SIZE in the environment, or torch.distributed already set up) a process owns one rank.
So it does under srun and mpirun, whose own words are read where MASTER_ADDR says at which host all meet.
Without a launcher one process owns every rank there is, and nothing is ever sent over a wire.
"""

import atexit
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from .device import card_here, family
from .errors import PlacementError, SbpflowError, TransportError, user_line
from .grid import Placement
from .launcher import one_host, torchruns_words, warn_of_many_worlds
from .network.absent import absent
from .network.hosts import RunHosts, hosts_of_run
from .network.interface import address_towards, check_interface, interface_of, is_loopback

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

__all__ = [
    "World",
    "at_close",
    "close",
    "device",
    "init",
    "is_joined",
    "joined",
    "owned",
    "process_group",
    "store",
    "world",
    "world_so_far",
]


@dataclass(slots=True)
class World:
    """`rank` and `size` are None where this process owns every rank. `timeout` is in seconds, for any one move."""

    rank: int | None
    size: int | None
    timeout: float
    native: bool | None  # whether moves use the backend's own collectives; None: where it is the faster way
    silence: float = 5.0  # seconds in which a host that does not answer any more is told; 0 where nobody asks
    check: bool = True  # whether ranks compare, now and then, what each of them passes as one value
    run: RunHosts | None = None  # which process is on which host; None where it is the only one
    clusters: dict[str, Any] = field(default_factory=dict)  # by types of devices, once they were asked for


DEFAULT_TIMEOUT = 300.0
_world: World | None = None
_groups: dict[tuple[int, ...], "ProcessGroup"] = {}
_closing: list[Callable[[], None]] = []
_joined = 0  # how often this process joined; the store's names hold it, since a store may outlive a world
_base: "tuple[Store, int, int] | None" = None  # where torchrun's processes meet; kept, so that they can meet again
_start = ""  # the name of this start of the processes, where their store has seen others
_ours = False  # whether we set up torch.distributed, and so take it down


def init(
    *,
    timeout: float | None = None,
    native: bool | None = None,
    check: bool | None = None,
    silence: float | None = None,
) -> World:
    """Join the world; optional (the first move does it), and may be repeated to change the options.

    `timeout` (seconds, 300 at first) bounds every move: a peer that is dead, stuck or elsewhere is an error by then.
    `native=True` makes Gloo use its own collectives as NCCL does, False only sends and receives; None, the usual, also
    takes shared memory between ranks of one host. `check=False` leaves out the comparison of what processes pass as one
    value (flow.tensor, a step's batch), which is made in the first calls of a line and then in every 64th. `silence`
    (seconds, 5 at first, to be said before the first move) is how soon a host that does not answer any more is told and
    ends what waits for it; 0 leaves it to the timeout.
    """
    global _world
    if timeout is not None and not timeout > 0:
        raise PlacementError(f"init(timeout={timeout!r}): seconds, above 0")
    if silence is not None and not (silence == 0 or 2 <= silence < float("inf")):
        raise PlacementError(f"init(silence={silence!r}): seconds, from 2 on, or 0 to ask no host whether it is there")
    if _world is None or (_world.rank is None and _launched()):
        _world = _join(timeout or DEFAULT_TIMEOUT)
    if timeout is not None:
        _world.timeout = timeout
        if _world.rank is not None:
            _bound_groups(timeout)
    _world.native = native
    if check is not None:
        _world.check = check
    if silence is not None:
        _world.silence = silence
    return _world


def world() -> World:
    """The world this process is in, joined now if it was not."""
    return _world or init()


def joined() -> World | None:
    """The world, if this process is in one, or has others to join."""
    return world() if is_joined() or _launched() else None


def world_so_far() -> World | None:
    """The world, if this process is in one already."""
    return _world


def is_joined() -> bool:
    """Whether this process is in a world."""
    return _world is not None


def _join(timeout: float) -> World:
    global _ours, _joined
    if not _launched():
        warn_of_many_worlds()
        return World(None, None, timeout, None)
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    _joined += 1
    if dist.is_initialized():
        _name_start(_get_default_store(), dist.get_rank(), dist.get_world_size(), timeout)
    else:
        os.environ.update(torchruns_words(os.environ))
        try:
            _meet(timeout)
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
            raise TransportError(
                f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} did not meet the others within {timeout:g} s "
                f"(flow.init(timeout=...) sets the limit)\n  {absent(_base, _came, said)}\n"
                f"  torch.distributed said: {said}"
            ) from error
        _ours = True
    atexit.register(close)
    here = World(dist.get_rank(), dist.get_world_size(), timeout, None)
    here.run = _run_of(here)
    return here


def _run_of(here: World) -> RunHosts:
    """The hosts of the run, once all of its processes have come."""
    assert here.rank is not None
    assert here.size is not None
    try:
        return hosts_of_run(_store(here), here.rank, here.size)
    except RuntimeError as error:
        if isinstance(error, SbpflowError):
            raise
        raise TransportError(
            f"rank {here.rank} of {here.size} did not hear from all others on which host they are within "
            f"{here.timeout:g} s (flow.init(timeout=...) sets the limit)\n"
            "  every process comes to flow.init, or to its first move\n"
            f"  torch.distributed said: {str(error).partition(chr(10))[0]}"
        ) from error


def _meet(timeout: float) -> None:
    """Set up torch.distributed as torchrun has prepared it."""
    global _base
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    card = card_here()
    if card is not None:
        card.module.set_device(int(os.environ.get("LOCAL_RANK", "0")) % card.count)
    backend = ",".join(f"{row.name}:{row.backend}" for row in (family("cpu"), card) if row) if card else "gloo"
    check_interface(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    # Under a name of its own each time: joined again on the same store, torch would find stale addresses.
    if _base is None:
        _base = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    meeting, rank, size = _base
    _name_start(meeting, rank, size, timeout)
    meeting.set(_came(rank), str(size))
    if not one_host(os.environ):
        _choose_interface(meeting, rank, size)
    named = PrefixStore(f"join/{_start}{_joined}", meeting)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), store=named, rank=rank, world_size=size)


def _choose_interface(meeting: "Store", rank: int, size: int) -> None:
    """Have Gloo take the interface by which the hosts of a run reach each other.

    By itself it takes that of this host's name, which often is loopback (Debian: 127.0.1.1), where no other answers.
    The host where all meet may reach itself by loopback too; it looks which way an address of another one lies.
    """
    mine, key = address_towards(os.environ["MASTER_ADDR"]), f"join/{_start}{_joined}/address"
    meeting.set(f"{key}/{rank}", "" if is_loopback(mine) else mine)
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return  # check_interface has looked at it
    others = iter(range(size))
    while is_loopback(mine) and (other := next(others, None)) is not None:
        there = meeting.get(f"{key}/{other}").decode()
        mine = address_towards(there) if there else mine
    if not is_loopback(mine) and (found := interface_of(mine)):
        os.environ["GLOO_SOCKET_IFNAME"] = found


def _name_start(meeting: "Store", rank: int, size: int, timeout: float) -> None:
    """Agree on a name that this start of the processes has alone.

    The store of torchrun's agent outlives its workers: after a restart it still has addresses, verdicts and files of
    those that are gone, under the same keys. So each process says hello by a number that nobody had before, the first
    one answers with its own, and asks again until everybody who is there now has taken it up.
    """
    global _start
    if _start or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    mine = secrets.token_hex(8)
    if rank:
        meeting.set(f"hello/{rank}", mine)
        _start = f"{meeting.get(f'answer/{mine}').decode()}/"
        meeting.set(_came(rank), str(size))
        return
    _start, end, answered = f"{mine}/", time.monotonic() + timeout, dict[int, bytes]()
    meeting.set(_came(rank), str(size))
    waiting = {*range(1, size)}
    while waiting:
        for other in sorted(waiting):
            if meeting.check([_came(other)]):
                waiting.discard(other)
            elif meeting.check([f"hello/{other}"]) and answered.get(other) != (said := meeting.get(f"hello/{other}")):
                answered[other] = said
                meeting.set(f"answer/{said.decode()}", mine)
        if time.monotonic() > end:
            raise RuntimeError(f"ranks {sorted(waiting)} did not come")
        time.sleep(0.002)


def _came(rank: int) -> str:
    """The key in the store where all meet by which a rank says that it is there."""
    return f"join/{_start}{_joined}/came/{rank}"


def _launched() -> bool:
    """Whether there are other processes: a launcher says so in the environment, or torch.distributed is set up."""
    import torch.distributed as dist

    if not dist.is_available():
        return False
    return dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= {*os.environ, *torchruns_words(os.environ)}


def at_close(action: Callable[[], None]) -> None:
    """Have something done when the world is left."""
    _closing.append(action)


def close() -> None:
    """Leave the world: process groups that were made here are closed. Safe to call twice; a later move joins anew."""
    global _world, _ours
    import torch.distributed as dist

    atexit.unregister(close)
    while _closing:
        _closing.pop()()
    if _ours and dist.is_initialized():
        dist.destroy_process_group()  # and with it all others
    elif dist.is_initialized():
        for known in _groups.values():
            if known is not dist.group.WORLD:
                dist.destroy_process_group(known)
    _groups.clear()
    _world, _ours = None, False


def owned(placement: Placement) -> tuple[int, ...]:
    """The ranks of a placement that this process owns, in the placement's order.

    >>> from .grid import placement
    >>> owned(placement("cpu:[2-5]"))
    (2, 3, 4, 5)
    """
    here = world()
    if here.rank is None:
        return placement.flat
    if here.size is not None and max(placement.flat) >= here.size:
        raise PlacementError(
            f"rank {max(placement.flat)} of {placement!r} does not exist\n"
            f"  {here.size} processes were started, ranks 0 to {here.size - 1}\n"
            f"  start more (torchrun --nproc-per-node {max(placement.flat) + 1} ...) or use fewer ranks"
        )
    return (here.rank,) if here.rank in placement else ()


def device(placement: Placement, rank: int) -> torch.device:
    """The device of a rank that this process owns; simulated ranks share the cards there are."""
    kind = family(placement.type)
    if not kind.here:
        host = type(placement)("cpu", placement.flat, placement.shape, placement.names)
        raise PlacementError(
            f"{placement!r} needs {kind.title}, which torch does not find here\n"
            f"  asked for at {user_line()}; a step on it can be planned without, as by graph.plan_for(...)\n"
            f"  to run it here, use {host!r}; python -m sbpflow doctor tells what is missing"
        )
    return kind.device(rank if world().rank is None else None)


def process_group(ranks: Sequence[int]) -> "ProcessGroup":
    """The process group of these ranks (in ascending order), made at first use by its members and kept.

    Members meet here in the order of their moves, which is one order, since every rank runs the same program.
    """
    import torch.distributed as dist

    key = tuple(sorted(ranks))
    known = _groups.get(key)
    if known is None:
        here = world()
        if here.rank is None:
            raise TransportError("one process owns every rank here, so there is no process group")
        if key == tuple(range(here.size or 0)):
            known = dist.group.WORLD
        else:
            known = _new_group(key, timedelta(seconds=here.timeout))
        assert known is not None
        _groups[key] = known
    return known


def _new_group(key: tuple[int, ...], wait: timedelta) -> "ProcessGroup":
    """The group of dist.new_group(use_local_synchronization=True), under a name that all members agree on.

    Torch's name holds the number of groups that the process has made so far, which differs from rank to rank.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    everybody = dist.group.WORLD
    assert everybody is not None
    backend, meeting = c10d._world.pg_map[everybody]
    name: Any = f"sbpflow/{_joined}/{'-'.join(map(str, key))}"
    known: ProcessGroup
    known, _ = c10d._new_process_group_helper(
        len(key), key.index(dist.get_rank()), list(key), backend, meeting, name, timeout=wait
    )
    c10d._world.pg_group_ranks[known] = {rank: i for i, rank in enumerate(key)}
    return known


def _bound_groups(timeout: float) -> None:
    """Bound the groups' own collectives: Gloo's reduce_scatter looks at no other limit, nor does NCCL's watchdog."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    set_timeout = getattr(dist, "set_timeout", _set_pg_timeout)  # public in torch 2.14; the old name warns in 2.15
    everybody = dist.group.WORLD  # keeps its limit where it is not ours
    for group in {*_groups.values(), everybody} - {None if _ours else everybody}:
        if group is not None:
            set_timeout(timedelta(seconds=timeout), group)


def store() -> "Store":
    """The key-value store that the processes met at."""
    return _store(world())


def _store(here: World) -> "Store":
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.distributed_c10d import _get_default_store

    meeting = PrefixStore(f"sbpflow/{_start}{_joined}", _get_default_store())
    meeting.set_timeout(timedelta(seconds=here.timeout))
    return meeting
