"""How many pairs a second skip-gram trains, beside a plain torch loop over the same pairs.

Caller: `python -m benchmarks code --task skip-gram`. The size is that of the published embedding; statements are drawn
by Zipf's law, as they occur in programs. One thread.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch

from laconic_code.skipgram import Integers, Training, train
from laconic_lab.bench.turns import SECONDS, Turns, Way

STATEMENTS, DIM, NEGATIVES = 8_565, 200, 5
PAIRS, PLAIN_PAIRS, REPEATS, BATCH = 400_000, 20_000, 5, 64


def run(pairs: int = PAIRS, plain_pairs: int = PLAIN_PAIRS, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs a second of the kernel and of the plain loop, medians of several repeats on one thread."""
    weights = 1 / np.arange(1, STATEMENTS + 1)
    drawn = np.random.default_rng(seed).choice(STATEMENTS, (pairs, 2), p=weights / weights.sum()).astype(np.int32)
    how = Training(dim=DIM, negatives=NEGATIVES, epochs=1, seed=seed)
    train(drawn[:1000], STATEMENTS, how)  # compiles
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kernel, loop = Way(lambda: train(drawn, STATEMENTS, how)), Way(lambda: plain(drawn[:plain_pairs]))
        found = Turns({"Numba kernel": kernel, "plain torch loop": loop}).run(REPEATS, warm_up=0)
        counts = {"Numba kernel": pairs, "plain torch loop": plain_pairs}
        rates = {name: [counts[name] / s for s in figures[SECONDS]] for name, figures in found.items()}
    finally:
        torch.set_num_threads(threads)
    return [
        {"task": "skip-gram", "platform": f"{STATEMENTS} statements × {DIM}, {NEGATIVES} negatives", "method": method,
         "folds": "", "accuracy": None, "speedup": None, "pairs_per_s": statistics.median(each), "each": each,
         "published": {}}
        for method, each in rates.items()
    ]  # fmt: skip


def plain(pairs: Integers) -> None:
    """What one would write first: two embeddings, automatic gradients, SGD, in batches."""
    own, other = (torch.nn.Embedding(STATEMENTS, DIM, sparse=True) for _ in range(2))
    optimizer = torch.optim.SGD([own.weight, other.weight], lr=0.05)
    for start in range(0, len(pairs), BATCH):
        centre, context = torch.from_numpy(pairs[start : start + BATCH]).long().T
        drawn = torch.randint(STATEMENTS, (len(centre), NEGATIVES))
        products = torch.einsum("bd,bkd->bk", own(centre), other(torch.cat([context[:, None], drawn], dim=1)))
        signs = torch.cat([torch.ones(1), -torch.ones(NEGATIVES)])
        optimizer.zero_grad()
        torch.autograd.backward(-torch.nn.functional.logsigmoid(signs * products).sum())
        optimizer.step()
