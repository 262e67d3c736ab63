"""Statements print as they are written, and read back as the same values."""

import pytest

from sbpflow import B, Plan
from sbpflow.nn.plan.language.statements import STATEMENTS, Cast, Flow, Recompute, Rest, Statement
from tests.nn.plan.good import DATA, EACH, SAME


@pytest.mark.parametrize("text", EACH)
def test_a_line_reads_as_a_value_that_prints_as_the_line(text: str) -> None:
    (found,) = Plan.read(text).statements
    assert found == EACH[text]
    assert str(found) == text


@pytest.mark.parametrize("kind", STATEMENTS)
def test_each_way_to_begin_a_line_has_an_example(kind: type[Statement]) -> None:
    for head, text in zip(kind.form.heads, [*kind.form.examples][: len(kind.form.heads)], strict=True):
        assert text.startswith(f"{head} ") if head[0].isalpha() else f"{head} " in text


@pytest.mark.parametrize("text", SAME, ids=repr)
def test_what_is_written_otherwise_says_the_same(text: str) -> None:
    (found,), (meant,) = Plan.read(text).statements, Plan.read(SAME[text]).statements
    assert found == meant
    assert str(found) == SAME[text]


@pytest.mark.parametrize("word", ["grid", "input", "take", "pipe", "cast", "expect", "states", "weights", "to", "over"])
def test_a_module_may_be_called_as_a_word_of_the_language(word: str) -> None:
    plan = Plan.read(
        f"{word}.weight: data=S(0)\n{word} -> data=B\n{word} : {word}=B\nrecompute {word}\ncast {word} to bf16"
    )
    assert plan.statements == (
        Rest(f"{word}.weight", DATA),
        Flow(word, (("data", B),)),
        Rest(word, ((word, B),)),
        Recompute(word),
        Cast(word, "bf16"),
    )
