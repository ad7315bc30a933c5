"""Dense layers and channels, divided, beside one process."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from laconic.errors import BadInput
from laconic.parallel import Channels, Data, Dense, Norm, Space, Stages, product
from laconic.parallel.divide import divide, exact
from laconic.parallel.pipeline import Pipeline
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from tests.parallel.whole import check, close

SIZES = {"ranks": st.integers(1, 4), "batch": st.integers(4, 9), "n": st.integers(4, 9), "m": st.integers(4, 9),
         "bias": st.booleans()}  # fmt: skip


def chain(n: int, m: int, bias: bool, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(n * 100 + m)
    return nn.Sequential(nn.Linear(n, m, bias), nn.Tanh(), nn.Linear(m, n, bias), nn.Linear(n, m)).to(dtype)


@pytest.mark.parametrize(
    "plan",
    [
        "0=dense(output)",
        "0=dense(output); 2=dense(input)",
        "0=dense(input); 3=dense(output)",
        "0=dense(output, gives=whole); 2=dense(input, takes=whole); 3=dense(input)",
        "*=dense(input)",
    ],
)
@settings(max_examples=8)
@given(**SIZES)
def test_by_output_and_input(plan: str, ranks: int, batch: int, n: int, m: int, bias: bool) -> None:
    x = torch.randn(batch, n, dtype=torch.float64)
    chosen = {"0": Dense("input"), "2": Dense("input"), "3": Dense("input")} if plan[0] == "*" else plan
    check(chain(n, m, bias), chosen, ranks, x)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch", [(7,), (2, 3)])
def test_sums_travel_in_pieces(ranks: int, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "PIECE_NBYTES", 32)
    begun: list[str] = []
    begin = product.begin_sums

    def counted(cut, made, shapes, like, way):  # type: ignore[no-untyped-def]
        begun.extend([way] * len(shapes))
        return begin(cut, made, shapes, like, way)

    monkeypatch.setattr(product, "begin_sums", counted)
    check(chain(5, 6, True), "0=dense(output); 2=dense(input)", ranks, torch.randn(*batch, 5, dtype=torch.float64))
    assert begun.count("forward") == begun.count("backward") == ranks * product.PIECES


@pytest.mark.parametrize("split", ["summa", "cannon", "1.5d"])
@settings(max_examples=6)
@given(ranks=st.sampled_from([1, 4, 9]), batch=st.integers(3, 8), n=st.integers(3, 8), m=st.integers(3, 8),
       bias=st.booleans())  # fmt: skip
def test_grids(split: str, ranks: int, batch: int, n: int, m: int, bias: bool) -> None:
    x = torch.randn(batch, n, dtype=torch.float64)
    check(chain(n, m, bias), {"0": Dense(split), "2": Dense(split)}, ranks, x)


@pytest.mark.parametrize("split", ["summa", "cannon", "1.5d"])
def test_blocks_stay_on_the_grid(split: str) -> None:
    plan = {"0": Dense(split, gives="grid"), "2": Dense(split, takes="grid")}
    check(chain(6, 10, True), plan, 4, torch.randn(8, 6, dtype=torch.float64))


@pytest.mark.parametrize("grid", [2, 3, 6])
def test_grids_need_not_be_square(grid: int) -> None:
    x = torch.randn(7, 8, dtype=torch.float64)
    check(chain(8, 9, True), {"0": Dense("summa", grid=grid), "2": Dense("1.5d", grid=grid)}, 6, x)


@pytest.mark.parametrize(
    "plan",
    [
        {"0": Data(), "2": Dense("output"), "3": Dense("input")},
        {"0": Dense("output"), "2": Dense("input"), "3": Data()},
        {"0": Dense("summa"), "3": Data()},
        {"0": Dense("input"), "3": Data(), "2": Dense("output", gives="rows")},
    ],
)
def test_rows_of_their_own(plan: dict[str, object]) -> None:
    check(chain(5, 7, True), plan, 4, torch.randn(8, 5, dtype=torch.float64), rows=[2, 2, 2, 2])


def test_unequal_shares() -> None:
    plan = {"0": Data((3, 1, 2)), "2": Dense("output"), "3": Dense("input")}
    check(chain(5, 7, True), plan, 3, torch.randn(12, 5, dtype=torch.float64), rows=[6, 2, 4])


@pytest.mark.parametrize("rows", [[3, 1, 4], [2, 5, 1]])
def test_ranks_that_ask_for_each_others_rows(rows: list[int]) -> None:
    plan = {"0": Data(ask=True), "2": Dense("output"), "3": Dense("input")}
    check(chain(5, 7, True), plan, 3, torch.randn(sum(rows), 5, dtype=torch.float64), rows=rows)


def test_rows_are_counted_by_name_too() -> None:
    whole, x = chain(5, 7, True), torch.randn(8, 5, dtype=torch.float64)
    part, rows = copy.deepcopy(whole), [x[:6], x[6:]]
    whole(x).square().mean().backward()

    def work(transport):  # type: ignore[no-untyped-def]
        model = divide(copy.deepcopy(part), {"0": Data(ask=True)}, world=World(transport))
        model(input=rows[transport.rank]).square().mean().backward()
        close(model[0].weight.grad, whole[0].weight.grad, 1e-12, "gradient")
        with pytest.raises(BadInput, match="counts rows by the first tensor"):
            model(input=3)

    run_threads(2, work)


FLOAT32: dict[str, tuple[nn.Module, dict[str, object]]] = {
    "dense": (nn.Sequential(nn.Linear(33, 70), nn.Tanh(), nn.Linear(70, 9)),
              {"0": Dense("output"), "2": Dense("input")}),
    "grid": (nn.Sequential(nn.Linear(33, 70)), {"0": Dense("summa")}),
    "channels": (nn.Sequential(nn.Conv2d(3, 7, 3), nn.Tanh(), nn.Conv2d(7, 3, 3)),
                 {"0": Channels("output"), "2": Channels("input")}),
    "space": (nn.Sequential(nn.Conv2d(3, 7, 3, 2, 1, bias=False), nn.BatchNorm2d(7), nn.MaxPool2d(2, 1)),
              {"0": Space(), "1": Norm(), "2": Space()}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FLOAT32))
@settings(max_examples=4)
@given(ranks=st.integers(2, 4), batch=st.integers(4, 17), size=st.integers(11, 19))
@example(ranks=3, batch=12, size=17)  # 1.05e-6 off in a sum of 4,080 products
def test_float32_is_within_rounding(name: str, ranks: int, batch: int, size: int) -> None:
    model, plan = FLOAT32[name]
    torch.manual_seed(size)
    model.apply(lambda layer: getattr(layer, "reset_parameters", lambda: None)())  # whatever was imported before
    x = torch.randn(batch, 33) if isinstance(model[0], nn.Linear) else torch.randn(batch, 3, size, size + 3)
    terms = x.numel() // x.shape[1]  # of a weight's gradient: errors of a sum grow with the root of their number
    check(model, plan, ranks, x, tolerance=max(1e-6, 2**-24 * math.sqrt(terms)))


def test_evaluation_with_and_without_the_codec() -> None:
    model, x = chain(6, 8, True, torch.float32).eval(), torch.randn(5, 6)

    def work(transport):  # type: ignore[no-untyped-def]
        part = divide(copy.deepcopy(model), "0=dense(output); 2=dense(input)", codec="dynamic8", world=World(transport))
        coded = part(x)
        with exact(part):
            plain = part(x)
        torch.testing.assert_close(plain, model(x))
        assert 0 < (coded - plain).abs().max() < 0.1
        assert torch.equal(part(x), coded)

    run_threads(2, work)
    with pytest.raises(BadInput, match="not divided"), exact(model):
        pass


def test_exact_inside_exact_does_not_end_it() -> None:
    whole = chain(6, 8, True)  # threads that draw weights at once would draw different ones

    def work(transport):  # type: ignore[no-untyped-def]
        model = divide(copy.deepcopy(whole), {"0": Dense()}, codec="fp16", world=World(transport))
        stages = divide(copy.deepcopy(whole), Stages(("2",), 2), codec="fp16", world=World(transport))
        assert isinstance(stages, Pipeline)
        with exact(model), exact(stages):
            with exact(model), exact(stages):
                pass
            assert model[0].cut.boundary.exact
            assert stages._active.trainer.exact
        assert str(model[0].cut.boundary) == "fp16"
        assert not stages._active.trainer.exact

    run_threads(2, work)


@pytest.mark.parametrize("plan", ["0=channels(output)", "0=channels(output); 2=channels(input)", "0=channels(input)"])
@settings(max_examples=5)
@given(ranks=st.integers(1, 3), n=st.integers(3, 6), m=st.integers(3, 6), stride=st.integers(1, 2))
def test_channels(plan: str, ranks: int, n: int, m: int, stride: int) -> None:
    torch.manual_seed(n)
    model = nn.Sequential(nn.Conv2d(n, m, 3, stride, 1), nn.ReLU(), nn.Conv2d(m, n, 2, bias=False)).double()
    check(model, plan, ranks, torch.randn(2, n, 7, 6, dtype=torch.float64))


class Attention(nn.Module):
    """A block whose heads follow from its projections' sizes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = self.mixed(x).reshape(batch, length, 3, -1, self.head).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, -1))
        return x + self.narrow(nn.functional.gelu(self.widen(x)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_heads_and_mlp_of_a_transformer(ranks: int) -> None:
    torch.manual_seed(1)
    plan = {
        "*.mixed": Dense("output", gives="part", blocks=3, unit=4), "*.out": Dense("input", takes="part", unit=4),
        "*.widen": Dense("output", gives="part"), "*.narrow": Dense("input", takes="part"),
    }  # fmt: skip
    model = nn.Sequential(Attention(20, 5), Attention(20, 5)).double()
    check(model, plan, ranks, torch.randn(2, 6, 20, dtype=torch.float64))


def test_torchs_own_transformer_layer_in_training_and_evaluation() -> None:
    torch.manual_seed(1)
    whole = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    plan = {"linear1": Dense("output", gives="part"), "linear2": Dense("input", takes="part")}
    check(whole, plan, 2, x)

    def work(transport):  # type: ignore[no-untyped-def]
        model = divide(copy.deepcopy(whole), plan, world=World(transport)).eval()
        with torch.no_grad():
            close(model(x), copy.deepcopy(whole).eval()(x), 1e-12, "output")
        with pytest.raises(BadInput, match="is a NonDynamicallyQuantizableLinear, and dense divides Linear"):
            divide(copy.deepcopy(whole), {"self_attn.out_proj": Dense()}, world=World(transport))
        inside = divide(copy.deepcopy(whole), {"": Dense()}, world=World(transport))
        close(inside(x), whole(x), 1e-12, "output of all that can be divided")

    run_threads(2, work)


def test_blocks_come_back_in_order() -> None:
    model = nn.Sequential(nn.Linear(5, 12)).double()
    check(model, {"0": Dense("output", blocks=3)}, 2, torch.randn(4, 5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"0": Dense("output", unit=3)}, "cannot be cut in 1 × multiples of 3"),
        ({"1": Dense()}, "is a Tanh, and dense divides Linear"),
        ({"nothing": Dense()}, "matches no layer"),
        ({"0": Dense("cannon")}, "grid is square"),
        ({"0": Dense(), "2": Data((1, 2, 3))}, "3 for 2 ranks"),
    ],
)
def test_what_cannot_be_divided_is_one_sentence(plan: dict[str, object], words: str) -> None:
    model = chain(4, 5, True)

    def work(transport):  # type: ignore[no-untyped-def]
        with pytest.raises(BadInput, match=words):
            divide(copy.deepcopy(model), plan, world=World(transport))  # type: ignore[arg-type]

    run_threads(2, work)


@pytest.mark.parametrize("twice", ["weight", "module"])
def test_a_weight_that_two_layers_have_is_not_divided(twice: str) -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer if twice == "module" else nn.Linear(4, 4))
    model[2].weight = layer.weight

    def work(transport):  # type: ignore[no-untyped-def]
        with pytest.raises(BadInput, match=r"'0.weight' is '2.weight' too"):
            divide(copy.deepcopy(model), {"0": Dense()}, world=World(transport))

    run_threads(2, work)


def test_a_layer_that_is_too_small() -> None:
    model = nn.Sequential(nn.Linear(5, 2))

    def work(transport):  # type: ignore[no-untyped-def]
        with pytest.raises(BadInput, match="has 2 outputs for 3 ranks"):
            divide(copy.deepcopy(model), {"0": Dense()}, world=World(transport))

    run_threads(3, work)
