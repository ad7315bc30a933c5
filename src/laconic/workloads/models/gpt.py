"""A decoder-only transformer over characters, as people train it today; its sizes are arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.errors import BadInput
from laconic.workloads.models.registry import network

_DEVIATION = 0.02  # of the weights at the start, as in GPT-2


class GptBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); a character attends to itself and to those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = nn.Linear(width, 3 * width, bias=False)  # query, key and value in one product
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.attention(self.attention_norm(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, length, width))
        narrowed: Tensor = self.narrow(functional.gelu(self.widen(self.mlp_norm(x))))
        return x + narrowed


class CharGPT(nn.Module):
    """Embeddings of character and place, blocks, norm, linear: logits (N, T, characters) for tokens (N, T ≤ length)."""

    def __init__(self, characters: int, length: int, layers: int, width: int, heads: int, tied: bool) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, characters, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # what is added to the stream 2·layers times starts smaller, so that the sum does not grow with depth
                depth = 2 * layers if name.endswith(("projection.weight", "narrow.weight")) else 1
                nn.init.normal_(parameter, std=_DEVIATION / math.sqrt(depth))
        if tied:
            self.head.weight = self.characters.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.characters(tokens) + self.places(places))))
        return logits


@network("char-gpt", sample=(64,), vocabulary=65)
def char_gpt(
    characters: int = 65, length: int = 64, layers: int = 4, width: int = 256, heads: int = 4, tied: bool = True
) -> nn.Module:
    """A decoder-only transformer over characters: 4 blocks of width 256, 3,181,056 parameters.

    Args:
        characters: how many there are.
        length: of the longest window.
        layers: blocks.
        width: of the embedding; the inner layer of a block is four times as wide.
        heads: of attention; they divide the width.
        tied: the embedding of characters is also the last layer's weight.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2).
    Differs: no biases and no dropout, and characters instead of tokens, as in Karpathy's nanoGPT.
    """
    if min(characters, length, layers, width, heads) < 1:
        raise BadInput("characters, length, layers, width and heads of a GPT are 1 or more")
    if width % heads:
        raise BadInput(f"the heads of a GPT divide its width, got {heads} heads and width {width}")
    return CharGPT(characters, length, layers, width, heads, tied)
