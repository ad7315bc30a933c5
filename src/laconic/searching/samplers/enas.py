"""Weight sharing: one large network, of which a controller chooses a part for each trial."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.searching.history import History, Proposal, Seen
from laconic.searching.parameters import Choice, Parameter, Value
from laconic.searching.samplers.base import Chance, Sampler, need, need_choices, register
from laconic.searching.space import Space


@register("enas")
@dataclass(frozen=True)
class Enas(Sampler):
    """Each trial trains a part of a shared network; a controller learns by REINFORCE which choices pay.

    A trial begins with the weights that the last one left. The controller has one weight for each value of each choice:
    θ ← θ + rate · (score − baseline)/spread · ∇ log p(point). It is found anew from the history, trial by trial.
    `controller=random` is the control: the same sharing of weights, with choices by chance.

    Source: Pham et al., Efficient Neural Architecture Search via Parameter Sharing, ICML 2018; the control: Li,
    Talwalkar, Random Search and Reproducibility for Neural Architecture Search, UAI 2019.
    Differs: independent choices in place of a recurrent controller.

    Attributes:
        controller: "reinforce" or "random".
        rate: of the controller's learning.
        decay: of the baseline, a moving mean of the scores.
    """

    inherits: ClassVar[bool] = True
    repeats: ClassVar[bool] = True
    controller: str = "reinforce"
    rate: float = 0.3
    decay: float = 0.9

    def __post_init__(self) -> None:
        need(self.controller in ("reinforce", "random"), f"a controller is reinforce or random, got {self.controller}")
        need(self.rate > 0 and 0 <= self.decay < 1, f"enas: rate is above 0, decay from 0 to below 1, got {self}")

    def check(self, space: Space) -> None:
        need_choices(self, space)

    def propose(self, space: Space, history: History, chance: Chance) -> Proposal:
        parent = history.ended[-1].number if history.ended else None
        if self.controller == "random":
            return Proposal(space.draw(chance), parent)
        logits = self._logits(space, history)

        def choose(name: str, each: Parameter) -> Value:
            assert isinstance(each, Choice)
            return each.values[int(chance.choice(len(each.values), p=_shares(logits[name])))]

        return Proposal(space.build(choose), parent)

    def _logits(self, space: Space, history: History) -> dict[str, np.ndarray]:
        """The controller after all trials so far; what it had learned of this history before is kept."""
        kept = _CONTROLLERS.get(history)
        if kept is None or kept.method != self:
            kept = _CONTROLLERS[history] = _Controller(self, {})
        for name, each in space.parameters.items():
            kept.logits.setdefault(name, np.zeros(each.count or 1))
        for trial in history.ended[kept.seen :]:
            kept.learn(space, trial)
        return kept.logits


@dataclass
class _Controller:
    """What a controller has learned from the first `seen` trials."""

    method: Enas
    logits: dict[str, np.ndarray]
    seen: int = 0
    baseline: float = 0.0
    square: float = 0.0

    def learn(self, space: Space, trial: Seen) -> None:
        score, decay = trial.score or 0.0, self.method.decay
        self.baseline = decay * self.baseline + (1 - decay) * score if self.seen else score
        gain = score - self.baseline
        self.square = decay * self.square + (1 - decay) * gain * gain
        gain = min(max(gain / max(self.square**0.5, 1e-12), -3.0), 3.0)
        for name, value in trial.point.items():
            step = -_shares(self.logits[name])
            step[int(space.parameters[name].place(value) * len(step))] += 1
            self.logits[name] += self.method.rate * gain * step
        self.seen += 1


_CONTROLLERS: weakref.WeakKeyDictionary[History, _Controller] = weakref.WeakKeyDictionary()


def _shares(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    shares: np.ndarray = powers / powers.sum()
    return shares
