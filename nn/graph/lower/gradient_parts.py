"""Parts of gradients: a value that several use has one of each, which are added up before anybody reads the sum."""

from collections import Counter
from collections.abc import Iterable, Iterator

from ....sbp import Layout
from .instructions import Instruction, LocalRegister

__all__ = ["Parts"]


class Parts:
    """Gradients that come in parts: the first has its slot, each further one a register of its own, and is added."""

    def __init__(self, layouts: dict[str, Layout]) -> None:
        self.layouts = layouts
        self.come: Counter[LocalRegister] = Counter()
        self.added: Counter[LocalRegister] = Counter()

    def part(self, slot: LocalRegister) -> LocalRegister:
        """The register of one more part; what is no gradient has none but its own."""
        if not slot.is_gradient:
            return slot
        self.come[slot] += 1
        register = slot.part(self.come[slot])
        self.layouts[register] = self.layouts[slot]
        return register

    def summed(self, slots: Iterable[LocalRegister]) -> Iterator[Instruction]:
        """Add up what has come of these gradients."""
        for slot in slots:
            for number in range(max(2, self.added[slot] + 1), self.come[slot] + 1):
                yield Instruction("add", number, (slot, slot.part(number)), (slot,))
            self.added[slot] = self.come[slot]
