"""Steps that go every path: losses, results, optimizers, layers, buffers, arguments, and changes between steps."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, RMSprop
from torch.utils.checkpoint import checkpoint

import sbpflow as flow
from sbpflow import B, S

from .paths import Case, Given
from .pipes import F32, F64, Gpt, adamw, mlp, numbers, sgd, square_loss, text, whole, words_loss

__all__ = ["CASES", "EARLY"]

BF16 = torch.bfloat16
MANY = "needs more than one micro-batch at once"


def case(model: Callable[[], nn.Module] | None = None, run: Any = square_loss, batch: Any = None, **more: Any) -> Case:
    def seeded() -> nn.Module:
        torch.manual_seed(3)
        return (model or (lambda: mlp(3).double()))()

    more.setdefault("make", sgd)
    return Case(seeded, run, batch or (lambda at: (numbers(at), {})), **more)


def labelled(at: int, rows: int = 8) -> Given:
    return (numbers(at, rows)[0], torch.randint(6, (rows,), generator=torch.Generator().manual_seed(at))), {}


def sized(rows: int) -> Callable[[int], Given]:
    return lambda at: (numbers(at, rows), {})


# Losses


LOSSES: dict[str, Any] = {
    "mean": lambda m, x, y: F.cross_entropy(m(x), y),
    "sum": lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"),
    "ignored": lambda m, x, y: F.cross_entropy(m(x), y.where(y > 1, -100)),
    "decayed": lambda m, x, y: m(x).square().mean() + 0.01 * sum(p.square().sum() for p in m.parameters()),
    "of weights alone": lambda m, x, y: sum(p.square().sum() for p in m.parameters()),
    "of the first layer": lambda m, x, y: m[0](x).square().mean(),
    "of the first sample": lambda m, x, y: m(x)[0].sum(),
    "inputs centred": lambda m, x, y: F.mse_loss(m(x - x.mean(0)), x),
    "rows apart": lambda m, x, y: sum(m(part).square().sum() for part in x.split(2)),
    "rows together": lambda m, x, y: m(torch.cat([x, -x])).square().mean(),
    "of two dims": lambda m, x, y: m(x).square().mean().reshape(1, 1),
    "of both signs": lambda m, x, y: m(x).where(x > 0, 0.0).sum() / (x > 0).sum(),
}
APART: dict[str, Any] = {  # losses of which micro-batches have no part each
    "sqrt": lambda m, x, y: m(x).square().mean().sqrt(),
    "mul": lambda m, x, y: m(x).mean() * m(x).square().mean(),
    "matmul": lambda m, x, y: F.cross_entropy(m(x) @ m(x).t(), y),
    "std": lambda m, x, y: (m(x) / m(x).std(0)).mean(),
    "topk": lambda m, x, y: m(x).square().mean(1).topk(3)[0].mean(),
}


# Results, of a model, its arguments, and what the model made


class Pair(NamedTuple):
    loss: Any
    more: Any


RESULTS: dict[str, Any] = {
    "logits": lambda m, x, z: z,
    "turned": lambda m, x, z: z.t(),
    "by columns": lambda m, x, z: z.sum(0),
    "of the batch": lambda m, x, z: (z.mean(), z.max(), z.amin(0), z.t() @ z),
    "rows": lambda m, x, z: (z[: len(x) // 2], z[-1], z[[0, 2, 1]], z[:0], z[:, :0]),
    "more dims": lambda m, x, z: (z[:, :, None] * z[:, None]).movedim(0, 2),
    "one line": lambda m, x, z: (z.flatten(), torch.stack([z, z])),
    "an argument": lambda m, x, z: (x, x[:, 1:3], x.t()),
    "a weight": lambda m, x, z: (m[0][0].weight, m[2][0].weight * 2, sum(p.norm() for p in m.parameters())),
    "constants": lambda m, x, z: (torch.ones(3), torch.arange(len(x)), torch.eye(len(x)), z.new_zeros(len(x), 2)),
    "counts": lambda m, x, z: ((z > 0).sum(), (z > 0).sum(0), z.argmax(-1), z > 0),
    "shares": lambda m, x, z: (
        (z > 0).sum() / len(x),
        100 * (z > 0).count_nonzero() / z.numel(),
        (z > 0).double().mean(),
    ),
    "no tensors": lambda m, x, z: (None, z.shape, len(x), z.dtype, "a"),
    "nested": lambda m, x, z: {"a": [z, (z.sum(0), 3)], "b": Pair(z.t(), OrderedDict(c=None))},
    "twice": lambda m, x, z: (z, z, z.detach(), z[:, 0]),
    "of the first layer": lambda m, x, z: m[0](x),
    "complex": lambda m, x, z: torch.complex(z, z),
}
WHOLE: dict[str, Any] = {
    "sort": lambda m, x, z: z.sort(0)[0],
    "flip": lambda m, x, z: z.flip(0),
    "argmax": lambda m, x, z: z.argmax(0),
}


def also(more: Any) -> Any:
    """The squared error, and more."""
    return lambda m, x, y: (F.mse_loss(z := m(x), y), more(m, x, z))


# Optimizers


def groups(model: Any) -> Any:
    first = {"params": list(model[0].parameters()), "lr": 0.02}
    return AdamW([first, {"params": list(model[1:].parameters()), "weight_decay": 0.3}], eps=1e-4)


OPTIMIZERS: dict[str, Any] = {
    "none": None,
    "nesterov": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "amsgrad": lambda m: Adam(m.parameters(), lr=0.01, amsgrad=True, eps=1e-4),
    "rate in a tensor": lambda m: AdamW(m.parameters(), lr=torch.tensor(0.01), eps=1e-4),
    "rmsprop": lambda m: RMSprop(m.parameters(), lr=0.01, centered=True, momentum=0.5, eps=1e-4),
    "adagrad": lambda m: Adagrad(m.parameters(), lr=0.01),
    "muon": lambda m: Muon([p for p in m.parameters() if p.ndim == 2]),
    "groups": groups,
    "of one layer": lambda m: SGD(m[1].parameters(), lr=0.1),
    "two": lambda m: [SGD(m[0].parameters(), lr=0.1), AdamW(m[1:].parameters(), lr=0.1, eps=1e-4)],
}


# Layers


class Repeated(nn.Module):
    """Each sample through two weights, of copies one behind the other, as experts of Llama 4 have it."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.eye(6).repeat(2, 1, 1) * 0.7)

    def forward(self, x: Tensor) -> Any:
        x = x.repeat(2, 1) * x.softmax(-1)[:, :2].t().reshape(-1, 1)
        return torch.bmm(x.view(2, -1, 6), self.both).reshape(2, -1, 6).sum(0)


