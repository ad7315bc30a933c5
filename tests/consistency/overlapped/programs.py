"""Models, optimisers and ways to train, for the tests that compare overlapped with plain training bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic.transports.world import World, current

VOCABULARY, LENGTH = 40, 12


class Tied(nn.Module):
    """A transformer whose embedding is its last layer too; attention takes its output weights past their module."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x + self.fall(F.gelu(self.rise(x)))).mean(1)


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.lstm = nn.LSTM(24, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


class Branches(nn.Module):
    """A layer that is used twice, one that each rank uses in other steps, one that nobody uses, one used by name only.

    Each is a bucket of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.shared, self.sometimes, self.never = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.borrowed = nn.Linear(64, VOCABULARY)
        self.calls = current().rank

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.shared(torch.relu(self.shared(self.embedding(tokens).mean(1))))
        self.calls += 1
        if self.calls % 3 == 0:
            x = x + self.sometimes(x)
        return F.linear(x, self.borrowed.weight, self.borrowed.bias)


class Images(nn.Module):
    """A convolutional network with normalisation, on tokens taken as pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 12, VOCABULARY),
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        pixels = (tokens.float() / VOCABULARY).view(-1, 1, LENGTH, 1).expand(-1, 1, LENGTH, 4)
        return self.layers(pixels)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied, "recurrent": Recurrent, "branches": Branches, "images": Images,
}  # fmt: skip
OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


def batch(rank: int, step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10_000 * part + 100 * step + rank)
    tokens = torch.randint(VOCABULARY, (6, LENGTH), generator=draw)
    return tokens, tokens.sum(1) % VOCABULARY


def digest(model: nn.Module, *, buffers: bool = True) -> str:
    whole = hashlib.sha256()
    for value in model.state_dict().values() if buffers else model.parameters():
        whole.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def compare(cases: list[tuple[str, str, str, str]], steps: int) -> list[dict[str, Any]]:
    """On every rank: train each case plainly and overlapped; what differs, and what was hidden."""
    torch.set_num_threads(1)
    found = []
    with laconic.init(timeout_s=60) as world:
        for model, optimiser, codec, way in cases:
            plain, hidden = (
                train(world, model, optimiser, codec, steps, overlap=overlap, way=way) for overlap in (False, None)
            )
            differs = [name for name in plain if name != "explained" and plain[name] != hidden[name]]
            found.append({"differs": differs, **{name: hidden[name] for name in ("explained", "parameters")}})
    return found


def _evaluate(
    net: nn.Module, inner: torch.optim.Optimizer, tokens: Tensor, target: Tensor, losses: list[float]
) -> Tensor:
    inner.zero_grad()
    loss = F.cross_entropy(net(tokens), target)
    loss.backward()
    losses.append(loss.item())
    return loss


def train(
    world: World, model: str, optimiser: str, codec: Any, steps: int, *, overlap: bool | None, way: str = "plain"
) -> dict[str, Any]:
    """Train; returns the losses, which show every forward's weights, and digests of the weights and the job's state."""
    torch.manual_seed(3)
    net = MODELS[model]()
    half = [p for n, p in net.named_parameters() if n.endswith("bias")]
    rest = [p for n, p in net.named_parameters() if not n.endswith("bias")]
    inner = OPTIMISERS[optimiser]([{"params": rest}, {"params": half, "lr": 0.01}])
    plan = torch.optim.lr_scheduler.ExponentialLR(inner, 0.97)
    job = laconic.distribute(net, inner, codec=codec, overlap=overlap, world=world, message_nbytes=1 << 11)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    forward = torch.compile(net, backend="eager") if way == "compiled" else net
    losses: list[float] = []
    saved: list[str] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=4)  # overflows in the first steps
    for step in range(steps):
        inner.zero_grad(set_to_none=way != "zeros")
        parts = 3 if way in ("accumulated", "no_sync") else 1
        for part in range(parts):
            tokens, target = batch(world.rank, step, part)
            if way == "no_sync" and part < parts - 1:
                with job.no_sync():
                    F.cross_entropy(net(tokens), target).backward()
                continue
            if way == "closure":
                inner.step(partial(_evaluate, net, inner, tokens, target, losses))  # type: ignore[arg-type]
                continue
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                loss = F.cross_entropy(forward(tokens), target)
            (scaler.scale(loss) if way == "scaled" else loss).backward()
            losses.append(loss.item())
        if way == "clamped":
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.clamp_(-1e-3, 1e-3)
        if way == "talking":
            laconic.all_reduce(torch.tensor(losses[-1]), algorithm="tree", group=world)
        if way == "clipped":
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        if way == "scaled":
            scaler.step(inner)
            scaler.update()
        elif way != "closure":
            inner.step()
        plan.step()
        if way == "looked at" and step % 3 == 2:
            saved.append(digest(net))
            with torch.inference_mode():
                losses.append(F.cross_entropy(net.eval()(batch(0, 999)[0]), batch(0, 999)[1]).item())
            net.train()
        if way == "saved" and step == steps // 2:
            kept = inner.state_dict()
            inner.load_state_dict(kept)
    job.finish()
    found = {"losses": losses, "weights": digest(net), "saved": saved, "explained": job.explain()}
    found["parameters"] = digest(net, buffers=False)
    found["records"] = len(job.records)
    found["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found["sent_nbytes"] = sum(record.sent_nbytes for record in job.records)
    job.close()
    found["closed"] = digest(net)
    return found
