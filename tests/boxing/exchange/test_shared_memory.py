"""Mailboxes in shared memory: messages keep their order, whatever their size, and nothing is lost or overwritten."""

import mmap
import platform
import random
from collections import deque
from itertools import permutations

import pytest
import torch

from sbpflow.boxing.exchange.bell import Bell
from sbpflow.boxing.exchange.shared_memory import (
    BELL,
    BUDGET,
    SLOTS,
    Idle,
    Mail,
    Mailbox,
    _chunks,
    box_size,
    mail_size,
)

SLOT = 4096


def pair() -> tuple[Mailbox, Mailbox]:
    """The sender's and the receiver's side of one mailbox."""
    memory = mmap.mmap(-1, box_size(SLOT))
    words, whole = memoryview(memory).cast("Q"), torch.frombuffer(memory, dtype=torch.uint8)
    bell = Bell(mmap.mmap(-1, BELL), 0)
    return Mailbox(words, whole, 0, SLOT, bell), Mailbox(words, whole, 0, SLOT, bell)


def test_messages_arrive_in_order_and_none_is_overwritten() -> None:
    sender, receiver = pair()
    chance, sent, count = random.Random(0), deque[torch.Tensor](), 0
    while count < 500 or sent:
        if count < 500 and sender.free() and chance.random() < 0.6:
            piece = torch.full((chance.randint(1, SLOT // 8),), count, dtype=torch.int64)
            sender.put(count, piece)
            sent.append(piece)
            count += 1
        elif receiver.ready():
            piece = sent.popleft()
            found = receiver.look(int(piece[0]), piece.nbytes).view(torch.int64)
            assert torch.equal(found, piece)
            receiver.drop()
        assert len(sent) <= SLOTS


def test_a_full_mailbox_takes_no_more_and_an_empty_one_gives_none() -> None:
    sender, receiver = pair()
    assert not receiver.ready()
    for tag in range(SLOTS):
        assert sender.free()
        sender.put(tag, torch.ones(1))
    assert not sender.free()
    receiver.look(0, 4)
    assert not sender.free(), "what is being read is not free"
    receiver.drop()
    assert sender.free()


def test_a_strided_piece_is_packed_by_being_sent() -> None:
    sender, receiver = pair()
    piece = torch.arange(12.0).reshape(3, 4)[:, 1:3]
    sender.put(7, piece)
    assert torch.equal(receiver.look(7, piece.nbytes).view(torch.float32), piece.reshape(-1))


def test_a_message_of_another_move_is_refused() -> None:
    sender, receiver = pair()
    sender.put(7, torch.ones(1))
    with pytest.raises(RuntimeError, match="another move"):
        receiver.look(8, 4)


@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 5000])
def test_chunks_fit_a_slot_and_make_the_whole(numel: int) -> None:
    flat = torch.arange(float(numel))
    chunks = _chunks(flat, SLOT)
    assert all(chunk.nbytes <= SLOT for chunk in chunks)
    assert torch.equal(torch.cat(chunks), flat)


def test_waiting_ends_at_the_limit_and_looks_after_peers_on_the_way() -> None:
    idle = Idle(0.1, Bell(mmap.mmap(-1, BELL), 0))
    looks: list[bool] = []
    with pytest.raises(RuntimeError, match=r"timed out after 0\.1 s"):
        looks.extend(idle.wait() for _ in iter(int, 1))
    assert sum(looks) >= 2


# Mailboxes of a host


class Hosted:
    """A ledger, as far as mail asks it: the ranks of this host, and memory that there is up to so many bytes."""

    def __init__(self, rank: int, ranks: int, room: int = BUDGET) -> None:
        self.rank, self.local, self.room = rank, tuple(range(ranks)), room
        self.asked: list[int] = []

    def share(self, name: str, size: int) -> mmap.mmap | None:
        self.asked.append(size)
        return mmap.mmap(-1, size) if size <= self.room else None


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_each_pair_has_memory_of_its_own(ranks: int) -> None:
    memory = mmap.mmap(-1, mail_size(ranks, SLOT))
    mails = [Mail(Hosted(rank, ranks), memory, SLOT) for rank in range(ranks)]  # type: ignore[arg-type]
    starts = []
    for here, there in permutations(range(ranks), 2):
        assert mails[here].outgoing[there].at == mails[there].incoming[here].at
        starts.append(8 * mails[here].outgoing[there].at)
    ends = [start + box_size(SLOT) for start in sorted(starts)]
    assert sorted(starts) == [ranks * BELL, *ends[:-1]]
    assert ends[-1] == mail_size(ranks, SLOT)


@pytest.mark.parametrize(("ranks", "slot"), [(2, 1 << 21), (4, 1 << 20), (8, 1 << 18), (16, 1 << 16)])
def test_a_slot_holds_a_ranks_part_of_a_bucket_where_four_share_a_host(ranks: int, slot: int) -> None:
    mail = Mail.open(Hosted(0, ranks))  # type: ignore[arg-type]
    assert mail is None if platform.machine() not in ("x86_64", "AMD64") else mail is not None and mail.slot == slot


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="mailboxes rely on the order of x86's stores")
def test_where_there_is_less_room_slots_are_smaller() -> None:
    tight, none = Hosted(0, 4, room=1 << 22), Hosted(0, 4, room=0)
    mail = Mail.open(tight)  # type: ignore[arg-type]
    assert mail is not None
    assert mail_size(4, mail.slot) <= tight.room
    assert tight.asked == sorted(tight.asked, reverse=True)
    assert Mail.open(none) is None  # type: ignore[arg-type]
    assert len(none.asked) < 8
