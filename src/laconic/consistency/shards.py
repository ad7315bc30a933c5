"""A model sharded by fully_shard inside each site, as modes of blocks between sites see it: this rank's own shards.

Caller: `distribute.py`. Inside a site torch averages gradients at every step, as it does without us. Ranks with the
same place in all sites hold the same shards, so the mode runs among these counterparts alone, on plain parameters that
share the shards' memory: no rank ever holds more of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.consistency.base import Mode
from laconic.consistency.sites import counterparts_of, site_numbers
from laconic.errors import BadInput
from laconic.transports.base import members_of
from laconic.transports.world import World


class Shards(nn.Module):
    """This rank's shards under the names of the model's parameters, and its buffers.

    Args:
        model: whose parameters fully_shard has sharded.

    Raises:
        BadInput: a parameter is not sharded over one dimension of ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = [model]  # in a list: not a submodule
        self._shards: dict[str, nn.Parameter] = {}
        for name, whole in model.named_parameters():
            self._shards[name] = nn.Parameter(_local(name, whole), requires_grad=whole.requires_grad)

    def of(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """The shards of the parameters that an optimiser trains, in the model's order."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = [self._shards[name] for name, p in self._model[0].named_parameters() if id(p) in trained]
        if len(found) != len(trained):
            text = f"the optimiser trains {len(trained) - len(found)} parameters that are not the model's"
            raise BadInput(f"{text}: make it after fully_shard")
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model[0](*args, **kwargs)

    def check_in_place(self) -> None:
        """Refuse shards that lie elsewhere than they did: averaging would miss them."""
        for name, whole in self._model[0].named_parameters():
            if self._shards[name].data_ptr() != _local(name, whole).data_ptr():
                raise BadInput(f"the shard of '{name}' was replaced after distribute() (model.to, …); do that before")

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._shards.items()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from self._shards.values()

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        yield from self._model[0].buffers()


def between_sites(model: nn.Module, mode: Mode, world: World, own: dict[str, Any]) -> tuple[Shards, World]:
    """What `mode` sees of a sharded model, and the world of this rank's counterparts, to be closed with the job.

    Args:
        own: the mode's options of `distribute`; those of sites are taken out.

    Raises:
        BadInput: the mode, an option or the division into shards does not go between sites.
    """
    sites: int | Sequence[int] | None = own.pop("sites", None)
    inside = "laconic.compress(model, codec) compresses what fully_shard sends"
    if "site_codec" not in mode.own_options or sites is None:
        text = "distribute takes a model that every rank has whole, and this one is sharded"
        raise BadInput(f"{text}; {inside}, and a mode of blocks with sites=… trains a sharded model between sites")
    if "site_codec" in own:
        raise BadInput(f"site_codec is not for a sharded model, whose gradients torch averages in a site; {inside}")
    if "masters" in own:
        raise BadInput("masters='device' is not for a sharded model, whose shards stay where they lie: leave it out")
    if "period" in own:
        raise BadInput("period='auto' compares whole models, and ranks here have shards of one: leave period= out")
    if (state := getattr(mode, "state", "keep")) != "keep":
        raise BadInput(f"a sharded model keeps the optimiser's state of each shard: state=keep, not {state}")
    numbers = site_numbers(world.world_size, sites)
    colours = counterparts_of(numbers)
    near = members_of(numbers, world.rank)
    for name, whole in model.named_parameters():
        _local(name, whole)
        ranks = sorted(whole.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
        if ranks != near:
            cure = "fully_shard(model, mesh=mesh['rank']) with a mesh of (sites, ranks a site)"
            raise BadInput(f"'{name}' is sharded over ranks {ranks}, and this rank's site has {near}; {cure}")
    return Shards(model), world.split(colours)


def _local(name: str, whole: Tensor) -> Tensor:
    placements = getattr(whole, "placements", None)
    if placements is None or len(placements) != 1 or not placements[0].is_shard():
        how = "not at all" if placements is None else f"by {placements}"
        text = f"between sites every parameter is sharded over the ranks of a site, and '{name}' is {how}"
        raise BadInput(f"{text}; fully_shard the whole model on a mesh of one dimension")
    local: Tensor = whole.to_local()  # type: ignore[attr-defined]
    return local.detach()
