"""Parameter servers: what they apply, what they survive, and what a wrong use is told."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.consistency import build
from laconic.consistency.modes.easgd import Centre
from laconic.consistency.servers.clocks import Clocks
from laconic.consistency.servers.messages import ServerKind, ServerMessage, settings, unpack, weights_in
from laconic.consistency.servers.requests import RequestHandler, Serving
from laconic.consistency.servers.server import Server
from laconic.consistency.servers.shards import (
    ShardLayout,
    ShardOptimizer,
    WeightShard,
    changed_options,
    cut,
    plain_options,
)
from laconic.errors import BadInput, PayloadError, PeerLost
from laconic.transports.frame import EngineKind
from laconic.transports.launcher import LocalJob, run_local
from tests.reference.downpour import downpour
from tests.transports.frames import travelled


def test_messages_survive_the_wire_and_broken_ones_do_not() -> None:
    payload = torch.arange(100, dtype=torch.uint8)
    message = ServerMessage(
        ServerKind.PUSH, 3, 7, 2**40, 5, 9, 2.5, True, text='{"codec": "topk(0.1)"}', payload=payload
    )
    again = unpack(travelled(message.frame))
    assert torch.equal(again.payload, payload)
    assert again.payload.data_ptr() % 8 == 0
    fields = [name for name in message.__dataclass_fields__ if name != "payload"]
    assert [getattr(again, name) for name in fields] == [getattr(message, name) for name in fields]
    forwarded = unpack(travelled(message.forwarded(4.0).frame))
    assert (forwarded.kind, forwarded.original, forwarded.value) == (ServerKind.FORWARD, ServerKind.PUSH, 4.0)
    header = message.frame.header
    for wrong in (header._replace(kind=EngineKind.DATA), header._replace(flag=250)):
        with pytest.raises(PayloadError):
            unpack(message.frame._replace(header=wrong))
    with pytest.raises(PayloadError):
        unpack(message.frame._replace(payload=torch.ones(3)))
    with pytest.raises(PayloadError, match="shard 3 has 404 bytes"):
        weights_in(again, 101)


def test_options_of_many_groups_travel_with_a_push() -> None:
    groups = {str(number): {"lr": 0.1 / (1 + number), "initial_lr": 0.1} for number in range(2000)}
    push = ServerMessage(ServerKind.PUSH, 0, 0, text=json.dumps({"groups": groups}))
    assert settings(unpack(travelled(push.frame)).text) == {"groups": groups}


def test_layouts() -> None:
    assert [end - begin for begin, end in cut(10, 4)] == [2, 3, 2, 3]
    dedicated = ShardLayout(5, servers=2, replicas=1, numel=100)
    assert (dedicated.homes, dedicated.trainers) == ([0, 1, 2, 3, 4, 3, 4], [0, 1, 2])
    assert (dedicated.chain(1), dedicated.held_by(5)) == ([6, 5], [0, 1])
    with pytest.raises(BadInput, match="leaves no worker"):
        ShardLayout(2, servers=2, replicas=0, numel=10)
    with pytest.raises(BadInput, match="replicas=1"):
        ShardLayout(3, servers=1, replicas=1, numel=10)


def test_a_server_stays_until_those_who_finished_have_their_answers() -> None:
    """A copy answers in the place of a server that is killed between two answers to FINISH."""
    layout, sent = ShardLayout(2, servers=None, replicas=1, numel=4), list[tuple[int, ServerMessage]]()
    serving = Serving("async")
    shards = {number: serving.shard(layout, number, torch.zeros(2)) for number in (0, 1)}
    handler = RequestHandler(3, layout, shards, serving, lambda member, message: sent.append((member, message)))
    for worker in (0, 1):
        handler.take(2, ServerMessage(ServerKind.FINISH, 0, worker, payload=torch.empty(0)).forwarded(0))
        handler.take(worker, ServerMessage(ServerKind.FINISH, 1, worker, wants_weights=True, payload=torch.empty(0)))
        for member, message in list(sent):
            if message.kind == ServerKind.FORWARD:
                handler.take(member, ServerMessage(ServerKind.STORED, message.shard, message.worker, message.sequence))
    handler.answer()
    assert handler.unanswered
    handler.leave(2)  # and the workers turn to this one
    handler.take(0, ServerMessage(ServerKind.FINISH, 0, 0, wants_weights=True))
    handler.answer()
    assert sent[-1][0] == 0
    assert sent[-1][1].kind == ServerKind.REPLY
    for worker in (0, 1):
        assert handler.unanswered
        handler.take(worker, ServerMessage(ServerKind.COMMIT, 0, worker))
    assert not handler.unanswered


def test_a_copy_that_took_over_answers_only_what_another_copy_has_too() -> None:
    """A push that its dead server had passed on is asked again: two hold it before the worker hears so."""
    layout, sent = ShardLayout(3, servers=None, replicas=1, numel=6), list[tuple[int, ServerMessage]]()
    serving = Serving("async")
    shards = {number: serving.shard(layout, number, torch.zeros(2)) for number in range(3) if 4 in layout.chain(number)}
    handler = RequestHandler(4, layout, shards, serving, lambda member, message: sent.append((member, message)))
    push = ServerMessage(ServerKind.PUSH, 0, 0, payload=laconic.codec("none").encode(torch.ones(2)))
    handler.take(3, push.forwarded(0))
    handler.leave(3)
    sent.clear()
    handler.take(0, push)
    handler.answer()
    assert [(member, message.kind) for member, message in sent] == [(5, ServerKind.COPY), (5, ServerKind.FORWARD)]
    handler.take(5, ServerMessage(ServerKind.STORED, 0, 0, push.sequence))
    handler.answer()
    assert sent[-1][0] == 0
    assert sent[-1][1].kind == ServerKind.REPLY
    assert torch.equal(handler.shards[0].values, torch.ones(2))


def _two_servers() -> tuple[list[Server], Callable[[int, ServerMessage], None]]:
    """The servers beside two workers, without threads and sockets, and what delivers a message and all that follow."""
    layout, serving, servers = ShardLayout(2, servers=None, replicas=1, numel=4), Serving("async"), list[Server]()
    on_the_way: list[tuple[int, int, ServerMessage]] = []
    for me in (2, 3):
        server, shards = object.__new__(Server), {n: serving.shard(layout, n, torch.zeros(2)) for n in (0, 1)}
        server.shards, server.lock = shards, threading.Lock()
        server._handler = RequestHandler(
            me, layout, shards, serving, lambda to, note, me=me: on_the_way.append((me, to, note))
        )
        servers.append(server)

    def deliver(to: int, message: ServerMessage) -> None:
        on_the_way.append((message.worker, to, message))
        while on_the_way:
            sender, to, message = on_the_way.pop(0)
            if to >= 2:
                servers[to - 2]._handler.take(sender, message)

    return servers, deliver


def test_copies_that_were_saved_at_other_moments_are_given_anew_after_a_restart() -> None:
    servers, deliver = _two_servers()
    for server, updates in zip(servers, (5, 3), strict=True):
        server.load_state_dict({n: {"values": torch.full((2,), float(updates)), "version": updates} for n in "01"})
    push = ServerMessage(ServerKind.PUSH, 0, 0, payload=laconic.codec("none").encode(torch.ones(2)))
    deliver(2, push)
    deliver(3, dataclasses.replace(push, shard=1))
    for number, updates in enumerate((6, 4)):  # as the shard's server had it, and the push
        for server in servers:
            assert server.shards[number].version == updates
            assert torch.equal(server.shards[number].values, torch.full((2,), float(updates)))


def test_a_state_saved_after_a_loss_holds_more_shards_than_its_server_has_to_begin_with() -> None:
    (server, _), _ = _two_servers()
    saved = {n: {"values": torch.ones(2), "version": 7} for n in "012"}
    server.load_state_dict(saved)
    assert [shard.version for shard in server.shards.values()] == [7, 7]
    with pytest.raises(BadInput, match="the state holds shards"):
        server.load_state_dict({"1": saved["1"], "2": saved["2"]})


def _network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("servers", [1, 3])
def test_shards_step_as_the_users_optimiser_does(name: str, servers: int) -> None:
    """Two groups, a scheduler and an option changed by hand: every shard ends with the bits of the plain optimiser."""
    plain = _network()
    groups = [{"params": plain[0].parameters(), "weight_decay": 0.1}, {"params": plain[2].parameters()}]
    optimizer = OPTIMIZERS[name](groups)
    initial = [plain_options(group) for group in optimizer.param_groups]
    parameters = list(plain.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    shards = []
    for begin, end in cut(flat.numel(), servers):
        own = flat[begin:end].clone()
        shards.append(
            (begin, end, WeightShard(own, ShardOptimizer(optimizer, parameters, begin, own), Clocks([0], None)))
        )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        gradient = torch.randn(flat.numel(), generator=generator)
        for parameter, piece in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter)
        changed = changed_options(optimizer.param_groups, initial)
        for begin, end, shard in shards:
            text = json.dumps({"groups": changed})
            payload = laconic.codec("none").encode(gradient[begin:end].clone())
            shard.apply(ServerMessage(ServerKind.PUSH, 0, 0, step, clock=step + 1, text=text, payload=payload), 0, 1.0)
        optimizer.step()
        scheduler.step()
        if step == 3:
            optimizer.param_groups[1]["weight_decay"] = 0.3
    served = torch.cat([shard.values for _, _, shard in shards])
    assert torch.equal(served, torch.cat([p.detach().reshape(-1) for p in parameters]))
    state = shards[0][2].state_dict()
    shards[0][2].values.zero_()
    shards[0][2].load_state_dict(state)
    assert torch.equal(shards[0][2].values, served[: shards[0][1]])
    with pytest.raises(BadInput, match="as many servers"):
        shards[0][2].load_state_dict({**state, "values": torch.zeros(1)})


class _Vector(nn.Module):
    """A model whose gradient is what the test says."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel))

    def step(self, optimizer: torch.optim.Optimizer, gradient: Tensor) -> None:
        self.w.grad = gradient.clone()
        optimizer.step()


