"""The weights cut into shards, and the optimiser that runs on one.

Callers: `server.py`. A shard is a stretch of the flat weights; its optimiser is made anew from the user's, with the
same class and options, over the stretches of the parameters that lie in it. A parameter that lies in one shard whole
keeps its shape, one that is cut becomes flat pieces; so optimisers that work element by element (SGD, Adam, RMSprop and
most others) do on servers what they do at home, and those that look at a matrix as a whole (Muon) want one server.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laconic.codecs import codec
from laconic.consistency.servers.clocks import Clocks
from laconic.consistency.servers.messages import ServerKind, ServerMessage, settings
from laconic.errors import BadInput
from laconic.schedules.schedule import bounds
from laconic.storage.form import check_like, check_optimizer

Options = Mapping[str, Any]


def cut(numel: int, servers: int) -> list[tuple[int, int]]:
    """Where each shard begins and ends; one per server, none empty.

    >>> cut(10, 3), cut(1, 3)
    ([(0, 3), (3, 6), (6, 10)], [(0, 1)])
    """
    edges = [int(edge) for edge in bounds(numel, max(1, min(servers, numel)))]
    return list(itertools.pairwise(edges))


def copies(servers: int | None, replicas: int | None) -> int:
    """Copies of each shard; by default 1 if servers run beside workers, since both are lost together."""
    if replicas is not None:
        return replicas
    return 1 if servers is None else 0


def outlives(rank: int, world_size: int, servers: int | None, replicas: int | None) -> bool:
    """Whether every shard is still held when `rank` is lost: it has copies, or the rank only trains."""
    return copies(servers, replicas) > 0 or (servers is not None and rank < world_size - servers)


class WeightShard:
    """One slice of the weights, with its optimiser and the requests applied to it."""

    def __init__(self, values: Tensor, optimizer: ShardOptimizer | None, clocks: Clocks) -> None:
        self.values = values
        self.optimizer = optimizer
        self.clocks = clocks
        self.version = 0  # updates applied so far
        self.last: dict[int, tuple[int, int]] = {}  # each worker's latest request and its staleness: none applies twice
        self.finished: set[int] = set()  # workers that wait for the others to finish
        self.idle: set[int] = set()  # workers that have asked for nothing since all finished
        self.buffers: dict[int, Tensor] = {}  # of the model, as workers that finish have them
        self.mean = torch.empty(0, dtype=torch.uint8)  # of the buffers, when all had finished
        self._sum = torch.zeros_like(values)

    def missing(self, message: ServerMessage) -> int:
        """How many requests of this worker come before this one that has not been applied: 0 for the next in line,
        below 0 for one applied already."""
        return message.sequence - self.last.get(message.worker, (-1, 0))[0] - 1

    def apply(self, message: ServerMessage, staleness: int, rate: float) -> None:
        """Apply one push: step the optimiser with learning rate · `rate`; without an optimiser, values += payload.

        PayloadError, with nothing applied, if the payload is not its codec's for this many values.
        """
        told = settings(message.text)
        _codec(str(told.get("codec", "none"))).decode(message.payload, self._sum.numel(), out=self._sum)
        if self.optimizer is None:
            self.values.add_(self._sum)
        else:
            self.optimizer.step(self._sum, told.get("groups", {}), rate, staleness)
        self.version += 1
        self.last[message.worker] = (message.sequence, staleness)
        self.idle.discard(message.worker)
        if message.worker in self.clocks.clocks:  # else it has died since
            self.clocks.tick(message.worker, message.clock)

    def note(self, message: ServerMessage, kind: ServerKind, staleness: int) -> None:
        """Apply a request that changes no weights."""
        self.last[message.worker] = (message.sequence, staleness)
        self.idle.discard(message.worker)
        if kind == ServerKind.FINISH:
            self.finished.add(message.worker)
            self.clocks.pause(message.worker)
            if message.payload.numel():
                self.buffers[message.worker] = message.payload

    def leave(self, worker: int) -> None:
        """Stop waiting for this worker; keep its buffers if it finished."""
        self.clocks.leave(worker)
        self.finished.discard(worker)

    def close(self, merge: Callable[[list[Tensor]], Tensor]) -> None:
        """`merge` all workers' buffers once they have finished, and reset."""
        self.idle |= self.finished
        self.finished.clear()
        self.clocks.resume()
        self.mean = merge([self.buffers[worker] for worker in sorted(self.buffers)]) if self.buffers else self.mean
        self.buffers.clear()

    def handed_over(self) -> dict[str, Any]:
        """The shard's whole state, for a copy on another server."""
        return {
            **self.state_dict(), "last": dict(self.last), "clocks": self.clocks.state_dict(), "idle": sorted(self.idle),
            "finished": sorted(self.finished), "buffers": dict(self.buffers), "mean": self.mean,
        }  # fmt: skip

    def take_over(self, state: Mapping[str, Any]) -> None:
        """The reverse of `handed_over`."""
        self.load_state_dict(state)
        self.version = int(state["version"])
        self.last, self.buffers, self.mean = dict(state["last"]), dict(state["buffers"]), state["mean"]
        self.finished, self.idle = set(state["finished"]), set(state["idle"])
        self.clocks.load_state_dict(state["clocks"])

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"values": self.values.clone(), "version": self.version}
        return state if self.optimizer is None else {**state, "optimizer": self.optimizer.state_dict()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of another shard."""
        check_like(state, {"values": None, "version": 0}, "the state of a shard")
        values = state["values"]
        if not isinstance(values, Tensor) or (values.dtype, values.numel()) != (torch.float32, self.values.numel()):
            numel = values.numel() if isinstance(values, Tensor) else "no"
            raise BadInput(
                f"the saved shard has {numel} values, this one {self.values.numel()} of float32: resume with as many "
                "servers as it was saved with"
            )
        if self.optimizer is not None:
            check_like(state, {"optimizer": None}, "the state of a shard")
            self.optimizer.check_state(state["optimizer"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; the version never decreases, since workers may hold later weights."""
        self.check_state(state)
        self.values.copy_(state["values"])
        self.version = max(self.version, int(state["version"]))
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])


