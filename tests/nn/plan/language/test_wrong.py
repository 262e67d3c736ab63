"""Texts that are no plan: each is one error, of the first wrong line, that points at the place and says what to do."""

import contextlib
import random
import re
from pathlib import Path

import pytest

from sbpflow import Plan, SbpError
from sbpflow.nn.plan.language import syntax
from tests.counts import calls
from tests.nn.plan.good import EACH, SAME

# A line that is none, the column of its caret, and what is said of it.
WRONG = [
    ("recomput model.layers.*", 0, "no line begins with 'recomput'"),
    ("gird (data=2)", 0, "no line begins with 'gird'"),
    ("grid data=2", 9, "expected '(', found '='"),
    ("grid (data=2", 12, "expected ',', 'folds' or ')', found the end of the line"),
    ("grid (data)", 10, "expected '=', found ')'"),
    ("grid (data=0)", 11, "0 is out of range"),
    ("grid (data=2.5)", 12, "expected ',', 'folds' or ')', found '.5'"),
    ("grid (data=2, data=4)", 14, "the axis 'data' stands twice"),
    ("grid (data=*, pipe=*)", 19, "two axes are *"),
    ("grid (data=8, expert=3 folds data)", 21, "3 ranks of expert do not divide the 8 of data"),
    ("grid (data=8, expert=4 folds dta)", 29, "'dta' is no axis that can be folded"),
    ("grid (data=8, expert=4 folds expert)", 29, "'expert' is no axis that can be folded"),
    ("grid gpu (data=2)", 5, "unknown device type 'gpu'"),
    ("grid (for=2)", 6, "an axis name is a Python identifier, as in p.at(data=0)"),
    ("grid cuda:[0-7] as (data=2, tensor=3)", 25, "the grid has 2 x 3 = 6 places, but 8 ranks are given"),
    ("grid cuda:[0-7 as (data=2)", 15, "expected ',' or ']', found 'as'"),
    ("grid cuda:[7-0]", 11, "the range 7-0 runs backwards"),
    ("model.layers.*", 14, "expected ':', '<-', '->' or a path, found the end of the line"),
    ("**: S(0)", 4, "this S is of no axis"),
    ("**: data", 8, "expected '=', found the end of the line"),
    ("**: data=", 9, "expected '?' or a signature such as S(0), found the end of the line"),
    ("**: data=Q", 9, "'Q' is no signature of an axis"),
    ("**: data=S(0", 9, "'S(0' is no signature of an axis"),
    ("**: data=S", 9, "'S' is no signature of an axis"),
    ("**: data=S(a)", 9, "'S(a)' is no signature of an axis"),
    ("**: data=0", 9, "expected '?' or a signature such as S(0), found '0'"),
    ("**: data=S(0), data=S(1)", 15, "the axis 'data' stands twice"),
    ("**: data=S(0) tensor=S(1)", 14, "expected the end of the line or ',', found 'tensor'"),
    ("**: ", 3, "expected '?' or an axis, found the end of the line"),
    ("{grad,states} **: data=S(0)", 1, "'grad' is no kind of value"),
    ("{grads,grads} **: data=S(0)", 7, "grads stands twice"),
    ("gradients **: data=S(0)", 0, "'gradients' is no kind of value"),
    ("{} **: data=S(0)", 0, "nothing stands in {}"),
    ("model.layers.{a,b.weight: data=S(0)", 13, "this { is not closed"),
    ("model.layers.[0-3].up: data=S(0)", 13, "[0-3] is no range of numbers"),
    ("model..layers: data=S(0)", 6, "a name is missing, found '.'"),
    ("model.layers** -> data=S(0)", 12, "** stands for whole names"),
    ("model.layers.[2:8]up -> data=S(0)", 18, "numbers are a name of their own, found 'u' behind them"),
    ("model.norm => tensor=S(1)", 11, "expected ':', '<-', '->' or a path, found '='"),
    ("states model.norm -> tensor=S(1)", 18, "expected ':', found '-'"),
    ("input tokens: data=S(0)", 12, "expected '<-', found ':'"),
    ("input <- ", 8, "expected '?' or an axis, found the end of the line"),
    ("take plan over tensor", 5, "'plan' is no plan of a config"),
    ("take tp_plan on tensor", 13, "expected 'over', found 'on'"),
    ("place model.vision at 0", 22, "expected an axis, found '0'"),
    ("place model.vision at pipe=-1", 27, "expected a whole number, found '-1'"),
    ("pipe model.layers", 17, "expected 'over', found the end of the line"),
    ("pipe model.layers ovr pipe", 18, "expected 'over', found 'ovr'"),
    ("pipe model.layers over pipe by 1f1f", 31, "'1f1f' is no schedule"),
    ("pipe model.layers over pipe by interleaved w=3", 43, "'w' is no mark of a schedule that is a number"),
    ("pipe model.layers over pipe by interleaved v=0", 45, "0 is out of range"),
    (
        "pipe model.layers over pipe by 1f1b 8 micro-batches",
        36,
        "expected the end of the line, ',' or a name, found '8'",
    ),
    ("pipe model.layers over pipe by 1f1b, 0 micro-batches", 37, "0 is out of range"),
    ("pipe model.layers over pipe by 1f1b, 8 micro-batches, 4 slices", 31, "1f1b does not cut sequences into slices"),
    ("pipe model.layers over pipe by terapipe, 8 micro-batches", 31, "terapipe cuts sequences into slices"),
    ("pipe model.layers over pipe by 1f1b, 8 micro-batches, 9 micro-batches", 54, "micro-batches stand twice"),
    ("recompute", 9, "expected a path, found the end of the line"),
    ("recompute model.layers.* keep", 29, "expected 'every' or an op, found the end of the line"),
    ("recompute model.layers.* keep mm only gelu", 33, "keep and only stand together"),
    ("recompute model.layers.* keep mm, mm", 34, "the op 'mm' stands twice"),
    ("recompute model.layers.* without mm", 25, "expected the end of the line, 'keep' or 'only', found 'without'"),
    ("offload states ** to gpu", 21, "'gpu' is no place to offload to"),
    ("offload state ** to cpu", 8, "'state' is no kind of value"),
    ("offload {grads,states} ** to cpu", 8, "several kinds of values are offloaded"),
    ("offload states ** to cpu ahead", 30, "expected a whole number, found the end of the line"),
    ("cast ** to bf17", 11, "'bf17' is no type"),
    ("cast ** bf16", 12, "expected 'to', found the end of the line"),
    ("cast saved ** to bf16", 5, "'saved' is no kind of value"),
    ("inside model.layers.* use ring", 30, "expected 'over', found the end of the line"),
    ("inside model.layers.* ring over context", 22, "expected 'run' or 'use', found 'ring'"),
    ("inside model.layers.* run slowly", 26, "expected 'eager', found 'slowly'"),
    ("limit 70 GiB", 6, "expected 'memory', found '70'"),
    ("limit memory 70", 15, "expected a unit such as GiB, found the end of the line"),
    ("limit memory 70 GiG", 16, "'GiG' is no unit of memory"),
    ("limit memory 0 GiB", 13, "a size of 0 bytes"),
    ("limit time 1 s", 6, "expected 'memory', found 'time'"),
    ("limit memory 9999999999999999999999999999999999 GiB", 13, "999999999999999999999999999999 is out of range"),
    ("seek", 4, "expected what to look for, found the end of the line"),
    ("seek pipe data", 10, "expected the end of the line or ',', found 'data'"),
    ("seek pipe, pipe", 11, "pipe stands twice"),
    (
        "expect",
        6,
        "expected 'at most', 'gathered at once', a whole number, 'memory', 'no' or 'time', found the end of the line",
    ),
    (
        "expect all_gather over data",
        7,
        "expected 'at most', 'gathered at once', a whole number, 'memory', 'no' or 'time', found 'all_gather'",
    ),
    ("expect 2 allgather", 9, "'allgather' is no move"),
    ("expect 2 broadcast", 9, "'broadcast' is no move"),
    (
        "expect 2 all_gather or 1 all_reduce",
        20,
        "expected the end of the line, 'and', 'a layer', 'forward', 'backward', 'update' or 'over', found 'or'",
    ),
    ("expect 2 all_gather and 3 all_gather", 26, "all_gather stands twice"),
    ("expect at most all_reduce", 15, "expected a whole number or 'no', found 'all_reduce'"),
    (
        "expect 2 all_gather over tensor a layer sideways",
        40,
        "expected the end of the line or 'forward', 'backward', 'update', found 'sideways'",
    ),
    ("expect gathered <= two layers", 19, "expected a whole number, found 'two'"),
    ("expect memory < 40 GiB", 14, "expected '<=', found '<'"),
    ("expect memory <= 40", 19, "expected a unit such as GiB, found the end of the line"),
    ("expect time <= 1.1", 18, "expected 'of' or 's', found the end of the line"),
    ("expect time <= 1.1 of", 21, "expected the file of a plan, found the end of the line"),
    ("data=2", 4, "expected ':', '<-', '->' or a path, found '='"),
    ("()", 0, "expected a statement, found '('"),
    ("?", 0, "expected a statement, found '?'"),
    ("**", 2, "expected ':', '<-', '->' or a path, found the end of the line"),
    ("=== data ===", 0, "expected a statement, found '='"),
    ("import torch", 12, "expected ':', found the end of the line"),
    ("<html>", 0, "expected a statement, found '<'"),
    ('{"grid": {"data": 2}}', 9, "expected '?' or an axis, found '{'"),
]


