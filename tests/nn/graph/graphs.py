"""Graphs by hand, and what one device makes of them: the oracle of all tests of this folder."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sbpflow.boxing import gather, scatter
from sbpflow.boxing.graph.physical import Box, Op, Physical, Source, Value, Var
from sbpflow.boxing.graph.transpose import with_backs
from sbpflow.nn.graph.lower.localise import renamed
from sbpflow.nn.graph.run.program import Outcome, Program
from sbpflow.placement import Placement, placement
from sbpflow.sbp import B, P, S, SbpLike, layout
from sbpflow.sbp.call import fill, tensors_in
from sbpflow.sbp.logical import Origin

aten = torch.ops.aten
F64 = torch.float64


class Build:
    """Writes a graph down value by value; shapes are those that torch finds on metas."""

    def __init__(self, where: Placement, name: str = "test") -> None:
        self.where, self.name, self.block = where, name, ""
        self.sources: list[Source] = []
        self.steps: list[Op | Box] = []
        self.values: dict[str, Value] = {}

    def source(
        self,
        name: str,
        shape: Sequence[int],
        sbp: SbpLike,
        grad_sbp: SbpLike | None = None,
        *,
        kind: str = "parameter",
        dtype: torch.dtype = F64,
        where: Placement | None = None,
        grads: SbpLike | None = None,
        states: SbpLike | None = None,
    ) -> Var:
        where = where or self.where
        of = layout(where, sbp, tuple(shape), dtype, grad_sbp)
        self.values[name] = value = Value(name, of, kind == "parameter")
        rests = (None if sbp is None else layout(where, sbp, tuple(shape), dtype) for sbp in (grads, states))
        home, master = rests
        self.sources.append(Source(value, kind, home, master))
        return Var(name)

    def input(self, name: str, shape: Sequence[int], sbp: SbpLike, dtype: torch.dtype = F64) -> Var:
        return self.source(name, shape, sbp, kind="input", dtype=dtype)

    def op(self, op: Any, *args: Any, out: Any, grad_sbp: Any = None, grad: bool = True, **kwargs: Any) -> Any:
        """`out` is the signature of the output, or a list of those of several."""
        made = Op(op, args, kwargs, (), grad)
        held = [self.values[name].layout for name in made.inputs]
        number = {name: i for i, name in enumerate(made.inputs)}
        metas = [torch.empty(of.shape, dtype=of.dtype, device="meta") for of in held]
        device = {} if held else {"device": "meta"}
        fakes = tensors_in(op(*fill(renamed(args, number), metas), **fill(renamed(kwargs, number), metas), **device))
        several = isinstance(out, list)
        duals = grad_sbp if isinstance(grad_sbp, list) else [grad_sbp] * len(fakes)
        flows = grad and any(self.values[name].grad for name in made.inputs)
        values = []
        for fake, sbp, dual in zip(fakes, out if several else [out], duals, strict=True):
            where = held[0].placement if held else self.where
            of = layout(where, sbp, tuple(fake.shape), fake.dtype, dual)
            values.append(Value(f"%{len(self.values)}", of, flows and fake.dtype.is_floating_point))
            self.values[values[-1].name] = values[-1]
        self.steps.append(Op(op, args, kwargs, tuple(values), grad, Origin(block=self.block)))
        names = [Var(value.name) for value in values]
        return names if several else names[0]

    def box(self, x: Var, sbp: SbpLike, grad_sbp: SbpLike | None = None, where: Placement | None = None) -> Var:
        of = self.values[x.name]
        value = Value(f"%{len(self.values)}", of.layout.to(sbp, where, grad_sbp), of.grad)
        self.values[value.name] = value
        self.steps.append(Box(x.name, value))
        return Var(value.name)

    def graph(self, *losses: Var, result: Any = None, given: Sequence[Var | None] = ()) -> Physical:
        pairs = [(loss.name, None) for loss in losses] if not given else [
            (loss.name, start and start.name) for loss, start in zip(losses, given, strict=True)
        ]  # fmt: skip
        made = Physical(self.name, tuple(self.sources), tuple(self.steps), (), result or losses, tuple(pairs))
        return with_backs(made)


def wholes(graph: Physical, seed: int = 0) -> dict[str, Tensor]:
    """A value for each source; integers are below 5."""
    rng = torch.Generator().manual_seed(seed)
    out = {}
    for source in graph.sources:
        of = source.value.layout
        if of.dtype.is_floating_point:
            out[source.value.name] = torch.randn(of.shape, dtype=of.dtype, generator=rng)
        else:
            out[source.value.name] = torch.randint(0, 5, of.shape, dtype=of.dtype, generator=rng)
    return out


def plain(graph: Physical, given: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What one device makes of a graph: values and gradients."""
    values = {s.value.name: given[s.value.name].clone().requires_grad_(s.value.grad) for s in graph.sources}
    for step in graph.steps:
        if isinstance(step, Box):
            values[step.output.name] = values[step.source]
            continue
        number = {name: i for i, name in enumerate(step.inputs)}
        held = [values[name] for name in step.inputs]
        with torch.set_grad_enabled(step.grad):
            made = step.op(*fill(renamed(step.args, number), held), **fill(renamed(dict(step.kwargs), number), held))
        for y, value in zip(step.outputs, tensors_in(made), strict=True):
            values[y.name] = value
    wanted = [s.value.name for s in graph.sources if s.value.grad]
    grads: dict[str, Tensor] = {}
    if graph.losses:
        ends = [values[name] for name, _ in graph.losses]
        starts = [
            torch.ones_like(y) if of is None else values[of].detach()
            for y, (_, of) in zip(ends, graph.losses, strict=True)
        ]
        found = torch.autograd.grad(ends, [values[n] for n in wanted], starts, allow_unused=True)
        grads = {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
    return {name: value.detach() for name, value in values.items()}, grads


def shards_of(graph: Physical, given: dict[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    return {s.value.name: scatter(given[s.value.name], s.value.layout) for s in graph.sources}


def check(graph: Physical, program: Program, given: dict[str, Tensor] | None = None) -> Outcome:
    """Run it twice, and hold what came out against one device."""
    given = given or wholes(graph)
    values, grads = plain(graph, given)
    shards = shards_of(graph, given)
    before = {name: [x.clone() for x in held] for name, held in shards.items()}
    for _ in range(2):
        outcome = program(shards)
        for name, held in outcome.values.items():
            same(gather(held, graph.layout(name)), values[name], name)
        assert outcome.grads.keys() == grads.keys()
        for source in graph.sources:
            if source.value.name in grads:
                whole = gather(outcome.grads[source.value.name], source.home)
                same(whole, grads[source.value.name], f"gradient of {source.value.name}")
    for held in (*outcome.values.values(), *outcome.grads.values()):
        assert not any(x.requires_grad for x in held if x is not None)
    for name, old in before.items():
        assert all(torch.equal(a, b) for a, b in zip(old, shards[name], strict=True)), f"{name} was written to"
    return outcome


def same(mine: Tensor, one: Tensor, name: str) -> None:
    if mine.shape != one.shape and not mine.numel():  # a token: this process owns none of it
        return
    largest = float(one.abs().max()) if one.numel() else 1.0  # sums are made in another order
    torch.testing.assert_close(
        mine, one, rtol=1e-10, atol=1e-10 * max(1.0, largest), msg=lambda text: f"{name}: {text}"
    )


LINE = placement("cpu:[0-3]")
GRID = placement("cpu:[0-3] as (a=2, b=2)")


def total(b: Build, x: Var, out: SbpLike, weight: SbpLike | None = None) -> Var:
    """A loss that tells elements apart: the sum of squares."""
    square = b.op(aten.mul.Tensor, x, x, out=weight if weight is not None else b.values[x.name].layout.sbp)
    loss: Var = b.op(aten.sum.default, square, out=out)
    return loss


def data_parallel() -> Physical:
    b = Build(LINE)
    x, w, c = b.input("x", (8, 6), S(0)), b.source("w", (5, 6), B, P), b.source("c", (5,), B, P)
    h = b.op(aten.linear.default, x, w, c, out=S(0))
    return b.graph(total(b, b.op(aten.gelu.default, h, out=S(0)), P))


def tensor_parallel() -> Physical:
    """Columns, then rows, on one axis, with the batch split on the other."""
    b = Build(GRID)
    x = b.input("x", (4, 6), (S(0), B))
    w, v = b.source("w", (8, 6), (B, S(0)), (P, S(0))), b.source("v", (6, 8), (B, S(1)), (P, S(1)))
    e = b.source("e", (4, 6), (S(0), B))
    x = b.op(aten.add.Tensor, x, e, out=(S(0), B))
    y = b.box(x, (S(0), B), (S(0), P))
    h = b.op(aten.relu.default, b.op(aten.linear.default, y, w, out=(S(0), S(1))), out=(S(0), S(1)))
    z = b.box(b.op(aten.linear.default, h, v, out=(S(0), P)), (S(0), B))
    return b.graph(total(b, b.op(aten.add.Tensor, z, x, out=(S(0), B)), (P, B)))


def sharded_parameters(layers: int = 3, *, size: int = 6) -> Physical:
    """ZeRO-3: every parameter in pieces, gathered where it is used."""
    b = Build(LINE)
    x = b.input("x", (8, size), S(0))
    for layer in range(layers):
        b.block = f"blocks.{layer}"
        w, c = b.source(f"w{layer}", (size, size), S(0)), b.source(f"c{layer}", (size,), S(0))
        w, c = b.box(w, B, P), b.box(c, B, P)
        x = b.op(aten.tanh.default, b.op(aten.linear.default, x, w, c, out=S(0)), out=S(0))
    return b.graph(total(b, x, P))


def sharded_states() -> Physical:
    """ZeRO-2: parameters whole, their gradients brought together in pieces."""
    b = Build(LINE)
    x, w = b.input("x", (8, 6), S(0)), b.source("w", (8, 6), B, P, grads=S(0), states=S(0))
    return b.graph(total(b, b.op(aten.linear.default, x, w, out=S(0)), P))


def pipeline() -> Physical:
    front, back = GRID[0], GRID[1]
    b = Build(front)
    x, w = b.input("x", (6, 4), S(0)), b.source("w", (4, 4), B, P)
    v = b.source("v", (4, 4), S(0), where=back)
    h = b.op(aten.gelu.default, b.op(aten.linear.default, x, w, out=S(0)), out=S(0))
    y = b.box(h, B, P, where=back)
    return b.graph(total(b, b.op(aten.linear.default, y, v, out=S(1)), P))


def uneven(size: int) -> Physical:
    """Rows that do not share out evenly; some ranks may have none."""
    b = Build(LINE)
    x, w = b.source("x", (size, 3), S(0)), b.source("w", (4, 3), B, P)
    h = b.op(aten.relu.default, b.op(aten.linear.default, x, w, out=S(0)), out=S(0))
    t = b.op(aten.transpose.int, h, 0, 1, out=S(1))
    return b.graph(total(b, b.box(t, S(0)), P))


def nothing() -> Physical:
    """Tensors without an element; their dims of size 0 are not split."""
    b = Build(LINE)
    x, w = b.source("x", (0, 3), B, P), b.source("w", (4, 3), S(0))
    return b.graph(total(b, b.op(aten.linear.default, x, w, out=S(1)), P))


def thrice() -> Physical:
    """One value with three users, in two other layouts."""
    b = Build(LINE)
    x, w, d = b.source("x", (8, 8), S(0)), b.source("w", (8, 8), S(0)), b.input("d", (8, 8), S(0))
    h = b.op(aten.mul.Tensor, x, d, out=S(0))
    cut, whole = b.box(h, S(1)), b.box(h, B, P)
    first = b.op(aten.cos.default, cut, out=S(1))
    second = b.op(aten.linear.default, whole, w, out=S(1))
    third = b.op(aten.mul.Tensor, h, h, out=S(0))
    y = b.op(aten.add.Tensor, first, second, out=S(1))
    y = b.op(aten.add.Tensor, b.box(y, S(0)), third, out=S(0))
    return b.graph(total(b, y, P))


def several_losses() -> Physical:
    """Two losses, one of them with a gradient to start from, and one value that no loss sees."""
    b = Build(LINE)
    x, w, v = b.input("x", (8, 6), S(0)), b.source("w", (6, 6), B, P), b.source("v", (6, 6), B, P)
    unseen, start = b.source("unseen", (3,), B), b.input("start", (8, 6), S(1))
    h = b.op(aten.linear.default, x, w, out=S(0))
    y = b.op(aten.linear.default, h, v, out=S(0))
    start = b.box(start, S(0))
    other = b.op(aten.exp.default, unseen, out=B)
    return b.graph(total(b, h, P), y, given=[None, start], result=[y, other, h])


def vocabulary() -> Physical:
    """An embedding whose rows are split, looked up by integers."""
    b = Build(LINE)
    at, w = b.input("at", (3, 4), B, torch.int64), b.source("w", (6, 5), S(0))
    v = b.source("v", (8, 5), B, P)
    h = b.box(b.op(aten.embedding.default, w, at, out=P), S(0))
    return b.graph(total(b, b.op(aten.linear.default, h, v, out=S(0)), P))


def split_classes() -> Physical:
    """A log of a sum over classes that are split: a maximum without a gradient, a sum with one."""
    b = Build(LINE)
    x, w = b.input("x", (3, 6), B), b.source("w", (10, 6), S(0))
    logits = b.op(aten.linear.default, x, w, out=S(1))
    still = b.op(aten.detach.default, logits, out=S(1), grad=False)
    top = b.box(b.op(aten.amax.default, still, [1], True, out=P("max"), grad=False), B)
    e = b.op(aten.exp.default, b.op(aten.sub.Tensor, logits, top, out=S(1)), out=S(1))
    norm = b.box(b.op(aten.sum.dim_IntList, e, [1], True, out=P), B)
    logs = b.op(aten.log.default, norm, out=B)
    return b.graph(b.op(aten.sum.default, b.op(aten.mul.Tensor, logs, logs, out=B), out=B))


def maximum() -> Physical:
    """A maximum over what is split, whose gradient goes back to who held it."""
    b = Build(LINE)
    x, w = b.source("x", (5, 8), S(1)), b.source("w", (5,), B)
    top = b.box(b.op(aten.amax.default, b.op(aten.sin.default, x, out=S(1)), [1], out=P("max")), B)
    return b.graph(total(b, b.op(aten.mul.Tensor, top, w, out=B), B, B))


def addends() -> Physical:
    """A sum that stays in addends through a linear op before it is brought together."""
    b = Build(LINE)
    x, w, v = b.input("x", (4, 8), S(1)), b.source("w", (6, 8), S(1)), b.source("v", (5, 6), B)
    h = b.op(aten.linear.default, x, w, out=P)
    y = b.op(aten.linear.default, h, b.box(v, B, P), out=P)
    return b.graph(total(b, b.box(y, S(1)), P))


def attention(layers: int = 2) -> Physical:
    """Attention with heads split on one axis and the batch on the other."""
    b = Build(GRID)
    x = b.input("x", (4, 3, 8), (S(0), B))
    e = b.source("e", (3, 8), (B, B), (P, B))
    x = b.op(aten.add.Tensor, x, e, out=(S(0), B))
    for layer in range(layers):
        b.block = f"blocks.{layer}"
        y = b.box(x, (S(0), B), (S(0), P))
        heads = []
        for kind in "qkv":
            w = b.source(f"{kind}{layer}", (8, 8), (B, S(0)), (P, S(0)))
            h = b.op(aten.linear.default, y, w, out=(S(0), S(2)))
            h = b.op(aten.view.default, h, [4, 3, 4, 2], out=(S(0), S(2)))
            heads.append(b.op(aten.transpose.int, h, 1, 2, out=(S(0), S(1))))
        a = b.op(aten.scaled_dot_product_attention.default, *heads, None, 0.0, True, out=(S(0), S(1)))
        a = b.op(aten.transpose.int, a, 1, 2, out=(S(0), S(2)))
        a = b.op(aten.reshape.default, a, [4, 3, 8], out=(S(0), S(2)))
        o = b.source(f"o{layer}", (8, 8), (B, S(1)), (P, S(1)))
        z = b.box(b.op(aten.linear.default, a, o, out=(S(0), P)), (S(0), B))
        x = b.op(aten.add.Tensor, x, z, out=(S(0), B))
    b.block = ""
    return b.graph(total(b, x, (P, B)))


def odd_wires() -> Physical:
    """Views of inputs, an input returned, outputs that share memory, one input used twice, and several outputs."""
    b = Build(LINE)
    x, w = b.source("x", (4, 8), S(0)), b.source("w", (4, 8), S(0))
    same_ = b.op(aten.alias.default, x, out=S(0))
    t = b.op(aten.transpose.int, x, 0, 1, out=S(1))
    left, right = b.op(aten.split.Tensor, w, 4, 1, out=[S(0), S(0)])
    twice = b.op(aten.mul.Tensor, left, left, out=S(0))
    top, at = b.op(aten.max.dim, x, 1, out=[S(0), S(0)])
    picked = b.op(aten.gather.default, w, 1, b.op(aten.unsqueeze.default, at, 1, out=S(0)), out=S(0))
    losses = [total(b, v, P) for v in (same_, t, twice, top, picked)]
    return b.graph(*losses, result=[x, same_, t, left, right, at, top])


def forward_only() -> Physical:
    b = Build(LINE)
    x, w = b.input("x", (8, 6), S(0)), b.source("w", (5, 6), S(0))
    return b.graph(result=b.op(aten.linear.default, x, b.box(w, B), out=S(0)))


GRAPHS: dict[str, Callable[[], Physical]] = {
    "data parallel": data_parallel,
    "tensor parallel": tensor_parallel,
    "ZeRO-3": sharded_parameters,
    "ZeRO-2": sharded_states,
    "pipeline": pipeline,
    "uneven": lambda: uneven(7),
    "empty shards": lambda: uneven(2),
    "nothing": nothing,
    "thrice": thrice,
    "several losses": several_losses,
    "vocabulary": vocabulary,
    "classes": split_classes,
    "maximum": maximum,
    "addends": addends,
    "attention": attention,
    "odd wires": odd_wires,
    "forward only": forward_only,
}
