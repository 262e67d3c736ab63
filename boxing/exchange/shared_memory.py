"""Exchanges between processes of one host through shared memory: two copies and no system call for the data.

Each ordered pair of ranks has a mailbox: a few slots, a count of slots filled (written by the sender alone) and one of
slots emptied (by the receiver alone). Messages go through in order, cut where they are larger than a slot. A rank that
waits yields the processor some times, then sleeps until a peer rings its bell, and looks from time to time whether the
peer is still coming.

The counts are plain stores: x86 keeps them behind the data they announce. Other processors may not, and use Gloo.
"""

import mmap
import os
import platform
import time
from collections.abc import Callable, Iterator
from math import ceil

import torch
from torch import Tensor

from ...placement.ledger import Ledger
from ...placement.network.page import stamp
from .bell import Bell
from .buffer import finish, keep, landing, pack, plain
from .transport import Exchange, Sent

__all__ = ["Mail", "Shared"]

SLOTS = 4
HEAD = 4096  # bytes before the slots: filled count, emptied count, and the tag of each slot, apart from each other
FILLED, EMPTIED, TAGS = 0, 8, 16  # in words of 8 bytes
LARGEST, SMALLEST = 1 << 21, 1 << 12  # bytes of a slot: two and four ranks have one for a part of a whole bucket
BUDGET = 1 << 26  # bytes of all mailboxes of a host
BELL = 64  # bytes of a rank's bell, a cache line of its own; bells lie before the mailboxes
YIELDS = 20  # before sleeping: some 60 us where cores are idle; where others need them, each gives one of them its turn
DOZE = 0.001  # seconds of the first sleep
PATROL = 0.02  # seconds of the longest sleep, and between looks at what the peers are doing


