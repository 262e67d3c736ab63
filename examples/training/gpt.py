"""The GPT of examples/train.py, in plain torch."""

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT"]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_in, self.norm_up, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_in(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_up(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self, words: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 32) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for module in self.modules():
            self._init_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        """The first values of what a module holds itself, also where it was made on meta."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()

    def forward(self, text: Tensor, following: Tensor | None = None) -> Tensor:
        """The loss or, if it is not told what follows, scores of what may."""
        x = self.words(text) + self.places.weight
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores if following is None else F.cross_entropy(scores.flatten(0, 1), following.flatten())
