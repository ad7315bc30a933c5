"""A GPT of 6.7 billion weights, built from shapes alone: what `laconic plan` needs of a large model.

laconic plan gpt_7b:model -n 16 --device-profile h100 --input-shape 2048 --input-type int64 --batch 16
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.first(x)
        x = x + self.attention(normal, normal, normal, need_weights=False)[0]
        wide: torch.Tensor = nn.functional.gelu(self.up(self.second(x)))
        changed: torch.Tensor = self.down(wide)
        return x + changed


def model(
    layers: int = 32, width: int = 4096, heads: int = 32, hidden: int = 16384, words: int = 32000
) -> nn.Sequential:
    with torch.device("meta"):  # shapes without memory
        blocks = [Block(width, heads, hidden) for _ in range(layers)]
        return nn.Sequential(nn.Embedding(words, width), *blocks, nn.Linear(width, words))


if __name__ == "__main__":
    print(f"{sum(parameter.numel() for parameter in model().parameters()):,} weights")
