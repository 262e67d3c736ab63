"""Bells of ranks: one that waits for mail sleeps in the kernel until a peer rings, so its core is free.

A bell is a word of shared memory. A rank that is about to sleep sets it, looks once more whether there is mail, and
sleeps as long as the word is set (a futex). A peer that brings mail and finds it set clears it and wakes the sleeper.
Where a processor puts the sender's look before its data, a ring may be missed: no sleep is long, so mail is late then
and never lost.
"""

import ctypes
import mmap
import sys
import time
from ctypes import c_int, c_long, c_uint32, c_void_p

__all__ = ["Bell"]

FUTEX, WAIT, WAKE = 202, 0, 1  # the system call of Linux on x86_64, and what is asked of it
EVERYONE = (1 << 31) - 1


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


class Bell:
    """The bell of one rank, for its owner and its peers.

    >>> bell = Bell(mmap.mmap(-1, 4096), 0)
    >>> bell.ring()  # nobody sleeps: no system call
    False
    >>> bell.set()
    >>> bell.ring()
    True
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self.word = c_uint32.from_buffer(memory, offset)
        self.address = c_void_p(ctypes.addressof(self.word))
        self.call = ctypes.CDLL(None).syscall if sys.platform == "linux" else None

    def set(self) -> None:
        """Set the bell, before the last look for mail and `sleep`."""
        self.word.value = 1

    def sleep(self, seconds: float) -> None:
        """Sleep until the bell is rung, which may have happened since it was set, or for so long."""
        if self.call is None:
            time.sleep(min(seconds, 1e-4))  # nobody can wake us
            return
        limit = Timespec(int(seconds), int(seconds % 1 * 1e9))
        self.call(FUTEX, self.address, c_int(WAIT), c_uint32(1), ctypes.byref(limit), None, c_int(0))

    def ring(self) -> bool:
        """Wake the owner if it sleeps or is about to; whether that was so."""
        if not self.word.value:
            return False
        self.word.value = 0
        if self.call is not None:
            self.call(FUTEX, self.address, c_int(WAKE), c_int(EVERYONE), None, None, c_int(0))
        return True
