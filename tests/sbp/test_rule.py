"""Rules as text: what they say of a call, and what is wrong with one that cannot be right."""

from typing import Any

import pytest
import torch

from sbpflow.placement.errors import SbpError
from sbpflow.sbp import registry
from sbpflow.sbp.call import NEVER, Call, Match, tensors_in
from sbpflow.sbp.rule import Rule, define, load, parse
from sbpflow.sbp.schema import named_op

N = NEVER


def call(name: str, *args: Any, **kwargs: Any) -> Call:
    """A call on tensors of these shapes; a list of shapes is a list of tensors."""
    found = named_op(name)
    given = [made(arg) for arg in args]
    return Call(found, tuple(given), kwargs, tuple(tensors_in(found(*given, **kwargs))))


def made(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return torch.zeros(arg)
    return [made(part) for part in arg] if isinstance(arg, list) and arg and isinstance(arg[0], tuple) else arg


def matched(text: str, what: Call) -> Match:
    match = parse(what.name, text)(what)
    assert match is not None
    return match


def test_a_name_is_one_factor_wherever_it_stands() -> None:
    match = matched("m k+, k+ n -> m n ; lin(0|1) hollow", call("mm", (2, 3), (3, 4)))
    assert (match.inputs, match.outputs, match.sizes) == (((0, 1), (1, 2)), ((0, 2),), (2, 3, 4))
    assert match.reduced == {1: "sum"}
    assert match.linear == ((0,), (1,))
    assert match.hollow


def test_any_number_of_dims_stands_before_the_named_ones() -> None:
    match = matched("... k+, n k+, & n -> ... n", call("linear", (2, 5, 3), (4, 3), (4,)))
    assert match.inputs == ((0, 1, 2), (3, 2), (3,))
    assert match.outputs == ((0, 1, 3),)
    assert match.addends == {2}


@pytest.mark.parametrize(
    ("shape", "factors"),
    [((2, 4), (2, 0)), ((4,), (0,)), ((1, 4), (N, 0)), ((), ())],
    ids=str,
)
def test_an_addend_may_have_fewer_dims(shape: tuple[int, ...], factors: tuple[int, ...]) -> None:
    match = matched("& m n, m k+, k+ n -> m n", call("addmm", shape, (2, 3), (3, 4)))
    m, n = match.outputs[0]
    assert match.inputs[0] == tuple({2: m, 0: n}.get(f, f) for f in factors)


def test_dims_broadcast_from_the_right() -> None:
    match = matched("*, * -> *", call("add.Tensor", (2, 1, 3), (4, 1)))
    assert (match.inputs, match.outputs) == (((0, N, 2), (1, N)), ((0, 1, 2),))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [1, -1, [1], [0, 1], [], None], ids=str)
def test_the_marked_dims_are_those_that_the_argument_names(dim: int | list[int] | None, keepdim: bool) -> None:
    match = matched("*[dim]+ -> *[dim]+", call("sum.dim_IntList", (2, 3), [dim] if dim in (1, -1) else dim, keepdim))
    whole = dim in ([0, 1], [], None)
    assert match.inputs == ((0, 1),)
    assert match.reduced == ({0: "sum", 1: "sum"} if whole else {1: "sum"})
    assert match.outputs == (((() if whole else (0,)) + (N,) * keepdim * (1 + whole)),)


def test_what_is_never_split_is_no_factor() -> None:
    match = matched("*[dim]! -> *[dim]!, *[dim]!", call("topk", (2, 3), 2, 0))
    assert (match.inputs, match.outputs, match.sizes) == (((N, 0),), ((N, 0), (N, 0)), (3,))


def test_a_list_has_one_pattern_for_all_and_is_linear_as_one() -> None:
    match = matched("{*[dim]!} -> *[dim]! ; lin(0)", call("cat", [(2, 3), (4, 3)], 0))
    assert (match.inputs, match.outputs, match.linear) == (((N, 0), (N, 0)), ((N, 0),), ((0, 1),))
    match = matched("*[dim]! -> {*[dim]!}", call("split.Tensor", (5, 3), 2))
    assert match.outputs == ((N, 0),) * 3


