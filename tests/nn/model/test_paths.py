"""Patterns of names: what they meet, against a plain search of all ways, and errors at their places."""

import random
import re
from fnmatch import fnmatchcase

import pytest

from sbpflow.nn.model.paths import PathPattern, meant_path, met
from sbpflow.placement.errors import SbpError

NAMES = [
    "",
    "emb.weight",
    *(f"h.{n}.{name}" for n in range(12) for name in ("norm.weight", "mlp.up.weight", "mlp.down.weight")),
    "input_norm",
    "post_attention_norm",
    "norm",
    "a-b.é",
]


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("**", NAMES),
        ("*", ["input_norm", "post_attention_norm", "norm"]),
        ("emb.weight", ["emb.weight"]),
        ("emb", []),
        ("emb.**", ["emb.weight"]),
        ("emb.weight.**", ["emb.weight"]),
        ("**.weight", [name for name in NAMES if name.endswith(".weight")]),
        ("**.norm", ["norm"]),
        ("**.norm.**", ["h." + f"{n}.norm.weight" for n in range(12)] + ["norm"]),
        ("h.**.**.up.**.weight", [f"h.{n}.mlp.up.weight" for n in range(12)]),
        ("h.[2:4].norm.weight", ["h.2.norm.weight", "h.3.norm.weight"]),
        ("h[2:4].norm.weight", ["h.2.norm.weight", "h.3.norm.weight"]),
        ("h.[9:].norm.*", [f"h.{n}.norm.weight" for n in (9, 10, 11)]),
        ("h.[:2].norm.*", [f"h.{n}.norm.weight" for n in (0, 1)]),
        ("h.[3].norm.*", ["h.3.norm.weight"]),
        ("h.[-1].norm.*", ["h.11.norm.weight"]),
        ("h.[-2:].norm.*", ["h.10.norm.weight", "h.11.norm.weight"]),
        ("h.[:-10].norm.*", ["h.0.norm.weight", "h.1.norm.weight"]),
        ("h.[9:-1].norm.*", ["h.9.norm.weight", "h.10.norm.weight"]),
        ("h.[-100:1].norm.*", ["h.0.norm.weight"]),
        ("h.[-1:1].norm.*", []),
        ("**.[-1].mlp.{up, down}.weight", ["h.11.mlp.up.weight", "h.11.mlp.down.weight"]),
        ("{input,post_attention}_norm", ["input_norm", "post_attention_norm"]),
        ("{input_,post_attention_,}norm", ["input_norm", "post_attention_norm", "norm"]),
        ("h.{1,[10:]}.{norm,mlp.{up,down}}.weight", [name for name in NAMES if re.match(r"h\.(1|10|11)\.", name)]),
        ("*_n*m", ["input_norm", "post_attention_norm"]),
        ("*t*{en,at}*ion*_{n,no}rm*", ["post_attention_norm"]),
        ("a-b.é", ["a-b.é"]),
    ],
)
def test_a_pattern_meets_these_names(pattern: str, meant: list[str]) -> None:
    assert met(pattern, NAMES) == meant
    assert [name for name in NAMES if PathPattern.of(pattern).fits(name, among=NAMES)] == meant


def test_ranges_from_the_end_count_the_children_of_each_path() -> None:
    names = ["a.0.x", "a.1.x", "b.0.x", "b.1.x", "b.2.x"]
    assert met("*.[-1].x", names) == ["a.1.x", "b.2.x"]
    assert met("a.[-1].x", names, among=["a.2"]) == []  # the last has no parameters
    assert met("[-1]", ["0", "1"]) == ["1"]
    with pytest.raises(SbpError, match=r"h.\[-1\]: a range from the end needs the names that there are"):
        PathPattern.of("h.[-1]").fits("h.1")


@pytest.mark.parametrize("seed", range(60))
def test_ranges_are_those_of_python(seed: int) -> None:
    dice = random.Random(seed)
    count = dice.choice([1, 9, 10, 11, 120, 1234])
    low, high = (dice.choice([None, dice.randint(0, count + 3), -dice.randint(1, count + 3)]) for _ in range(2))
    pattern = f"h.[{'' if low is None else low}:{'' if high is None else high}]"
    names, meant = [f"h.{n}" for n in range(count)], list(range(count))[low:high]
    ordered = low is None or high is None or (low < 0) != (high < 0) or low < high
    if ordered and high != 0:
        assert met(pattern, names) == [f"h.{n}" for n in meant]
    else:
        with pytest.raises(SbpError, match="there are no numbers in"):
            met(pattern, names)
        assert meant == []


def plain(pattern: str, name: str) -> bool:
    """Whether a pattern of letters and stars meets a name, by all ways to cut it."""
    if not pattern or not name:
        return not name and not pattern.strip("*")
    if pattern[0] == "*":
        return plain(pattern[1:], name) or plain(pattern, name[1:])
    return pattern[0] == name[0] and plain(pattern[1:], name[1:])


