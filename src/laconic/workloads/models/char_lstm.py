"""A recurrent network that predicts the next character."""

from __future__ import annotations

from torch import Tensor, nn

from laconic.workloads.models.registry import network


class CharLSTM(nn.Module):
    """Embedding, LSTM, linear: logits (N, T, characters) for tokens (N, T). The state starts at zero in each window."""

    def __init__(self, characters: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(states)
        return logits


@network("char-lstm", sample=(64,))
def char_lstm(characters: int = 65, embedding: int = 64, hidden: int = 256, layers: int = 1) -> nn.Module:
    """A character LSTM: 64-dimensional embedding, 256 units, 350,593 parameters.

    Source: Karpathy, The Unreasonable Effectiveness of Recurrent Neural Networks, 2015 (smaller here).
    """
    return CharLSTM(characters, embedding, hidden, layers)
