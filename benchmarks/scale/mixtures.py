"""Models of experts, on meta: Mixtral, and DeepSeek with latent attention, a shared expert and dense first layers.

A router chooses experts of each token; `flow.nn.experts` is the layer, which a plan of experts sends tokens to.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpflow as flow

from .models import GatedMLP, Llama, LlamaAttention, LlamaBlock
from .setting import Architecture

__all__ = ["DeepSeek", "Mixtral"]

ROTARY = 64  # dims of a DeepSeek head that are turned, beside those that are not


class Experts(nn.Module):
    """All experts of a layer, gated."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(of.experts, of.hidden, 2 * of.expert_ffn))
        self.down = nn.Parameter(torch.empty(of.experts, of.expert_ffn, of.hidden))

    def forward(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        return flow.nn.experts(x, chosen, share, self.up, self.down)


class Mixture(nn.Module):
    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.chosen = of.chosen
        self.router, self.experts = nn.Linear(of.hidden, of.experts, bias=False), Experts(of)
        self.shared = GatedMLP(of.hidden, of.shared * of.expert_ffn) if of.shared else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, chosen = self.router(tokens).softmax(-1).topk(self.chosen, -1)
        found: Tensor = self.experts(tokens, chosen, share / share.sum(-1, keepdim=True)).view_as(x)
        return found if self.shared is None else found + self.shared(x)


class LatentAttention(nn.Module):
    """Queries, and keys and values, each by way of a narrow product; all heads have the same turned part of a key."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.heads, self.width = of.heads, 128
        query, keys = of.latent
        self.q_down, self.q_norm = nn.Linear(of.hidden, query, bias=False), nn.RMSNorm(query)
        self.q_up = nn.Linear(query, of.heads * (self.width + ROTARY), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(of.hidden, keys, bias=False), nn.RMSNorm(keys)
        self.turned = nn.Linear(of.hidden, ROTARY, bias=False)
        self.kv_up = nn.Linear(keys, of.heads * 2 * self.width, bias=False)
        self.o = nn.Linear(of.heads * self.width, of.hidden, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.q_up(self.q_norm(self.q_down(x))).view(batch, length, self.heads, -1).transpose(1, 2)
        packed = self.kv_up(self.kv_norm(self.kv_down(x))).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = packed.chunk(2, -1)
        plain, turned = query.split([self.width, ROTARY], -1)
        same = (self.turned(x) * turns).unsqueeze(1).expand(-1, self.heads, -1, -1)
        query, key = torch.cat([plain, turned * turns], -1), torch.cat([key, same], -1)
        made = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: Tensor = self.o(made.transpose(1, 2).reshape(batch, length, -1))
        return found


class Mixtral(Llama):
    """Llama with experts in each layer."""

    attention: type[nn.Module] = LlamaAttention

    def block(self, of: Architecture, at: int) -> nn.Module:
        mlp = GatedMLP(of.hidden, of.ffn) if at < of.dense else Mixture(of)
        return LlamaBlock(of.hidden, self.attention(of), mlp)

    def turned(self, of: Architecture) -> int:
        return ROTARY if of.latent[0] else super().turned(of)


class DeepSeek(Mixtral):
    """The same with latent attention."""

    attention = LatentAttention
