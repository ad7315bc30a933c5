"""How fast the layers of published networks are by each method, beside torch: Deep500's level of operators.

Caller: `operators.py`. A layer is tuned, and what was chosen is timed once more in turns with torch's own: medians, and
the median of the ratios. Random inputs and weights; weights are frozen unless training is measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.operators import layer_sets
from laconic import operators
from laconic.operators.convolve import ConvolutionRoute, turned
from laconic.operators.method_error import Judge
from laconic.operators.methods.native import convolution, gradients
from laconic.operators.search import Limits, MethodChoice, choose
from laconic.operators.shape import Convolution
from laconic.operators.timing import race
from laconic_lab.environment import environment


@dataclass(frozen=True)
class Result:
    """One layer: what was chosen, how long it takes beside torch's own.

    `speedup` is the median over turns of the ratios; what is of the backward pass is None without training.
    `micro_batching` is what dividing the batch gave beside the quickest undivided method within the same workspace, by
    the tuner's times, over all roles.
    """

    set: str
    layer: str
    count: int
    batch: int
    method: str
    micro_batch: int
    forward_ms: float
    backward_ms: float | None
    native_ms: float
    native_backward_ms: float | None
    speedup: float
    backward_speedup: float | None
    max_error: float
    workspace_nbytes: int
    micro_batching: float
    turns: int
    roles: dict[str, str]


def measure(
    name: str, batch: int, limits: Limits, turns: int = 21, budget_s: float = 20.0, only: str = ""
) -> Iterator[Result]:
    """Tune and time each layer of a set, or those with a text in their names."""
    for layer, count, conv in layer_sets.layers(name, batch, only):
        yield _measured(name, layer, count, conv, limits, turns, budget_s)


def _operands(conv: Convolution) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=rng) for shape in (conv.input_shape, conv.output_shape))
    return x, torch.randn(conv.weight_shape, generator=rng) / math.sqrt(conv.terms), grad


@torch.no_grad()
def _measured(
    name: str, layer: str, count: int, conv: Convolution, limits: Limits, turns: int, budget_s: float
) -> Result:
    x, weight, grad = _operands(conv)
    chosen = {choice.role: choice for choice in choose(conv, x[:1], weight, None, limits)}
    forward = chosen["forward"]
    route = ConvolutionRoute(operators.build(forward.method), forward.pieces)
    prepared = route.method.prepare(weight, conv)

    def ours() -> Any:
        return route.run(x, route.method.prepare(weight, conv) if limits.train else prepared, None, conv)

    ways = {"native": lambda: convolution(x, weight, None, conv)}
    if (forward.method, len(forward.pieces)) != ("native", 1):
        ways["ours"] = ours
    timed = race(ways, turns, budget_s, float("inf"))
    best = timed.get("ours", timed["native"])
    back = _backward(conv, (x, weight, grad), chosen, turns, budget_s) if limits.train else (None, None, None)
    return Result(
        name, layer, count, conv.batch, forward.method, max(forward.pieces), 1e3 * best.seconds, back[0],
        1e3 * timed["native"].seconds, back[1], best.speedup, back[2], max(c.error for c in chosen.values()),
        forward.workspace_nbytes, _micro_batching(chosen), best.turns,
        {role: f"{choice.method} in {max(choice.pieces)}s" for role, choice in chosen.items()},
    )  # fmt: skip


def _backward(conv: Convolution, operands: tuple[Tensor, Tensor, Tensor], chosen: dict[str, MethodChoice], turns: int,
              budget_s: float) -> tuple[float, float, float]:  # fmt: skip
    """Milliseconds of both gradients by what was chosen and by torch, and the median ratio."""
    x, weight, grad = operands
    of_input, of_weight = chosen["input gradient"], chosen["weight gradient"]
    adjoint = conv.adjoint()
    back, of_w = (ConvolutionRoute(operators.build(each.method), each.pieces) for each in (of_input, of_weight))

    def ours() -> None:
        native = [each.method == "native" and len(each.pieces) == 1 for each in (of_input, of_weight)]
        if any(native):
            gradients(x, weight, grad, conv, (native[0], native[1]))
        if not native[0]:
            assert adjoint is not None
            back.run(grad, back.method.prepare(turned(weight, conv), adjoint), None, adjoint)
        if not native[1]:
            of_w.weight_gradient(x, grad, conv)

    ways = {"native": lambda: gradients(x, weight, grad, conv, (True, True)), "ours": ours}
    timed = race(ways, turns, budget_s, float("inf"))
    return 1e3 * timed["ours"].seconds, 1e3 * timed["native"].seconds, timed["ours"].speedup


def _micro_batching(chosen: dict[str, MethodChoice]) -> float:
    """Time of the best undivided methods over that of what was chosen."""
    every = chosen.values()
    return sum(choice.undivided_s for choice in every) / sum(choice.tuned_s for choice in every)


def geometric_means(results: Iterable[Result]) -> dict[str, dict[str, float]]:
    """Of the speed-ups, by set, batch and kind of layer; layers that occur often count once."""
    groups: dict[str, list[Result]] = {}
    for each in results:
        kind = each.layer.split()[1] if len(each.layer.split()) > 1 else ""
        for key in {f"{each.set} N={each.batch}", f"{each.set} {kind} N={each.batch}".replace("  ", " ")}:
            groups.setdefault(key, []).append(each)
    found = {}
    for key, rows in groups.items():
        found[key] = {
            "forward": statistics.geometric_mean(r.speedup for r in rows),
            "least": min(r.speedup for r in rows),
            "micro_batching": statistics.geometric_mean(r.micro_batching for r in rows),
        }
        if all(r.backward_ms is not None for r in rows):
            before = [r.native_ms + (r.native_backward_ms or 0) for r in rows]
            after = [r.forward_ms + (r.backward_ms or 0) for r in rows]
            found[key]["training"] = statistics.geometric_mean(b / a for a, b in zip(after, before, strict=True))
    return found


def validate(name: str) -> list[dict[str, Any]]:
    """The error of every method on every layer of a set, and whether it is within the bound that the method states."""
    rows = []
    for layer, _, conv in layer_sets.layers(name):
        x, weight, _ = _operands(conv)
        judge = Judge(conv, x, weight)
        # The bound is relative to terms · max|x| · max|w|, the error to the largest output.
        scale = max(conv.terms * float(each.abs().max() * weight.abs().max()) / largest
                    for each, (_, largest) in zip(judge.inputs, judge.exact, strict=True))  # fmt: skip
        for method in operators.names():
            for spec in operators.candidates(method):
                built = operators.build(spec)
                if built.refuses(conv) or built.cost(conv).workspace_nbytes > 1 << 30:
                    continue
                bound = built.cost(conv).error_bound * torch.finfo(torch.float32).eps / 2 * scale
                error = judge.error(built)
                rows.append({"set": name, "layer": layer, "method": spec, "max_error": error, "bound": bound,
                             "passed": error <= bound})  # fmt: skip
    return rows


def record(results: list[Result], **more: Any) -> dict[str, Any]:
    """What `--json` prints."""
    rows = [asdict(each) for each in results]
    means = geometric_means(results)
    machine = {"environment": environment(), "threads": torch.get_num_threads()}
    return {**machine, "results": rows, "geometric_mean": means, **more}
