"""Moves as instructions: made at once, or started and waited for; of one tensor, a bucket, or in fewer bytes."""

from typing import ClassVar

from ....boxing import box_async
from ....boxing.boxing import between
from ....boxing.exchange.filled_rows import box_filled
from ....placement.world import owned
from ..compiler.generated_calls import Bucket, hold, to_holders
from ..compiler.source_text import SourceText
from ..lower.registers import Transfer
from .instruction import Instruction, Storages

__all__ = ["DecodeHop", "EncodeHop", "MoveInstruction", "MoveNow", "NextExchange", "Pause", "StartMove", "WaitForMove"]

NAMED = 2  # values of a bucket that a trace names


class MoveInstruction(Instruction):
    """A move; `number` is that of the transfer."""

    way: ClassVar[str]

    def title(self, text: SourceText) -> str:
        transfer = text.transfers[self.number]
        if not (transfer.here and transfer.sends):
            return ""
        moved = [x for x in (*self.writes, *self.reads) if x.kind not in ("moving", "holders")][: len(transfer.pairs)]
        names = [f"{'gradient of ' * x.is_gradient}{(x.of or x).partition('@')[0]}" for x in moved]
        values = ", ".join(names[:NAMED]) + f" and {len(names) - NAMED} more" * (len(names) > NAMED)
        src, dst = transfer.pairs[0]
        return f"{self.way} {values}: {src.lie} -> {dst.lie} by {transfer.plans[0].route}"

    def moved(self, memory: Storages) -> tuple[list[int], list[int]]:
        """The storages of moved values, and of those that arrive; a view that arrives has the storage moved."""
        transfer = memory.transfers[self.number]
        sent = [memory.held[name][0] for name in self.reads[-len(transfer.pairs) :] if name in memory.held]
        if len(transfer.pairs) > 1:
            packed = sum(memory.size(src) for src, _ in transfer.pairs)
            whole = memory.new(sum(memory.size(dst) for _, dst in transfer.pairs))
            memory.passing(packed + memory.bytes[whole])
            return sent, [whole] * len(transfer.pairs)
        ((src, dst),) = transfer.pairs
        own = transfer.encodings or transfer.is_cut_off(self.writes[0])
        seen = sent and not own and between(src, dst).is_view(memory.rank)
        return sent, [sent[0] if seen else memory.new(memory.size(dst))]


class MoveNow(MoveInstruction, word="box"):
    way = "move"

    def source(self, text: SourceText) -> None:
        transfer = text.transfers[self.number]
        if not transfer.here:
            return
        x, y = self.reads[0], self.writes[0]
        if not transfer.sends:
            made = [name for register in self.writes for name in text.names(register)]
            text.borrowed.update(made if text.borrowed.intersection(text.names(self.reads[-1])) else ())
        if transfer.saves:
            ends = ", ".join(text.bind(of, "at") for of in transfer.pairs[0])
            call = f"{text.bind(hold, 'hold')}({text.held(x)}, {ends})"
            saved = text.target(text.name(self.writes[1], 0))
            text.line(f"({text.targets(y)}), {saved} = {call}")
        elif transfer.saved:
            call = f"{text.bind(to_holders, 'back')}({text.name(x, 0)}, {text.held(self.reads[1])})"
            text.line(f"{text.targets(y)} = {call}")
        elif transfer.together:
            bucket, first = _bucket(text, transfer)
            given = ", ".join([*first, *map(text.held, self.reads)])
            text.line("".join(f"({text.targets(y)}), " for y in self.writes) + f"= {bucket}.now({given})")
        elif not transfer.plans[0].moves and transfer.pairs[0][0].placement is transfer.pairs[0][1].placement:
            text.line(f"{text.targets(y)} = {text.held(x)}")
        else:
            src, dst = (text.bind(of, "at") for of in transfer.pairs[0])
            by = text.bind(box_filled, "box_filled") if transfer.filled else "box"
            text.line(f"{text.targets(y)} = {by}({text.held(x)}, {src}, {dst}, op={x!r})")
            for name in text.names(y) if transfer.is_cut_off(y) else ():
                text.line(f"{name} = own({name})")

    def effect(self, memory: Storages) -> None:
        for register, storage in zip(self.writes, self.moved(memory)[1], strict=False):
            memory.hold(register, [storage])


class StartMove(MoveInstruction, word="start"):
    way = "start to move"

    def source(self, text: SourceText) -> None:
        transfer = text.transfers[self.number]
        if transfer.here:
            ends = [] if transfer.together else [text.bind(of, "at") for of in transfer.pairs[0]]
            call, first = _bucket(text, transfer) if transfer.together else (text.bind(box_async, "start"), ())
            filled = ["filled=True"] if transfer.filled else []
            given = ", ".join([*first, *map(text.held, self.reads), *ends, *filled])
            pending = text.target(text.name(self.writes[0], 0))
            text.line(f"{pending} = {call}{'.start' if transfer.together else ''}({given})")

    def effect(self, memory: Storages) -> None:
        memory.hold(self.writes[0], [storage for storages in self.moved(memory) for storage in storages])


class WaitForMove(MoveInstruction, word="wait"):
    way = "wait for"

    def source(self, text: SourceText) -> None:
        transfer = text.transfers[self.number]
        if transfer.here:
            targets = [text.targets(register) for register in self.writes]
            made = "".join(f"({target}), " for target in targets) if transfer.together else targets[0]
            text.line(f"{made} = {text.name(self.reads[0], 0)}.wait()")

    def effect(self, memory: Storages) -> None:
        held = memory.held.get(self.reads[0], ())
        memory.drop(self.reads[0])
        # The storages that arrived stand behind those that were sent.
        for register, storage in zip(self.writes, held[-len(self.writes) :], strict=False):
            memory.hold(register, [storage])


class NextExchange(Instruction, word="on"):
    """The next exchange of a move under way."""

    def source(self, text: SourceText) -> None:
        if text.transfers[self.number].here:
            text.line(f"{text.name(self.reads[0], 0)}.go_on()")


class Pause(Instruction, word="pause"):
    """The turn of another task: the function is a generator, whose caller has another go on."""

    def source(self, text: SourceText) -> None:
        text.line("yield")


class EncodeHop(Instruction, word="encode"):
    """One end of a hop, on its ranks."""

    end = 0

    def source(self, text: SourceText) -> None:
        transfer = text.transfers[self.number]
        assert transfer.encoder is not None
        if owned(transfer.pairs[0][self.end].placement):
            hop = text.bind(transfer.encoder.hop(*transfer.pairs[0]), "hop")
            text.line(f"{text.targets(self.writes[0])} = {hop}.{self.word}({text.held(self.reads[0])})")


class DecodeHop(EncodeHop, word="decode"):
    end = 1


def _bucket(text: SourceText, transfer: Transfer) -> tuple[str, tuple[str, ...]]:
    """The bucket of several gradients, or of encoded ones, and what it is handed besides."""
    if transfer.encodings:
        sums = transfer.encodings[0].encoder.sums(transfer.pairs, transfer.encodings)
        return text.bind(sums, "encoded"), ("shards['kept']",)
    return text.bind(Bucket(transfer), "bucket"), ()