class Mail:
    """The mailboxes of this rank, to and from every other rank of its host."""

    def __init__(self, ledger: Ledger, memory: mmap.mmap, slot: int) -> None:
        self.local = frozenset(ledger.local)
        self.slot = slot
        self.words = memoryview(memory).cast("Q")
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        ranks = ledger.local
        size, boxes, others = box_size(slot), len(ranks) * BELL, len(ranks) - 1
        self.outgoing, self.incoming = {}, {}
        me = ranks.index(ledger.rank)
        self.bell = Bell(memory, me * BELL)
        for i, peer in enumerate(ranks):
            if peer != ledger.rank:
                bell = Bell(memory, i * BELL)
                to, fro = me * others + i - (i > me), i * others + me - (me > i)
                self.outgoing[peer] = Mailbox(self.words, whole, boxes + to * size, slot, bell)
                self.incoming[peer] = Mailbox(self.words, whole, boxes + fro * size, slot, bell)

    @classmethod
    def open(cls, ledger: Ledger) -> "Mail | None":
        """The mailboxes, or None where there are no other ranks, not the memory, or another kind of processor."""
        n = len(ledger.local)
        if n == 1 or platform.machine() not in ("x86_64", "AMD64"):
            return None
        sizes = [LARGEST >> k for k in range((LARGEST // SMALLEST).bit_length())]
        for slot in [size for size in sizes if mail_size(n, size) <= BUDGET][::2]:  # a host may have less room
            memory = ledger.share(f"mail of {slot}", mail_size(n, slot))
            if memory is not None:
                return cls(ledger, memory, slot)
        return None

    def serves(self, exchange: Exchange) -> bool:
        """Whether all ranks of the exchange are on this host; every one of them finds the same."""
        return self.local.issuperset(exchange.program.group)


def box_size(slot: int) -> int:
    """Bytes of one mailbox."""
    return HEAD + SLOTS * slot


def mail_size(ranks: int, slot: int) -> int:
    """Bytes of the bells and mailboxes of a host."""
    return ranks * BELL + ranks * (ranks - 1) * box_size(slot)


class Mailbox:
    """One direction of one pair of ranks. Each side keeps its own count, reads the other's, and rings its bell."""

    def __init__(self, words: memoryview, whole: Tensor, start: int, slot: int, bell: Bell) -> None:
        self.words, self.at, self.bell = words, start // 8, bell
        self.slots = [whole.narrow(0, start + HEAD + i * slot, slot) for i in range(SLOTS)]
        self.count = 0

    def free(self) -> bool:
        return bool(self.count - self.words[self.at + EMPTIED] < SLOTS)

    def put(self, tag: int, piece: Tensor) -> None:
        """Fill the next slot; only when there is a free one."""
        i = self.count % SLOTS
        # View the slot as the piece, so that a strided piece is packed by this one copy.
        self.slots[i].narrow(0, 0, piece.nbytes).view(piece.dtype).view(piece.shape).copy_(piece)
        self.words[self.at + TAGS + i] = tag
        self.count += 1
        self.words[self.at + FILLED] = self.count
        self.bell.ring()

    def ready(self) -> bool:
        return bool(self.words[self.at + FILLED] > self.count)

    def look(self, tag: int, nbytes: int) -> Tensor:
        """The oldest message as it lies in its slot, which stays filled until `drop`."""
        i = self.count % SLOTS
        found = self.words[self.at + TAGS + i]
        if found != tag:
            raise RuntimeError(f"a message of another move arrived (tag {found}, not {tag})")
        return self.slots[i].narrow(0, 0, nbytes)

    def drop(self) -> None:
        self.count += 1
        self.words[self.at + EMPTIED] = self.count
        self.bell.ring()


class Shared:
    """One exchange through the mailboxes: pieces that fit are sent when it is made, the rest while waiting."""

    def __init__(self, mail: Mail, sent: Sent, exchange: Exchange) -> None:
        rank, program, buffer, _, turn = exchange
        self.mail, self.exchange = mail, exchange
        self.tag = stamp(turn.number, turn.fingerprint)
        self.unsent: dict[int, Iterator[Tensor]] = {}
        self.next: dict[int, Tensor] = {}
        for peer, boxes, _ in program.sends:
            piece = pack(buffer, boxes)
            sent.add(rank, piece.nbytes)
            if piece.nbytes <= mail.slot and mail.outgoing[peer].free():
                mail.outgoing[peer].put(self.tag, _own_values(piece))
            else:
                self._queue(peer, iter(_chunks(plain(piece), mail.slot)))
        self.out = None if program.terms or program.adds else buffer.new_empty(program.shape)
        if self.out is not None:
            keep(program, buffer, self.out)

    def _queue(self, peer: int, pieces: Iterator[Tensor]) -> None:
        self.unsent[peer] = pieces
        self.next[peer] = next(pieces)

    def wait(self, patrol: Callable[[set[int]], None], limit: float) -> Tensor:
        """The result. `patrol` raises if one of these peers is known not to come; `limit` is in seconds."""
        rank, program, buffer, reduction, _ = self.exchange
        slot, incoming = self.mail.slot, self.mail.incoming
        data: dict[int, Tensor] = {}
        whole = {p.peer: p.numel * buffer.element_size() for p in program.receives}
        held = [peer for peer, nbytes in whole.items() if nbytes <= slot]
        in_parts = {p.peer: landing(p, self.out, buffer) for p in program.receives if whole[p.peer] > slot}
        chunks = {peer: iter(_chunks(target, slot)) for peer, target in in_parts.items()}
        current = {peer: next(rest) for peer, rest in chunks.items()}
        missing = set(held)
        idle = Idle(limit, self.mail.bell)
        while missing or current or self.next:
            moved = self._send() if self.next else False
            for peer in tuple(missing):
                if incoming[peer].ready():
                    data[peer] = incoming[peer].look(self.tag, whole[peer]).view(buffer.dtype)
                    missing.remove(peer)
                    moved = True
            for peer in tuple(current):
                while peer in current and incoming[peer].ready():
                    current[peer].copy_(incoming[peer].look(self.tag, current[peer].nbytes).view(buffer.dtype))
                    incoming[peer].drop()
                    _advance(current, chunks, peer)
                    moved = True
            if moved:
                idle.rounds = 0
            elif idle.wait():
                patrol({*missing, *current, *self.next})
        data.update(in_parts)
        result = finish(program, rank, buffer, data.__getitem__, reduction, self.out, in_parts)
        for peer in held:
            incoming[peer].drop()
        return result

    def _send(self) -> bool:
        moved = False
        for peer in tuple(self.next):
            box = self.mail.outgoing[peer]
            while peer in self.next and box.free():
                box.put(self.tag, self.next[peer])
                moved = True
                _advance(self.next, self.unsent, peer)
        return moved


class Idle:
    """Waiting without a wire to wait on: yield at first, then sleep; `wait` tells when to look after the peers."""

    def __init__(self, limit: float, bell: Bell) -> None:
        self.limit, self.bell = limit, bell
        self.rounds = 0
        self.start = self.looked = 0.0
        self.nap = DOZE

    def wait(self) -> bool:
        """Wait a round, when nothing has come: the first rounds yield, and behind them every second one sleeps."""
        self.rounds += 1
        if self.rounds <= YIELDS:
            os.sched_yield()
            return False
        now = time.monotonic()
        if self.rounds == YIELDS + 1:
            self.start, self.looked, self.nap = now, now, DOZE
        if now - self.start > self.limit:
            raise RuntimeError(f"timed out after {self.limit:g} s")
        if (self.rounds - YIELDS) % 2:
            self.bell.set()  # and the caller looks once more before we sleep
            return False
        self.bell.sleep(self.nap)
        self.nap = min(2 * self.nap, PATROL)
        if now - self.looked < PATROL:
            return False
        self.looked = now
        return True


def _chunks(flat: Tensor, slot: int) -> list[Tensor]:
    """A message of one run of memory, cut into what slots hold."""
    flat = flat.reshape(-1)
    most = slot // flat.element_size()
    return [flat.narrow(0, i * most, min(most, flat.numel() - i * most)) for i in range(ceil(flat.numel() / most))]


def _own_values(piece: Tensor) -> Tensor:
    return piece.resolve_conj().resolve_neg()


def _advance(current: dict[int, Tensor], rest: dict[int, Iterator[Tensor]], peer: int) -> None:
    following = next(rest[peer], None)
    if following is None:
        del current[peer], rest[peer]
    else:
        current[peer] = following
