"""YellowFin: momentum and learning rate tuned while training, from curvature, variance and distance; closed-loop.

Callers: users, and searches by the name `yellowfin`. It is an ordinary torch optimiser, so every mode takes it. On the
servers of `async` and `stale` each shard tunes itself by the gradients it gets, and is told how stale they are:
staleness acts as momentum, so the loop measures the total and lowers its own part until it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.errors import BadInput

MOST_STALE = 16  # weights of so many steps are kept at most; a staler gradient is not measured by
_TINY = 1e-12


class YellowFin(Optimizer):
    """SGD with heavy-ball momentum, x ← x + μ(x − x₋₁) − lr·α·g, whose μ and α it finds itself.

    With hₜ = ‖g‖², the extremes h_min and h_max over the last `window` steps, the variance C = Σ(E[g²] − E[g]²) and the
    distance D = E[E‖g‖ / E‖g‖²], all moving means:

        √μ = the larger of the root of p·x = (1 − x)³, p = D²h_min²/(2C), and (√(h_max/h_min) − 1)/(√(h_max/h_min) + 1)
        α = (1 − √μ)² / h_min

    Gradients longer than √h_max are cut to that length. Where gradients are stale by τ steps the total momentum is
    measured as the median over all weights of (x₊₁ − x + α·g)/(x − x₋₁) at the point x where g was computed, and the
    momentum that is applied is moved by `gain` times the difference; it may become negative.

    Cost: three values a weight, and where gradients are stale up to 16 + 2 earlier weights.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    >>> optimizer = YellowFin([weight])
    >>> for _ in range(1000):
    ...     optimizer.zero_grad()
    ...     (weight * weight * torch.tensor([1.0, 10.0])).sum().backward()
    ...     optimizer.step()
    >>> bool(weight.abs().max() < 1)
    True

    Args:
        lr: factor on the rate that is found.
        beta: of all moving means.
        window: steps over which the extremes of curvature are taken.
        gain: of the loop that corrects the momentum under staleness; 0 leaves it open.
        staleness: of the gradient of the next step; servers set it at every push.

    Source: Zhang and Mitliagkas, YellowFin and the Art of Momentum Tuning, MLSys 2019, Alg. 1–5.
    Differs: extremes are averaged on a logarithmic scale, and rates grow over the first ten windows, as in the authors'
    code; staleness is the measured one of each push, where Alg. 5 knows a fixed one.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1.0, beta: float = 0.999, window: int = 20, gain: float = 0.01,
        staleness: int = 0,
    ) -> None:  # fmt: skip
        if not (lr >= 0 and 0 < beta < 1 and window >= 1 and gain >= 0 and staleness >= 0):
            given = f"lr {lr}, beta {beta}, window {window}, gain {gain}, staleness {staleness}"
            raise BadInput(f"YellowFin: lr, gain and staleness are ≥ 0, beta is in (0, 1), window ≥ 1, got {given}")
        super().__init__(params, {"lr": lr, "beta": beta, "window": window, "gain": gain, "staleness": staleness})

    @property
    def tuned(self) -> dict[str, float]:
        """The momentum that is applied, the one that is aimed at, the rate, and the measured total momentum."""
        found = self._found()
        return {name: float(found.get(name, 0.0)) for name in ("momentum", "target", "rate", "total")}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not pairs:
            return loss
        group, found = pairs[0][0], self._found()
        gradients = [p.grad for _, p in pairs]
        self._tune(group, found, [p for _, p in pairs], gradients)
        if found.get("closed"):
            self._close_loop(group, found, [p for _, p in pairs], gradients)
        clip = min(1.0, math.sqrt(found["most"] / found["square"]))
        warm = min(1.0, found["step"] / (10.0 * group["window"]))
        for each, p in pairs:
            rate = each["lr"] * warm * found["rate"]
            self._move(p, p.grad, found["momentum"], rate * clip, keeps=found.get("closed", False))
        found["applied"] = group["lr"] * warm * found["rate"] * clip
        return loss

    def _found(self) -> dict[str, Any]:
        """The statistics over all parameters; kept with the first one, since state_dict has no other place.
        """
        first = self.param_groups[0]["params"][0]
        found: dict[str, Any] = self.state[first].setdefault("tuning", {"step": 0, "window": [], "momentum": 0.0})
        return found

    def _tune(self, group: dict[str, Any], found: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
              ) -> None:  # fmt: skip
        found["step"] += 1
        beta, share = group["beta"], 1 - group["beta"] ** found["step"]
        square = sum(float(torch.linalg.vector_norm(g)) ** 2 for g in gradients) + _TINY

        def mean(name: str, value: float) -> float:
            found[f"sum {name}"] = beta * found.get(f"sum {name}", 0.0) + (1 - beta) * value
            return float(found[f"sum {name}"] / share)

        found["square"] = square
        if found["step"] > 1:  # one that explodes is cut, and must not widen the range by more
            square = min(square, 100.0 * found["most"])
        found["window"] = [*found["window"], square][-int(group["window"]) :]
        found["most"] = math.exp(mean("most", math.log(max(found["window"]))))
        least = math.exp(mean("least", math.log(min(found["window"]))))
        distance = mean("distance", mean("length", math.sqrt(square)) / mean("square", square))
        variance = self._variance(beta, share, parameters, gradients)
        momentum, rate = single_step(variance, distance, least, found["most"])
        found["target"], found["rate"] = mean("target", momentum), mean("rate", rate)
        if group["staleness"] and group["gain"]:
            found["closed"] = True
        if not found.get("closed"):
            found["momentum"] = found["target"]

    def _variance(self, beta: float, share: float, parameters: list[Tensor], gradients: list[Tensor]) -> float:
        total = 0.0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if "mean" not in state:
                state["mean"], state["squares"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["mean"].lerp_(gradient, 1 - beta)
            state["squares"].lerp_(gradient * gradient, 1 - beta)
            total += float((state["squares"] / share - (state["mean"] / share).square()).sum())
        return max(total, _TINY)

    def _move(self, p: Tensor, gradient: Tensor, momentum: float, rate: float, *, keeps: bool) -> None:
        state = self.state[p]
        if "before" not in state:
            state["before"] = p.detach().clone()
        if keeps:
            state["trail"] = [*state.get("trail", []), p.detach().clone()][-(MOST_STALE + 2) :]
        moved = (p - state["before"]).mul_(momentum).add_(gradient, alpha=-rate)
        state["before"].copy_(p)
        p.add_(moved)

    def _close_loop(self, group: dict[str, Any], found: dict[str, Any], parameters: list[Tensor],
                    gradients: list[Tensor]) -> None:  # fmt: skip
        """Measure the total momentum where this gradient was computed, and correct the momentum that is applied."""
        stale, ratios = int(group["staleness"]), []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            trail = [*self.state[parameter].get("trail", []), parameter]
            if stale < 1 or len(trail) < stale + 2:
                continue
            earlier, at, later = trail[-2 - stale], trail[-1 - stale], trail[-stale]
            before = (at - earlier).flatten()
            after = (later - at).flatten() + found.get("applied", 0.0) * gradient.flatten()
            moved = before.abs() > _TINY
            ratios.append(after[moved] / before[moved])
        every = torch.cat(ratios) if ratios else torch.empty(0)
        if every.numel():
            found["total"] = float(every.median())
            wanted = found["momentum"] + group["gain"] * (found["target"] - found["total"])
            found["momentum"] = min(max(wanted, -0.9), 0.999)


def single_step(variance: float, distance: float, least: float, most: float) -> tuple[float, float]:
    """The momentum and the rate that bring a noisy quadratic closest to its optimum in one step.

    Minimises μD² + α²C under √μ ≥ (√(h_max/h_min) − 1)/(√(h_max/h_min) + 1) and α = (1 − √μ)²/h_min.

    >>> momentum, rate = single_step(variance=1e-12, distance=1.0, least=1.0, most=1.0)
    >>> round(momentum, 3), round(rate, 3)
    (0.0, 1.0)
    """
    p = (distance * least) ** 2 / (2 * variance)
    # p·x = (1 − x)³ by Cardano, with y = x − 1: y³ + p·y + p = 0
    w = math.cbrt(-(math.sqrt(p * p + 4 / 27 * p**3) + p) / 2)
    root = 1.0 + w - p / (3 * w) if w else 0.0
    if root < 0.5:  # a difference of numbers near 1: what it has lost, one step of Newton's method brings back
        root = max(root, 0.0)
        root += ((1 - root) ** 3 - p * root) / (3 * (1 - root) ** 2 + p)
    wide = math.sqrt(most / least)
    root = min(max(root, (wide - 1) / (wide + 1), 0.0), 1.0 - 1e-6)
    return root * root, (1 - root) ** 2 / least