def _in_turns(aware: bool) -> dict[str, Any]:
    """Rank 0 pushes three times while rank 1 holds its weights; then rank 1 pushes, three updates late."""
    world = laconic.init(timeout_s=30)
    model = _Vector(10)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    spec = f"async(staleness_aware={str(aware).lower()})"
    agreement = laconic.distribute(model, optimizer, consistency=spec, codec="none")
    gradient = torch.arange(10.0) * (1 + world.rank)
    if world.rank == 0:
        for _ in range(3):
            model.step(optimizer, gradient)
    laconic.barrier()
    if world.rank == 1:
        model.step(optimizer, gradient)
    staleness = [record.staleness for record in agreement.records]
    agreement.finish()
    found = {"w": model.w.detach().clone(), "staleness": staleness, "gradient_kept": model.w.grad is not None}
    agreement.close()
    world.close()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("aware", [True, False])
def test_late_pushes_count_less(aware: bool) -> None:
    found = run_local(2, _in_turns, (aware,), timeout_s=100)
    g = np.arange(10.0)
    expected = downpour(np.zeros(10), [(g, 0), (g, 1), (g, 2), (2 * g, 0)], 0.5, aware=aware)
    for rank in found:
        np.testing.assert_allclose(rank["w"].numpy(), expected, rtol=2e-7)  # the last bit: fused multiply-adds
        assert rank["gradient_kept"]
    assert [rank["staleness"] for rank in found] == [[0, 0, 0], [3]]