def error(text: str, name: str = "") -> list[str]:
    with pytest.raises(SbpError) as caught:
        Plan.read(text, name)
    return str(caught.value).split("\n")


@pytest.mark.parametrize(("text", "column", "said"), WRONG)
def test_a_wrong_line_is_shown_with_a_caret_and_a_fix(text: str, column: int, said: str) -> None:
    first, shown, mark, *fix = error(f"grid_of.weight: data=S(0)\n\n{text}  # why\nwrong too", "a.plan")
    assert first == f"a.plan, line 3: {said}"
    assert shown == f"  3 | {text}  # why"
    assert mark == " " * (6 + column) + "^"
    assert fix
    assert all(fix)


def test_the_first_wrong_line_is_the_error() -> None:
    assert error("\n**: data=S\ngird")[:2] == ["plan, line 2: 'S' is no signature of an axis", "  2 | **: data=S"]


def test_two_grids_are_both_shown() -> None:
    assert error("grid (data=2) # a\n\n  grid (data=4)\nwhat is this", "a.plan") == [
        "a.plan, lines 1 and 3: the grid stands twice",
        "  1 | grid (data=2) # a",
        "      ^",
        "  3 |   grid (data=4)",
        "        ^",
        "  keep one of them",
    ]


def test_a_plan_without_a_grid_is_read() -> None:
    assert len(Plan.read("**: data=S(0)").statements) == 1


