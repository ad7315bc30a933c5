"""Exchange the first step after a checkpoint is loaded in the buckets that the checkpoint was saved with.

Caller: `stream.py`. In its first step DDP uses different buckets than in all later ones. The bucket affects the bits:
where a codec's blocks begin, which random number a value gets, which values compete for selection, in which order an
engine adds. So that a job resumes to the bit with any codec, all gradients of its first step are copied into the former
buckets, exchanged, and copied back. From the second step on DDP's own buckets match, and nothing is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.exchange.layout import Gradients

_log = logging.getLogger("laconic.exchange")


class FormerBuckets:
    """Buckets by the names of their parameters, in order; `names` are those of the model's parameters, by id."""

    def __init__(self, buckets: Sequence[Sequence[str]], names: Mapping[int, str]) -> None:
        self._buckets = [list(bucket) for bucket in buckets]
        self._names = names

    def arranged(self, given: Sequence[Gradients]) -> Sequence[Gradients]:
        """Arrange a step's gradients in the former buckets; return `given` if these match, or hold other parameters.

        The futures of `given` are set when those of the others are.
        """
        places = {self._names.get(id(p), ""): (p, values) for each in given for p, values in _parts(each)}
        now = [[self._names.get(id(p), "") for p in each.parameters] for each in given]
        if now == self._buckets:
            return given
        if sorted(places) != sorted(name for bucket in self._buckets for name in bucket):
            _log.warning("the state was saved with other parameters in its buckets: it goes on, but not to the bit")
            return given
        made = []
        for index, bucket in enumerate(self._buckets):
            parameters, parts = zip(*(places[name] for name in bucket), strict=True)
            buffer = parts[0] if parts[0].is_sparse else torch.cat(parts)
            last = index + 1 == len(self._buckets)
            made.append(Gradients(buffer, index, parameters, given[0].step, last, torch.futures.Future(), index == 0))

        def hand_back(done: Any) -> None:
            try:
                done.value()
                for bucket, each in zip(self._buckets, made, strict=True):
                    for name, (_, values) in zip(bucket, _parts(each), strict=True):
                        if not values.is_sparse:
                            places[name][1].copy_(values)
                for each in given:
                    each.future.set_result(each.buffer)
            except Exception as error:
                for each in given:
                    if not each.future.done():
                        each.future.set_exception(error)

        torch.futures.collect_all([each.future for each in made]).add_done_callback(hand_back)
        return made


def check_buckets(buckets: Any, known: Collection[str] | None) -> None:
    """Refuse a state that is not lists of known parameter names."""
    if not isinstance(buckets, list) or not all(isinstance(b, list) and b for b in buckets):
        raise BadInput(f"the state does not fit: 'buckets' is {type(buckets).__name__}, not lists of names")
    for name in (name for bucket in buckets for name in bucket):
        if not isinstance(name, str):
            raise BadInput(f"the state does not fit: 'buckets' holds {type(name).__name__}, not names")
        if known is not None and name not in known:
            raise BadInput(f"the state is of another model: this one has no parameter '{name}'")


def _parts(gradients: Gradients) -> list[tuple[Tensor, Tensor]]:
    """Each parameter of a bucket and its part of the buffer, flat; a sparse gradient as it is."""
    if gradients.buffer.is_sparse:
        return [(gradients.parameters[0], gradients.buffer)]
    parts = torch.split(gradients.buffer, [parameter.numel() for parameter in gradients.parameters])
    return list(zip(gradients.parameters, parts, strict=True))
