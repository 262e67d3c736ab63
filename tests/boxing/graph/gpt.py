"""Physical graphs to draw and to explain: a GPT of n layers, its tensors split as Megatron does, batches by data."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from sbpflow.boxing.graph.physical import Back, Box, GraphStep, Op, Physical, Source, Value, Var
from sbpflow.placement import Placement, placement
from sbpflow.sbp import B, Layout, P, SbpLike, layout
from sbpflow.sbp.logical import Origin

ATEN = torch.ops.aten
GRID = placement("cpu:[0-3] as (data=2, tensor=2)")
LINES = {"": 12, "wte": 14, "wpe": 15, "attn": 22, "mlp": 31, "ln_f": 40, "head": 41, "loss": 44}


class Builder:
    """Adds sources, calls and moves one after the other; a move brings its transpose for the gradient."""

    def __init__(self, place: Placement = GRID) -> None:
        self.place = place
        self.values: dict[str, Value] = {}
        self.sources: list[Source] = []
        self.steps: list[GraphStep] = []
        self.backs: list[Back] = []
        self.module, self.block, self.line = "", "", 12

    def at(self, module: str, block: str = "", line: int = 12) -> None:
        self.module, self.block, self.line = module, block, line

    @property
    def origin(self) -> Origin:
        return Origin(self.module, f"model.py:{self.line}", self.block)

    def keep(self, name: str, where: Layout, grad: bool) -> Value:
        value = Value(name, where, grad)
        assert name not in self.values
        self.values[name] = value
        return value

    def source(self, name: str, shape: tuple[int, ...], sbp: SbpLike, kind: str = "parameter") -> str:
        """A parameter's gradient is an addend on each rank of `data`, if this axis does not split it."""
        whole = kind == "parameter"
        there = layout(self.place, sbp, shape, torch.float32 if whole else torch.int64)
        axis = 0  # data
        if whole and there.sbp[axis] is B:
            dual = [P if a == axis else entry for a, entry in enumerate(there.dual.sbp)]
            there = layout(self.place, sbp, shape, grad_sbp=dual)
        source = Source(self.keep(name, there, whole), kind)
        self.sources.append(source)
        return name

    def close(self, bucket: int | None = None) -> None:
        """Parameters' gradients are brought together, the last used first."""
        for source in reversed(self.sources):
            dual = source.value.layout.dual
            if source.kind == "parameter" and dual is not source.home:
                name = source.value.name
                self.backs.append(Back(name, name, dual, source.home, bucket))

    def op(
        self,
        name: str,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        shape: tuple[int, ...],
        sbp: SbpLike,
        **more: Any,
    ) -> str:
        value = self.keep(name, layout(self.place, sbp, shape), True)
        self.steps.append(Op(op, tuple(args), more, (value,), True, self.origin))
        return name

    def split(self, names: Sequence[str], args: Sequence[Any], shape: tuple[int, ...], sbp: SbpLike) -> None:
        there = layout(self.place, sbp, shape)
        values = tuple(self.keep(name, there, True) for name in names)
        self.steps.append(Op(ATEN.split.Tensor, tuple(args), {}, values, True, self.origin))

    def box(self, source: str, name: str, sbp: SbpLike, grad_sbp: SbpLike | None = None) -> str:
        old = self.values[source].layout
        new = old.to(sbp, grad_sbp=grad_sbp)
        self.steps.append(Box(source, self.keep(name, new, True), self.origin))
        if new.dual is not old.dual:
            self.backs.insert(0, Back(name, source, new.dual, old.dual))
        return name

    def graph(self, name: str, result: Any = None, loss: str | None = None) -> Physical:
        losses = ((loss, None),) if loss else ()
        return Physical(name, tuple(self.sources), tuple(self.steps), tuple(self.backs), result, losses)


def piped() -> Physical:
    """Two stages, each on its own two ranks; weights lie in pieces, gathered for use or for the optimizer alone."""
    first, second = placement("cpu:[0-1] as (data=2)"), placement("cpu:[2-3] as (data=2)")
    b = Builder(first)
    x = b.source("x", (8, 4), "S(0)", "input")
    for stage, place in enumerate((first, second)):
        b.place = place
        b.at(f"stages.{stage}", f"stages.{stage}", 5 + stage)
        if stage:
            moved = b.keep("x.there", layout(place, "S(0)", (8, 4)), True)
            b.steps.append(Box(x, moved, b.origin))
            b.backs.insert(0, Back("x.there", x, moved.layout.dual, b.values[x].layout.dual))
            x = "x.there"
        w = b.source(f"stages.{stage}.fc.weight", (4, 4), "S(0)" if not stage else "B")
        if stage:
            home = layout(place, "S(0)", (4, 4))
            b.sources[-1] = replace(b.sources[-1], grads=home, states=home)
        else:
            w = b.box(w, f"stages.{stage}.fc.whole", "B", "P")
        b.at(f"stages.{stage}.fc", f"stages.{stage}", 5 + stage)
        b.op(f"stages.{stage}.fc", ATEN.linear.default, [Var(x), Var(w)], (8, 4), "S(0)")
        b.at(f"stages.{stage}", f"stages.{stage}", 5 + stage)
        x = b.op(f"stages.{stage}.relu", ATEN.relu.default, [Var(f"stages.{stage}.fc")], (8, 4), "S(0)")
    b.at("", line=9)
    b.op("loss", ATEN.sum.default, [Var(x)], (), "P")
    b.box("loss", "loss.all", "B")
    b.close()
    return b.graph("piped", Var("loss.all"), "loss.all")


