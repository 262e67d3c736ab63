"""The statements that random programs are made of. Each is drawn for the tensors that there are, as text."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["STEPS", "Scene"]


class Scene:
    """What has been made so far, and a source of chance."""

    def __init__(self, rng: random.Random, env: dict[str, Any], *, smooth: bool) -> None:
        self.rng, self.env, self.smooth, self.count = rng, env, smooth, 0

    def names(self, fits: Callable[[Tensor], bool] = lambda t: True) -> list[str]:
        return [n for n, t in self.env.items() if isinstance(t, Tensor) and t.is_floating_point() and fits(t)]

    def pick(self, fits: Callable[[Tensor], bool] = lambda t: True) -> str | None:
        found = self.names(fits)
        return self.rng.choice(found[-6:] + found) if found else None

    def new(self) -> str:
        self.count += 1
        return f"y{self.count}"

    def __getitem__(self, name: str) -> Tensor:
        found = self.env[name]
        assert isinstance(found, Tensor)
        return found

    def dim(self, x: str) -> int:
        return self.rng.randrange(-self[x].ndim, self[x].ndim) if self[x].ndim else 0

    def partner(self, x: str) -> str:
        """Something that broadcasts with it: a tensor, a number, a plain tensor, one with a dim of size 1."""
        shape = self[x].shape
        kind = self.rng.random()
        if kind < 0.2:
            return str(round(self.rng.uniform(-2, 2), 2))
        if kind < 0.35:
            cut = [1 if self.rng.random() < 0.4 else n for n in shape][self.rng.randint(0, len(shape)) :]
            return f"const({self.rng.randrange(99)}, {tuple(cut)})"
        if kind < 0.45 and shape:
            d = self.dim(x)
            return f"{x}.sum({d}, keepdim=True)"

        def broadcasts(t: Tensor) -> bool:
            return all(a == b or a == 1 or b == 1 for a, b in zip(t.shape[::-1], shape[::-1], strict=False))

        return self.pick(broadcasts) or "0.5"

    def key(self, x: str) -> str:
        """A part of a tensor: ints, slices, ellipses, None, index lists."""
        parts = []
        for n in self[x].shape[: self.rng.randint(1, max(1, self[x].ndim))]:
            lo = self.rng.randrange(n) if n else 0
            kinds = [":", f"{lo}:", f":{lo + 1}", f"{lo}", f"-{lo + 1}", "::2", f"{lo}:{min(n, lo + 2)}"]
            parts.append(self.rng.choice(kinds))
        chance = self.rng.random()
        if chance < 0.1:
            parts.append("None")
        elif chance < 0.2 and len(parts) < self[x].ndim:
            parts.insert(self.rng.randint(0, 1), "...")
        elif chance < 0.35 and self[x].shape[:1].numel():
            n = self[x].shape[0]
            parts[0] = f"torch.tensor([{', '.join(str(self.rng.randrange(-n, n)) for _ in range(2))}])"
        return ", ".join(parts)


class Step(NamedTuple):
    draw: Callable[[Scene], str | None]
    smooth: bool
    weight: float


STEPS: dict[str, Step] = {}


def step(weight: float = 1.0, smooth: bool = True) -> Callable[[Callable[[Scene], str | None]], Any]:
    def put(function: Callable[[Scene], str | None]) -> Callable[[Scene], str | None]:
        STEPS[function.__name__] = Step(function, smooth, weight)
        return function

    return put


def one_of(name: str, text: str, *, ndim: int = 0, weight: float = 1.0, smooth: bool = True) -> None:
    """A step that makes a tensor of one: `x` is it, `d` and `e` are dims of it, `n` an index, `k` a number."""
    forms = [form.strip() for form in text.strip().replace("\n", " | ").split(" | ")]

    def drawn(s: Scene) -> str | None:
        x = s.pick(lambda t: t.ndim >= ndim)
        if x is None:
            return None
        d, e = s.dim(x), s.dim(x)
        size = s[x].shape[d] if s[x].ndim else 1
        k = s.rng.randrange(1000)
        said = s.rng.choice(forms).format(x=x, d=d, e=e, n=s.rng.randrange(max(size, 1)), k=k, size=size)
        return f"{s.new()} = {said}"

    STEPS[name] = Step(drawn, smooth, weight)


one_of("pointwise", """
torch.sin({x}) | torch.tanh({x}) | {x}.sigmoid() | ({x} * 0.3).exp() | F.softplus({x}) | F.gelu({x})
({x} * {x} + 1).sqrt() | ({x}.square() + 1).log() | 1 / ({x} * {x} + 1) | -{x} | {x} ** 2 | 2 - {x} | F.silu({x})
torch.atan({x}) | {x}.pow(3) | 0.5 ** {x} | ({x} * 0.1).cosh() | {x}.neg().add({x}, alpha=2)
""", weight=4)  # fmt: skip
one_of("kinked", """
torch.relu({x}) | {x}.abs() | {x}.clamp(-1, 1) | {x}.sign() | F.leaky_relu({x}) | F.hardtanh({x}) | {x}.round()
torch.where({x} > 0, {x}, 0.1) | {x}.masked_fill({x} > 0, 2.) | {x}.clamp_min(0.2) | F.elu({x})
({x} > 0).double() * {x} | torch.where({x} > 0, {x} * 2, {x}.sum()) | {x}.floor() | {x} % 1.3
""", weight=2, smooth=False)  # fmt: skip
one_of("reduction", """
{x}.sum() | {x}.sum({d}) | {x}.sum({d}, keepdim=True) | {x}.mean() | {x}.mean({d}) | {x}.var({d})
{x}.mean({d}, keepdim=True) | {x}.logsumexp({d}) | {x}.std({d}, unbiased=False) | {x}.norm()
torch.linalg.vector_norm({x}, dim={d}) | ({x} * .5).prod({d}) | {x}.norm(dim={d}, keepdim=True) | {x}.var()
torch.var_mean({x}, {d})[1] | {x}.nansum({d}) | ({x} * .5).prod() | {x}.sum((0, -1)) | {x}.mean((0, -1))
""", ndim=1, weight=3)  # fmt: skip
one_of("extreme", """
{x}.amax({d}) | {x}.max() | {x}.max({d})[0] | {x}.amin({d}, keepdim=True) | {x}.median({d})[0] | {x}.min()
{x}.norm(1, {d}) | {x}.norm(float('inf')) | {x}.aminmax(dim={d})[1] | {x}.norm(3, dim={d}) | {x}.min({d})[0]
{x}.argmax({d}).double() | ({x} > 0).sum({d}).double() * {x}.sum() | ({x} > 0).any({d}).double() | {x}.amax()
{x}.quantile(0.5, {d}) | {x}.count_nonzero({d}).double() | {x}.kthvalue(1, {d})[0]
""", ndim=1, weight=2, smooth=False)  # fmt: skip
one_of("along", """
{x}.softmax({d}) | {x}.log_softmax({d}) | F.normalize({x}, dim={d}) | F.layer_norm({x}, {x}.shape[-1:])
{x}.cumsum({d}) | ({x} * .5).cumprod({d}) | {x}.logcumsumexp({d}) | {x}.flip({d}) | {x}.roll(1, {d})
{x}.diff(dim={d}) | {x}.renorm(2, 0, 1.5) | F.softmin({x}, {d}) | {x}.tril() if {x}.ndim > 1 else {x} * 2
F.pad({x}, (1, 2)) | {x}.repeat_interleave(2, {d}) | {x}.tile(2) | {x}.movedim(0, {d}) | F.pad({x}, (-1, 0))
""", ndim=1, weight=2.5)  # fmt: skip
one_of("order", """
{x}.sort({d})[0] | {x}.sort({d}, descending=True)[0] | {x}.topk(1, {d})[0] | {x}.cummax({d})[0]
{x}.gather({d}, {x}.argsort({d})) | {x}.index_select({d}, {x}.sum() .gt(0).long().reshape(1) * {n})
F.one_hot({x}.argmax({d}), {size}).double() | torch.take_along_dim({x}, {x}.argsort({d}), {d}) | {x}.msort()
{x}.scatter({d}, {x}.argsort({d}), {x} * 2) | {x}.scatter_add({d}, {x}.argsort({d}), {x})
torch.searchsorted({x}.detach().sort(-1)[0], {x}.detach()).double()
""", ndim=1, weight=1.5, smooth=False)  # fmt: skip
one_of("view", """
{x}.reshape(-1) * 1 | {x}.flatten() + 0 | {x}.transpose({d}, {e}) | {x}.unsqueeze({d}) | {x}.squeeze() | {x}.mT.mT
{x}.squeeze({d}) | {x}.permute(*reversed(range({x}.ndim))) | {x}.narrow({d}, {n}, 1) | {x}.select({d}, {n})
{x}.unflatten({d}, (-1, 1)) | {x}.expand(2, *{x}.shape) | {x}.reshape(*{x}.shape[::-1]) * 1 | {x}.T
{x}.swapaxes(0, -1) | {x}.unflatten({d}, (2, -1)) | {x}.view(-1) | {x}.flatten(0, 1) * 1 | {x}[None] | {x}.diagonal()
{x}.unfold({d}, 1, 1) | {x}.chunk(2, {d})[-1] | {x}.split(2, {d})[0] | {x}.unbind({d})[{n}]
{x}.tensor_split(2, {d})[1] | {x}.ravel() * 1 | {x}.split([1, {size} - 1], {d})[1] | {x}.expand_as({x})
{x}.contiguous() * 1 | {x}.broadcast_to(3, *{x}.shape)
""", ndim=1, weight=4)  # fmt: skip
one_of("copy", """
{x}.detach() | {x}.detach() * 2 | {x}.clone() | {x}.float().double() | {x} * 1 | {x}.data * 3 | +{x} * 1
torch.zeros_like({x}) + {x} | {x}.new_ones({x}.shape) * {x} | {x}.to(torch.float32) | torch.ones_like({x}) * {x}
checkpoint(lambda t: torch.tanh(t) * t.sum(), {x}, use_reentrant=False)
checkpoint(torch.sin, {x}, use_reentrant=False)
""", weight=1.5)  # fmt: skip
one_of("moved", """
move({x}, {k}) | move(move({x}, {k}), {k} // 7) | whole({x}) * {x} | move({x}.clone(), {k})
""", weight=1.5)  # fmt: skip


@step(weight=4)
def binary(s: Scene) -> str | None:
    x = s.pick()
    if x is None:
        return None
    y = s.partner(x)
    smooth = [
        "{x} + {y}",
        "{x} * {y}",
        "{x} - {y}",
        "{y} - {x}",
        "{x} / ({y} * {y} + 1)",
        "torch.add({x}, {y}, alpha=3)",
    ]
    kinked = [
        "torch.where({x} > {y}, {x}, {y})",
        "torch.maximum({x}, torch.as_tensor({y}))",
        "({x} > {y}).double() * {x}",
    ]
    if s.rng.random() < 0.15 and not s.smooth:
        return f"{s.new()} = " + s.rng.choice(kinked).format(x=x, y=y)
    return f"{s.new()} = " + s.rng.choice(smooth).format(x=x, y=y)


@step(weight=2.5)
def product(s: Scene) -> str | None:
    x = s.pick(lambda t: t.ndim >= 1)
    if x is None:
        return None
    n, out = s[x].shape[-1], s.new()
    y = s.pick(lambda t: t.ndim >= 2 and t.shape[-2] == n and (t.ndim == 2 or s[x].ndim == 2))
    w = s.pick(lambda t: t.ndim == 2 and t.shape[-1] == n)
    v = s.pick(lambda t: t.ndim == 1 and t.shape[0] == n)
    forms = [f"{x} @ const({s.rng.randrange(99)}, ({n}, 3))", f"F.linear({x}, const(5, (2, {n})), const(6, (2,)))"]
    if y is not None:
        forms += [f"{x} @ {y}", f"torch.matmul({x}, {y})"] * 2
    if w is not None:
        forms += [
            f"F.linear({x}, {w})",
            f"torch.einsum('...n,mn->...m', {x}, {w})",
            f"{x} @ {w}.T",
            f"F.linear({x}, {w}, {w}.sum(1))",
        ]
    if v is not None:
        forms += [f"{x} @ {v}", f"torch.einsum('...n,n->...n', {x}, {v})"]
    if s[x].ndim == 3:
        forms += [
            f"torch.bmm({x}, {x}.mT)",
            f"torch.einsum('bij,bkj->bik', {x}, {x})",
            f"{x}.mT @ {x}",
            f"torch.baddbmm({x} @ {x}.mT, {x}, {x}.mT, beta=2)",
        ]
    if s[x].ndim == 2:
        forms += [f"{x}.T @ {x}", f"torch.mm({x}, {x}.T)", f"torch.addmm({x}.sum(0)[:1], {x}, {x}.T)"]
        forms += [f"torch.einsum('ij->j', {x})", f"torch.einsum('ij,ij->i', {x}, {x})"]
    if s[x].ndim == 1:
        forms += [f"torch.outer({x}, {x})", f"torch.dot({x}, {x})"]
    return f"{out} = {s.rng.choice(forms)} * 0.5"


@step(weight=1.5)
def joined(s: Scene) -> str | None:
    x = s.pick(lambda t: t.ndim >= 1)
    if x is None:
        return None
    y = s.pick(lambda t: t.shape == s[x].shape) or x
    d = s.dim(x)
    form = s.rng.choice(
        [
            "torch.cat([{x}, {y}], {d})",
            "torch.stack([{x}, {y}], {d})",
            "torch.cat([{y}, {x}, {x}], {d})",
            "torch.cat([{x}[:1], {y}], 0)",
            "torch.hstack([{x}, {y}])",
            "torch.cat([{x}, const(3, {shape})], {d})",
        ]
    )
    return f"{s.new()} = " + form.format(x=x, y=y, d=d, shape=tuple(s[x].shape))


@step(weight=3)
def part(s: Scene) -> str | None:
    x = s.pick(lambda t: t.ndim >= 1)
    return None if x is None else f"{s.new()} = {x}[{s.key(x)}]"


@step(weight=0.7, smooth=False)
def mask(s: Scene) -> str | None:
    x = s.pick(lambda t: t.ndim >= 1)
    return None if x is None else f"{s.new()} = {x}[{x} > 0]"


def written(s: Scene) -> str | None:
    """Something that was made, which may be written to."""
    return s.pick(lambda t: not (t.is_leaf and t.requires_grad) and t.ndim >= 1)


IN_PLACE = [
    "{x}.add_({y})",
    "{x}.mul_({y})",
    "{x}.sub_({y})",
    "{x}.neg_()",
    "{x}.mul_(2)",
    "{x}.copy_(torch.as_tensor({y}))",
    "{x}.fill_(0.5)",
    "{x}.zero_()",
    "{x} += {y}",
    "{x} *= {y}",
    "{x}.sin_()",
    "{x}.tanh_()",
    "{x}.add_({y}, alpha=2)",
    "{x}.lerp_({x} * 2, 0.3)",
    "{x}.addcmul_({x} * 1, {x} * 1, value=.5)",
    "{x}.clone().mul_({y})",
    "{x}.cumsum_({d})",
    "{x}.div_(2)",
    "{x}.index_add_(0, torch.tensor([0]), {x}[:1] * 2)",
    "{x}.index_fill_(0, torch.tensor([0]), 2.)",
    "{x}.index_copy_(0, torch.tensor([0]), {x}[:1] * 2)",
    "{x}.fill_diagonal_(2.)",
    "{x}.mul_({x}.sum())",
]
KINKED = ["{x}.relu_()", "{x}.clamp_(-1, 1)", "{x}.abs_()", "{x}.masked_fill_({x} > 0, 2.)", "{x}[{x} > 0] = 0.3"]


@step(weight=2.5)
def in_place(s: Scene) -> str | None:
    x = written(s)
    if x is None:
        return None
    forms = IN_PLACE if s.smooth or s.rng.random() < 0.8 else KINKED
    return s.rng.choice(forms).format(x=x, y=s.partner(x), d=s.dim(x))


@step(weight=3)
def into_part(s: Scene) -> str | None:
    x = written(s)
    if x is None:
        return None
    key = s.key(x)
    try:
        shape = tuple(eval(f"{x}[{key}]", s.env).shape)
    except (IndexError, TypeError):
        return None
    y = s.pick(lambda t: t.shape == shape) or f"const({s.rng.randrange(99)}, {shape})"
    forms = [
        "{x}[{key}] = 5.",
        "{x}[{key}] = {y}",
        "{x}[{key}] += {y}",
        "{x}[{key}] *= 2",
        "{x}[{key}].mul_(2)",
        "{n} = {x}[{key}]; {n}.mul_(2)",
        "{n} = {x}[{key}]; {n}.add_({y})",
        "{n} = {x}[{key}]; {x}.mul_(0.5)",
        "{x}[{key}].fill_(.3)",
        "{x}[{key}].copy_({y})",
        "{x}[{key}] = {y} * 2",
        "{x}[{key}] -= {x}[{key}] * .5",
    ]
    return s.rng.choice(forms).format(x=x, key=key, y=y, n=s.new())


@step(weight=1)
def through_view(s: Scene) -> str | None:
    x = written(s)
    if x is None:
        return None
    views = [
        "{x}.view(-1)",
        "{x}.transpose(0, {d})",
        "{x}.unsqueeze(0)",
        "{x}.narrow({d}, 0, 1)",
        "{x}.select({d}, 0)",
        "{x}.detach()",
        "{x}.squeeze()",
        "{x}.T",
        "{x}.unflatten({d}, (-1, 1))",
        "{x}.diagonal()",
        "{x}[None]",
    ]
    view = s.rng.choice(views).format(x=x, d=s.dim(x))
    write = s.rng.choice(["mul_(2)", "add_(1)", "fill_(.5)", "sin_()", "zero_()"])
    if s.rng.random() < 0.3:
        return f"{view}.{write}"
    n = s.new()
    return f"{n} = {view}; {n}.{write}"


@step(weight=1)
def without_grad(s: Scene) -> str | None:
    x = s.pick()
    if x is None:
        return None
    y = s.partner(x)
    forms = [
        "{n} = {x} * {y}",
        "{x}.mul_(2)",
        "{x}.add_({y})",
        "{n} = {x}.sum()",
        "{x}[0] = .5",
        "{n} = {x}[..., 0] * 2",
        "{x}.copy_({x} * 2)",
        "{x}[..., 0] += 1",
    ]
    return "with torch.no_grad(): " + s.rng.choice(forms).format(n=s.new(), x=x, y=y)


@step(weight=0.8)
def watched(s: Scene) -> str | None:
    latest = list(s.env)[-1]  # once it was used, hooks do not hear all of its gradient, which is an error
    x = (
        latest
        if isinstance(s.env[latest], Tensor) and s[latest].requires_grad
        else s.pick(lambda t: t.requires_grad and t.is_leaf)
    )
    if x is None:
        return None
    return s.rng.choice(
        ["{x}.retain_grad()", "{x}.register_hook(lambda g: g * 2)", "{x}.register_hook(lambda g: None)"]
    ).format(x=x)


@step(weight=0.25, smooth=False)
def in_half(s: Scene) -> str | None:
    x = s.pick(lambda t: t.ndim == 2)
    if x is None:
        return None
    n = s.rng.choice(["{x} @ {x}.T", "F.linear({x}, {x})", "{x}.softmax(-1)", "({x} @ {x}.T).softmax(0)"]).format(
        x=f"{x}.float()"
    )
    return f"with torch.autocast('cpu', torch.bfloat16): {s.new()} = ({n}).double() * .1"