class ShardOptimizer:
    """The user's optimiser made anew over one shard.

    Args:
        parameters: what `like`, the user's, trains, in the order of the flat weights.
        first: where the shard begins in them.
        values: the shard's weights, which it updates in place.
    """

    def __init__(
        self, like: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], first: int, values: Tensor
    ) -> None:
        group_of = {id(p): number for number, group in enumerate(like.param_groups) for p in group["params"]}
        self._pieces: list[tuple[nn.Parameter, int, int]] = []
        members: dict[int, list[nn.Parameter]] = {}
        at = 0
        for parameter in parameters:
            begin, end = max(at, first), min(at + parameter.numel(), first + values.numel())
            if begin < end:
                view = values[begin - first : end - first]
                whole = end - begin == parameter.numel()
                piece = nn.Parameter(view.view(parameter.shape) if whole else view)
                self._pieces.append((piece, begin - first, end - first))
                members.setdefault(group_of[id(parameter)], []).append(piece)
            at += parameter.numel()
        self._numbers = sorted(members)
        self._initial = [_on_a_server(like.param_groups[number]) for number in self._numbers]
        self._inner = _made_anew(like, [{**_own(like.param_groups[n]), "params": members[n]} for n in self._numbers])

    def step(self, gradient: Tensor, changed: Mapping[str, Options], rate: float, staleness: int = 0) -> None:
        """One step with the options the worker has; `changed` holds those that differ from the first, by group.

        An optimiser with an option `staleness`, such as YellowFin, is told how stale the gradient is.
        """
        for number, initial, group in zip(self._numbers, self._initial, self._inner.param_groups, strict=True):
            group.update(initial)
            group.update({name: _tupled(value) for name, value in changed.get(str(number), {}).items()})
            if "lr" in group:
                group["lr"] = group["lr"] * rate
            if "staleness" in group:
                group["staleness"] = staleness
        for piece, begin, end in self._pieces:
            piece.grad = gradient[begin:end].view(piece.shape)
        self._inner.step()

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._inner.state_dict())

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse what an optimiser of other pieces remembers."""
        what = "the state of a shard's optimiser"
        check_optimizer(state, self._inner, what)
        members = [piece for group in self._inner.param_groups for piece in group["params"]]
        for number, kept in state["state"].items():
            for name, value in kept.items():
                if isinstance(value, Tensor) and value.dim() and value.numel() != members[number].numel():
                    raise BadInput(f"{what} does not fit: its '{name}' of parameter {number} is another's")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(copy.deepcopy(dict(state)))


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group that are plain values, as JSON can carry them; tensors of one value as floats.

    >>> plain_options({"params": [], "lr": torch.tensor(0.5), "betas": (0.9, 0.99), "fused": None})
    {'lr': 0.5, 'betas': (0.9, 0.99), 'fused': None}
    """
    found: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = float(value)
        elif name != "params" and _is_plain(value):
            found[name] = value
    return found