def _with_a_server(_: int) -> dict[str, Any]:
    """Two workers and a rank that only serves; then the same servers as the centre of elastic averaging."""
    world = laconic.init(timeout_s=30)
    model = _Vector(33)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    agreement = laconic.distribute(
        model, optimizer, consistency="async(servers=1, staleness_aware=false, push=2, pull=2)", codec="topk(0.1)+none"
    )
    refused = ""
    if world.rank == 2:
        try:
            model.step(optimizer, torch.ones(33))
        except BadInput as error:
            refused = str(error)
    else:
        for _ in range(40):
            model.step(optimizer, -torch.ones(33))
    left = sum(float(value.sum()) for value in agreement.state_dict()["residuals"].values())
    sent = sum(record.sent_nbytes for record in agreement.records)
    agreement.finish()
    agreement.close()
    centre = Centre(world, torch.zeros(7), codec="none")
    for step in range(5):
        centre.pull()
        centre.add(torch.full((7,), 1.0 + world.rank), step)
    centre.finish()
    found = {
        "w": model.w.detach().clone(), "left": left, "refused": refused, "sent": sent, "centre": centre.values.clone()
    }  # fmt: skip
    centre.close()
    world.close()
    return found


@pytest.mark.processes
def test_a_rank_may_only_serve_and_nothing_is_lost_on_the_way() -> None:
    """Everything pushed is in the weights or left out by the codec so far; a centre holds the sum of what was added."""
    found = run_local(3, _with_a_server, (0,), timeout_s=100)
    for rank in found:
        assert torch.equal(rank["w"], found[0]["w"])
        assert torch.equal(rank["centre"], torch.full((7,), 5.0 * (1 + 2 + 3)))
    assert float(found[0]["w"].sum()) - found[0]["left"] - found[1]["left"] == pytest.approx(2 * 40 * 33)
    assert found[0]["left"] < 0
    assert "rank 2 serves and does not train" in found[2]["refused"]
    assert 0 < found[0]["sent"] < 40 * 33 * 4


STEPS, NUMEL = 150, 1000


