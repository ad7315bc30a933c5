"""From files to an embedding in a file, on one worker or several.

Caller: `laconic code embed`, on every rank; arguments and result are plain, so that any launcher can carry them.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from laconic.transports.world import init
from laconic_code.corpus import Progress, find_files, read_all
from laconic_code.embedding import FAN_OUT, Embedding, context_pairs, hubs, vocabulary_of
from laconic_code.ir import Dialect
from laconic_code.skipgram import Training, train
from laconic_lab.clusters.launch import is_launched

_CONTEXT = {"distance": 2, "cutoff": 1, "fan_out": FAN_OUT}


def embed(
    paths: list[str],
    output: str,
    how: dict[str, Any],
    cache: str | None = None,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Train an embedding on all programs among `paths` and write it to `output`; on several ranks, rank 0 writes.

    Args:
        how: fields of `Training`; `distance` and `fan_out` of the context, `cutoff` of the vocabulary; `prelude` and
            `standard` of sources.
        cache: a folder that keeps what was compiled, and the vectors after every epoch; an interrupted job goes on
            from there.
        progress: is told of programs read, then of pairs done, and of how many.

    Returns:
        Sizes and seconds, for the user.
    """
    how = dict(how)
    distance, cutoff, fan_out = (int(how.pop(name, usual)) for name, usual in _CONTEXT.items())
    prelude, standard = how.pop("prelude", None), how.pop("standard", "")
    training = Training(**how)
    folder = Path(cache) if cache else None
    dialect = Dialect(Path(prelude) if prelude else None, standard)
    corpus = read_all(find_files(paths), folder, progress, dialect)
    vocabulary = vocabulary_of([graph.abstracted for graph in corpus.graphs], cutoff)
    context = (distance, fan_out, training.seed)
    pairs = np.concatenate([context_pairs(graph, vocabulary, *context) for graph in corpus.graphs])
    begin = time.perf_counter()
    world = init() if is_launched() else None
    vectors = train(pairs, len(vocabulary), training, world, progress, folder)
    seconds = time.perf_counter() - begin
    about = {**asdict(training), "distance": distance, "cutoff": cutoff, "fan_out": fan_out,
             "programs": len(corpus.paths)}  # fmt: skip
    found = Embedding(vocabulary, vectors, about)
    if world is None or world.rank == 0:
        found.save(output)
    statements = [graph.abstracted for graph in corpus.graphs]
    return {
        "embedding": output, **about, "skipped": [list(each) for each in corpus.skipped],
        "vocabulary": len(vocabulary), "unknown_share": found.unknown_share(statements),
        "statements": sum(map(len, statements)), "pairs": len(pairs),
        "hubs": sum(hubs(graph, fan_out) for graph in corpus.graphs), "seconds": seconds,
        "pairs_per_s": len(pairs) * training.epochs / seconds,
    }  # fmt: skip