class Checked(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def told(say: Callable[[Any], Any], layers: int = 3, dtype: torch.dtype = F64) -> Callable[[], nn.Module]:
    """A model of which something was said."""

    def made() -> nn.Module:
        model = mlp(layers).to(dtype)
        say(model)
        return model

    return made


def tie(model: Any) -> None:
    model[2][0].weight = model[0][0].weight


def between(*layers: Any) -> Callable[[], nn.Module]:
    """Such layers between two others."""
    return lambda: nn.Sequential(mlp(1), *copy.deepcopy(layers), mlp(1)).double()


def half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        return F.mse_loss(model(x).float(), y)


def of(dtype: torch.dtype) -> Callable[[int], Given]:
    return lambda at: (numbers(at, dtype=dtype), {})


LAYERS: dict[str, Case] = {
    "gpt": case(
        lambda: Gpt().double(), words_loss, lambda at: (text(at), {}), make=adamw, first=["words", "places", "blocks.0"]
    ),
    "tied gpt": case(
        lambda: Gpt(tied=True).double(),
        words_loss,
        lambda at: (text(at), {}),
        make=adamw,
        first=["words", "places", "blocks.0"],
        options={"clip_grad_norm": 0.1},
    ),
    "tied": case(told(tie)),
    "tied gpt of 9": case(
        lambda: Gpt(tied=True).double(),
        words_loss,
        lambda at: (text(at, 9), {}),
        make=adamw,
        first=["blocks.0"],
    ),
    "used twice": case(lambda: (lambda one: nn.Sequential(one, mlp(1), one))(mlp(1)).double()),
    "frozen first": case(told(lambda m: m[0].requires_grad_(False))),
    "frozen last": case(told(lambda m: m[2].requires_grad_(False))),
    "frozen bias": case(told(lambda m: m[1][0].bias.requires_grad_(False))),
    "checkpoint": case(between(Checked(mlp(2)))),
    "checkpoint first": case(lambda: nn.Sequential(Checked(mlp(2)), mlp(1)).double()),
    "recomputed": case(told(lambda m: flow.nn.recompute([m[0], m[2]]))),
    "clipped": case(options={"clip_grad_norm": 0.05}),
    "clipped, of one layer": case(options={"clip_grad_norm": 0.05}, make=lambda m: SGD(m[1].parameters(), lr=0.1)),
    "zero": case(told(lambda m: flow.nn.shard(m, {"*": S(0)})), make=adamw, options={"clip_grad_norm": 0.05}),
    "copies": case(told(lambda m: flow.nn.shard(m, {"*": B}))),
    "by autograd": case(options={"backend": "autograd"}),
    "float32": case(told(id, dtype=F32), batch=of(F32), tolerance=1e-5),
    "bfloat16": case(told(id, dtype=BF16), batch=of(BF16), tolerance=5e-2),
    "complex": case(told(id, dtype=torch.complex128), lambda m, x, y: (m(x + 0j) - y).abs().square().mean()),
    "autocast": case(told(id, dtype=F32), half, of(F32), tolerance=2e-2),
    "skipped where not finite": case(options={"skip_nonfinite": True}),
    "there and back": case(told(id, 4), first=["0", "2"]),
    "last first": case(first=["2"]),
    "layer norm": case(between(nn.LayerNorm(6))),
    "batch norm": case(between(nn.BatchNorm1d(6)), refused={"pieces": MANY}, tolerance=1e-9),
    "batch norm in eval": case(between(nn.BatchNorm1d(6).eval())),
    "batch norm without statistics": case(
        between(nn.BatchNorm1d(6, track_running_stats=False)), refused={"pieces, training": MANY}, tolerance=1e-9
    ),
    "spectral norm": case(lambda: between(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)))()),
    "weight norm": case(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), mlp(1)).double()),
    "dropout in eval": case(between(nn.Dropout(0.5).eval())),
    "dropout": case(between(nn.Dropout(0.5))),
    "dropout on both": case(lambda: nn.Sequential(nn.Dropout(0.3), mlp(2), nn.Dropout(0.5)).double()),
    "dropout in a checkpoint": case(between(Checked(nn.Sequential(nn.Dropout(0.5), mlp(1))))),
    "noise by length": case(run=lambda m, x, y: F.mse_loss(m(x + torch.randn(len(x), 6, dtype=F64)), y)),
    "noise of all rows": case(run=lambda m, x, y: F.mse_loss(m(x + torch.randn(6, dtype=F64)), y)),
}


