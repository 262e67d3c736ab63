"""The text of a physical graph: it parses back exactly, changes with the graph, and wrong text is shown in place."""

import math
import random
from dataclasses import replace
from string import ascii_lowercase
from typing import Any

import pytest
import torch

from sbpflow.boxing.graph.physical import Back, Box, GraphStep, Op, Physical, Source, Value, Var
from sbpflow.boxing.graph.text import text
from sbpflow.boxing.graph.text.parse import from_text
from sbpflow.boxing.graph.text.text import difference, fingerprint, to_text
from sbpflow.placement import placement
from sbpflow.placement.errors import SbpError
from sbpflow.sbp import B, Layout, P, S, Sbp, SbpLike, State, layout
from sbpflow.sbp.logical import OffloadPlace, Origin, SavedOffload
from tests.counts import calls

ATEN = torch.ops.aten
GRID = placement("cpu:[0-3] as (data=2, tensor=2)")
NEXT = placement("cpu:[4-7] as (data=2, tensor=2)")
LONG = placement("cpu:[0-7] as (2, 1, 4)")


def lies(sbp: SbpLike, *shape: int, dtype: torch.dtype = torch.float32, grad: SbpLike | None = None) -> Layout:
    return layout(GRID, sbp, shape, dtype, grad)


def small() -> Physical:
    """A layer, its box, the gradient's way back, a second stage, and a count that is written."""
    x, w, n = lies("(S(0), B)", 8, 64), lies("(B, S(0))", 64, 64, grad="(P, S(0))"), lies(B, dtype=torch.int64)
    h, y, there = lies("(S(0), S(1))", 8, 64), lies("(S(0), B)", 8, 64), layout(NEXT, "(S(0), B)", (8, 64))
    sources = (
        Source(Value("x", x), "input"),
        Source(Value("w", w, True), "parameter", lies("(S(1), S(0))", 64, 64), lies("(S(1), S(0))", 64, 64)),
        Source(Value("count", n), "buffer"),
    )
    fc = Op(
        ATEN.linear.default, (Var("x"), Var("w")), {}, (Value("h", h, True),), True, Origin("fc", "model.py:12", "b")
    )
    one = Op(ATEN.add.Tensor, (Var("count"), 1), {"alpha": 2}, (Value("count.1", n),), False)
    top, at = Value("top", lies("(P, B)", 8)), Value("at", lies(B, 8, dtype=torch.int64))
    best = Op(ATEN.max.dim, (Var("y.1"), -1), {}, (top, at))
    box = Box("h", Value("y", y, True), Origin(line="model.py:13"))
    backs = (Back("y", "h", y, h), Back("w", "w", w.dual, lies("(S(1), S(0))", 64, 64), 3))
    steps = (fc, box, Box("y", Value("y.1", there, True)), best, one)
    return Physical("step", sources, steps, backs, {"y": Var("y"), "more": [None, 1.5]}, (("y", None), ("h", "x")),
                 {"count": "count.1"})  # fmt: skip


