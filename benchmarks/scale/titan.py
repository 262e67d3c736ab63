"""The Llama of torchtitan, op by op as its trainer writes it: norms and rotary embeddings in float32, and keys and
values that are repeated for all heads. A compiler makes few kernels of these; without one each of them is a kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import GatedMLP, Llama, LlamaAttention, LlamaBlock
from .setting import Architecture

__all__ = ["TitanLlama"]


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        found: Tensor = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight
        return found


class Repeated(nn.Module):
    """Attention whose keys and values are repeated before it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        many = query.shape[1] // key.shape[1]
        keys, values = (part.repeat_interleave(many, 1) for part in (key, value))
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True)


class TitanAttention(LlamaAttention):
    def __init__(self, of: Architecture) -> None:
        super().__init__(of)
        self.core = Repeated()

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (part(x).view(batch, length, -1, self.width) for part in (self.q, self.k, self.v))
        turned = [(part.float() * turns[:, None].float()).type_as(part) for part in (query, key)]
        made = self.core(*(part.transpose(1, 2) for part in (*turned, value)))
        found: Tensor = self.o(made.transpose(1, 2).reshape(batch, length, -1))
        return found


class TitanLlama(Llama):
    def __init__(self, of: Architecture) -> None:
        super().__init__(of)
        self.norm = Norm(of.hidden)

    def block(self, of: Architecture, at: int) -> nn.Module:
        return LlamaBlock(of.hidden, TitanAttention(of), GatedMLP(of.hidden, of.ffn), Norm)
