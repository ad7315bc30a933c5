"""Train a small GPT on characters with DDP: a plain torchrun script, in the style of nanoGPT, that knows no Laconic.

torchrun --nproc-per-node=2 examples/char_gpt.py --text input.txt      (or just python …)
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--text", default=argparse.__file__, help="what is learnt; by default, some Python")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--batch", type=int, default=8, help="windows a step, of each process")
parser.add_argument("--steps", type=int, default=20)
config = parser.parse_args()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(2))
        self.attention = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(self.norms[0](x)).unflatten(2, (3, config.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(2))
        after: Tensor = self.mlp(self.norms[1](x))
        return x + after


class GPT(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, config.width)
        self.places = nn.Embedding(config.length, config.width)
        self.blocks = nn.Sequential(*(Block() for _ in range(config.layers)))
        self.head = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, characters))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.characters(tokens) + self.places.weight[: tokens.shape[1]]))
        return logits


ddp = "RANK" in os.environ  # torchrun sets it
if ddp:
    dist.init_process_group("gloo")
rank = dist.get_rank() if ddp else 0

text = Path(config.text).read_text()
alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
tokens = torch.tensor([alphabet[character] for character in text])
torch.manual_seed(1337)
model: nn.Module = GPT(len(alphabet))
if ddp:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))

torch.manual_seed(1337 + rank)  # every process draws its own windows
times = []
for step in range(config.steps):
    begun = time.perf_counter()
    starts = torch.randint(len(tokens) - config.length, (config.batch, 1))
    windows = tokens[starts + torch.arange(config.length + 1)]
    loss = functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    times.append(time.perf_counter() - begun)
    if rank == 0 and (step + 1) % 5 == 0:
        recent = sorted(times[-5:])[2]
        print(f"step {step + 1}: loss {loss.item():.3f}, {1000 * recent:.0f} ms a step")
if ddp:
    dist.destroy_process_group()
