"""From files to an embedding in a file, on one worker or several.

Caller: `laconic code embed`, on every rank; arguments and result are plain, so that any launcher can carry them.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from laconic.comprehension.corpus import Progress, find_files, read_all
from laconic.comprehension.embedding import Embedding, context_pairs, vocabulary_of
from laconic.comprehension.skipgram import Training, train
from laconic.lab.clusters.launch import is_launched
from laconic.transports.world import init


def embed(
    paths: list[str],
    output: str,
    how: dict[str, Any],
    cache: str | None = None,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Train an embedding on all programs among `paths` and write it to `output`; on several ranks, rank 0 writes.

    Args:
        how: fields of `Training`, and `distance` and `cutoff` of the context and the vocabulary.
        cache: a folder that keeps what was compiled, and the vectors after every epoch; an interrupted job goes on
            from there.
        progress: is told of programs read, then of pairs done, and of how many.

    Returns:
        Sizes and seconds, for the user.
    """
    how = dict(how)
    distance, cutoff = int(how.pop("distance", 2)), int(how.pop("cutoff", 1))
    training = Training(**how)
    folder = Path(cache) if cache else None
    corpus = read_all(find_files(paths), folder, progress)
    vocabulary = vocabulary_of([graph.abstracted for graph in corpus.graphs], cutoff)
    pairs = np.concatenate([context_pairs(graph, vocabulary, distance) for graph in corpus.graphs])
    begin = time.perf_counter()
    world = init() if is_launched() else None
    vectors = train(pairs, len(vocabulary), training, world, progress, folder)
    seconds = time.perf_counter() - begin
    about = {**asdict(training), "distance": distance, "cutoff": cutoff, "programs": len(corpus.paths)}
    found = Embedding(vocabulary, vectors, about)
    if world is None or world.rank == 0:
        found.save(output)
    statements = [graph.abstracted for graph in corpus.graphs]
    return {
        "embedding": output, **about, "skipped": [list(each) for each in corpus.skipped],
        "vocabulary": len(vocabulary), "unknown_share": found.unknown_share(statements),
        "statements": sum(map(len, statements)), "pairs": len(pairs), "seconds": seconds,
        "pairs_per_s": len(pairs) * training.epochs / seconds,
    }  # fmt: skip
