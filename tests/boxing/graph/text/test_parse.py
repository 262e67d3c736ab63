"""Wrong text of a graph is shown with its line, a caret, and what may have been meant."""

import pytest

from sbpflow.boxing.graph.text.parse import from_text
from sbpflow.placement.errors import SbpError

GOOD = """\
graph step
p0 = cpu:[0-3] as (data=2, tensor=2)
p1 = cpu:[4-7] as (data=2, tensor=2)

input     %x: float32[8, 64] (S(0), B)
parameter %w: float32[64, 64] (B/P, S(0)) grad, grads (S(1), S(0)), states (S(1), S(0))
buffer    %count: int64[] (B, B)

forward
  %h: float32[8, 64] (S(0), S(1)) grad = linear(%x, %w)  # in fc of b at model.py:12
  %y: float32[8, 64] (S(0), B) grad = box(%h)  # all_gather over tensor, 512 B a rank; at model.py:13
  %y.1: float32[8, 64] (S(0), B) on p1 grad = box(%y)  # transfer, 1 KiB a rank
  %top: float32[8] (P, B),
  %at: int64[8] (B, B) = max.dim(%y.1, -1)
  %count.1: int64[] (B, B) = add.Tensor(%count, 1, alpha=2) no_grad

backward
  %h <- %y: (S(0), B) -> (S(0), S(1))  # slice, nothing is sent
  %w <- %w: (P, S(0)) -> (S(1), S(0)) bucket 3  # reduce_scatter over data, 4 KiB a rank

return {'y': %y, 'more': [None, 1.5]}
loss %y
loss %h from %x
write %count = %count.1
"""

