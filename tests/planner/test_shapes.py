"""Models that look at values, followed on shapes alone: the same counts as on a processor, and nothing is computed."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from laconic.cli import main
from laconic.errors import BadInput
from laconic.planner.cost import Cost, cost, sum_of_outputs
from laconic.planner.plan import Asked, plan
from laconic.planner.subject import subject
from laconic.planner.trace import step

transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, **SMALL}  # fmt: skip


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, **SMALL))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **LLAMA))


def no_real_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a product of matrices with values an error."""

    def refused(self: nn.Module, x: Tensor) -> Tensor:
        assert x.is_meta, "computed for real"
        return nn.functional.linear(x, self.weight, self.bias)

    monkeypatch.setattr(nn.Linear, "forward", refused)


def agrees(found: Cost, model: nn.Module, tokens: int) -> None:
    """With a step that is computed."""
    model.config.use_cache = False
    chosen = subject(model, (tokens,))
    traced = step(chosen.model("cpu"), (chosen.inputs(2, "cpu"),), sum_of_outputs, chosen.optimizer)
    assert found.total("multiply_adds") == sum(layer.multiply_adds for layer in traced.layers.values())
    assert found.backward_multiply_adds == traced.backward_multiply_adds
    assert (found.saved_nbytes, found.training_nbytes) == (traced.saved_nbytes, traced.peak_nbytes)


@pytest.mark.parametrize("make", [gpt2, llama, mixtral])
@pytest.mark.parametrize("cache", [True, False])
def test_transformers_are_followed_on_shapes(make, cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    model.config.use_cache = cache
    with monkeypatch.context() as patched:
        no_real_product(patched)
        patched.setattr(transformers.DynamicCache, "__init__", lambda *_, **__: pytest.fail("a cache is kept"))
        found = cost(model, 2, (8,))
    assert any("use_cache=False" in note for note in found.notes) == cache
    assert model.config.use_cache == cache  # the user's model is as it was
    assert found.uncounted == ()
    agrees(found, model, 8)


class Padded(nn.Module):
    """Gives a mask of ones, as a collator does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, attention_mask=torch.ones_like(x)).logits


def test_a_mask_of_ones_is_seen_to_be_one() -> None:
    """Its attention is that without a mask."""
    assert cost(Padded(), 2, (8,), "int64").saved_nbytes == cost(gpt2(), 2, (8,)).saved_nbytes


def test_experts_are_counted() -> None:
    """Every token goes to 2 experts of three matrices each, in 2 layers."""
    dense = cost(llama(), 2, (8,)).total("multiply_adds")
    mlp, router = 16 * 3 * 32 * 64, 16 * 32 * 4
    assert cost(mixtral(), 2, (8,)).total("multiply_adds") == dense + 2 * (2 * mlp - mlp + router)


def test_a_plan_computes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_real_product(monkeypatch)
    found = plan(subject(gpt2(), (64,)), Asked(2, device="a100"), tmp_path)
    assert found.chosen.seconds > 0


class Branches(nn.Module):
    """Goes by the value of a result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum() > 0:
            y = self.layer(y)
        return y


def test_a_branch_on_a_value_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    no_real_product(monkeypatch)
    with pytest.raises(BadInput, match="goes by a value that depends on weights") as raised:
        cost(Branches(), 2, (4,))
    text = str(raised.value)
    assert "if y.sum() > 0:" in text
    assert text.count("\n") == 0


class Positions(nn.Module):
    """Looks at what follows from shapes, writes into it, and takes a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("order", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0], device=x.device)
        places[0] = 7
        chosen = (places > 0).nonzero()[:, 0]
        assert chosen.shape[0] == x.shape[0]
        assert self.order[-1].item() == 3
        noise = torch.zeros(4, device=x.device)
        noise += torch.rand(4, device=x.device)
        return self.layer(x[chosen]) + noise


def test_what_follows_from_shapes_is_known() -> None:
    assert cost(Positions(), 3, (4,)).total("multiply_adds") == 3 * 16


class Overwritten(nn.Module):
    """A known value that a weight is added to is known no more, through a view neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.zeros(4, device=x.device)
        view = sums[:2]
        with torch.no_grad():
            sums += self.weight
        return x * self.weight if view[0].item() else x


def test_what_is_overwritten_is_forgotten() -> None:
    with pytest.raises(BadInput, match=r"view\[0\]\.item"):
        cost(Overwritten(), 3, (4,))


def test_the_command_says_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("import transformers as t", "def model():",
             "    return t.GPT2LMHeadModel(t.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=100))")  # fmt: skip
    (tmp_path / "own_gpt.py").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["cost", "own_gpt:model", "--input-shape", "8"])
    sys.modules.pop("own_gpt", None)
    assert not ended.value.code
    assert "use_cache=False" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["cost", "lenet"], ["plan", "lenet", "-n", "2", "--device-profile", "v100"]])
def test_a_terminal_shows_that_a_command_is_at_work(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    assert "following the model on shapes" in shown.getvalue()


FACTORY = """
import torch
class Large(torch.nn.Sequential):
    def __init__(self):
        super().__init__(*(torch.nn.Linear(8192, 8192) for _ in range(104)))
def model(): return Large()
"""


@pytest.mark.parametrize("command", [["cost"], ["plan", "-n", "8", "--device-profile", "a100"]])
def test_a_factory_of_seven_billion_weights_allocates_none(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_large.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), before[1]))
    try:
        with pytest.raises(SystemExit) as ended:
            main([command[0], "own_large:model", "--input-shape", "8192", *command[1:]])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        sys.modules.pop("own_large", None)
    assert not ended.value.code, capsys.readouterr().err
