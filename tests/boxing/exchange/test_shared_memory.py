"""Mailboxes in shared memory: messages keep their order, whatever their size, and nothing is lost or overwritten."""

import mmap
import random
from collections import deque

import pytest
import torch

from sbpflow.boxing.exchange.bell import Bell
from sbpflow.boxing.exchange.shared_memory import BELL, SLOTS, Idle, Mailbox, _chunks, box_size

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
