"""Models as the trainers of the tables have them, on meta: GPT of Megatron-LM, and Llama of torchtitan.

Those of transformers compute the same, but by more kernels: a mask that is added, float32 softmax by casts, rotary
embeddings in five ops. What trainers run as one kernel is one op here. In a GPT the fused softmax has scale and mask
inside, and dropout of the scores is a kernel behind it; a bias and dropout are added with the residual.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .setting import Architecture

__all__ = ["GPT", "EvenLlama", "Fused", "GatedMLP", "Llama", "LlamaAttention", "LlamaBlock"]


class Scores(nn.Module):
    """Attention that is not fused: what selective recomputation runs again. What is kept is 5 bytes a score: the
    softmax, its part that dropout leaves, and which that is. Scaling is inside of the kernels."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.matmul(query, key.transpose(-1, -2))
        share = F.softmax(scores, -1)
        kept = torch.ops.sbpflow.kept_on_card(share.detach(), 0.1)  # a byte an element
        return torch.matmul(share * kept, value)


class Attention(nn.Module):
    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.heads, self.width = of.heads, of.hidden // of.heads
        self.qkv, self.proj = nn.Linear(of.hidden, 3 * of.hidden), nn.Linear(of.hidden, of.hidden)
        self.core = Fused(of) if of.fused else Scores()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        packed = self.qkv(x).view(batch, length, self.heads, 3 * self.width)
        made = self.core(*packed.transpose(1, 2).chunk(3, -1))
        found: Tensor = self.proj(made.transpose(1, 2).reshape(batch, length, -1))
        return found


class MLP(nn.Module):
    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(of.hidden, 4 * of.hidden), nn.Linear(4 * of.hidden, of.hidden)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.gelu(self.up(x)))
        return found


class Block(nn.Module):
    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(of.hidden), Attention(of)
        self.norm2, self.mlp = nn.LayerNorm(of.hidden), MLP(of)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        found: Tensor = x + self.mlp(self.norm2(x))
        return found


class Embedding(nn.Module):
    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(of.vocabulary, of.hidden), nn.Embedding(of.length, of.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.words(tokens) + self.places.weight
        return found


class GPT(nn.Module):
    """The head has the table of words, as published ones do."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.embedding = Embedding(of)
        self.layers = nn.ModuleList(Block(of) for _ in range(of.layers))
        self.norm, self.head = nn.LayerNorm(of.hidden), nn.Linear(of.hidden, of.vocabulary, bias=False)
        self.head.weight = self.embedding.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(self.norm(x))
        return found


class LlamaAttention(nn.Module):
    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.width = of.hidden // of.heads
        few = of.keys * self.width
        self.q, self.o = (nn.Linear(of.hidden, of.hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(of.hidden, few, bias=False) for _ in range(2))
        self.core: nn.Module = Fused(of)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part(x).view(batch, length, -1, self.width).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        made = self.core(query * turns, key * turns, value)
        found: Tensor = self.o(made.transpose(1, 2).reshape(batch, length, -1))
        return found


class Fused(nn.Module):
    """Causal attention in one kernel."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.shared = of.keys not in (0, of.heads)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.shared)


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return found


class LlamaBlock(nn.Module):
    def __init__(
        self, width: int, attention: nn.Module, mlp: nn.Module, norm: Callable[[int], nn.Module] = nn.RMSNorm
    ) -> None:
        super().__init__()
        self.norm1, self.attention = norm(width), attention
        self.norm2, self.mlp = norm(width), mlp

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), turns)
        found: Tensor = x + self.mlp(self.norm2(x))
        return found


class Words(nn.Module):
    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.words = nn.Embedding(of.vocabulary, of.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.words(tokens)
        return found


class Head(nn.Module):
    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(of.hidden), nn.Linear(of.hidden, of.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(x))
        return found


class Llama(nn.Module):
    """Rotary embeddings are a product with a table: a kernel that reads and writes queries and keys."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.words = nn.Embedding(of.vocabulary, of.hidden)
        self.layers = nn.ModuleList(self.block(of, at) for at in range(of.layers))
        self.norm: nn.Module = nn.RMSNorm(of.hidden)
        self.head = nn.Linear(of.hidden, of.vocabulary, bias=False)
        self.register_buffer("turns", torch.empty(of.length, self.turned(of), dtype=torch.bfloat16))

    def block(self, of: Architecture, at: int) -> nn.Module:
        return LlamaBlock(of.hidden, LlamaAttention(of), GatedMLP(of.hidden, of.ffn))

    def turned(self, of: Architecture) -> int:
        """Dims of a head that are turned."""
        return of.hidden // of.heads

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        found: Tensor = self.head(self.norm(x))
        return found


class EvenLlama(Llama):
    """Words and head are entries of the list of layers: pieces of stages of their own, as Llama 3 has them."""

    def __init__(self, of: Architecture) -> None:
        super().__init__(of)
        self.layers = nn.ModuleList([Words(of), *self.layers, Head(of)])
        del self.words, self.norm, self.head

    def forward(self, tokens: Tensor) -> Tensor:
        words, *blocks, head = self.layers
        x = words(tokens)
        for block in blocks:
            x = block(x, self.turns)
        found: Tensor = head(x)
        return found