def _count_pushes(folder: str, spec: str) -> dict[str, Any]:
    """Each push adds 1 to every weight, so that the weights tell how many updates were applied.

    `gap` is the longest time between two steps, the first left out, in which much is imported.
    """
    world = laconic.init(timeout_s=30)
    model = _Vector(NUMEL)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    agreement = laconic.distribute(model, optimizer, consistency=spec, codec="none")
    counter = Path(folder, f"acknowledged-{world.rank}")
    gaps, last, error, culprit, gone = [], time.monotonic(), "", None, []
    try:
        for step in range(STEPS):
            model.step(optimizer, torch.full((NUMEL,), -1.0))
            counter.with_suffix(".new").write_text(str(step + 1))
            counter.with_suffix(".new").rename(counter)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
            time.sleep(0.005)
        gone = list(agreement.lost_ranks)
        agreement.finish()
    except PeerLost as lost:
        error, culprit = str(lost), lost.peer
        gaps.append(time.monotonic() - last)
    found = {
        "w": model.w.detach().clone(), "gap": max(gaps[1:]), "steps": agreement.step, "error": error,
        "culprit": culprit, "lost": gone,
    }  # fmt: skip
    agreement.close()
    world.close()
    return found


def _counted(counter: Path) -> int:
    return int(counter.read_text() or 0) if counter.exists() else 0


def _killed(folder: Path, spec: str, world_size: int, victim: int) -> tuple[list[Any], int]:
    """Kill a rank in the middle of training; returns the others' results and how many pushes of it were answered."""
    job = LocalJob(world_size, _count_pushes, (str(folder), spec))
    counter = folder / f"acknowledged-{victim}"
    deadline = time.monotonic() + 80
    while _counted(counter) < STEPS // 5:
        assert time.monotonic() < deadline, "the victim never trained"
        time.sleep(0.02)
    job.processes[victim].kill()  # SIGKILL
    others = [rank for rank in range(world_size) if rank != victim]
    outcomes = job.outcomes(60, ranks=others)
    for outcome in outcomes:
        assert outcome.value is not None, outcome.error
    return [outcome.value for outcome in outcomes], _counted(counter)


@pytest.mark.processes
@pytest.mark.parametrize("spec", ["async(replicas=1, staleness_aware=false)"])
def test_no_answered_update_is_lost_when_a_rank_is_killed(spec: str, tmp_path: Path) -> None:
    found, acknowledged = _killed(tmp_path, spec, 3, victim=1)
    least = 2 * STEPS + acknowledged
    for rank in found:
        assert rank["error"] == ""
        assert rank["steps"] == STEPS
        assert rank["lost"] == [1]
        assert rank["gap"] < 20.0  # no hang; how long it really takes is in docs/reference/modes/servers.md
        assert torch.equal(rank["w"], found[0]["w"])
    applied = found[0]["w"]
    # at most the one push that was under way when its worker died may be there besides
    assert least <= float(applied.min())
    assert float(applied.max()) <= least + 1


@pytest.mark.processes
def test_without_replicas_a_lost_server_is_named(tmp_path: Path) -> None:
    found, _ = _killed(tmp_path, "async(replicas=0)", 2, victim=1)
    assert found[0]["culprit"] == 1
    lost = "rank 1, which serves shard 1 of 2, is lost; with replicas=1, where the mode has it, the others"
    assert lost in found[0]["error"]
    assert found[0]["gap"] < 20.0


def _copies(_: int) -> dict[str, Any]:
    world = laconic.init(timeout_s=30)
    model = _Vector(300)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    agreement = laconic.distribute(model, optimizer, consistency="async(replicas=1)", codec="dynamic8")
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(30):
        model.step(optimizer, torch.randn(300, generator=generator))
    agreement.finish()
    shards = agreement.state_dict()["shards"]
    agreement.close()
    world.close()
    return shards


@pytest.mark.processes
def test_copies_of_a_shard_are_the_same_bits() -> None:
    ranks = run_local(3, _copies, (0,), timeout_s=100)
    for shard in range(3):
        held = [rank[str(shard)] for rank in ranks if str(shard) in rank]
        assert len(held) == 2
        assert held[0]["version"] == held[1]["version"] == 90
        assert torch.equal(held[0]["values"], held[1]["values"])
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(*(each["optimizer"]["state"][0][name] for each in held))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("async(push=0)", "push is a whole number of steps from 1"),
        ("async(hierarchical=true, replicas=1)", "no use for replicas"),
        ("async(hierarchical=true, servers=1)", "servers beside the workers"),
        ("stale(-1)", "whole number of steps from 0"),
        ("stale(central=false, replicas=1)", "no servers and no replicas"),
        ("gaia(-0.1)", "relative change from 0"),
        ("gaia(sites=0)", "sites is a whole number from 1"),
    ],
)
def test_wrong_values_are_refused_at_once(spec: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        build(spec)


def test_options_that_a_mode_does_not_have() -> None:
    model = _Vector(3)
    with pytest.raises(BadInput, match="'async' has no option algorithm"):
        laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), consistency="async", algorithm="ring")