def test_a_statement_that_is_no_path_for_the_grid_is_found_where_the_byte_order_mark_is() -> None:
    assert error("\ufeffgird (data=2)")[1:3] == ["  1 | gird (data=2)", "      ^"]


def test_letters_that_a_terminal_acts_on_are_not_printed() -> None:
    shown = "\n".join(error("grid (\x1b[31m\x00data=2)\r"))
    assert "  1 | grid (\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}data=2)\n            ^" in shown
    assert shown.isprintable() or not {*shown} & {"\x1b", "\x00", "\r"}


LARGE = {
    "lines": "a: data=B\n" * 10_001,
    "megabytes_of_lines": "".join(f"model.layers.{n}.mlp.up.weight: data=S(0)  # {n}\n" for n in range(200_000)),
    "statements": "".join(f"a{n}: ?\n" for n in range(2_001)),
    "a_line": "grid (data=2)\n**: " + "a=B, " * 200_000,
    "a_path": "a" * 1_000_000 + ": data=S(0)",
    "braces": "{" * 9_000 + "}" * 900 + ": data=S(0)",
    "brackets": "[" * 9_000 + ": data=S(0)",
    "dots": "." * 9_000 + ": data=S(0)",
    "stars": "*" * 9_000 + ": data=S(0)",
    "parentheses": "**: data=" + "S(" * 4_000,
    "commas": "seek " + "," * 9_000,
    "digits": "grid (data=" + "9" * 9_000 + ")",
    "power": "limit memory 1e999999999 GiB",
    "small_power": "expect time <= 1e-999999999 s",
    "ranks": "grid cuda:[0-99999999999]",
    "nothing": "\x00" * 9_000,
    "spaces": "grid" + " " * 5_000 + "|",
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_large_is_refused_before_long(name: str) -> None:
    error("grid")  # the grammar is read once, whoever comes first
    steps = calls(lambda: error(LARGE[name]))
    assert steps < 600_000  # of 2,000 statements; a million are a second


@pytest.mark.parametrize("seed", range(5))
def test_files_of_any_bytes_are_refused(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    data = dice.randbytes(dice.choice([10, 1000, 1 << 20]))
    (tmp_path / "x.plan").write_bytes(data)
    with pytest.raises(SbpError, match=r"x\.plan, line \d+: "):
        Plan.load(tmp_path / "x.plan")


GOOD = [*EACH, *SAME]
LETTERS = "".join(sorted({*"".join(GOOD), *"#\n\t\r\x00 {}[]()*?.,:=<>-é\u2028\ufeff😀0123456789"}))


def edited(text: str, dice: random.Random) -> str:
    """The text with a few letters, words or lines changed."""
    for _ in range(dice.randint(1, 4)):
        at, end = sorted(dice.randint(0, len(text)) for _ in range(2))
        end = dice.choice([at, at + 1, at + 1, end])
        other = dice.choice(["", "", dice.choice(LETTERS), text[at:end] * 2, dice.choice(dice.choice(GOOD).split(" "))])
        text = text[:at] + other + text[end:]
    return text


@pytest.mark.parametrize("seed", range(40))
def test_edited_plans_read_and_print_or_are_one_error(seed: int) -> None:
    dice, read = random.Random(seed), 0
    for _ in range(40):
        text = edited("\n".join(dice.sample(GOOD, dice.randint(1, 3))), dice)
        syntax.reading.cache_clear()
        try:
            plan = Plan.read(text)
        except SbpError as wrong:
            said = str(wrong).split("\n")
            assert re.match(r"plan, lines? \d+", said[0])
            assert said[2].strip() == "^"
            continue
        read += 1
        assert str(plan) == text
        assert Plan.of(plan.statements).statements == plan.statements
    assert read


def test_the_work_of_a_text_grows_with_its_letters() -> None:
    dice, most = random.Random(0), 0.0
    for _ in range(200):
        text = edited(dice.choice(GOOD), dice)
        syntax.reading.cache_clear()
        with contextlib.suppress(SbpError):
            most = max(most, calls(lambda text=text: Plan.read(text)) / (len(text) + 20))  # type: ignore[misc]
    assert most < 100
