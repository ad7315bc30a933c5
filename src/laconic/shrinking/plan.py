"""How to shrink a model: how much to prune, how many shared values to leave, and in how many rounds.

Callers: `laconic.shrink`, the search, the command line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.shrinking import prune, retrain
from laconic.shrinking.parts import Part, Shared, Whole, uniform
from laconic.shrinking.share import bits_in, build, share
from laconic.shrinking.training import Train
from laconic.specs import check_kinds


@dataclass(frozen=True)
class Plan:
    """How a model is shrunk; frozen.

    Attributes:
        density: the share of weights that is kept, of all or by name (the others keep all); None searches for it,
            where the model can be retrained and judged, and prunes nothing elsewhere.
        bits: of the values that are left, for all weights or by name (the others have 6); None takes those of the
            spec, such as "kmeans(4)", or else searches; without a judge, 6.
        share: how values are shared, a spec such as "kmeans" or "ternary"; "none" keeps the weights as they are.
        scope: how one density is divided among weights: "lamp", "global" or "layer".
        structured: prune whole rows, such as filters.
        rounds: of pruning and retraining; each prunes more.
        small_bits: of biases and gains, 2 to 8; 32 keeps them as they are.
        bit_price: above 0, a weight takes a value that is further off, or zero, where that saves bits of the file; in
            units of the mean square error of sharing, so that 1 and 2 are usual. 0 takes the nearest.
    """

    density: prune.Density | None = None
    bits: int | Mapping[str, int] | None = None
    share: str = "kmeans"
    scope: str = "lamp"
    structured: bool = False
    rounds: int = 4
    small_bits: int = 8
    bit_price: float = 0.0

    def __post_init__(self) -> None:
        check_kinds("shrink", Plan, vars(self))
        if self.rounds < 1:
            raise BadInput(f"pruning takes 1 round or more, got {self.rounds}")
        if self.small_bits not in (*range(2, 9), 32):
            raise BadInput(f"small_bits is 2 to 8, or 32 for biases as they are, got {self.small_bits}")
        if not 0 <= self.bit_price < math.inf:
            raise BadInput(f"bit_price is 0 or more, got {self.bit_price}")
        prune.check(1.0 if self.density is None else self.density, self.scope)
        if self.bits is None:
            object.__setattr__(self, "bits", None if self.share == "none" else bits_in(self.share))
        elif not self._has_bits:
            raise BadInput(f"share '{self.share}' leaves no bits to choose; leave them out")
        for bits in self.bits.values() if isinstance(self.bits, Mapping) else [self.bits]:
            if self.share != "none":
                build(self.share, bits)

    @property
    def _has_bits(self) -> bool:
        return self.share != "none" and hasattr(build(self.share), "bits")

    @property
    def searches_bits(self) -> bool:
        """Whether bits are left open, and there are any to choose."""
        return self.bits is None and self._has_bits

    def check(self, model: nn.Module) -> None:
        """Raise BadInput unless this can be done to the model: its weights are float32, and those named are there."""
        self.check_dtypes(dict(model.named_parameters()))
        for given in (self.density, self.bits):
            prune.check_names(prune.weights(model), given)

    def check_dtypes(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise BadInput where weights would be left as they are for their dtype."""
        if self.share == "none" and self.density is None:
            return
        for name, tensor in tensors.items():
            if tensor.dim() > 1 and tensor.is_floating_point() and tensor.dtype != torch.float32:
                text = f"weights are pruned and shared in float32, and '{name}' is {tensor.dtype}"
                raise BadInput(f"{text}: take model.float(), or share 'none', which codes them without loss")

    def bits_of(self, name: str) -> int | None:
        """The bits of a weight, where they are given."""
        return self.bits.get(name) if isinstance(self.bits, Mapping) else self.bits

    def prune(self, model: nn.Module, train: Train | None) -> dict[str, Tensor]:
        """Prune the model in rounds, retraining after each; returns the last masks."""
        masks: dict[str, Tensor] = {}
        if self.density is None or self.density == 1.0:
            return masks
        rounds = self.rounds if train else 1
        for turn in range(1, rounds + 1):
            now: prune.Density
            if isinstance(self.density, Mapping):
                now = {name: prune.gradual(turn, rounds, share) for name, share in self.density.items()}
            else:
                now = prune.gradual(turn, rounds, self.density)
            masks = prune.magnitude(prune.weights(model), now, scope=self.scope, structured=self.structured)
            with retrain.masked(model, masks):
                if train:
                    train(model)
        return masks

    def share_values(self, model: nn.Module, masks: Mapping[str, Tensor], train: Train | None) -> dict[str, Part]:
        """Share the values of what is left, tune them by training, and give the model the result; returns all parts."""
        found: dict[str, Shared] = {}
        if self.share != "none":
            for name, weight in prune.weights(model).items():
                mask = masks.get(name, torch.ones_like(weight, dtype=torch.bool))
                bits = self.bits_of(name)
                found[name] = share(weight, build(self.share, 6 if bits is None else bits), mask, self.bit_price)
            with retrain.shared(model, found):
                if train:
                    train(model)
        trained = {name for name, parameter in model.named_parameters()} - found.keys()
        first = {other: name for name, others in retrain.tied(model).items() for other in others}
        parts: dict[str, Part] = {}
        for name, tensor in model.state_dict().items():
            is_small = name in trained and tensor.dim() < 2
            same = found.get(name) or parts.get(first.get(name, name))  # weights that are tied have one part
            parts[name] = same or (uniform(tensor, self.small_bits) if is_small else Whole(tensor.clone()))
        retrain.load(model, parts)
        return parts
