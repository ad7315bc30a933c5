"""Is a network computed rightly, forward and backward, and how long does it take? Deep500's level of networks.

Callers: `python -m benchmarks networks`. Both checks are against float64: the forward pass in float32 beside the one in
float64, and the gradient in float64 beside a central difference of the loss along random directions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from laconic.cli.shared import Json, echo_json, echo_table
from laconic.errors import BadInput
from laconic.workloads import models
from laconic_lab.bench.turns import SECONDS, Turns, Way

FORWARD_TOLERANCE = 1e-4  # of the output's norm; float32 rounds to 6e-8, which depth and cancellation multiply
GRADIENT_TOLERANCE = 1e-4  # of the difference quotient
# Of each tensor's root mean square. Long steps cross kinks of ReLU and pooling, short ones drown in rounding, and which
# is which depends on the depth; a right gradient agrees at some length, a wrong one at none.
STEPS = (1e-6, 1e-7, 1e-8, 1e-5, 1e-9)
SMALL_SAMPLE = 3 * 32 * 32  # values of an input up to which a network is checked by default


@dataclass(frozen=True)
class Checked:
    """What was found of one network.

    Attributes:
        forward_error: ‖y₃₂ − y₆₄‖ / ‖y₆₄‖ of the outputs.
        gradient_error: of ⟨∇L, v⟩ against (L(θ + hv) − L(θ − hv)) / 2h, relatively; the best h, the worst direction v.
        forward_seconds: median, of a batch in float32.
        backward_seconds: median, of the gradient after it.
    """

    name: str
    parameters: int
    batch: int
    forward_error: float
    gradient_error: float
    forward_seconds: float
    backward_seconds: float

    @property
    def passed(self) -> bool:
        """Whether both errors are within their tolerances."""
        return self.forward_error <= FORWARD_TOLERANCE and self.gradient_error <= GRADIENT_TOLERANCE


def small_names() -> list[str]:
    """The registered networks that take a second or so: those with small, dense inputs."""
    samples = {name: models.describe(name).sample for name in models.names()}
    return [name for name, sample in samples.items() if sample and math.prod(sample) <= SMALL_SAMPLE]


def check(name: str, batch: int = 4, directions: int = 3, repeats: int = 5, seed: int = 0) -> Checked:
    """Check and time one network.

    >>> found = check("digits-cnn")
    >>> found.passed, found.parameters
    (True, 22602)

    Args:
        name: a registered network, with arguments if any: "cifar-resnet(20)".
        batch: samples, random; two at least, for batch normalisation.
        directions: how many random directions are differentiated along.

    Raises:
        BadInput: its inputs are no dense tensors, or too few samples.
    """
    network = models.describe(name.partition("(")[0].strip())
    sample = network.sample
    if not sample:
        raise BadInput(f"network '{name}' takes no dense tensor: tests/workloads/test_models.py tests it by hand")
    if batch < 2 or directions < 1 or repeats < 1:
        raise BadInput("a check needs a batch of 2 or more, a direction and a repeat")
    torch.manual_seed(seed)
    model, x = models.build(name), _inputs(network, batch)
    _fill_zeros(model)
    forward_s, backward_s = _timed(model, x, repeats)
    model.eval()
    with torch.no_grad():
        single = model(x).double()
        model.double()
        double = model(_double(x))
    model.train()  # batch normalisation by the batch, as in training; dropout's masks are drawn alike every time
    error = max(_gradient_error(model, _double(x), seed + i) for i in range(directions))
    return Checked(
        name, models.parameter_count(model), batch, float((single - double).norm() / double.norm()), error, forward_s,
        backward_s,
    )  # fmt: skip


def _fill_zeros(model: nn.Module) -> None:
    """What starts at zero would hide what is multiplied by it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)


def _inputs(network: models.KnownNetwork, batch: int) -> Tensor:
    if network.vocabulary:
        return torch.randint(network.vocabulary, (batch, *network.sample))
    return torch.randn(batch, *network.sample)


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _loss(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    """A fixed random combination of the outputs, so that every output counts and the gradient is not near zero."""
    torch.manual_seed(seed)  # of dropout
    output: Tensor = model(x)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=output.dtype)
    return (output * weights).sum()


def _gradient_error(model: nn.Module, x: Tensor, seed: int) -> float:
    """Relative difference between the derivative along a random direction by autograd and by central difference."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    direction = [
        float(p.detach().square().mean().sqrt()) * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for p in parameters
    ]  # fmt: skip
    gradients = torch.autograd.grad(_loss(model, x, seed), parameters)
    along = float(sum((g * v).sum() for g, v in zip(gradients, direction, strict=True)))
    least = math.inf
    for step in STEPS:
        quotient = _quotient(model, x, seed, parameters, direction, step)
        least = min(least, abs(along - quotient) / max(abs(along), abs(quotient), 1e-300))
        if least < GRADIENT_TOLERANCE / 10:
            break
    return least


@torch.no_grad()
def _quotient(
    model: nn.Module, x: Tensor, seed: int, parameters: Sequence[Tensor], direction: Sequence[Tensor], step: float
) -> float:
    start = [parameter.clone() for parameter in parameters]
    found = []
    for signed in (step, -step):
        for parameter, begin, along in zip(parameters, start, direction, strict=True):
            parameter.copy_(begin + signed * along)
        found.append(float(_loss(model, x, seed)))
    for parameter, begin in zip(parameters, start, strict=True):
        parameter.copy_(begin)
    return (found[0] - found[1]) / (2 * step)


def _timed(model: nn.Module, x: Tensor, repeats: int) -> tuple[float, float]:
    """Median seconds of forward and of backward; a first round, which allocates, is not counted."""
    model.train()
    losses: list[Tensor] = []
    ways = {
        "forward": Way(lambda: losses.append(model(x).sum()), prepare=model.zero_grad),
        "backward": Way(lambda: losses.pop().backward()),
    }
    turns = Turns(ways)
    found = [{name: turns.block(name)[SECONDS] for name in ways} for _ in range(1 + repeats)][1:]
    return statistics.median(each["forward"] for each in found), statistics.median(each["backward"] for each in found)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Networks; default: those with small inputs.")] = None,
    batch: Annotated[int, typer.Option(help="Samples.")] = 4,
    directions: Annotated[int, typer.Option(help="Random directions to differentiate along.")] = 2,
    repeats: Annotated[int, typer.Option(help="Of the timing.")] = 5,
    json: Json = False,
) -> None:
    """Check networks against float64 and against differences of their loss, and time them, on one thread."""
    torch.set_num_threads(1)
    found = [check(name, batch, directions, repeats) for name in names or small_names()]
    if json:
        echo_json({"results": [{**asdict(each), "passed": each.passed} for each in found]})
    else:
        tolerances = f"{FORWARD_TOLERANCE:g}, gradient {GRADIENT_TOLERANCE:g}"
        typer.echo(f"tolerances: forward {tolerances}, both relative")
        headings = ["network", "parameters", "forward error", "gradient error", "forward", "backward", ""]
        echo_table(headings, [_network_cells(each) for each in found])
    if not all(each.passed for each in found):
        raise typer.Exit(1)


def _network_cells(each: Checked) -> list[str]:
    errors = [f"{each.forward_error:.1e}", f"{each.gradient_error:.1e}"]
    times = [f"{1e3 * each.forward_seconds:.2f} ms", f"{1e3 * each.backward_seconds:.2f} ms"]
    return [each.name, f"{each.parameters:,}", *errors, *times, "" if each.passed else "FAILS"]
