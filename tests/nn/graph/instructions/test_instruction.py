"""Kinds of instructions: each has a word, and none can be made that does not say its source."""

import inspect
from collections import Counter
from collections.abc import Iterator

import pytest

from sbpflow.nn.graph.instructions import order
from sbpflow.nn.graph.instructions.computing import AddPart, Backward, Forward
from sbpflow.nn.graph.instructions.instruction import Instruction
from sbpflow.nn.graph.lower.registers import LocalRegister


def kinds(of: type[Instruction] = Instruction) -> Iterator[type[Instruction]]:
    for kind in of.__subclasses__():
        if kind.__module__.startswith("sbpflow.") and not inspect.isabstract(kind):
            yield kind
        yield from kinds(kind)


def test_an_instruction_prints_what_it_reads_and_writes() -> None:
    d = LocalRegister("d", "x")
    assert str(AddPart(2, (d, d.part(2)), (d,))) == "add 2: d x, d x #2 -> d x"


def test_every_kind_has_a_word_of_its_own_that_the_order_explains() -> None:
    words = Counter(kind.word for kind in kinds())
    assert len(words) == words.total() == 21
    assert {word for word in words if word not in str(order.__doc__)} == set()


def test_a_kind_that_does_not_say_its_source_cannot_be_made() -> None:
    class Forgets(Instruction, word="forget"):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Forgets(0)  # type: ignore[abstract]


def test_instructions_are_equal_that_are_of_one_kind_and_do_the_same() -> None:
    x = (LocalRegister("value", "x"),)
    assert Forward(0, x) == Forward(0, x)
    assert Forward(0, x) != Forward(1, x)
    assert Forward(0, x) != Backward(0, x)  # type: ignore[comparison-overlap]
    assert len({Forward(0, x), Forward(0, x), Backward(0, x)}) == 2