@pytest.mark.parametrize("seed", range(30))
def test_stars_between_letters_are_those_of_a_plain_search(seed: int) -> None:
    dice = random.Random(seed)
    texts = ["".join(dice.choices("ab", k=dice.randint(1, 9))) for _ in range(60)]
    for _ in range(40):
        pattern = re.sub(r"\*\*+", "*", "".join(dice.choices("ab*", k=dice.randint(1, 7))))
        assert met(pattern, texts) == [text for text in texts if plain(pattern, text)]
        assert met(PathPattern.of(pattern, dots=True), texts) == [text for text in texts if plain(pattern, text)]
        both = f"x{{{pattern},b}}*a{pattern}"
        assert met(both, [f"x{t}" for t in texts]) == [
            f"x{t}" for t in texts if plain(f"{pattern}*a{pattern}", t) or plain(f"b*a{pattern}", t)
        ]


@pytest.mark.parametrize(
    "pattern", ["*", "h.*", "*.weight", "h.?.*", "h.[0-2].*", "h.[!0-2].*", "*[", "h.*.m*.w*", "emb"]
)
def test_with_dots_a_star_is_that_of_file_names(pattern: str) -> None:
    assert met(PathPattern.of(pattern, dots=True), NAMES) == [name for name in NAMES if fnmatchcase(name, pattern)]


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("h.[10:].*.up*", ["h.10.mlp.up.weight", "h.11.mlp.up.weight"]),
        ("*[11:].norm*", ["h.11.norm.weight"]),
        ("h.[-1].*up*", ["h.11.mlp.up.weight"]),
        ("*.{0,[-1:]}.norm.weight", None),
        ("*.{0,1}.{norm,mlp.up}.weight", [f"h.{n}.{x}.weight" for n in (0, 1) for x in ("norm", "mlp.up")]),
    ],
)
def test_with_dots_there_are_the_other_forms_too(pattern: str, meant: list[str] | None) -> None:
    if meant is None:
        with pytest.raises(SbpError, match="a range from the end stands in"):
            PathPattern.of(pattern, dots=True)
        return
    assert met(PathPattern.of(pattern, dots=True), NAMES) == meant


@pytest.mark.parametrize(
    ("pattern", "column", "said"),
    [
        ("", 0, "a name is missing, found the end"),
        ("a..b", 2, "a name is missing, found '.'"),
        (".a", 0, "a name is missing, found '.'"),
        ("a.", 2, "a name is missing, found the end"),
        ("a.h**.b", 3, "** stands for whole names"),
        ("a.***", 2, "** stands for whole names"),
        ("h.{a,b", 2, "this { is not closed"),
        ("h.{}", 2, "nothing stands in {}"),
        ("h.a}", 3, "this } closes nothing"),
        ("h.a]", 3, "this ] closes nothing"),
        ("h.[a]", 2, "[a] is no range of numbers"),
        ("h.[0-2]", 2, "[0-2] is no range of numbers"),
        ("h.[1:2:3]", 2, "[1:2:3] is no range of numbers"),
        ("h.[", 2, "[ is no range of numbers"),
        ("h.[4:4]", 2, "there are no numbers in [4:4]"),
        ("h.[:-0]", 2, "there are no numbers in [:-0]"),
        ("h.[-2:-5]", 2, "there are no numbers in [-2:-5]"),
        ("h.[1234567]", 2, "a number of 7 digits"),
        ("h.[2:4]up", 7, "numbers are a name of their own, found 'u' behind them"),
        ("h.{a,[-2:]}", 9, "a range from the end stands in {}"),
        ("{" * 9, 8, "braces in braces, 9 deep"),
        ("{a}" * 17, 48, "a name with 17 braces"),
        ("**.a." * 17, 80, "a path with 17 times **"),
        ("a" * 10001, 0, "a path of 10001 letters"),
    ],
)
def test_an_error_points_at_the_place(pattern: str, column: int, said: str) -> None:
    with pytest.raises(SbpError) as caught:
        PathPattern.of(pattern)
    first, shown, mark, *_ = str(caught.value).split("\n")
    assert first == said
    assert shown.strip() in pattern or "..." in shown
    assert mark == " " * (2 + column) + "^"


@pytest.mark.parametrize("dots", [False, True])
def test_any_letters_are_a_pattern_or_one_error(dots: bool) -> None:
    dice, read, marks = random.Random(0), 0, set[str]()
    for _ in range(3000):
        text = "".join(
            dice.choices(
                ["*", "**", ".", "{", "}", ",", "[", "]", ":", "-", "!", "^", "\\", "?", "1", "h", "$"],
                k=dice.randint(1, 9),
            )
        )
        try:
            pattern = PathPattern.of(text, dots=dots)
        except SbpError as wrong:
            marks.add(str(wrong).split("\n")[2].strip())
            continue
        read += 1
        assert set(met(pattern, NAMES)) <= {*NAMES}
    assert read > 100
    assert marks == {"^"}


def test_a_pattern_that_meets_nothing_names_the_nearest() -> None:
    assert meant_path("h.[2:4].mpl.up.weight", NAMES) == "did you mean 'h.*.mlp.up.weight'?"
    assert meant_path("emb.wieght", NAMES) == "did you mean 'emb.weight'?"
    assert meant_path("zzz", NAMES) == "see all names: print(flow.nn.annotations(model))"
