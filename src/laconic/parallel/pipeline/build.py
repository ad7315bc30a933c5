"""From a model and `Stages` to this rank's stage.

Caller: `laconic.divide`. All ranks call it with the same model; each keeps its own stage's weights, and an outline of
the whole without values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.exchange.likeness import check_alike
from laconic.parallel.boundary import Boundary, Cut, Traffic
from laconic.parallel.forms.stages import Stages
from laconic.parallel.pipeline import balance
from laconic.parallel.pipeline.cutting import Traced
from laconic.parallel.pipeline.delta import Deltas
from laconic.parallel.pipeline.forms import Outline
from laconic.parallel.pipeline.pipeline import Layout, Pipeline, Track, answerable
from laconic.parallel.pipeline.runner import Runner
from laconic.parallel.pipeline.tied import Tied, weights_of_several
from laconic.parallel.pipeline.timetable import lags
from laconic.transports.executor import gather_texts
from laconic.transports.world import World

_CUTS_NBYTES = 4096


def build(
    model: nn.Module, stages: Stages, boundary: Boundary, world: World, sample: Sequence[Tensor] | None = None
) -> Pipeline:
    """This rank's stage of `model`, one stage a rank.

    Args:
        sample: inputs of a micro-batch, on which `cuts="auto"` measures the layers.

    Raises:
        BadInput: the model cannot be cut so.
        Mismatch: another rank has another model, plan or codec.
    """
    rank, size = world.rank, world.world_size
    state = model.state_dict()
    traced = {training: Traced.of(model, training) for training in (True, False)}
    terms = [("plan", str(stages)), ("codec", str(boundary))]
    terms += [(f"tensor {n}", f"'{key}' {tuple(each.shape)}") for n, (key, each) in enumerate(state.items())]
    check_alike("divide", terms, world.transport)  # and all have traced
    cuts = _cuts(traced[True], stages, boundary, world, sample)
    modules = [traced[True].segment(traced[True].positions(cuts), stage).module for stage in range(size)]
    keys = [[key for key in state if key in module.state_dict()] for module in modules]
    _adopt(model, modules[0], keys)
    lag, delays = _lags(stages, size)
    traffic, deltas = Traffic(), Deltas() if stages.delta else None
    shared = _shared(modules, world, traffic)
    if shared and any(delays):
        raise BadInput(
            f"'{shared[0][0].name}' is used on stages {shared[0][2]}, and memory='{stages.memory}' has no common step "
            "to add its gradients in; take memory='flush', or cut so that one stage has it"
        )
    device = next((each.device for each in modules[rank].parameters()), torch.device("cpu"))
    tracks = {}
    for training, each in traced.items():
        places = each.positions(cuts)
        values = each.values(places)
        crossings = {
            value.name: (Cut(world, boundary, value.name, traffic), Cut(world, Boundary.of(None), value.name, traffic))
            for value in values
        }
        runners = [Runner(rank, values, crossings, lag, device, memory) for memory in (deltas, None)]
        segment = each.segment(places, rank)
        if training:
            segment.module = modules[rank]
        tracks[training] = Track(segment, values, Outline(model, each.graph), *runners)
    forms = {key: (each.shape, each.dtype) for key, each in state.items()}
    boundaries = [*(value.name for value in tracks[True].values), *(cut.name for cut, _, _ in shared)]
    layout = Layout(cuts, stages.micro, lag, delays, tuple(map(tuple, keys)), forms, tuple(boundaries), stages.uneven)
    tied = Tied(shared)
    tied.begin()
    return Pipeline(world, layout, tracks, tied, traffic, deltas)


def _cuts(
    traced: Traced, stages: Stages, boundary: Boundary, world: World, sample: Sequence[Tensor] | None
) -> tuple[str, ...]:
    """The cuts that are asked for, or rank 0's choice."""
    size = world.world_size
    if stages.cuts != "auto":
        if len(stages.cuts) != size - 1:
            raise BadInput(f"{len(stages.cuts)} cuts make {len(stages.cuts) + 1} stages, and there are {size} ranks")
        return tuple(stages.cuts)
    bandwidth = balance.GBIT_BPS if world.profile is None else 1 / world.profile.link.s_per_byte
    chosen: list[str] = []
    if sample is None:
        chosen = balance.choose(traced, size, boundary, None, bandwidth)
    elif world.rank == 0:
        with answerable(world.transport):
            chosen = balance.choose(traced, size, boundary, sample, bandwidth)
    return tuple(filter(None, gather_texts(";".join(chosen), world.transport, _CUTS_NBYTES, "cuts")[0].split(";")))


def _lags(stages: Stages, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """By stage, the lag of backward passes in micro-batches, and of gradients in batches."""
    if stages.memory == "stash":
        delays = [size - 1 - stage for stage in range(size)]
        return tuple(delay * stages.micro for delay in delays), tuple(delays)
    found = lags(stages.schedule, size, stages.micro, stages.in_flight)
    return tuple(found), (int(stages.memory == "2bw"),) * size


def _shared(
    modules: Sequence[nn.Module], world: World, traffic: Traffic
) -> list[tuple[Cut, nn.Parameter | None, tuple[int, ...]]]:
    """Weights that are trained on several stages: where they cross, this rank's, and the stages."""
    exact = Boundary.of(None)
    return [
        (Cut(world, exact, name, traffic), weight if world.rank in stages else None, stages)
        for name, weight, stages in weights_of_several(modules)
    ]


def _adopt(model: nn.Module, first: nn.Module, keys: list[list[str]]) -> None:
    """Assign unused modules to the first stage, so that the plain model's state stays complete."""
    used = {key for stage in keys for key in stage}
    for key in model.state_dict():
        if key not in used:
            *path, name = key.split(".")
            place, source = first, model
            for part in path:
                source = source.get_submodule(part)
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            tensor = getattr(source, name)
            if isinstance(tensor, nn.Parameter):
                place.register_parameter(name, tensor)
            else:
                place.register_buffer(name, tensor)
            keys[0].append(key)