def gpt(
    layers: int = 2,
    *,
    d: int = 768,
    heads: int = 12,
    batch: int = 8,
    length: int = 256,
    words: int = 8192,
    sharded: Sequence[int] = (),
    bucket: int | None = None,
) -> Physical:
    """Layers in `sharded` run their MLP with tokens gathered and scattered instead of summed everywhere."""
    b = Builder()
    v, shape = Var, (batch, length, d)
    tokens = b.source("tokens", (batch, length), "(S(0), B)", "input")
    labels = b.source("labels", (batch, length), "(S(0), B)", "input")
    positions = b.source("positions", (length,), "(B, B)", "buffer")
    wte = b.source("wte.weight", (words, d), "(B, S(0))")
    wpe = b.source("wpe.weight", (1024, d), "(B, B)")
    b.at("wte", line=14)
    b.op("wte", ATEN.embedding.default, [v(wte), v(tokens)], shape, "(S(0), P)")
    b.box("wte", "wte.all", "(S(0), B)")
    b.at("wpe", line=15)
    b.op("wpe", ATEN.embedding.default, [v(wpe), v(positions)], (length, d), "(B, B)")
    b.at("", line=16)
    x = b.op("embedded", ATEN.add.Tensor, [v("wte.all"), v("wpe")], shape, "(S(0), B)")
    for k in range(layers):
        x = block(b, f"blocks.{k}", x, shape, heads, scattered=k in sharded)
    b.at("ln_f", line=40)
    gain, shift = (b.source(f"ln_f.{n}", (d,), "(B, B)") for n in ("weight", "bias"))
    x = b.op("ln_f", ATEN.layer_norm.default, [v(x), [d], v(gain), v(shift)], shape, "(S(0), B)")
    b.at("head", line=41)
    w = b.source("head.weight", (words, d), "(B, S(0))")
    x = b.box(x, "head.in", "(S(0), B)", "(S(0), P)")
    b.op("logits", ATEN.linear.default, [v(x), v(w)], (batch, length, words), "(S(0), S(2))")
    loss(b, labels, (batch, length, words))
    b.close(bucket)
    return b.graph("gpt", Var("loss.all"), "loss.all")


@cache
def deep() -> Physical:
    """Of 96 layers, made once for all who read it."""
    return gpt(96)


def block(b: Builder, at: str, x: str, shape: tuple[int, ...], heads: int, scattered: bool) -> str:
    """Attention and MLP: weights cut by columns, then by rows, so that each half ends in one sum."""
    v, (n, t, d) = Var, shape
    for half in ("attn", "mlp"):
        b.at(f"{at}.ln_{half}", at, 21 if half == "attn" else 30)
        gain, shift = (b.source(f"{at}.ln_{half}.{kind}", (d,), "(B, B)") for kind in ("weight", "bias"))
        y = b.op(f"{at}.ln_{half}", ATEN.layer_norm.default, [v(x), [d], v(gain), v(shift)], shape, "(S(0), B)")
        b.at(f"{at}.{half}", at, LINES[half])
        if half == "attn":
            y = b.box(y, f"{at}.attn.in", "(S(0), B)", "(S(0), P)")
            y = attention(b, at, y, shape, heads)
        else:
            if scattered:
                y = b.box(y, f"{at}.mlp.piece", "(S(0), S(1))")
                y = b.box(y, f"{at}.mlp.in", "(S(0), B)", "(S(0), P)")
            else:
                y = b.box(y, f"{at}.mlp.in", "(S(0), B)", "(S(0), P)")
            w, bias = (
                b.source(f"{at}.mlp.fc.weight", (4 * d, d), "(B, S(0))"),
                b.source(f"{at}.mlp.fc.bias", (4 * d,), "(B, S(0))"),
            )
            b.at(f"{at}.mlp.fc", at, 32)
            y = b.op(f"{at}.mlp.fc", ATEN.linear.default, [v(y), v(w), v(bias)], (n, t, 4 * d), "(S(0), S(2))")
            b.at(f"{at}.mlp", at, 33)
            y = b.op(f"{at}.mlp.gelu", ATEN.gelu.default, [v(y)], (n, t, 4 * d), "(S(0), S(2))", approximate="tanh")
            b.at(f"{at}.mlp.proj", at, 34)
            w = b.source(f"{at}.mlp.proj.weight", (d, 4 * d), "(B, S(1))")
            y = b.op(f"{at}.mlp.proj", ATEN.linear.default, [v(y), v(w)], shape, "(S(0), P)")
        if half == "mlp" and scattered:
            y = b.box(y, f"{at}.mlp.out", "(S(0), S(1))")
            y = b.box(y, f"{at}.mlp.all", "(S(0), B)")
        else:
            y = b.box(y, f"{at}.{half}.all", "(S(0), B)")
        b.at(at, at, 24 if half == "attn" else 35)
        x = b.op(f"{at}.add_{half}", ATEN.add.Tensor, [v(x), v(y)], shape, "(S(0), B)")
    return x


