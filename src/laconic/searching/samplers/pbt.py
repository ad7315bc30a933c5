"""Population-based training: members train side by side, and the worst go on from the weights of the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from laconic.searching.history import History, Proposal, Seen, score_of
from laconic.searching.samplers.base import Chance, Sampler, need, register
from laconic.searching.space import Space


@register("pbt")
@dataclass(frozen=True)
class PopulationBasedTraining(Sampler):
    """A trial is one stretch of one member's training, begun with the weights that its parent left.

    After a stretch a member of the worst `share` takes weights and parameters of one of the best `share`, and moves the
    parameters (exploit, explore). All others go on as they are. By default a member goes on as soon as its stretch has
    ended, judged by the last stretch of each; `sync=true` waits for the whole generation.

    Source: Jaderberg et al., Population Based Training of Neural Networks, 2017.
    Differs: parameters are moved by addition on their scale, since a factor cannot leave 0.

    Attributes:
        population: how many members.
        share: of them that is replaced, and that is copied.
        far: how far parameters move, as a share of their range.
        sync: whether a generation begins together.
    """

    inherits: ClassVar[bool] = True
    schedules: ClassVar[bool] = True
    repeats: ClassVar[bool] = True
    population: int = 8
    share: float = 0.25
    far: float = 0.2
    sync: bool = False

    def __post_init__(self) -> None:
        need(self.population >= 2, f"pbt has a population of 2 or more, got {self.population}")
        need(0 < self.share <= 0.5, f"pbt replaces a share above 0 and up to 0.5, got {self.share}")

    def propose(self, space: Space, history: History, chance: Chance) -> Proposal | None:
        lines: dict[int, list[Seen]] = {member: [] for member in range(self.population)}
        members = [trial for trial in history.trials.values() if "member" in trial.proposal.notes]
        for trial in members:
            lines[trial.proposal.notes["member"]].append(trial)
        done = {member: line[-1].proposal.notes["generation"] + 1 if line else 0 for member, line in lines.items()}
        busy = {trial.proposal.notes["member"] for trial in members if trial.state == "running"}
        free = [member for member in lines if member not in busy]
        if not free:
            return None
        member = min(free, key=lambda each: (done[each], each))
        generation = done[member]
        if self.sync and generation and (busy & {each for each in lines if done[each] <= generation}):
            return None
        notes = {"member": member, "generation": generation}
        last = {each: [t for t in line if t.ended][-1] for each, line in lines.items() if any(t.ended for t in line)}
        if not last:
            return Proposal(space.draw(chance), notes=notes)
        own = last.get(member)
        if own is None and generation == 0:
            return Proposal(space.draw(chance), notes=notes)
        return self._next(space, own, sorted(last.values(), key=score_of), notes, chance)

    def _next(
        self, space: Space, own: Seen | None, ranked: Sequence[Seen], notes: dict[str, int], chance: Chance
    ) -> Proposal:
        """Go on, or from another's weights; `ranked` has the worst member first."""
        count = max(1, round(self.share * len(ranked)))
        if own is not None and (len(ranked) < 2 or own not in ranked[:count]):
            return Proposal(own.point, own.number, notes)
        other = ranked[-1 - int(chance.integers(count))]
        point = space.build(lambda name, each: each.moved(other.point[name], chance, self.far) if name in other.point
                            else each.draw(chance))  # fmt: skip
        return Proposal(point, other.number, notes)