WRONG = {
    "an unknown op": (
        "linear(%x", "linaer(%x",
        """\
unknown op linaer
  10 |   %h: float32[8, 64] (S(0), S(1)) grad = linaer(%x, %w)  # in fc of b at model.py:12
                                                ^
  did you mean 'linear'?""",
    ),
    "an unknown overload": (
        "add.Tensor(", "add.Tenser(",
        """\
unknown op add.Tenser
  15 |   %count.1: int64[] (B, B) = add.Tenser(%count, 1, alpha=2) no_grad
                                    ^
  did you mean 'add.Tensor'?""",
    ),
    "an unknown namespace": ("linear(", "nowhere::linear(", "unknown op nowhere::linear\n  10 | "),
    "an unknown value": (
        "box(%h)", "box(%hh)",
        """\
unknown value %hh
  11 |   %y: float32[8, 64] (S(0), B) grad = box(%hh)  # all_gather over tensor, 512 B a rank; at model.py:13
                                                 ^
  did you mean '%h'?""",
    ),
    "a value of a later line": ("linear(%x", "linear(%y", "it is made further down"),
    "an unknown value deep in the result": ("more': [None", "more': [(%z,)", "unknown value %z\n  21 | "),
    "a loss that is no value": ("loss %y", "loss %l", "unknown value %l\n  22 | "),
    "a value defined twice": (
        "%y.1:", "%y:",
        """\
the value %y is defined twice
  12 |   %y: float32[8, 64] (S(0), B) on p1 grad = box(%y)  # transfer, 1 KiB a rank
         ^
  each line makes a value of its own""",
    ),
    "a dim out of range": (
        "%h: float32[8, 64] (S(0), S(1))", "%h: float32[8, 64] (S(0), S(2))",
        """\
S(2) is out of range for a tensor of 2 dims
  10 |   %h: float32[8, 64] (S(0), S(2)) grad = linear(%x, %w)  # in fc of b at model.py:12
                                   ^
  dims are 0 to 1""",
    ),
    "a dim of brackets out of range": ("(S(0), B)\n", "(S(0), B) [dim 2: data]\n", "dim 2 is out of range for"),
    "a dim of brackets without its number": ("(S(0), B)\n", "(S(0), B) [dim: data]\n", "which dim?\n  5 | "),
    "a split of what has no dims": ("int64[] (B, B) =", "int64[] (B, S(0)) =", "S(0) is out of range"),
    "an unknown axis": (
        "(S(0), B)\n", "(S(0), B) [dim 0: daat]\n",
        """\
cpu:[0-3] as (data=2, tensor=2) has no axis daat
  5 | input     %x: float32[8, 64] (S(0), B) [dim 0: daat]
                                                     ^
  did you mean 'data'?""",
    ),
    "an axis by a number too high": ("(S(0), B)\n", "(S(0), B) [dim 0: 2]\n", "has no axis 2"),
    "a hole among partial axes": ("(S(0), B)\n", "(S(0), B) [partial: all 2]\n", "all 2 cannot stand here"),
    "an unknown note": ("(S(0), B)\n", "(S(0), B) [partail: data]\n", "'partail' says nothing of a layout"),
    "an unknown reduction": ("(S(0), B)\n", "(S(0), B) [reduction: mean]\n", "mean is no reduction"),
    "too few signatures": ("(S(0), B)\n", "(S(0),)\n", "has 1 entries, the placement 2 axes"),
    "two reductions": ("(S(0), B)\n", "(P, P(max))\n", "a sum of maxima is not the maximum of sums"),
    "no signature": ("(S(0), B)\n", "(S(0), R)\n", "R is no signature of an axis"),
    "a gradient of what is no B": ("(S(0), B)\n", "(S(0)/P, B)\n", "S(0)/P is no signature of an axis"),
    "an unknown dtype": ("float32[8, 64] (S(0), B)\n", "float23[8, 64] (S(0), B)\n", "unknown dtype 'float23'"),
    "a size that is no number": ("float32[8, 64] (S(0), B)\n", "float32[8, n] (S(0), B)\n", "[8, n] is no shape"),
    "no dtype": ("%x: float32[8, 64] ", "%x: ", "a value needs a dtype and a shape"),
    "an unknown placement": ("on p1", "on p7", "unknown placement p7"),
    "a placement twice": ("p1 =", "p0 =", "the placement p0 is defined twice\n  3 | p0 = "),
    "a placement that cannot be": ("[4-7]", "[7-4]", "the range 7-4 runs backwards\n  3 | p1 = cpu:[7-4]"),
    "too few outputs": ("%top: float32[8] (P, B),\n", "", "max.dim makes 2 tensors, not 1\n  13 |"),
    "too many outputs": ("%h: float32", "%k: float32[] (B, B),\n%h: float32", "linear makes 1 tensor, not 2\n  11 |"),
    "a box of two": ("box(%h)", "box(%h, %x)", "a box moves one value to one other"),
    "a box of another shape": ("%y: float32[8, 64]", "%y: float32[8, 32]", "a box changes where a value lies"),
    "a kind of source": ("input ", "inputs ", "'inputs' is no kind of source\n  5 | "),
    "a word": ("alpha=2", "alpha=none", "'none' is no constant, dtype, layout or memory format\n  15 | "),
    "a call in an argument": ("alpha=2", "alpha=size(%x)", "size(...) cannot stand in an argument\n  15 | "),
    "a device that cannot be": ("alpha=2", "alpha=device('gpu')", "no such device"),
    "an argument twice": ("alpha=2", "alpha=2, alpha=2", "the argument alpha is given twice"),
    "arguments out of order": ("%count, 1, alpha=2", "%count, alpha=2, 1", "an argument without a name stands behind"),
    "a bucket and a half": ("bucket 3", "bucket 3.5", "expected a whole number, found 3.5"),
    "a buffer written twice": ("write %count = %count.1\n", "write %count = %x\n" * 2, "%count is written twice"),
    "a key that is a list": ("'more':", "([],):", "this dict cannot be: unhashable type: 'list'"),
    "a missing bracket": (
        "linear(%x, %w)", "linear(%x, %w",
        """\
expected ')' or ',', found the end of the line
  10 |   %h: float32[8, 64] (S(0), S(1)) grad = linear(%x, %w  # in fc of b at model.py:12
                                                               ^
  a line is as %y:""",
    ),
    "a strange character": (
        "linear(%x", "linear(&x", "a number, a text, a list or the like or ')', found '&x,'\n  10 |"
    ),
    "no graph": ("graph step\n", "", "expected 'graph', found "),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_text_is_shown_with_its_line(case: str) -> None:
    good, bad, said = WRONG[case]
    assert good in GOOD
    with pytest.raises(SbpError) as error:
        from_text(GOOD.replace(good, bad, 1))
    assert said in str(error.value)
    assert "^" in str(error.value)


@pytest.mark.parametrize("text", ["", "graph", "graph g\nforward\n  %x:"], ids=repr)
def test_a_text_that_ends_too_soon_is_refused(text: str) -> None:
    with pytest.raises(SbpError, match=r"expected .*, found the end of the"):
        from_text(text)


def test_the_text_that_the_cases_change_is_right() -> None:
    assert len(from_text(GOOD).steps) == 5