# What seems to mix samples, and does not


class Experts(nn.Module):
    """Tokens in the order of the experts that they chose, each as its expert has it, and put back."""

    def __init__(self, single: bool = False) -> None:
        super().__init__()
        self.first, self.last = mlp(1), mlp(1)
        self.router, self.up = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.to(F32 if single else F64)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        shares, chosen = self.router(x).softmax(-1).topk(2)
        keys, order = chosen.reshape(-1).sort()
        rows = F.pad(x[order // 2], (0, 2))
        if rows.dtype == F32:
            ends = torch.histc(keys.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
            rows = F.grouped_mm(rows, self.up, offs=ends)
        else:
            rows = (rows[:, None] @ self.up[keys])[:, 0]
        rows = rows[:, :6].tanh() * shares.reshape(-1)[order][:, None]
        return self.last(torch.zeros_like(x).index_add(0, order // 2, rows))


class Pictures(nn.Module):
    """Numbers of a picture in the places of a sequence that are said to be its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.look, self.last = mlp(1), nn.Linear(6, 4), mlp(1)
        self.double()

    def forward(self, x: Tensor, words: Tensor) -> Any:
        x = self.first(x)
        found = torch.cat([self.look(picture) for picture in x.view(-1, 2, 3).repeat(1, 1, 2)])
        return self.last(x.masked_scatter(words == 3, found.view(len(x), -1)[:, :2].contiguous()))


def of_pictures(m: nn.Module, x: Tensor, words: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m(x, words), y)


def words_of(each: Any) -> Callable[[int], Given]:
    """Samples, and so many words of each of which say that there is a picture."""

    def made(at: int) -> Given:
        (x, y), many = numbers(at), torch.tensor(each)[:, None]
        return (x, (torch.arange(6) < many).roll(at, 1).long() * 3, y), {}

    return made


def one_by_one(z: Tensor, x: Tensor) -> Tensor:
    """Each sample with an argument's part and a number of its own, and some of it dropped."""
    rows = zip(z, x.cumsum(0), torch.arange(len(x)), strict=True)
    each = [F.dropout(row.softmax(0) + more, 0.5) * n * (x * 2)[at] for at, (row, more, n) in enumerate(rows)]
    return torch.stack(each)


def balanced(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss that has as many samples go to every column."""
    shares: Tensor = m(x).softmax(-1)
    many = torch.histc(shares.argmax(-1).double(), bins=6, min=0, max=5) / len(x)
    return F.mse_loss(shares, y) + (many * shares.mean(0)).sum()


MIXED: dict[str, Case] = {
    "experts": case(Experts, first=["first"]),
    "experts in groups": case(lambda: Experts(single=True), first=["first"], batch=of(F32), tolerance=1e-5),
    "experts of 9": case(Experts, first=["first"], batch=sized(9)),
    "repeated": case(between(Repeated()), first=["0"]),
    "pictures": case(Pictures, of_pictures, words_of([2] * 8), first=["first"]),
    "pictures of some": case(Pictures, of_pictures, words_of([1, 3, 2, 2, 0, 4, 2, 2]), first=["first"]),
    "pictures of others": case(
        Pictures, of_pictures, words_of([3, 3, 2, 2, 0, 2, 2, 2]), first=["first"],
        refused={"pieces": r"masked_scatter at \S+:\d+ needs more than one.*batch 0 takes 10 elements, .* have 8\n"},
    ),
    "one by one": case(run=lambda m, x, y: F.mse_loss(one_by_one(m(x), x), y)),
    "balanced experts": case(run=balanced, refused={"pieces, training": r"mul\.Tensor at .*are sums over all samples"}),
    "rates drawn": case(run=lambda m, x, y: F.mse_loss(m(x * torch.rand_like(x).uniform_(0.5, 1.5)), y)),
}  # fmt: skip


# Buffers that a forward changes


class Kept(nn.Module):
    """Two layers, and buffers a, b and c that a function of them and the arguments changes before these run."""

    a: Tensor
    b: Tensor
    c: Tensor

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(6, 6), nn.Linear(6, 6), change
        for at, name in enumerate("abc"):
            self.register_buffer(name, torch.arange(48.0).reshape(8, 6) * at)
        self.register_buffer("row", torch.zeros(6))
        self.register_buffer("square", torch.zeros(6, 6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.double()

    def forward(self, x: Tensor, more: Tensor | None = None) -> Any:
        found = self.change(self, x if more is None else more)
        return self.last(self.first(x)) * (1.0 if found is None else found)


def counted(m: Any, x: Tensor) -> None:
    m.count += 1


def rows_counted(m: Any, x: Tensor) -> None:
    m.count += len(x)


def read_back(m: Any, x: Tensor) -> Tensor:
    m.a.add_(1)
    return m.a[0]  # type: ignore[no-any-return]


def put_in(m: Any, x: Tensor) -> None:
    m.a = m.a + 1


def weight_averaged(m: Any, x: Tensor) -> None:
    m.a[:6].mul_(0.9).add_(m.first.weight.detach(), alpha=0.1)


def constant(m: Any, x: Tensor) -> None:
    m.a.copy_(torch.arange(6.0))


def weight(m: Any, x: Tensor) -> None:
    m.a[:6].copy_(m.last.weight.detach())
    m.square.copy_(m.last.weight.detach())


def argument(m: Any, x: Tensor) -> None:
    m.a[0] = 2
    m.row.copy_(x)


def other(m: Any, x: Tensor) -> None:
    m.a.copy_(m.b)
    m.b.add_(1)


def shifted(m: Any, x: Tensor) -> None:
    m.c.copy_(m.b)
    m.b.copy_(m.a)
    m.a.add_(1)


def shifted_back(m: Any, x: Tensor) -> None:
    m.a.copy_(m.b)
    m.b.copy_(m.c)
    m.c.add_(1)


def swapped(m: Any, x: Tensor) -> None:
    m.b, m.c = m.c, m.b


def rolled(m: Any, x: Tensor) -> None:
    m.c.copy_(m.c.roll(1, 0))


def mean(m: Any, x: Tensor) -> None:
    m.a[0].mul_(0.9).add_(x.detach().mean(0), alpha=0.1)


def rows(m: Any, x: Tensor) -> None:
    m.a.copy_(x.detach())


def masked(at: int) -> Given:
    return (*numbers(at), torch.arange(6.0, dtype=F64) + at), {}


HELD = {"pieces": r"the buffer a is changed by what one micro-batch holds"}
CHANGED = [
    weight,
    counted,
    rows_counted,
    read_back,
    put_in,
    weight_averaged,
    constant,
    other,
    shifted,
    shifted_back,
    swapped,
    rolled,
]
BUFFERS: dict[str, Case] = {
    **{f.__name__: case(partial(Kept, f), first=["first"]) for f in CHANGED},
    **{f.__name__: case(partial(Kept, f), first=["first"], refused=HELD) for f in (mean, rows)},
    "argument": case(partial(Kept, argument), lambda m, x, y, more: F.mse_loss(m(x, more), y), masked, first=["first"]),
}


# Arguments


class Named(NamedTuple):
    x: Tensor
    more: dict[str, Any]


def with_grad(at: int) -> Given:
    x, y = numbers(at)
    return (x.requires_grad_(), y), {}


def written(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x[:, 0] = 0
    y.add_(1)
    return F.mse_loss(m(x), y)


def filled(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z: Tensor = m(x)
    with torch.no_grad():
        y.copy_(z)
    return z.square().mean()


def scaled(m: nn.Module, x: Tensor, y: Tensor, k: Any, flag: bool = True) -> Tensor:
    loss: Tensor = F.mse_loss(m(x * k), y) if flag else m(x).mean()
    return loss


def views(at: int) -> Given:
    both = torch.cat(numbers(at), 1)
    return (both[:, :6], both[:, 6:]), {}


NO_ROWS = {"pieces": "was given no tensor to cut"}
TAKEN = rf"{MANY}.*6 samples were taken for a batch, as the argument 0 has them.*; 1 has 8 "
FEW = {"pieces": "2 micro-batches, and was given a batch of"}


def ones(m: nn.Module, k: Any) -> Tensor:
    """A batch that the step makes itself."""
    return (m(torch.ones(8, 6, dtype=F64)) * k).square().mean()  # type: ignore[no-any-return]


ARGUMENTS: dict[str, Case] = {
    "by name": case(batch=lambda at: ((), dict(zip("yx", numbers(at)[::-1], strict=True)))),
    "nested": case(
        run=lambda m, of: F.mse_loss(m(of.x), of.more["y"][0]) * of.more["k"],
        batch=lambda at: ((Named(numbers(at)[0], {"y": [numbers(at)[1]], "k": 0.5}),), {}),
    ),
    "a number": case(run=scaled, batch=lambda at: ((*numbers(at), 0.5), {"flag": True})),
    "a number in a tensor": case(run=scaled, batch=lambda at: ((*numbers(at), torch.tensor(0.5 + at)), {})),
    "a mask": case(run=scaled, batch=masked),
    "a mask as long as the batch": case(run=scaled, batch=lambda at: ((*numbers(at, 6), torch.arange(6.0)), {})),
    "a mask before the batch": case(
        run=lambda m, k, x, y: scaled(m, x, y, k),
        batch=lambda at: ((torch.arange(6.0), *numbers(at)), {}),
        refused=dict.fromkeys(["pieces, training", "pieces, stages"], TAKEN),
    ),
    "twice": case(batch=lambda at: ((numbers(at)[0],) * 2, {})),
    "views": case(batch=views),
    "turned": case(batch=lambda at: ((numbers(at, 6, 8)[0].t(), numbers(at)[1]), {})),
    "expanded": case(batch=lambda at: ((numbers(at, 1)[0].expand(8, 6), numbers(at)[1]), {})),
    "time first": case(batch=lambda at: (tuple(torch.stack([x] * 3) for x in numbers(at)), {})),
    "written": case(run=written),
    "filled with a result": case(run=filled),
    "that wants a gradient": case(batch=with_grad, refused={"actors, training": "the argument 0 requires grad, which"}),
    "none of tensors": case(run=ones, batch=lambda at: ((2,), {}), refused=NO_ROWS),
    "no rows": case(run=ones, batch=lambda at: ((torch.tensor(2.0 + at),), {}), refused=NO_ROWS),
    **{f"{rows} rows": case(batch=sized(rows)) for rows in (9, 5, 3, 2)},
    **{f"{rows} rows": case(batch=sized(rows), refused=FEW) for rows in (1, 0)},
    "rows that change": case(batch=lambda at: (numbers(at, [8, 5, 9][at]), {})),
}


# Changes between two steps, of a model and its optimizer


def loaded(m: nn.Module, optimizer: Any, at: int) -> None:
    m.load_state_dict({name: whole(x) * 0.9 for name, x in m.state_dict().items()})


def grown(m: Any, optimizer: Any, at: int) -> None:
    if optimizer is not None and at == 1:
        optimizer.add_param_group({"params": list(m[2].parameters()), "lr": 0.01})


def slower(m: nn.Module, optimizer: Any, at: int) -> None:
    for group in optimizer.param_groups if optimizer is not None else ():
        group["lr"] *= 0.5


def weights_written(m: Any, optimizer: Any, at: int) -> None:
    with torch.no_grad():
        m[0][0].weight.mul_(0.5)


def hooked(m: Any, optimizer: Any, at: int) -> None:
    if at == 1:
        m[0][0].weight.register_hook(lambda grad: grad * 2)


def gradients_halved(m: nn.Module, optimizer: Any, at: int) -> None:
    for p in m.parameters():
        p.grad = p.grad if p.grad is None else p.grad * 0.5


CHANGES: dict[str, Case] = {
    "loaded": case(between=loaded),
    "evaluated": case(between(nn.Dropout(0.0)), between=lambda m, o, at: m.train(at % 2 == 0), steps=4),
    "first frozen": case(between=lambda m, o, at: m[0].requires_grad_(at % 2 == 0), steps=4),
    "last frozen": case(between=lambda m, o, at: m[2].requires_grad_(at % 2 == 0), steps=4, make=None),
    "slower": case(between=slower),
    "written": case(between=weights_written),
    "grown": case(between=grown, make=lambda m: SGD(m[:2].parameters(), lr=0.1)),
    "hooked": case(between=hooked),
    "gradients gone": case(between=lambda m, o, at: m.zero_grad(), make=None),
    "gradients zero": case(between=lambda m, o, at: m.zero_grad(set_to_none=False), make=None),
    "gradients halved": case(between=gradients_halved, make=None),
    "another layer": case(between=lambda m, o, at: m.insert(1, nn.Tanh())),
}


def named(what: str, cases: Mapping[str, Case]) -> dict[str, Case]:
    return {f"{what}: {name}": each for name, each in cases.items()}


# Where optimizers of stages step before they know of all gradients
def transposed(m: Any, x: Tensor) -> None:
    m.square.copy_(m.last.weight.detach().t())


EARLY = {
    **{
        f"a buffer becomes {name}": case(partial(Kept, of), first=["first"], options={"post_validation": True})
        for name, of in {"a weight": weight, "a view of a weight": transposed}.items()
    },
    **{
        f"no optimizer has layer {layer}": case(make=make, options={"post_validation": True, "skip_nonfinite": True})
        for layer, make in {
            0: lambda m: SGD(m[1].parameters(), lr=0.1),
            1: lambda m: SGD(m[0].parameters(), lr=0.1),
        }.items()
    },
}
CASES: dict[str, Case] = {
    **named("loss", {name: case(run=run, batch=labelled) for name, run in LOSSES.items()}),
    **named(
        "loss",
        {
            name: case(run=run, batch=labelled, refused={"pieces, training": rf"{name}\b.*{MANY}"})
            for name, run in APART.items()
        },
    ),
    "loss: amax": case(run=lambda m, x, y: m(x).amax(), refused={"pieces, training": "no sum or mean over samples"}),
    **named("result", {name: case(run=also(more), tolerance=1e-6) for name, more in RESULTS.items()}),
    **named(
        "result of 9", {name: case(run=also(more), batch=sized(9), tolerance=1e-6) for name, more in RESULTS.items()}
    ),
    **named(
        "result",
        {
            name: case(run=also(more), refused={"pieces, training": rf"{name}\b.*{MANY}"})
            for name, more in WHOLE.items()
        },
    ),
    "result: a dict": case(run=lambda m, x, y: {"loss": F.mse_loss(z := m(x), y), "out": z}),
    "result: a named tuple": case(run=lambda m, x, y: Pair(F.mse_loss(z := m(x), y), z)),
    **named("optimizer", {name: case(make=make) for name, make in OPTIMIZERS.items()}),
    **named("layers", LAYERS),
    **named("mixed", MIXED),
    **named("buffer", BUFFERS),
    **named("arguments", ARGUMENTS),
    **named("changed", CHANGES),
}
