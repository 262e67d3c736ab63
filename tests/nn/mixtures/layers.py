"""Layers of experts as models write them: looped over experts that are hit, sorted, batched; packed and not."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["F64", "WIDTH", "Mixtures", "StackedMixture", "tokens"]

F64, WIDTH, INNER = torch.float64, 16, 12


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=F64) / 4)


class Looped(nn.Module):
    """One expert after the other, of those that are hit; gate and product packed, and clamped, with biases."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts, self.limit = count, 0.7
        self.gate_up, self.gate_up_bias = drawn(count, WIDTH, 2 * INNER), drawn(count, 2 * INNER)
        self.down, self.down_bias = drawn(count, INNER, WIDTH), drawn(count, WIDTH)

    def forward(self, hidden: Tensor, index: Tensor, share: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        mask = nn.functional.one_hot(index, self.num_experts).permute(2, 1, 0)
        for expert in mask.sum((-1, -2)).nonzero()[:, 0]:
            choice, token = torch.where(mask[expert])
            wide = hidden[token] @ self.gate_up[expert] + self.gate_up_bias[expert]
            gate, up = wide[..., ::2].clamp(max=self.limit), wide[..., 1::2]
            made = (gate * gate.sigmoid() * (up + 1)) @ self.down[expert] + self.down_bias[expert]
            out.index_add_(0, token, made * share[token, choice, None])
        return out


class Sorted(nn.Module):
    """Tokens sorted by their experts, in the packed rows of a matrix, and a scale of each expert's own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.n_experts = count
        self.weight = drawn(count, WIDTH, WIDTH)
        self.scale = drawn(count)
        self.norm = nn.RMSNorm(WIDTH, dtype=F64)

    def forward(self, x: Tensor, chosen: Tensor, *, share: Tensor) -> Tensor:
        flat = chosen.flatten()
        order = flat.argsort()
        loads = flat.bincount(minlength=self.n_experts).tolist()
        rows = torch.split(x.repeat_interleave(chosen.shape[1], 0)[order], loads)
        made = torch.cat([(part @ w).relu() * s for part, w, s in zip(rows, self.weight, self.scale, strict=True)])
        made = self.norm(made[order.argsort()]).unflatten(0, chosen.shape)
        out: Tensor = (made * share[..., None]).sum(1)
        return out


class Gathered(nn.Module):
    """The weights of each choice gathered; rows of experts one behind the other, and samples apart."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.moe_num_experts = count
        self.inner = nn.ParameterDict({name: drawn(count * INNER, WIDTH) for name in ("up", "down")})

    def forward(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        up, down = (w.view(self.moe_num_experts, INNER, WIDTH)[chosen] for w in self.inner.values())
        wide = torch.einsum("bsw,bskiw->bski", x, up).relu()
        return torch.einsum("bski,bskiw,bsk->bsw", wide, down, share)


KINDS: dict[str, Callable[[int], nn.Module]] = {"looped": Looped, "sorted": Sorted, "gathered": Gathered}


class Mixture(nn.Module):
    """A router, a layer of experts and one that all tokens share. Choices may lean to one expert; shares do not."""

    def __init__(self, kind: str, count: int, choices: int, favourite: int | None = None) -> None:
        super().__init__()
        self.gate, self.shared = nn.Linear(WIDTH, count, dtype=F64), nn.Linear(WIDTH, WIDTH, dtype=F64)
        self.experts, self.choices, self.kind = KINDS[kind](count), choices, kind
        lean = torch.zeros(count, dtype=F64)
        if favourite is not None:
            lean[favourite] = 1000.0
        self.lean = nn.Buffer(lean)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x if self.kind == "gathered" else x.flatten(0, 1)
        shares = self.gate(x).softmax(-1)
        chosen = (shares + self.lean).topk(self.choices, -1).indices
        made = self.experts(x, chosen, share=shares.gather(-1, chosen))
        out: Tensor = (x + made + self.shared(x)).view(shape)
        return out


class Stacked(nn.Module):
    """A row of every token for every expert; with a bias, rows that are zero would not stay so."""

    def __init__(self, count: int, biased: bool = False) -> None:
        super().__init__()
        self.gate_up, self.down = drawn(count, WIDTH, 2 * INNER), drawn(count, INNER, WIDTH)
        self.bias = drawn(count, 1, WIDTH) if biased else None

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = torch.bmm(rows.view(len(self.down), -1, WIDTH), self.gate_up).chunk(2, -1)
        made = torch.bmm(up * nn.functional.silu(gate), self.down)
        return (made if self.bias is None else made + self.bias).view(-1, WIDTH)


class StackedMixture(nn.Module):
    """A token is scaled by its share before experts, and zero for those that it did not choose (Llama 4)."""

    def __init__(self, count: int = 8, biased: bool = False) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, count, dtype=F64), Stacked(count, biased)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        logits = self.gate(flat)
        best, chosen = logits.topk(1, -1)
        shares = torch.full_like(logits, -torch.inf).scatter(1, chosen, best).sigmoid()
        rows = flat.repeat(shares.shape[1], 1) * shares.T.reshape(-1, 1)
        made = self.experts(rows).reshape(shares.shape[1], -1, WIDTH).sum(0)
        out: Tensor = x + made.view(x.shape)
        return out


class Mixtures(nn.Module):
    def __init__(self, kind: str = "looped", count: int = 8, choices: int = 2, layers: int = 2, **said: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH, dtype=F64)
        self.layers = nn.ModuleList(Mixture(kind, count, choices, **said) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def tokens(rows: int = 8) -> Tensor:
    return torch.randn(rows, 4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=F64)
