"""Which kind of bucket a codec needs, and what matrix codecs keep by parameter name beyond one bucket's life.

Callers: the DDP hook. DDP rebuilds its buckets after the first step, so nothing that must last may live in one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from laconic.codecs import Codec
from laconic.codecs.factors import Factors
from laconic.codecs.powersgd import PowerSGD
from laconic.errors import BadInput
from laconic.exchange.bucket import Bucket
from laconic.exchange.dgc import MomentumCorrection
from laconic.exchange.exact import LayerForm
from laconic.exchange.factors import FactorsBucket
from laconic.exchange.layout import BucketInfo
from laconic.exchange.linear_watch import LinearWatch
from laconic.exchange.low_rank import LowRankBucket
from laconic.exchange.residuals import Residuals

AnyBucket = Bucket | LowRankBucket | FactorsBucket


class Forms:
    """Makes buckets.

    Attributes:
        warm: PowerSGD's last Q by parameter name, the same on every rank.
        agreed: the names of the weights that go by factors at the next step, the same on every rank.
        watch: catches the factors of the model's layers, once `observe` was called.
    """

    def __init__(self) -> None:
        self.warm: dict[str, Tensor] = {}
        self.agreed: set[str] = set()
        self.watch: LinearWatch | None = None

    def observe(self, model: nn.Module, names: Mapping[int, str]) -> None:
        """Catch the factors of this model's fully connected layers from now on."""
        self.close()
        self.watch = LinearWatch(model, names)

    def bucket(
        self, chosen: Codec, info: BucketInfo, residuals: Residuals, correction: MomentumCorrection | None
    ) -> AnyBucket:
        """A new bucket of the kind that `chosen` needs; only flat vectors have momentum correction."""
        if chosen.kind == "matrix" and correction is not None:
            raise BadInput(f"momentum is corrected for flat vectors, not for {chosen}; leave it to the optimiser")
        if isinstance(chosen, PowerSGD):
            return LowRankBucket(info, residuals, self.warm)
        if isinstance(chosen, Factors):
            return FactorsBucket(info, residuals, self.watch, self.agreed)
        return Bucket(info, residuals, correction)

    @staticmethod
    def suits(bucket: AnyBucket, chosen: Codec) -> bool:
        """Whether this bucket can go on with `chosen`."""
        kinds = {PowerSGD: LowRankBucket, Factors: FactorsBucket}
        return isinstance(bucket, kinds.get(type(chosen), Bucket))

    @staticmethod
    def layers(buckets: Iterable[AnyBucket], world_size: int) -> list[LayerForm]:
        """How each parameter of the matrix codecs' buckets travels."""
        return [form for b in buckets if not isinstance(b, Bucket) for form in b.layers(world_size)]

    def end_of_step(self) -> None:
        """Let go of what was caught and not asked for."""
        if self.watch is not None:
            self.watch.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """The warm starts; what is agreed is found anew at the first step."""
        return {name: q.clone() for name, q in self.warm.items()}

    def load_state_dict(self, warm: Mapping[str, Tensor]) -> None:
        """Go on with these warm starts. In place, since buckets share them."""
        self.warm.clear()
        self.warm.update({name: q.clone() for name, q in warm.items()})
        self.agreed.clear()

    def close(self) -> None:
        """Take the hooks off the model."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None