def changed_options(groups: Sequence[Mapping[str, Any]], initial: Sequence[Options]) -> dict[str, dict[str, Any]]:
    """The options that schedulers changed since `initial`, by group and name."""
    found = {}
    for number, (group, before) in enumerate(zip(groups, initial, strict=True)):
        now = plain_options(group)
        if differing := {name: value for name, value in now.items() if before.get(name, ...) != value}:
            found[str(number)] = differing
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _own(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options; the learning rate as a number, since a tensor would be the user's own."""
    options = {name: value for name, value in group.items() if name != "params"}
    return {**options, **_on_a_server(group)}


def _on_a_server(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's plain options without those that say how a device computes: servers compute on the processor."""
    options, away = plain_options(group), not all(parameter.is_cpu for parameter in group["params"])
    plain = {"capturable": False, "fused": None, "foreach": None} if away else {}
    return {name: plain.get(name, value) for name, value in options.items()}


def _made_anew(like: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    cls = type(like)
    accepted = inspect.signature(cls).parameters
    defaults = {n: float(v) if isinstance(v, Tensor) else v for n, v in like.defaults.items() if n in accepted}
    try:
        return cls(groups, **defaults)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise BadInput(f"{cls.__name__} cannot be made anew on a server from its options: {error}") from None


_codec = functools.lru_cache(maxsize=64)(codec)


@dataclass(frozen=True)
class ShardLayout:
    """Maps shards to servers: workers are members 0 … P−1 of the mesh, one per rank; servers are P, P+1, …

    >>> layout = ShardLayout(4, servers=None, replicas=1, numel=10)
    >>> layout.homes, layout.chain(3)
    ([0, 1, 2, 3, 0, 1, 2, 3], [7, 4])
    """

    world_size: int  # P
    servers: int | None  # dedicated servers, the last ranks; None for one beside every worker
    replicas: int  # further servers that hold a copy of each shard
    numel: int  # of the flat weights

    def __post_init__(self) -> None:
        if self.servers is not None and not 0 < self.servers < self.world_size:
            raise BadInput(
                f"servers={self.servers} of {self.world_size} ranks leaves no worker or no server; without it every "
                "rank serves a part"
            )
        if self.replicas not in (0, 1):
            raise BadInput(f"replicas is 0 or 1: one copy of each shard on another server, got {self.replicas}")
        if not 0 <= self.replicas < self.server_count:
            raise BadInput(
                f"replicas={self.replicas} needs as many servers more than one, and there are {self.server_count}"
            )

    @property
    def server_count(self) -> int:
        return self.world_size if self.servers is None else self.servers

    @property
    def homes(self) -> list[int]:
        """The rank of each member."""
        return [*range(self.world_size), *range(self.world_size - self.server_count, self.world_size)]

    @property
    def trainers(self) -> list[int]:
        """The workers that train: all but those on dedicated servers."""
        return list(range(self.world_size - (self.servers or 0)))

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Where each shard begins and ends."""
        return cut(self.numel, self.server_count)

    def ring(self, shard: int) -> list[int]:
        """All servers, in the order in which they serve a shard: the first of them that lives."""
        return [self.world_size + (shard + k) % self.server_count for k in range(self.server_count)]

    def chain(self, shard: int) -> list[int]:
        """The servers that hold a shard to begin with."""
        return self.ring(shard)[: self.replicas + 1]

    def held_by(self, member: int) -> list[int]:
        """The shards that a server holds to begin with, its own and copies."""
        return [shard for shard in range(len(self.edges)) if member in self.chain(shard)]

    def linked(self, one: int, other: int) -> bool:
        """Workers speak with servers, and servers with each other where there are replicas."""
        is_server = [one >= self.world_size, other >= self.world_size]
        return is_server[0] != is_server[1] or (all(is_server) and self.replicas > 0)
