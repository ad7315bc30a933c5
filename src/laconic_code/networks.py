"""Networks over programs: the paper's recurrent one over the sequence of statements, and one over the flow graph.

Callers: `classify`, `device_mapping`. Both begin with an embedding's vectors and end with the same two dense layers,
which also see the auxiliary numbers, where a task has any. A row of a task is predicted by a network that has seen the
other folds alone; how long it trains is fixed beforehand, so that nothing is chosen on the rows that are predicted.

    recurrent  two LSTM layers over the first `longest` statements; the last state of each is kept, padded in buckets
    graph      each round adds to a statement's state what a layer makes of it and of the means over its neighbours,
               for edges of data and of control and calls, along them and against them; then mean and maximum

Source: Neural Code Comprehension, NeurIPS 2018, §5 (recurrent). Differs: as wide as `width`, not as the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laconic.errors import BadInput, UnknownName
from laconic_code.embedding import Integers, normalised
from laconic_code.graph import DATA

Floats = np.ndarray[Any, np.dtype[np.float32]]
Labels = np.ndarray[Any, np.dtype[np.int64]]
_HIDDEN = 64
_WITHIN = 16  # batches whose programs are put in order of length


@dataclass(frozen=True)
class Fitting:
    """How a network is trained.

    Args:
        width: numbers of a state.
        rounds: of the graph network.
        longest: statements of a program that the recurrent network reads.
        rate: of Adam; it falls linearly to zero.
    """

    epochs: int = 12
    batch: int = 64
    width: int = 64
    rounds: int = 2
    longest: int = 256
    rate: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "width", "rounds", "longest"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is 1 or more, got {getattr(self, name)}")


@dataclass(frozen=True)
class ProgramSet:
    """What the networks read.

    Args:
        rows: each program's statements as numbers of a vocabulary.
        edges: each program's edges, as `FlowGraph.edges`.
        place: the program of each row of the task; several rows may have the same.
        extra: auxiliary numbers of each row, or None.
    """

    rows: Sequence[Integers]
    edges: Sequence[np.ndarray[Any, Any]]
    place: Labels
    extra: Floats | None = None


class Recurrent(nn.Module):
    """Two LSTM layers; a program is the second's last state."""

    def __init__(self, dim: int, how: Fitting) -> None:
        super().__init__()
        self.longest, self.width = how.longest, how.width
        self.layers = nn.LSTM(dim, how.width, 2, batch_first=True)

    def forward(self, table: nn.Embedding, rows: Sequence[Integers], _: Sequence[Any]) -> Tensor:
        cut = [torch.from_numpy(each[: self.longest]).long() for each in rows]
        ends = torch.tensor([len(each) for each in cut]) - 1
        states, _state = self.layers(table(nn.utils.rnn.pad_sequence(cut, batch_first=True)))
        last: Tensor = states[torch.arange(len(cut)), ends]
        return last


class GraphNetwork(nn.Module):
    """Rounds of messages between neighbours; a program is the mean and the maximum of its statements' states."""

    def __init__(self, dim: int, how: Fitting) -> None:
        super().__init__()
        self.width = 2 * how.width
        self.first = nn.Linear(dim, how.width)
        self.rounds = nn.ModuleList(nn.Linear(5 * how.width, how.width) for _ in range(how.rounds))

    def forward(self, table: nn.Embedding, rows: Sequence[Integers], edges: Sequence[Any]) -> Tensor:
        lengths = torch.tensor([len(each) for each in rows])
        states = torch.relu(self.first(table(torch.from_numpy(np.concatenate(rows)).long())))
        ways = list(_ways(edges, np.cumsum([0, *lengths[:-1].tolist()])))
        for layer in self.rounds:
            around = [_mean_of_neighbours(states, source, target) for source, target in ways]
            states = states + torch.relu(layer(torch.cat([states, *around], dim=1)))
        means = torch.segment_reduce(states, "mean", lengths=lengths)
        return torch.cat([means, torch.segment_reduce(states, "max", lengths=lengths)], dim=1)


NETWORKS: dict[str, type[Recurrent] | type[GraphNetwork]] = {
    "recurrent network": Recurrent, "graph network": GraphNetwork,
}  # fmt: skip


