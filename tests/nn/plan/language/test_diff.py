"""The lines of two plans side by side."""

import random

import pytest

from sbpflow import Plan
from sbpflow.nn.plan.language.diff import diff
from tests.nn.plan.good import EACH

A = """
grid (data=8)         # a comment
states **: data=S(0)
cast ** to bf16
recompute h.* keep mm
expect 2 all_gather over data
limit memory 70 GiB
"""
B = """
grid (data=4, tensor=2)
states  **:  data=S(0)   # another
grads **: data=S(0)
cast ** to bf16
recompute h.*
offload states ** to cpu
expect no all_gather over data
"""


def test_what_changed_of_the_same_thing_is_one_row() -> None:
    found = diff(Plan.read(A, "a.plan"), Plan.read(B, "b.plan"))
    assert str(found) == SIDE_BY_SIDE.strip("\n")
    assert [row.change for row in found.changes] == ["changed", "only b", "changed", "only b", "changed", "only a"]


SIDE_BY_SIDE = """
   a.plan                         b.plan
~  grid (data=8)                  grid (data=4, tensor=2)
   states **: data=S(0)           states **: data=S(0)
+                                 grads **: data=S(0)
   cast ** to bf16                cast ** to bf16
~  recompute h.* keep mm          recompute h.*
+                                 offload states ** to cpu
~  expect 2 all_gather over data  expect no all_gather over data
-  limit memory 70 GiB
"""


def test_notes_are_more_columns() -> None:
    found = diff(Plan.read("cast ** to bf16"), Plan.read("cast ** to fp16\nlimit memory 1 B"))
    noted = found.noted("bytes", ["+0", ""]).noted("seconds", ["0.1 ms", "none"])
    assert str(noted).split("\n") == [
        "   a                b                 bytes  seconds",
        "~  cast ** to bf16  cast ** to fp16   +0     0.1 ms",
        "+                   limit memory 1 B         none",
    ]
    with pytest.raises(ValueError, match="1 notes for 2 rows"):
        found.noted("bytes", ["+0"])


@pytest.mark.parametrize("seed", range(20))
def test_each_plan_stands_on_its_side_in_its_order(seed: int) -> None:
    dice = random.Random(seed)
    lines = [line for line in EACH if not line.startswith("grid")]
    a, b = ([EACH[line] for line in dice.choices(lines, k=dice.randint(0, 12))] for _ in range(2))
    b += dice.sample(a, len(a) // 2)
    found = diff(Plan.of(a), Plan.of(b))
    assert [row.a for row in found.rows if row.a] == a
    assert [row.b for row in found.rows if row.b] == b
    assert diff(Plan.of(a), Plan.of(a)).changes == ()