def test_absent_tensors_are_not_among_the_inputs() -> None:
    text = "*, _, c!, c! -> * ; lin(0|3)"
    what = call("layer_norm", (2, 3), [3], None, torch.zeros(3))
    match = matched("* , c!, c! -> * ; lin(0,1|2)", what)
    assert match.inputs == ((0, 1), (N,))
    assert match.linear == ((0,), (1,))
    with pytest.raises(SbpError, match="4 tensors, but layer_norm has 3"):
        parse("layer_norm", text)


@pytest.mark.parametrize(("other", "linear"), [(2, ()), (0, ((0,),))], ids=["plus_two", "plus_zero"])
def test_a_sum_with_a_number_is_linear_only_if_that_is_zero(other: int, linear: tuple[tuple[int], ...]) -> None:
    x = torch.zeros(3)
    what = Call(torch.ops.aten.add.Tensor, (x, other), {}, (x,))
    assert matched("*, * -> * ; lin(0,1)", what).linear == linear


def test_booleans_do_not_add_up() -> None:
    what = call("clone", torch.zeros(3, dtype=torch.bool))
    assert matched("* -> * ; lin(0)", what).linear == ()


def test_a_guard_holds_for_the_rule_or_for_lin() -> None:
    floor = call("div.Tensor_mode", torch.ones(3), torch.ones(3), rounding_mode="floor")
    plain = call("div.Tensor_mode", torch.ones(3), torch.ones(3), rounding_mode=None)
    for_lin = "*, * -> * ; lin(0) where rounding_mode is None"
    for_all = "*, * -> * ; where rounding_mode is None"
    assert (matched(for_lin, floor).linear, matched(for_lin, plain).linear) == ((), ((0,),))
    assert parse("div.Tensor_mode", for_all)(floor) is None
    assert parse("div.Tensor_mode", for_all)(plain) is not None


def test_the_first_of_several_rules_that_fits_is_taken() -> None:
    text = "*[dim]+ -> *[dim]+ ; where ord == 1 or *[dim]:max -> *[dim]:max ; where ord == inf or *[dim]! -> *[dim]!"
    found = [matched(text, call("linalg_vector_norm", (2, 3), ord, [1])).reduced for ord in (1, float("inf"), 2)]
    assert found == [{1: "sum"}, {1: "max"}, {}]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("m k+, k+ n -> m n", ("matmul", (2, 2, 3), (3, 4))),  # a dim too many
        ("m m, m m -> m m", ("add.Tensor", (2, 3), (2, 3))),  # one factor of two sizes
        ("1 n, 1 n -> 1 n", ("add.Tensor", (2, 3), (2, 3))),  # not of size one
        ("a b, a b -> b a", ("add.Tensor", (2, 3), (2, 3))),  # the result is not so
    ],
)
def test_a_call_that_does_not_fit_gets_no_answer(text: str, what: tuple[Any, ...]) -> None:
    assert parse(what[0], text)(call(*what)) is None


@pytest.mark.parametrize(
    ("name", "text", "at", "said"),
    [
        ("mm", "m k, k n -> m n", 2, "k is in no output"),
        ("mm", "m k+, k+ n -> m n o", 18, "o is in no input"),
        ("mm", "m k+, k+ n -> m k n", 16, "k is reduced, so it is in no output"),
        ("mm", "m k+, k:max n -> m n", 6, "k has two marks"),
        ("mm", "m k^, k n -> m n", 3, "unknown mark '^'"),
        ("mm", "m k:prod, k n -> m n", 3, "unknown mark ':prod'"),
        ("mm", "m k+ -> m", 0, "1 tensors, but mm has 2: self, mat2"),
        ("mm", "m, n, n -> m n", 6, "3 tensors, but mm has 2"),
        ("mm", "m, n -> m, n", 11, "2 results, but mm has 1"),
        ("mm", "{m k+}, k+ n -> m n", 1, "self is one tensor"),
        ("cat", "* -> *", 0, "tensors is a list of tensors"),
        ("mm", "m k+, k+ n -> m n ; lin(0|2)", 24, "lin names an operand that the rule has not"),
        ("mm", "m k+, k+ n -> m n ; where dim is None", 26, "mm has no argument 'dim'"),
        ("amax", "*[dims]:max -> *", 0, "amax has no argument 'dims'"),
        ("amax", "*[dim] -> *", 0, "[dim] marks nothing"),
        ("amax", "* -> ", 5, "cannot read the rule"),
        ("amax", "* = *", 2, "cannot read the rule"),
        ("amax", "*[dim:max -> *", 5, "cannot read the rule"),
        ("amax", "* -> * ; hollowly", 9, "cannot read the rule"),
        ("amax", "* -> * ; hollow where dim is 3", 29, "cannot read the rule"),
        ("amaxx", "* -> *", -7, "there is no op amaxx"),
        ("sum.dim", "* -> *", -9, "there is no op sum.dim"),
        ("prims::nothing", "* -> *", -16, "there is no op prims::nothing"),
    ],
)
def test_what_cannot_be_right_is_pointed_at(name: str, text: str, at: int, said: str) -> None:
    with pytest.raises(SbpError) as caught:
        parse(name, text, "my.rules:7")
    first, line, caret, *fix = str(caught.value).splitlines()
    assert first.startswith(f"my.rules:7: {said}")
    assert line.rstrip() == f"  {name}  {text}".rstrip()
    assert caret == " " * (2 + len(name) + 2 + at) + "^"
    assert fix