def _ways(edges: Sequence[Any], starts: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Sources and targets in the batch: edges of data and the others, each along and against."""
    shifted = np.concatenate([each[:, :2] + start for each, start in zip(edges, starts, strict=True)])
    is_data = np.concatenate([each[:, 2] for each in edges]) == DATA
    for some in (shifted[is_data], shifted[~is_data]):
        source, target = torch.from_numpy(some.astype(np.int64)).T
        yield source, target
        yield target, source


def _mean_of_neighbours(states: Tensor, source: Tensor, target: Tensor) -> Tensor:
    count = torch.bincount(target, minlength=len(states)).clamp(min=1)
    return torch.zeros_like(states).index_add(0, target, states[source]) / count[:, None]


class Classifier(nn.Module):
    """A table of vectors, a network over programs, and two dense layers that see the auxiliary numbers too."""

    def __init__(self, network: str, vectors: Floats, extra: int, classes: int, how: Fitting) -> None:
        super().__init__()
        # The graph network may move the vectors. The paper's recurrent one reads them as they are.
        is_fixed = NETWORKS[network] is Recurrent
        size, dim = vectors.shape
        self.table = nn.Embedding(size, dim, _weight=torch.from_numpy(normalised(vectors)))
        self.table.weight.requires_grad_(not is_fixed)
        self.network = NETWORKS[network](dim, how)
        self.norm = nn.BatchNorm1d(self.network.width + extra)
        self.dense = nn.Sequential(
            nn.Linear(self.network.width + extra, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, classes)
        )

    def forward(self, rows: Sequence[Integers], edges: Sequence[Any], back: Tensor, extra: Tensor | None) -> Tensor:
        found = self.network(self.table, rows, edges)[back]
        found = found if extra is None else torch.cat([found, extra], dim=1)
        scores: Tensor = self.dense(self.norm(found))
        return scores


def cross_predict(
    network: str,
    programs: ProgramSet,
    labels: Labels,
    folds: Labels,
    vectors: Floats,
    how: Fitting | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Labels:
    """What is predicted for each row by a network that has seen only the other folds.

    Args:
        network: a name in NETWORKS.
        vectors: of the statements that `programs.rows` number.
        progress: is told of epochs done and epochs in all.

    Raises:
        UnknownName: there is no such network.
    """
    if network not in NETWORKS:
        raise UnknownName("network", network, NETWORKS)
    how = how or Fitting()
    found, places, classes = np.empty_like(labels), np.unique(folds), int(labels.max()) + 1
    for number, fold in enumerate(places.tolist()):
        train, test = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        ready = _standardised(programs, train)
        torch.manual_seed(how.seed)
        begun = number * how.epochs
        model = Classifier(network, vectors, 0 if ready.extra is None else ready.extra.shape[1], classes, how)
        for epoch in _fit(model, ready, labels, train, how):
            progress(begun + epoch, len(places) * how.epochs)
        found[test] = _predicted(model, ready, test, how.batch)
    return found


def _standardised(programs: ProgramSet, train: Labels) -> ProgramSet:
    """With auxiliary numbers as logarithms of mean 0 and deviation 1 over the rows to train on."""
    if programs.extra is None:
        return programs
    logs = np.log1p(programs.extra)
    scaled = (logs - logs[train].mean(axis=0)) / (logs[train].std(axis=0) + 1e-6)
    return ProgramSet(programs.rows, programs.edges, programs.place, scaled.astype(np.float32))


def _fit(model: Classifier, programs: ProgramSet, labels: Labels, train: Labels, how: Fitting) -> Iterator[int]:
    """Train on the rows `train`; yields the number of epochs done."""
    random = np.random.default_rng(how.seed)
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=how.rate)
    lengths = np.array([min(len(programs.rows[place]), how.longest) for place in programs.place])
    for epoch in range(how.epochs):
        batches = list(_batches(random.permutation(train), lengths, how.batch, random))
        for number, batch in enumerate(batches):
            if len(batch) < 2:  # batch normalisation needs two
                continue
            optimizer.param_groups[0]["lr"] = how.rate * (1 - (epoch + number / len(batches)) / how.epochs)
            optimizer.zero_grad()
            scores = model(*_given(programs, batch))
            torch.autograd.backward(nn.functional.cross_entropy(scores, torch.from_numpy(labels[batch])))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        yield epoch + 1


def _batches(order: Labels, lengths: Any, size: int, random: np.random.Generator) -> Iterator[Labels]:
    """Batches of programs of about the same length, so that little is padded, in random order."""
    for start in range(0, len(order), size * _WITHIN):
        some = order[start : start + size * _WITHIN]
        some = some[np.argsort(lengths[some], kind="stable")]
        parts = [some[at : at + size] for at in range(0, len(some), size)]
        yield from (parts[number] for number in random.permutation(len(parts)))


def _given(programs: ProgramSet, batch: Labels) -> tuple[list[Any], list[Any], Tensor, Tensor | None]:
    """A batch's programs, each once, and the rows' places among them."""
    unique, back = np.unique(programs.place[batch], return_inverse=True)
    extra = None if programs.extra is None else torch.from_numpy(programs.extra[batch])
    rows, edges = ([part[number] for number in unique] for part in (programs.rows, programs.edges))
    return rows, edges, torch.from_numpy(back), extra


def _predicted(model: Classifier, programs: ProgramSet, test: Labels, size: int) -> Labels:
    model.eval()
    with torch.no_grad():
        parts = [model(*_given(programs, test[at : at + size])).argmax(dim=1).numpy()
                 for at in range(0, len(test), size)]  # fmt: skip
    found: Labels = np.concatenate(parts)
    return found
