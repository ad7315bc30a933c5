"""Train a small GPT on characters in stages, one a process, with 8-bit activations between them.

torchrun --nproc-per-node=2 examples/pipeline_transformer.py
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import laconic
from laconic.parallel import Stages

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--length", type=int, default=32)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--micro", type=int, default=8, help="micro-batches of a batch")
parser.add_argument("--codec", default="dynamic8", help="of what crosses between stages; none is exact")
parser.add_argument("--steps", type=int, default=30)
config = parser.parse_args()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(config.width, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )
        self.register_buffer("hidden", torch.ones(config.length, config.length, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, attn_mask=self.hidden, need_weights=False)[0]
        after: Tensor = self.mlp(self.norms[1](x))
        return x + after


class GPT(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, config.width)
        self.places = nn.Parameter(0.02 * torch.randn(config.length, config.width))
        self.blocks = nn.Sequential(*(Block() for _ in range(config.layers)))
        self.head = nn.Linear(config.width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.characters(tokens) + self.places))
        return logits


def loss_fn(logits: Tensor, answers: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), answers.flatten())


world = laconic.init()
text = Path(argparse.__file__).read_text()
alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
tokens = torch.tensor([alphabet[character] for character in text])

torch.manual_seed(1337)  # all processes draw the same weights and the same windows
plain = GPT(len(alphabet))
sample = tokens[: config.batch // config.micro * config.length].view(-1, config.length)
model = laconic.divide(plain, Stages(cuts="auto", micro=config.micro), codec=config.codec, sample=[sample])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # of this process's stage

for step in range(config.steps):
    starts = torch.randint(len(tokens) - config.length, (config.batch, 1))
    windows = tokens[starts + torch.arange(config.length + 1)]
    loss = model.step(windows[:, :-1], windows[:, 1:], loss_fn)  # on the last process
    optimizer.step()
    optimizer.zero_grad()
    if loss is not None and (step + 1) % 3 == 0:
        print(f"step {step + 1} loss {loss.item():.3f}", flush=True)

sent = model.traffic.total_nbytes / config.steps
print(f"stage {model.stage} begins with {(('the input', *model.layout.cuts)[model.stage])}: {sent:.0f} bytes a step")
state = model.whole_state_dict()  # on process 0
if state is not None:
    plain.load_state_dict(state)
    print(f"the plain model has all {len(state)} tensors")
world.close()
