"""The networks: those the workloads train, and the published ones that planning and benchmarks take as examples.

Callers: `workloads`, `laconic plan`, benchmarks. `build("vgg16")` is an `nn.Module`; under `torch.device("meta")`
it costs neither time nor memory. Registered with each: the shape of one sample and, where a paper or a reference
implementation gives one, the published number of parameters, which a test compares. Adding a network is adding a file.
"""

from __future__ import annotations

from laconic.registry import discover
from laconic.workloads.models.registry import KnownNetwork, build, describe, names, network, parameter_count

__all__ = ["KnownNetwork", "build", "describe", "names", "network", "parameter_count"]

discover(__name__, __path__)
