"""The change against the last activation of the same sample, instead of the activation (AQ-SGD).

Caller: `runner.py`. Sender and receiver keep the same memory m of what has arrived for each sample and value:

    sent = Q(a − m[sample]),    m[sample] += sent,    the next stage computes with m[sample].

Where weights change slowly, so do a sample's activations; changes are small, and Q's error with them. Cost: the bytes
of the codec, and 4 bytes of memory for each number of each sample's activation, at both ends.

Source: Wang et al., Fine-tuning Language Models over Slow Networks using Activation Quantization with Guarantees,
NeurIPS 2022 (AQ-SGD), Alg. 1.
Differs: a sample's first activation goes through the codec too (m = 0), not in full precision, so that all messages
have one size; the memory is in RAM.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Deltas:
    """The remembered activation of each sample, by value."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, int]] = {}
        self._memory: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Of the memory that is in use."""
        return sum(
            len(rows) * self._memory[name][:1].numel() * self._memory[name].itemsize
            for name, rows in self._rows.items()
        )

    def change(self, name: str, samples: Tensor, activations: Tensor) -> Tensor:
        """a − m for the samples of a micro-batch."""
        return activations.detach() - self._memory_of(name, samples, activations)[self._index(name, samples)]

    def add(self, name: str, samples: Tensor, change: Tensor) -> Tensor:
        """Add a change to m; returns the new m[samples].

        NaN and infinity are returned, but reset in m, which would otherwise keep them forever.
        """
        memory, index = self._memory_of(name, samples, change), self._index(name, samples)
        now = memory[index] + change
        memory[index] = torch.nan_to_num(now, nan=0.0, posinf=0.0, neginf=0.0)
        return now

    def _index(self, name: str, samples: Tensor) -> Tensor:
        rows = self._rows[name]
        return torch.tensor([rows[number] for number in samples.tolist()])

    def _memory_of(self, name: str, samples: Tensor, like: Tensor) -> Tensor:
        """The memory of a value, with room for these samples; new ones start at zero."""
        rows = self._rows.setdefault(name, {})
        for number in samples.tolist():
            rows.setdefault(number, len(rows))
        memory = self._memory.get(name)
        if memory is None or len(rows) > len(memory):
            grown = torch.zeros(max(len(rows), 2 * (0 if memory is None else len(memory))), *like.shape[1:])
            if memory is not None:
                grown[: len(memory)] = memory
            self._memory[name] = memory = grown
        return memory
