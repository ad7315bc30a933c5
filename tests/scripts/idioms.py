"""Small training scripts with the idioms of well-known ones; what is theirs is said above each.

They are trained as they are by every way of `ways.py`.
"""

from __future__ import annotations

import io
import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.scripts.ways import Run

STEPS = 6


class TinyGpt(nn.Module):
    """Tied embedding, a block of attention, loss from the model itself."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(32, width), nn.Embedding(16, width)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]])
        x = x + self.attention(x, x, x, need_weights=False)[0]
        logits = self.head(x + self.mlp(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def optimizer(self, lr: float) -> torch.optim.AdamW:
        """Weights decay, biases and norms do not."""
        decay = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr)


def nanogpt(run: Run) -> None:
    """Sets `require_backward_grad_sync` for accumulation; loads the optimiser before DDP; rates by hand; clips."""
    model = TinyGpt()
    optimizer = model.optimizer(1e-3)
    model(torch.arange(16).view(2, 8), torch.arange(16).view(2, 8))[1].backward()
    optimizer.step()
    checkpoint = optimizer.state_dict()
    model = TinyGpt()
    optimizer = model.optimizer(1e-3)
    optimizer.load_state_dict(checkpoint)
    ddp = DistributedDataParallel(model)
    run.join(ddp, optimizer)
    micro_steps, scaler = 3, torch.amp.GradScaler("cpu", enabled=False)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + math.cos(math.pi * step / STEPS)) / 2
        total = 0.0
        for micro in range(micro_steps):
            ddp.require_backward_grad_sync = micro == micro_steps - 1
            with nullcontext():
                tokens = run.tokens(10 * step + micro, 4, 9)
                _, loss = ddp(tokens[:, :-1], tokens[:, 1:])
                loss = loss / micro_steps
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        run.step(total)
        if step == 3:  # rank 0 evaluates the model itself, and saves
            model.eval()
            if run.rank == 0:
                with torch.no_grad():
                    model(run.tokens(7, 4, 8), run.tokens(8, 4, 8))
                torch.save({"model": model.state_dict()}, io.BytesIO())
            model.train()


def mingpt(run: Run) -> None:
    """A Trainer class that runs training and test batches through one function, and clips."""
    model = TinyGpt()
    optimizer = model.optimizer(2e-3)
    ddp = DistributedDataParallel(model)
    run.join(ddp, optimizer)

    def run_batch(step: int, train: bool) -> float:
        tokens = run.tokens(step, 6, 9)
        with torch.set_grad_enabled(train), torch.autocast("cpu", torch.bfloat16, enabled=False):
            _, loss = ddp(tokens[:, :-1], tokens[:, 1:])
        if train:
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 50.0)
            optimizer.step()
        return float(loss.item())

    for step in range(STEPS):
        run.step(run_batch(step, train=True))
        if step % 3 == 2:
            run_batch(1000 + step, train=False)


def imagenet(run: Run) -> None:
    """BatchNorm, momentum, a schedule, and an evaluation through the wrapped model after each epoch."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    ddp = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    run.join(ddp, optimizer)
    for epoch in range(STEPS // 2):
        ddp.train()
        for part in range(2):
            step = 2 * epoch + part
            images = (1 + 3 * run.rank) * run.batch(step, 8, 3, 8, 8) + run.rank  # ranks see other data
            loss = criterion(ddp(images), run.tokens(step, 8, below=10))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss)
        ddp.eval()
        with torch.no_grad():
            run.losses.append(float(criterion(ddp(run.batch(50, 8, 3, 8, 8)), run.tokens(50, 8, below=10))))
        scheduler.step()


class LanguageModel(nn.Module):
    """An LSTM whose state goes from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(32, 24), nn.Linear(40, 32)
        self.rnn = nn.LSTM(24, 40, 2)

    def forward(self, tokens: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output), hidden


def lstm(run: Run) -> None:
    """Hidden states that are detached, `model.zero_grad()`, clipping, a rate that is divided after an evaluation."""
    ddp = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.5)
    run.join(ddp, optimizer)
    hidden = (torch.zeros(2, 4, 40), torch.zeros(2, 4, 40))
    for step in range(STEPS):
        ddp.train()
        tokens = run.tokens(step, 9, 4)
        ddp.zero_grad()
        hidden = (hidden[0].detach(), hidden[1].detach())
        output, hidden = ddp(tokens[:-1], hidden)
        loss = F.cross_entropy(output.flatten(0, 1), tokens[1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 25.0)
        optimizer.step()
        run.step(loss)
        if step % 3 == 2:
            ddp.eval()
            with torch.no_grad():
                ddp(tokens, hidden)
            for group in optimizer.param_groups:
                group["lr"] /= 4


def dcgan(run: Run) -> None:
    """Two models and optimisers; two backwards a step of one, and a third through it that only the other steps by."""
    generator = nn.Sequential(nn.Linear(8, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
    critic = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    netg, netd = DistributedDataParallel(generator), DistributedDataParallel(critic)
    optimizer_d = torch.optim.Adam(netd.parameters(), 2e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(netg.parameters(), 2e-4, betas=(0.5, 0.999))
    run.join(netd, optimizer_d)
    run.join(netg, optimizer_g)
    criterion = nn.BCEWithLogitsLoss()
    for step in range(STEPS):
        netd.zero_grad()
        criterion(netd(run.batch(step, 8, 64)), torch.ones(8, 1)).backward()
        fake = netg(run.batch(1000 + step, 8, 8))
        loss_d = criterion(netd(fake.detach()), torch.zeros(8, 1))
        loss_d.backward()
        optimizer_d.step()
        netg.zero_grad()
        loss_g = criterion(netd(fake), torch.ones(8, 1))
        loss_g.backward()
        optimizer_g.step()
        run.step(loss_d + loss_g)


def fsdp2(run: Run) -> None:
    """`fully_shard` on the blocks and the model."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    run.join(model, optimizer)
    for step in range(STEPS):
        loss = model(run.batch(step, 8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)


class Finetuned(nn.Module):
    """A body, a head, and later a second head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 8)
        self.second: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x) if self.second is None else self.head(x) + self.second(x)


def finetune(run: Run) -> None:
    """Unfreezes the body in mid-training and adds a head; DDP alone has to be made anew for that."""
    model = Finetuned()
    model.body.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run.join(ddp, optimizer)
    for step in range(3 * STEPS):
        if step == STEPS:
            model.body.requires_grad_(True)
        if step == 2 * STEPS:
            torch.manual_seed(5 + run.rank * ("dynamic8" in run.way))  # ranks that differ begin with rank 0's
            model.second = nn.Linear(64, 8)
            optimizer.add_param_group({"params": model.second.parameters(), "lr": 0.05})
        if run.way == "ddp" and step % STEPS == 0:
            ddp = DistributedDataParallel(model)
        loss = ddp(run.batch(step, 8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
