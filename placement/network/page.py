"""A page of memory for each rank, on which it says what it is at: its latest turns, what it refused, why it gave up.

In words of 8 bytes, each written in one go: process id, which entry is the latest, the entries, the last turn refused,
the fault, what was sent to other hosts in the latest window. An entry is its group, turn and fingerprint in one word
(so that nobody reads one without the other), and its text. One rank writes while others read; ranks of another host
have a copy, written as it was heard.
"""

from typing import Any, NamedTuple

__all__ = ["PAGE", "Entry", "Page", "stamp"]

WORD = 8
TEXT, FAULT, TRAFFIC = 256, 1024, 4096
ENTRY = 2 + TEXT // WORD
BUCKETS = 8
REFUSED_AT = 2 + BUCKETS * ENTRY  # group, turn
FAULT_AT = REFUSED_AT + 2
TRAFFIC_AT = FAULT_AT + 1 + FAULT // WORD
PAGE = (TRAFFIC_AT + 1 + TRAFFIC // WORD) * WORD  # bytes
HALF = 0xFFFFFFFF


class Entry(NamedTuple):
    """One rank's latest turn in one group."""

    group: int
    turn: int
    fingerprint: int
    text: str


class Page:
    """The page of one rank."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._words = memory, memory.cast("Q")

    @property
    def pid(self) -> int:
        return self._words[0]

    @pid.setter
    def pid(self, number: int) -> None:
        self._words[0] = number

    def enter(self, group: int, word: int, text: bytes) -> None:
        """Write down a turn; a reader sees all of it or none."""
        words, at = self._words, 2 + group % BUCKETS * ENTRY
        words[at + 1] = 0  # nobody takes what is written now for a whole entry
        words[at] = group
        self._write(at + 2, text, TEXT)
        words[at + 1] = word
        words[1] = at
        if not word & HALF:
            self._refuse(group, word)

    def _refuse(self, group: int, word: int) -> None:
        """Kept beside the entry, since a rank that refused one turn goes on to the next before all have looked."""
        self._words[REFUSED_AT + 1] = 0
        self._words[REFUSED_AT] = group
        self._words[REFUSED_AT + 1] = word

    def latest(self) -> Entry | None:
        """The last turn, in any group."""
        words = self._words
        for _ in range(100):  # it may be writing right now
            at = words[1]
            if not at:
                return None
            word = words[at + 1]
            found = Entry(words[at], word >> 32, word & HALF, self._read(at + 2, TEXT))
            if word and words[at + 1] == word:
                return found
        return None

    def differs(self, group: int, word: int) -> bool:
        """Whether the rank took the same turn of the group for something else."""
        return any(self._differs(at, group, word) for at in (2 + group % BUCKETS * ENTRY, REFUSED_AT))

    def refused(self, group: int, turn: int) -> bool:
        """Whether the rank refused this turn, even if it went on since."""
        return self._differs(REFUSED_AT, group, stamp(turn, HALF))

    def _differs(self, at: int, group: int, word: int) -> bool:
        theirs = self._words[at + 1]
        if theirs == word or theirs >> 32 != word >> 32 or self._words[at] != group:
            return False
        return self._words[at + 1] == theirs  # else the peer went on between the two looks

    def fail(self, text: str) -> None:
        self._write(FAULT_AT + 1, text.encode(), FAULT)
        self._words[FAULT_AT] = 1

    def fault(self) -> str | None:
        """Why the rank gave up, or None if it did not."""
        return self._read(FAULT_AT + 1, FAULT) if self._words[FAULT_AT] else None

    def carry(self, number: int, text: str) -> None:
        """Write down the traffic of a window, whose number is not 0; a reader sees all of it or that of another."""
        self._words[TRAFFIC_AT] = 0
        self._write(TRAFFIC_AT + 1, text.encode(), TRAFFIC)
        self._words[TRAFFIC_AT] = number

    def carried(self) -> tuple[int, str]:
        """The number and the traffic of the latest window; 0 where there was none or it is being written."""
        number, text = self._words[TRAFFIC_AT], self._read(TRAFFIC_AT + 1, TRAFFIC)
        return (number, text) if self._words[TRAFFIC_AT] == number else (0, "")

    def told(self) -> list[Any]:
        """The content of the page, for its copy on another host."""
        return [self.latest(), self._words[REFUSED_AT], self._words[REFUSED_AT + 1], self.fault(), self.carried()]

    def hear(self, said: list[Any]) -> None:
        """Write down what another page told."""
        latest, group, word, fault, (number, text) = said
        if latest is not None:
            at = Entry(*latest)
            self.enter(at.group, stamp(at.turn, at.fingerprint), at.text.encode())
        if word:
            self._refuse(group, word)
        if fault is not None:
            self.fail(fault)
        if number:
            self.carry(number, text)

    def _write(self, at: int, text: bytes, room: int) -> None:
        text = text[: room - 1]
        self._memory[at * WORD : at * WORD + len(text) + 1] = text + b"\0"

    def _read(self, at: int, room: int) -> str:
        raw = bytes(self._memory[at * WORD : at * WORD + room])
        return raw.partition(b"\0")[0].decode(errors="replace")


def stamp(turn: int, fingerprint: int) -> int:
    """A turn and what it is for, in one word."""
    return (turn & HALF) << 32 | fingerprint & HALF
