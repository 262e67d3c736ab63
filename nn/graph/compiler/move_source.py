"""Moves as lines of a function: made at once, or started and waited for; of one tensor, a bucket, or in fewer bytes."""

from ....boxing import box_async
from ....boxing.exchange.filled_rows import box_filled
from ....placement.world import owned
from ..lower.instructions import Instruction, Transfer
from ..lower.order import Order
from .generated_calls import Bucket, hold, to_holders
from .source_text import SourceText

__all__ = ["MOVES", "MoveWriter"]

MOVES = ("box", "start", "wait", "pause", "on", "encode", "decode")


class MoveWriter:
    """Writes the moves of an order."""

    def __init__(self, plan: Order, text: SourceText) -> None:
        self.plan, self.text = plan, text

    def do_box(self, do: Instruction) -> None:
        transfer = self.plan.transfers[do.number]
        if not transfer.here:
            return
        if not transfer.sends:
            made = [name for register in do.writes for name in self.text.names(register)]
            self.text.borrowed.update(made if self.text.borrowed.intersection(self.text.names(do.reads[-1])) else ())
        if transfer.saves or transfer.saved:
            self._extremal(do, transfer)
        elif transfer.together:
            bucket, first = self._bucket(transfer)
            self._call(do, f"{bucket}.now", *first)
        elif not transfer.plans[0].moves and transfer.pairs[0][0].placement is transfer.pairs[0][1].placement:
            self.text.line(f"{self.text.targets(do.writes[0])} = {self.text.held(do.reads[0])}")
        else:
            src, dst = (self.text.bind(of, "at") for of in transfer.pairs[0])
            by, x = self.text.bind(box_filled, "box_filled") if transfer.filled else "box", do.reads[0]
            self.text.line(f"{self.text.targets(do.writes[0])} = {by}({self.text.held(x)}, {src}, {dst}, op={x!r})")
            for name in self.text.names(do.writes[0]) if transfer.is_cut_off(do.writes[0]) else ():
                self.text.line(f"{name} = own({name})")

    def do_start(self, do: Instruction) -> None:
        transfer = self.plan.transfers[do.number]
        if transfer.here:
            ends = [] if transfer.together else [self.text.bind(of, "at") for of in transfer.pairs[0]]
            call, first = self._bucket(transfer) if transfer.together else (self.text.bind(box_async, "start"), ())
            filled = ["filled=True"] if transfer.filled else []
            given = ", ".join([*first, *map(self.text.held, do.reads), *ends, *filled])
            pending = self.text.makes([self.text.name(do.writes[0], 0)])[:-1]
            self.text.line(f"{pending} = {call}{'.start' if transfer.together else ''}({given})")

    def do_wait(self, do: Instruction) -> None:
        transfer = self.plan.transfers[do.number]
        if not transfer.here:
            return
        wait = f"{self.text.name(do.reads[0], 0)}.wait()"
        targets = [self.text.targets(register) for register in do.writes]
        self.text.line(f"{targets[0] if not transfer.together else ''.join(f'({t}), ' for t in targets)} = {wait}")

    def do_pause(self, do: Instruction) -> None:
        """The function is a generator, whose caller has another go on."""
        self.text.line("yield")

    def do_on(self, do: Instruction) -> None:
        """The next exchange of a move under way."""
        if self.plan.transfers[do.number].here:
            self.text.line(f"{self.text.name(do.reads[0], 0)}.go_on()")

    def _bucket(self, transfer: Transfer) -> tuple[str, tuple[str, ...]]:
        """The bucket of several gradients, or of encoded ones, and what it is handed besides."""
        if transfer.encodings:
            sums = transfer.encodings[0].encoder.sums(transfer.pairs, transfer.encodings)
            return self.text.bind(sums, "encoded"), ("shards['kept']",)
        return self.text.bind(Bucket(transfer), "bucket"), ()

    def do_encode(self, do: Instruction) -> None:
        """One end of a hop, on its ranks."""
        transfer = self.plan.transfers[do.number]
        assert transfer.encoder is not None
        if owned(transfer.pairs[0][do.what == "decode"].placement):
            hop = self.text.bind(transfer.encoder.hop(*transfer.pairs[0]), "hop")
            self.text.line(f"{self.text.targets(do.writes[0])} = {hop}.{do.what}({self.text.held(do.reads[0])})")

    do_decode = do_encode

    def _call(self, do: Instruction, function: str, *first: str) -> None:
        given = ", ".join([*first, *map(self.text.held, do.reads)])
        self.text.line("".join(f"({self.text.targets(y)}), " for y in do.writes) + f"= {function}({given})")

    def _extremal(self, do: Instruction, transfer: Transfer) -> None:
        if transfer.saves:
            ends = ", ".join(self.text.bind(of, "at") for of in transfer.pairs[0])
            call = f"{self.text.bind(hold, 'hold')}({self.text.held(do.reads[0])}, {ends})"
            saved = self.text.makes([self.text.name(do.writes[1], 0)])[:-1]
            self.text.line(f"({self.text.targets(do.writes[0])}), {saved} = {call}")
        else:
            call = (
                f"{self.text.bind(to_holders, 'back')}({self.text.name(do.reads[0], 0)}, {self.text.held(do.reads[1])})"
            )
            self.text.line(f"{self.text.targets(do.writes[0])} = {call}")
