"""Ensembles, TreeNets and distillation: what several workers' models become after training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.consistency import build
from laconic.consistency.distill import distill, distill_loss
from laconic.consistency.modes.ensemble import Ensemble
from laconic.errors import BadInput, UnknownName
from laconic.transports.launcher import run_local

pytestmark = pytest.mark.timeout(240)
X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)


def _network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([value.detach().reshape(-1).double() for value in module.state_dict().values()])


def _train(spec: str, steps: int = 5, **options: Any) -> dict[str, Any]:
    """Train by one mode as a rank of the job; what there is before and after finish()."""
    with laconic.init(timeout_s=60) as world:
        model = _network(seed=world.rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        agreement: Any = laconic.distribute(model, optimizer, consistency=spec, **({"codec": "none"} | options))
        begun = _flat(model)
        for step in range(steps):
            rows = torch.arange(60)[step * world.world_size + world.rank :: 7]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()
            optimizer.step()
        sent = sum(record.sent_nbytes for record in agreement.records)
        own = [p.detach().clone() for p in model.parameters()]
        state = _flat(model)
        model.eval()
        predicted = model(X).softmax(-1).detach()
        agreement.finish()
        agreement.predictor().eval()
        found = {
            "begun": begun, "own": own, "state": state, "after": _flat(model), "sent": sent, "mine": predicted,
            "together": agreement.predictor()(X).exp().detach(),
            "members": [_flat(member) for member in agreement.ensemble.members],
            "finished_sent": sum(record.sent_nbytes for record in agreement.records),
        }  # fmt: skip
        agreement.close()
        return found


def _all() -> dict[str, dict[str, Any]]:
    return {
        "ensemble": _train("ensemble"),
        "apart": _train("ensemble(alike=false, keep=1)"),
        "treenet": _train("treenet(2)"),
        "named": _train("treenet('3', alike=false)", codec="dynamic8"),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_local(3, _all, timeout_s=200)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "kept"), [("ensemble", 0), ("apart", 1), ("treenet", 0), ("named", 0)])
def test_finish_gathers_every_member_and_they_predict_together(
    name: str, kept: int, ranks: list[dict[str, Any]]
) -> None:
    found = [rank[name] for rank in ranks]
    mean = torch.stack([each["mine"] for each in found]).mean(dim=0)
    for each in found:
        assert torch.allclose(each["together"], mean, atol=1e-6)
        for member, other in zip(each["members"], found, strict=True):
            assert torch.equal(member, other["state"])
        assert torch.equal(each["after"], found[kept]["state"]), "the model holds the member that is kept"
        assert each["finished_sent"] > each["sent"]


@pytest.mark.processes
def test_members_train_apart_and_nothing_is_sent(ranks: list[dict[str, Any]]) -> None:
    for name, alike in (("ensemble", True), ("apart", False)):
        found = [rank[name] for rank in ranks]
        assert all(each["sent"] == 0 for each in found)
        assert torch.equal(found[0]["begun"], found[1]["begun"]) == alike
        assert not torch.equal(found[0]["state"], found[1]["state"])
    model = _network(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        rows = torch.arange(60)[3 * step :: 7]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()
    torch.testing.assert_close(ranks[0]["ensemble"]["state"], _flat(model), rtol=1e-5, atol=1e-6)  # as if it were alone


@pytest.mark.processes
@pytest.mark.parametrize(("name", "shared"), [("treenet", 4), ("named", 4)])
def test_a_trunk_stays_the_same_bits_and_heads_differ(name: str, shared: int, ranks: list[dict[str, Any]]) -> None:
    own = [rank[name]["own"] for rank in ranks]
    for at, parameters in enumerate(zip(*own, strict=True)):
        alike = all(torch.equal(parameters[0], other) for other in parameters)
        assert alike == (at < shared), f"parameter {at}"
    assert all(rank[name]["sent"] > 0 for rank in ranks)
    begun = [rank[name]["begun"] for rank in ranks]
    assert torch.equal(begun[0], begun[1]) == (name == "treenet")


def test_wrong_choices_get_one_sentence() -> None:
    model = _network()
    for spec, options, text in [
        ("treenet(4)", {}, "1 to 3 of the model's 4 children, got 4"),
        ("ensemble(keep=1)", {}, "the ranks are 0 to 0"),
        ("ensemble", {"codec": "dynamic8"}, "sends no gradients"),
        ("ensemble", {"speed": 3}, "unknown option of distribute 'speed'"),
    ]:
        with pytest.raises(BadInput, match=text):
            laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), consistency=spec, **options)
    with pytest.raises(UnknownName, match="child of the model 'head'"):
        laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), consistency="treenet(head)", codec="none")
    with pytest.raises(BadInput, match="the optimiser trains nothing of the shared trunk"):
        laconic.distribute(model, torch.optim.SGD(model[3].parameters(), 0.1), consistency="treenet(1)", codec="none")
    for spec in ("treenet(0)", "treenet(true)", "treenet(1, keep=-1)", "ensemble(keep=-1)"):
        with pytest.raises(BadInput):
            build(spec)
    with pytest.raises(BadInput, match="at least one member"):
        Ensemble([])


def test_an_ensemble_is_the_mean_of_probabilities_where_logs_underflow() -> None:
    sure = [nn.Linear(2, 3), nn.Linear(2, 3)]
    for at, member in enumerate(sure):
        nn.init.zeros_(member.weight)
        member.bias.data = torch.tensor([-500.0, 500.0, -500.0] if at else [500.0, -500.0, -500.0])
    assert torch.allclose(Ensemble(sure)(torch.ones(1, 2)).exp(), torch.tensor([[0.5, 0.5, 0.0]]))


def test_the_loss_is_hinton_s_formula() -> None:
    torch.manual_seed(0)
    student, teacher, labels = torch.randn(7, 5, requires_grad=True), torch.randn(7, 5), torch.arange(7) % 5
    warmth, alpha, logits = 3.0, 0.7, student.detach()
    p, q = (teacher / warmth).softmax(-1), (logits / warmth).softmax(-1)
    kl = sum(float(p[i, k] * (p[i, k] / q[i, k]).log()) for i in range(7) for k in range(5)) / 7
    hard = -sum(float(logits[i].log_softmax(-1)[labels[i]]) for i in range(7)) / 7
    found = distill_loss(student, teacher, labels, temperature=warmth, alpha=alpha)
    assert float(found.detach()) == pytest.approx(alpha * warmth**2 * kl + (1 - alpha) * hard, rel=1e-5)
    found.backward()
    assert student.grad is not None
    assert float(distill_loss(logits, teacher, temperature=warmth)) == pytest.approx(warmth**2 * kl, rel=1e-5)
    for options in ({"temperature": 0.0}, {"alpha": 1.5}):
        with pytest.raises(BadInput):
            distill_loss(student, teacher, labels, **options)
    with pytest.raises(BadInput, match="same batch and classes"):
        distill_loss(student, teacher[:3])


def test_a_small_student_learns_what_an_ensemble_says_without_labels() -> None:
    torch.set_num_threads(1)
    members = []
    for seed in range(3):
        member = _network(seed)
        optimizer = torch.optim.Adam(member.parameters(), 0.05)
        for _ in range(40):
            optimizer.zero_grad()
            nn.functional.cross_entropy(member(X), Y).backward()
            optimizer.step()
        members.append(member)
    teacher = Ensemble(members)
    torch.manual_seed(9)
    student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    before = _flat(teacher)
    losses = distill(teacher, student, [X] * 200, torch.optim.Adam(student.parameters(), 0.02), temperature=2.0)
    assert losses[-1] < 0.1 * losses[0]
    assert teacher.training, "left as it was"
    assert torch.equal(_flat(teacher), before), "in evaluation mode its statistics stood still"
    teacher.eval()
    agree = (student(X).argmax(-1) == teacher(X).argmax(-1)).float().mean()
    assert agree > 0.9