def test_an_unknown_op_is_told_its_neighbours() -> None:
    with pytest.raises(SbpError, match=r"there are .*sum\.dim_IntList"):
        parse("sum.dim", "* -> *")


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> dict[str, Rule]:
    """A book of its own, so that a test leaves nothing in ours."""
    rules: dict[str, Rule] = {}
    monkeypatch.setattr("sbpflow.sbp.rule.RULES", rules)
    return rules


def test_lines_share_a_rule_and_go_on(shelf: dict[str, Rule]) -> None:
    load("# sums\nmm|bmm|\n  mv  {x!} -> x! # what\n".replace("{x!} -> x!", "_, _ -> _"), "a.rules")
    load("\namax  *[dim]:max -> *[dim]:max ; where keepdim == True\n  or  *[dim]! -> *[dim]!\n", "b.rules")
    assert sorted(shelf) == ["amax", "bmm", "mm", "mv"]
    match = shelf["amax"](call("amax", (2, 3), [0]))
    assert isinstance(match, Match)
    assert match.reduced == {}


def test_a_line_is_read_when_its_op_is_first_called(shelf: dict[str, Rule]) -> None:
    load("mm m k+, k+ n -> m n\n\namax *[dim]:max => *\n", "c.rules")
    assert shelf["mm"](call("mm", (2, 3), (3, 2))) is not None
    with pytest.raises(SbpError, match=r"c\.rules:3: cannot read the rule"):
        shelf["amax"](call("amax", (2, 3), [0]))


@pytest.mark.usefixtures("shelf")
def test_an_op_has_one_rule() -> None:
    with pytest.raises(SbpError, match=r"b\.rules:3: mm has a rule already"):
        load("mm m k+, k+ n -> m n\n\nmm m k+, k+ n -> m n\n", "b.rules")


@pytest.mark.usefixtures("shelf")
def test_an_op_unknown_so_far_is_checked_when_it_is_called() -> None:
    rule = define("sbptest::scale", "b d, d -> b d")
    with torch.library._scoped_library("sbptest", "FRAGMENT") as library:
        library.define("scale(Tensor x, Tensor s) -> Tensor")
        library.define("lone(Tensor x) -> Tensor")
        x = torch.zeros(2, 3)
        match = rule(Call(torch.ops.sbptest.scale.default, (x, x[0]), {}, (x,)))
        assert match is not None
        assert match.inputs == ((0, 1), (1,))
        with pytest.raises(SbpError, match="2 tensors, but sbptest::scale has 1"):
            rule(Call(torch.ops.sbptest.lone.default, (x,), {}, (x,)))


def test_what_writes_in_place_splits_as_what_does_not() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(3)
    whole = registry.find(Call(torch.ops.aten.mul.Tensor, (x, y), {}, (x,)))
    within = registry.find(Call(torch.ops.aten.mul_.Tensor, (x, y), {}, (x,)))
    assert isinstance(whole, Match)
    assert isinstance(within, Match)
    assert within.inputs == whole.inputs
    assert (whole.linear, within.linear) == (((0,), (1,)), ((0,),))  # a whole x cannot take a partial y