def attention(b: Builder, at: str, y: str, shape: tuple[int, ...], heads: int) -> str:
    v, (n, t, d) = Var, shape
    b.at(f"{at}.attn.qkv", at, 23)
    w, bias = (
        b.source(f"{at}.attn.qkv.{kind}", s, "(B, S(0))") for kind, s in (("weight", (3 * d, d)), ("bias", (3 * d,)))
    )
    b.op(f"{at}.attn.qkv", ATEN.linear.default, [v(y), v(w), v(bias)], (n, t, 3 * d), "(S(0), S(2))")
    b.at(f"{at}.attn", at, 24)
    b.split([f"{at}.attn.{x}" for x in "qkv"], [v(f"{at}.attn.qkv"), d, 2], shape, "(S(0), S(2))")
    cut = (n, heads, t, d // heads)
    for x in "qkv":
        b.op(f"{at}.attn.{x}.heads", ATEN.view.default, [v(f"{at}.attn.{x}"), [n, t, heads, d // heads]],
             (n, t, heads, d // heads), "(S(0), S(2))")  # fmt: skip
        b.op(f"{at}.attn.{x}.t", ATEN.transpose.int, [v(f"{at}.attn.{x}.heads"), 1, 2], cut, "(S(0), S(1))")
    qkv = [v(f"{at}.attn.{x}.t") for x in "qkv"]
    b.op(f"{at}.attn.sdpa", ATEN.scaled_dot_product_attention.default, qkv, cut, "(S(0), S(1))", is_causal=True)
    back = (n, t, heads, d // heads)
    b.op(f"{at}.attn.sdpa.t", ATEN.transpose.int, [v(f"{at}.attn.sdpa"), 1, 2], back, "(S(0), S(2))")
    b.op(f"{at}.attn.joined", ATEN.reshape.default, [v(f"{at}.attn.sdpa.t"), [n, t, d]], shape, "(S(0), S(2))")
    b.at(f"{at}.attn.proj", at, 26)
    w = b.source(f"{at}.attn.proj.weight", (d, d), "(B, S(1))")
    return b.op(f"{at}.attn.proj", ATEN.linear.default, [v(f"{at}.attn.joined"), v(w)], shape, "(S(0), P)")


def loss(b: Builder, labels: str, shape: tuple[int, int, int]) -> None:
    """Cross entropy over a split vocabulary: only maxima and sums of rows are sent."""
    v, (n, t, _) = Var, shape
    b.at("loss", line=44)
    b.op("top", ATEN.amax.default, [v("logits"), [-1], True], (n, t, 1), '(S(0), P("max"))')
    b.box("top", "top.all", "(S(0), B)")
    b.op("low", ATEN.sub.Tensor, [v("logits"), v("top.all")], shape, "(S(0), S(2))")
    b.op("exp", ATEN.exp.default, [v("low")], shape, "(S(0), S(2))")
    b.op("sum", ATEN.sum.dim_IntList, [v("exp"), [-1], True], (n, t, 1), "(S(0), P)")
    b.box("sum", "sum.all", "(S(0), B)")
    b.op("log", ATEN.log.default, [v("sum.all")], (n, t, 1), "(S(0), B)")
    b.op("index", ATEN.unsqueeze.default, [v(labels), -1], (n, t, 1), "(S(0), B)")
    b.op("picked", ATEN.gather.default, [v("low"), -1, v("index")], (n, t, 1), "(S(0), P)")
    b.box("picked", "picked.all", "(S(0), B)")
    b.op("each", ATEN.sub.Tensor, [v("log"), v("picked.all")], (n, t, 1), "(S(0), B)")
    b.op("loss", ATEN.mean.default, [v("each")], (), "(P, B)")
    b.box("loss", "loss.all", "(B, B)")


def tiny() -> Physical:
    """One linear layer whose output is summed up: small enough to know every figure of it by heart."""
    b = Builder(placement("cpu:[0-3] as (data=2, tensor=2)"))
    x = b.source("x", (8, 4), "(S(0), B)", "input")
    w = b.source("fc.weight", (6, 4), "(B, S(1))")
    b.at("fc", line=7)
    cut = b.op("x.cut", ATEN.slice.Tensor, [Var(x), 1, 0, 4], (8, 4), "(S(0), S(1))")
    b.op("fc", ATEN.linear.default, [Var(cut), Var(w)], (8, 6), "(S(0), P)")
    b.at("", line=9)
    b.box("fc", "fc.all", "(S(0), B)")
    b.op("loss", ATEN.sum.default, [Var("fc.all")], (), "(P, B)")
    b.box("loss", "loss.all", "(B, B)")
    b.close()
    return b.graph("tiny", Var("loss.all"), "loss.all")