SMALL = """\
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


def test_a_small_graph_reads_like_this() -> None:
    assert to_text(small()) == SMALL


def test_the_text_of_a_graph_is_the_graph() -> None:
    read = from_text(SMALL)
    assert read == small()
    assert [step.origin for step in read.steps] == [step.origin for step in small().steps]
    assert to_text(read) == SMALL


def test_the_example_of_the_page_is_a_graph() -> None:
    lines = [line.removeprefix("    ") for line in (text.__doc__ or "").splitlines()]
    example = "\n".join(lines[lines.index("graph step") : lines.index("return %y") + 1]) + "\n"
    assert to_text(from_text(example)) == example


def of_layout(*lies: Layout) -> Physical:
    return Physical("g", tuple(Source(Value(f"x{k}", lie), "input") for k, lie in enumerate(lies)), ())


@pytest.mark.parametrize(
    ("place", "state", "more", "said"),
    [
        (GRID, State(((0,), ())), {}, "(S(0), B)"),
        (GRID, State(((1, 0), ())), {}, "(S(0), S(0)) [dim 0: tensor, data]"),
        (GRID, State(((), (-3, 1))), {}, "(B, S(1)) [dim 1: all 3, tensor]"),
        (GRID, State(((-2,), (0, -2, 1))), {}, "(S(1), S(1)) [dim 0: all 2; dim 1: data, all 2, tensor]"),
        (GRID, State(((), ()), (1, 0)), {}, "(P, P) [partial: tensor, data]"),
        (GRID, State(((), ()), (1,), "max"), {}, "(B, P(max))"),
        (GRID, State(((), ()), (), "min"), {}, "(B, B) [reduction: min]"),
        (GRID, State(((), ())), {"grad_partial": (0, 1)}, "(B/P, B/P)"),
        (GRID, State(((), ())), {"grad_partial": (1, 0)}, "(B, B) [gradient: tensor, data]"),
        (GRID, State(((0,), ()), (1,)), {"grad_partial": (0,)}, "(S(0), P) [gradient: data]"),
        (LONG, State(((0, 2), ())), {"sbp": (S(0), S(1), S(0))}, "(S(0), S(1), S(0))"),
        (LONG, State(((2, 0), ())), {"sbp": (S(0), P, S(0))}, "(S(0), P, S(0)) [dim 0: 2, 0]"),
        (LONG, State(((1,), ())), {}, "(B, S(0), B) [dim 0: 1]"),
        (LONG, State(((), ())), {"sbp": (S(1), B, B)}, "(S(1), B, B) [dim 1:]"),
        (placement("cpu:[3]"), State(((), ())), {"sbp": (S(1),)}, "S(1)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_layout_is_short_where_the_signature_says_it_all(place: Any, state: State, more: Any, said: str) -> None:
    lie = Layout(place, state, (8, 6), torch.bfloat16, **more)
    text = to_text(of_layout(lie))
    assert f"%x0: bfloat16[8, 6] {said}\n" in text
    assert from_text(text).sources[0].value.layout is lie


ARGS = [
    None, True, False, 0, 1, -7, 2**70, 0.0, -0.0, 1.0, 1e-05, 1e22, 0.1, math.inf, -math.inf, complex(1, -0.0),
    complex(-math.inf, 2), "", "none", "it's # \"not\" a \\ comment\n\té\ud800", [], [1], [1, 2.0], (), (1,), (1, "a"),
    [[Var("x")], (Var("x"), None)], {"a": [Var("x")], 1: {}, ("b", 2): 3}, torch.float32, torch.bool, torch.complex64,
    torch.strided, torch.sparse_coo, torch.channels_last, torch.preserve_format, torch.device("cpu"),
    torch.device("cuda", 1), slice(None), slice(1, None, -2),
]  # fmt: skip


@pytest.mark.parametrize("arg", ARGS, ids=repr)
def test_every_argument_keeps_its_type_and_value(arg: Any) -> None:
    source = Source(Value("x", lies(B, 4)), "input")
    out = Value("y", lies(B, 4))
    graph = Physical("g", (source,), (Op(ATEN.relu.default, (arg, arg), {"some": arg}, (out,)),), result=[arg])
    (step,) = from_text(to_text(graph)).steps
    assert isinstance(step, Op)
    assert [repr(part) for part in (*step.args, step.kwargs)] == [repr(part) for part in (arg, arg, {"some": arg})]
    assert from_text(to_text(graph)) == graph


def test_not_a_number_is_read_back() -> None:
    nan = Physical("g", (), (), result=[math.nan, float("inf")])
    assert to_text(nan) == "graph g\n\nreturn [nan, inf]\n"
    assert from_text(to_text(nan)) == nan


NAMES = [
    "x",
    "0",
    "1.mask",
    "blocks.3.attn.qkv",
    "a/b@c-d",
    "é",
    "",
    "a b",
    "%x",
    "x:",
    "it's",
    "x\n#y",
    "x-",
    "->",
    '"',
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_any_name_is_written_and_read(name: str) -> None:
    sources = (Source(Value(name, lies(B, 4), True), "parameter"), Source(Value("other", lies((P, P), 4)), "constant"))
    steps = (Box(name, Value(f"{name}'s", lies("(S(0), B)", 4)), Origin(name, name, name)),)
    backs = (Back(name, name, lies((P, P), 4), lies(B, 4)),)
    graph = Physical(name, sources, steps, backs, (Var(name),), ((name, name),), {name: "other"})
    read = from_text(to_text(graph))
    assert read == graph
    assert read.steps[0].origin == steps[0].origin
    assert fingerprint(read) == fingerprint(graph)


@pytest.mark.parametrize(
    ("op", "outputs", "said"),
    [
        (ATEN.linear.default, 1, "linear"),
        (ATEN.add.Tensor, 1, "add.Tensor"),
        (ATEN.__and__.Scalar, 1, "__and__.Scalar"),
        (ATEN.split.Tensor, 0, "split.Tensor"),
        (ATEN.split.Tensor, 5, "split.Tensor"),
        (ATEN.native_layer_norm.default, 3, "native_layer_norm"),
        (ATEN.convolution_backward.default, 2, "convolution_backward"),
        (ATEN._assert_async.msg, 0, "_assert_async.msg"),
        (torch.ops.prims.convert_element_type.default, 1, "prims::convert_element_type"),
        (torch.ops.prim.NumToTensor.Scalar, 1, "prim::NumToTensor.Scalar"),
    ],
    ids=str,
)
def test_an_op_goes_by_its_name_and_overload(op: torch._ops.OpOverload, outputs: int, said: str) -> None:
    made = tuple(Value(f"y{k}", lies(B, 4)) for k in range(outputs))
    graph = Physical("g", (), (Op(op, (1,), {}, made),))
    assert f"{said}(1)\n" in to_text(graph)
    assert from_text(to_text(graph)) == graph


PLACES = [GRID, NEXT, LONG, placement("cpu:[2]"), placement("cuda:[0, 3, 2] as (all=3)")]
OPS = {ATEN.relu.default: 1, ATEN.add.Tensor: 1, ATEN.max.dim: 2, ATEN.split.Tensor: 4, ATEN._assert_async.msg: 0}


def any_layout(pick: random.Random) -> Layout:
    place = pick.choice(PLACES)
    shape = tuple(pick.choice([0, 1, 5, 8]) for _ in range(pick.randint(0, 3)))
    dtype = pick.choice([torch.float32, torch.int64, torch.bool, torch.complex128, torch.float8_e4m3fn])
    axes = pick.sample(range(place.ndim), place.ndim)
    if pick.random() < 0.5:
        kinds: list[Sbp] = [B, P, *(S(d) for d in range(len(shape)))]
        return layout(place, [pick.choice(kinds) for _ in axes], shape, dtype)
    dims: list[tuple[int, ...]] = [() for _ in shape]
    for axis in axes:
        where = pick.randrange(len(shape) + 1)
        if where < len(shape):
            dims[where] += (axis, *([-pick.randint(2, 5)] if pick.random() < 0.3 else []))
    left = [axis for axis in axes if not any(axis in dim for dim in dims)]
    partial = tuple(left[: pick.randint(0, len(left))])
    reduction = "sum" if dtype.is_complex else pick.choice(["sum", "max", "min"])
    grad_partial = tuple(pick.sample(axes, pick.randint(0, len(axes))))
    return Layout(place, State(tuple(dims), partial, reduction), shape, dtype, grad_partial)  # type: ignore[arg-type]


def any_argument(pick: random.Random, names: list[str], depth: int = 0) -> Any:
    kind = pick.choice(["var", "fixed", "float", "list", "tuple"]) if depth < 3 else "float"
    if kind == "var":
        return Var(pick.choice(names))
    if kind == "fixed":
        return pick.choice(ARGS[:-8])
    if kind == "float":
        return pick.uniform(-1, 1) * 10 ** pick.randint(-30, 30)
    parts = [any_argument(pick, names, depth + 1) for _ in range(pick.randint(0, 3))]
    return parts if kind == "list" else tuple(parts)


def any_graph(pick: random.Random) -> Physical:
    values: dict[str, Value] = {"x": Value("x", any_layout(pick))}

    def value() -> Value:
        name = ".".join("".join(pick.choices(ascii_lowercase + "_/ 01", k=4)) for _ in range(3)) + str(len(values))
        return values.setdefault(name, Value(name, any_layout(pick), pick.random() < 0.5))

    sources = [Source(values["x"], "input")]
    for _ in range(3):
        grads, states = (any_layout(pick) if pick.random() < 0.5 else None for _ in range(2))
        kind, whole = pick.choice(["input", "parameter", "buffer", "constant"]), pick.choice([None, 0, 2])
        places: list[OffloadPlace | None] = [None, "cpu", "disk"]
        sources.append(
            Source(value(), kind, grads, states, whole, offload=pick.choice(places), once=pick.random() < 0.5)
        )
    steps: list[GraphStep] = []
    for _ in range(pick.randint(0, 12)):
        names = list(values)
        offload = pick.choice([None, SavedOffload("cpu", 2), SavedOffload("disk")])
        origin = Origin(*(pick.choice(["", "a.b", "m y", "f.py:3"]) for _ in range(4)), offload=offload)
        if pick.random() < 0.3:
            old = values[pick.choice(names)]
            new = Value(f"box {len(values)}", old.layout.to(B))
            values[new.name] = new
            steps.append(Box(old.name, new, origin))
            continue
        op, count = pick.choice(list(OPS.items()))
        args = tuple(any_argument(pick, names) for _ in range(pick.randint(0, 4)))
        kwargs = {name: any_argument(pick, names) for name in pick.sample(["alpha", "dim", "msg", "from"], 2)}
        steps.append(Op(op, args, kwargs, tuple(value() for _ in range(count)), pick.random() < 0.8, origin))
    names = list(values)
    backs = [
        Back(pick.choice(names), pick.choice(names), any_layout(pick), any_layout(pick), pick.choice([None, 0, 12]))
        for _ in range(pick.randint(0, 4))
    ]
    losses = [(pick.choice(names), pick.choice([None, *names])) for _ in range(pick.randint(0, 2))]
    writes = {name: pick.choice(names) for name in pick.sample(names, 2)}
    return Physical(
        "random", tuple(sources), tuple(steps), tuple(backs), any_argument(pick, names), tuple(losses), writes
    )


@pytest.mark.sampled(15)
@pytest.mark.parametrize("seed", range(60))
def test_a_random_graph_is_read_back(seed: int) -> None:
    graph = any_graph(random.Random(seed))
    text = to_text(graph)
    read = from_text(text)
    assert read == graph
    assert [step.origin for step in read.steps] == [step.origin for step in graph.steps]
    assert to_text(read) == text
    assert fingerprint(read) == fingerprint(graph)
    assert difference(read, graph) == ""


def test_comments_blank_lines_and_spaces_say_nothing() -> None:
    loud = "# a step\n\n" + SMALL.replace("\n", "   # in short: fine\r\n\n  # and more\n\t\n").replace(", ", " ,  ")
    silent = "\n".join(line.partition("  #")[0] for line in SMALL.splitlines() if line)
    assert from_text(loud) == from_text(silent) == small()


def test_a_line_may_go_on_behind_a_comma() -> None:
    assert from_text(SMALL.replace("linear(%x, %w)", "linear(%x,  # rows\n\n    %w)")) == small()


def test_an_edited_layout_is_the_layout_of_the_graph() -> None:
    edited = from_text(SMALL.replace("%y: float32[8, 64] (S(0), B) grad", "%y: float32[8, 64] (B, S(1)) grad"))
    box = small().steps[1]
    assert isinstance(box, Box)
    changed = replace(box, output=replace(box.output, layout=lies("(B, S(1))", 8, 64)))
    assert edited == replace(small(), steps=(small().steps[0], changed, *small().steps[2:]))


def test_public_spellings_of_signatures_are_read() -> None:
    text = of_layout(lies("(B, S(1))", 8, 64), lies(B, 8), lies('(P("max"), B)', 8), lies(B, 8, grad=(P, P)))
    said = (
        "graph g\np0 = cpu:[0, 1, 2, 3] as (data=2, tensor=2)\n"
        'input %x0: float32[8,64] (B, S(-1),)\ninput %x1: float[8] B\ninput %x2: float32[8] (P("max"), B)\n'
        "input %x3: float32[8] B/P"
    )
    assert from_text(said) == text


def test_an_argument_without_a_text_is_named() -> None:
    op = Op(ATEN.rand.generator, ([4],), {"generator": torch.Generator()}, (Value("y", lies(B, 4)),))
    with pytest.raises(SbpError, match=r"rand\.generator holds a Generator, which has no text in a graph"):
        to_text(Physical("g", (), (op,)))


def test_the_difference_is_the_first_line_that_differs() -> None:
    other = from_text(SMALL.replace("alpha=2", "alpha=3"))
    assert difference(small(), small()) == ""
    assert difference(small(), other) == (
        "line 15\n"
        "-   %count.1: int64[] (B, B) = add.Tensor(%count, 1, alpha=2) no_grad\n"
        "+   %count.1: int64[] (B, B) = add.Tensor(%count, 1, alpha=3) no_grad"
    )
    assert difference(small(), replace(small(), writes={})) == "line 24\n- write %count = %count.1\n+ (the text ends)"


def test_the_fingerprint_is_that_of_the_graph_alone() -> None:
    graph = small()
    fc = graph.steps[0]
    assert isinstance(fc, Op)
    moved = replace(graph, steps=(replace(fc, origin=Origin("elsewhere")), *graph.steps[1:]))
    turned = replace(graph, steps=(replace(fc, grad=False), *graph.steps[1:]))
    assert fingerprint(moved) == fingerprint(graph) == fingerprint(from_text(SMALL))
    assert fingerprint(turned) != fingerprint(graph)


def test_equal_graphs_have_equal_texts_whatever_the_order_of_their_dicts() -> None:
    def graph(kwargs: dict[str, Any], writes: dict[str, str]) -> Physical:
        sources = tuple(Source(Value(name, lies(B, 4)), "buffer") for name in "ab")
        return Physical("g", sources, (Op(ATEN.add.Tensor, (), kwargs, (Value("y", lies(B, 4)),)),), writes=writes)

    one = graph({"self": Var("a"), "other": 2, "alpha": 3}, {"a": "y", "b": "y"})
    two = graph({"alpha": 3, "other": 2, "self": Var("a")}, {"b": "y", "a": "y"})
    assert one == two
    assert to_text(one) == to_text(two)


def deep(layers: int) -> Physical:
    """So many layers of 60 lines."""
    x = Value("x", lies("(S(0), B)", 8, 64))
    steps: list[GraphStep] = []
    last = "x"
    for k in range(layers * 30):
        where = lies("(S(0), S(1))" if k % 3 else "(S(0), P)", 8, 64)
        h, y = Value(f"blocks.{k}.h", where, True), Value(f"blocks.{k}.y", x.layout, True)
        origin = Origin(f"blocks.{k}.fc", f"model.py:{k}", f"blocks.{k}")
        steps += [Op(ATEN.add.Tensor, (Var(last), Var("x")), {"alpha": k}, (h,), True, origin), Box(h.name, y, origin)]
        last = y.name
    return Physical("deep", (Source(x, "input"),), tuple(steps), result=Var(last))


def test_a_graph_is_printed_and_read_in_calls_that_grow_with_its_lines() -> None:
    def of(layers: int) -> tuple[int, int]:
        graph = deep(layers)
        text = to_text(graph)
        assert from_text(text) == graph
        return calls(lambda: to_text(graph)), calls(lambda: from_text(text))

    (printed, read), (printed_twice, read_twice) = of(6), of(12)
    assert printed_twice < 2.2 * printed
    assert read_twice < 2.2 * read
