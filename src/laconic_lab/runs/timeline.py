"""The last two steps of a training on the clock: what was computed, encoded, on the wire and decoded, when.

Caller: the trainer, which notes every step. Two steps, since an exchange may end under the next one's forward. What a
layer takes in backward is the time from the gradients before its own to its own; the wire is what lies between encoding
and decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from laconic.exchange.job import BucketRecord
from laconic_lab.records.record import TimeSpan
from laconic_lab.runs.trainee import Times, Trainee

TRAINING = "training"


class StepTimeline:
    """What is needed of the last steps to draw them."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self._times: deque[Times] = deque(maxlen=2)

    def note(self, times: Times) -> None:
        """A step has ended."""
        self._times.append(times)

    def spans(self) -> list[TimeSpan]:
        """The parts of the last two steps by lane, the training's first; empty where nothing was exchanged."""
        records = {(r.step, r.bucket): r for r in (*self._trainee.recent, *self._trainee.exchanged())}
        if len(self._times) < 2 or not records:
            return []
        begun, ended = self._times[0].begun, self._times[-1].ended
        waits = sorted({wait for times in self._times for wait in self._trainee.waits(times)})
        waits = [(a, b) for a, b in waits if begun <= a and b <= ended]
        found = [TimeSpan(TRAINING, "wait", a, b - a) for a, b in waits]
        found += [TimeSpan(TRAINING, "compute", a, b - a) for a, b in between(waits, begun, ended)]
        for times in self._times:
            found += self._exchanged([r for r in records.values() if times.forward <= r.made <= times.ended], times)
        return [TimeSpan(s.lane, s.part, s.begun_s - begun, s.seconds) for s in found if begun <= s.begun_s <= ended]

    def _exchanged(self, records: Sequence[BucketRecord], times: Times) -> list[TimeSpan]:
        found, before = [], times.forward
        for record in sorted(records, key=lambda record: record.made):
            lane, ended = lane_of(self._trainee.layers_of(record.bucket)), record.begun + record.seconds
            sent, came = record.begun + record.encode_s, ended - record.decode_s
            if before < record.made <= times.backward:
                found.append(TimeSpan(lane, "compute", before, record.made - before))
                before = record.made
            found.append(TimeSpan(lane, "encode", record.begun, record.encode_s))
            found.append(TimeSpan(lane, "wire", sent, max(0.0, came - sent)))
            found.append(TimeSpan(lane, "decode", came, record.decode_s))
        return found


def between(waits: Sequence[tuple[float, float]], begun: float, ended: float) -> list[tuple[float, float]]:
    """What `waits` leave of the time from `begun` to `ended`.

    >>> between([(1.0, 2.0), (3.0, 4.0)], 0.0, 4.0)
    [(0.0, 1.0), (2.0, 3.0)]
    """
    edges = [begun, *(edge for wait in waits for edge in wait), ended]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def lane_of(names: Sequence[str]) -> str:
    """The layers of a bucket in a few letters.

    >>> lane_of(["3.mlp.weight", "3.mlp.bias", "3.norm.weight"]), lane_of([])
    ('3.mlp, 3.norm', 'all layers')
    """
    layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    more = f" and {len(layers) - 2} more" if len(layers) > 2 else ""
    return ", ".join(layers[:2]) + more if layers else "all layers"
