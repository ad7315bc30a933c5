"""The buckets of one model and the groups they travel in, kept from step to step.

Caller: `state.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import BadInput
from laconic.exchange.bucket import Bucket
from laconic.exchange.bucket_group import BucketGroup
from laconic.exchange.dgc import MomentumCorrection
from laconic.exchange.exact import LayerForm, Route
from laconic.exchange.layout import BucketInfo
from laconic.exchange.matrices import Matrices, MatrixBucket
from laconic.exchange.residuals import Residuals
from laconic.transports.call import Timings
from laconic.transports.rounds import Pausing

AnyBucket = Bucket | MatrixBucket
_log = logging.getLogger("laconic.exchange")


class Buckets:
    """Buckets by number, each of the kind its codec needs.

    Args:
        residuals: of all parameters; a new layout or codec takes them along.
        correction: the momentum of the gradients; None for plain gradients.
    """

    def __init__(self, residuals: Residuals, correction: MomentumCorrection | None) -> None:
        self.matrices = Matrices()
        self._residuals, self._correction = residuals, correction
        self._buckets: dict[int, AnyBucket] = {}
        self._groups: dict[tuple[int, ...], BucketGroup] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def at(self, index: int, info: BucketInfo, chosen: Codec) -> AnyBucket:
        """The bucket of this number with this codec; all are made anew when DDP has rebuilt them."""
        found = self._buckets.get(index)
        if found is not None and not (found.info == info and _suits(found, chosen)):
            _log.info("bucket %d holds %d parameters now: all buckets are made anew", index, len(info.entries))
            self.clear()
            found = None
        if found is None:
            found = self._buckets[index] = self._new(info, chosen)
        found.use(chosen)
        return found

    def _new(self, info: BucketInfo, chosen: Codec) -> AnyBucket:
        if chosen.kind != "matrix":
            return Bucket(info, self._residuals, self._correction)
        if self._correction is not None:
            raise BadInput(f"momentum is corrected for flat vectors, not for {chosen}; leave it to the optimiser")
        return self.matrices.of(chosen.name).bucket(info, self._residuals)

    def steps(
        self, buckets: Sequence[AnyBucket], buffers: Sequence[Tensor], route: Route
    ) -> Pausing[tuple[Timings, str]]:
        """Average the buffers of these buckets in the same messages, pausing where there is nothing to do but wait."""
        plain = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
        if len(plain) < len(buckets):
            matrices = buckets[0]
            assert not isinstance(matrices, Bucket)  # matrix codecs' buckets travel alone
            return (yield from matrices.steps(buffers[0], route))
        key = tuple(map(id, plain))
        if key not in self._groups:
            self._groups = {k: v for k, v in self._groups.items() if not set(k) & set(key)}
            self._groups[key] = BucketGroup(plain)
        return (yield from self._groups[key].steps(buffers, route))

    def layers(self, world_size: int) -> list[LayerForm]:
        """How each parameter of a matrix codec's buckets travels."""
        matrices = [bucket for bucket in self._buckets.values() if isinstance(bucket, MatrixBucket)]
        return [layer for bucket in matrices for layer in bucket.layers(world_size)]

    def clear(self) -> None:
        """Make all buckets anew at the next step."""
        self._buckets.clear()
        self._groups.clear()


def _suits(bucket: AnyBucket, chosen: Codec) -> bool:
    """Whether this bucket can go on with `chosen`."""
    if isinstance(bucket, Bucket):
        return chosen.kind != "matrix"
    return bucket.codec is not None and bucket.codec.name == chosen.name
