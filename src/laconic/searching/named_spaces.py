"""Spaces that come with Laconic, by name: one of small convolutional networks.

Callers: `laconic search --space NAME`. Every workload has a space of hyper-parameters besides, `training.space_of`.
"""

from __future__ import annotations

from laconic.searching.parameters import Choice
from laconic.searching.space import Space

KINDS = ("conv1", "conv3", "conv5", "separable3", "skip")
# `layered-cnn` names weights by place and kind of layer, so that networks of this space can share them (enas)
CONVOLUTIONS = Space({
    "channels": Choice([8, 16, 32]),
    **{f"layer{number}": Choice(KINDS) for number in range(1, 5)},
    "model": Choice(["layered-cnn({layer1}-{layer2}-pool-{layer3}-{layer4}-pool, {channels})"]),
})  # fmt: skip
SPACES = {"convolutions": CONVOLUTIONS}
