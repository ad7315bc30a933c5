"""`laconic.divide(model, plan, codec=…)`: the door to every way a model can be divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.parallel.boundary import Boundary, Spec
from laconic.parallel.forms.stages import Stages
from laconic.parallel.plan import Form, Plan
from laconic.transports.world import World, current


def divide(
    model: nn.Module,
    plan: Plan | Form | Mapping[str, Form | str] | str,
    *,
    codec: Spec | tuple[Spec, Spec] | Boundary | None = None,
    world: World | None = None,
    sample: Sequence[Tensor] | None = None,
) -> nn.Module:
    """Divide `model` over the ranks of a world; all ranks call it with the same model and plan.

    Args:
        plan: {pattern: form}, a form of the whole model, a spec, or `Plan.to_json`'s text.
        codec: of activations and of their gradients, a pair or one for both; exact when None.
        world: the ranks that share the model; the default world when None.
        sample: inputs of a micro-batch, on which `Stages("auto")` measures the layers.

    Raises:
        BadInput: a pattern matches nothing, a layer cannot be divided so, a codec's payloads vary in size.
    """
    boundary, asked, here = Boundary.of(codec), Plan.of(plan), world or current()
    if isinstance(asked.alone, Stages):
        build: Callable[..., nn.Module] = import_module("laconic.parallel.pipeline").build
        return build(model, asked.alone, boundary, here, sample)
    raise BadInput(f"'{asked}' is no division that is known")
