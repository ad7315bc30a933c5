"""Published set-ups, and what the planner says of them.

    python -m benchmarks plan-published

What a paper leaves open is said in `assumed`. A speed-up is over what the paper
compares with: the same machines without compression (SparCML), or one machine (Krizhevsky, Dettmers). Of trainings
across sites (INTELLECT-1, OpenDiLoCo) the utilisation is compared, over a range of links, and the rate that the
published utilisation implies is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import typer

from laconic import words
from laconic.cli.shared import Json, echo_json, echo_table
from laconic.planner.codec_speeds import speeds
from laconic.planner.cost import cost
from laconic.planner.devices import device
from laconic.planner.predict import Prediction, Setting, predict, rate_needed
from laconic.planner.strategy import Strategy
from laconic.planner.subject import subject
from laconic.planner.work import LayerTime, Work, estimate
from laconic.schedules.link import Link
from laconic.storage.files import cache_folder


@dataclass(frozen=True)
class SetUp:
    """A published measurement: `way` against `base`."""

    source: str
    model: str
    machine: str
    link: str
    batch: int
    base: Strategy
    way: Strategy
    published: float
    assumed: str


_ARIES, _EC2, _PCIE = "40gbit,2us", "1gbit,100us", "48gbit,10us"
_TOP16 = "topk(16, bucket=512)+qsgd(4)"
_sparcml = partial(SetUp, "Renggli et al., SparCML, 2018")
_weird = partial(SetUp, "Krizhevsky, One Weird Trick, 2014", "alexnet", "k20", _PCIE)


def _quantised(ranks: int, codec: str) -> tuple[Strategy, Strategy]:
    return Strategy(data=ranks, overlap="none"), Strategy(data=ranks, codec=codec, overlap="none")


SET_UPS = (
    _sparcml("vgg19", "p100", _ARIES, 256, *_quantised(8, "qsgd(4)"), 1.55, "40 Gbit/s of Aries, batch 32 a node"),
    _sparcml("alexnet", "p100", _ARIES, 1024, *_quantised(16, "qsgd(4)"), 1.30, "40 Gbit/s of Aries, batch 64 a node"),
    _sparcml("mlp", "p100", _ARIES, 256, *_quantised(8, _TOP16), 3.65, "40 Gbit/s of Aries, batch 32 a node"),
    _sparcml("mlp", "xeon-core", _EC2, 256, *_quantised(8, _TOP16), 19.12, "1 Gbit/s on EC2, batch 32 a node"),
    _weird(256, Strategy(), Strategy(data=2, dense_split=True), 1.95, "6 GB/s of PCIe"),
    _weird(512, Strategy(), Strategy(data=4, dense_split=True), 3.74, "6 GB/s of PCIe"),
    _weird(1024, Strategy(), Strategy(data=8, dense_split=True), 6.25, "6 GB/s of PCIe"),
    SetUp("Dettmers, 8-Bit Approximations, 2016, §2.3", "alexnet", "titan-x", "56gbit,50us", 128, Strategy(),
          Strategy(data=4, overlap="none"), 100 / 150,
          "here a ring; the paper sends all gradients four times in turn, see below"),
)  # fmt: skip


@dataclass(frozen=True)
class AcrossSites:
    """A published training by DiLoCo: utilisations from `published[0]` to `published[1]`.

    A step of a node takes 6 · weights · tokens / (8 H100 · 989 TFLOP/s · reached) seconds of computing.

    Attributes:
        side: of a square matrix with as many weights as the model.
        tokens: of a node's inner step.
        reached: the share of the peak that computing reaches.
        rates_bps: the slowest and the quickest link that are reckoned with.
    """

    source: str
    side: int
    ranks: int
    codec: str
    consistency: str
    published: tuple[float, float]
    tokens: int
    reached: float
    rates_bps: tuple[float, float]
    assumed: str

    @property
    def compute_s(self) -> float:
        return 6 * self.side**2 * self.tokens / (8 * 989e12 * self.reached)

    @property
    def strategy(self) -> Strategy:
        return Strategy(data=self.ranks, codec=self.codec, consistency=self.consistency)


_ACROSS_S = 0.05  # one way, of every link
ACROSS_SITES = (
    AcrossSites("INTELLECT-1, 2024, arXiv:2412.01152", 100_000, 14, "dynamic8", "diloco(100)", (0.83, 0.96),
                128 * 8192, 0.434, (5e8, 4e9), "H = 100; 128 sequences of 8,192 tokens a node's step; 43.4 % of the "
                "peak, from the published 36.2 and 41.4 % ÷ utilisation; 0.5 to 4 Gbit/s, 50 ms; nothing overlaps"),
    AcrossSites("OpenDiLoCo, 2024, arXiv:2407.07852", 33_166, 4, "fp16", "diloco(500)", (0.90, 0.95),
                2048 * 1024, 0.40, (1e8, 1e9), "H = 500; 4 nodes; 2,048 sequences of 1,024 tokens a node's step; 40 % "
                "of the peak; 0.1 to 1 Gbit/s, 50 ms; nothing overlaps"),
)  # fmt: skip


def across(given: AcrossSites) -> tuple[list[float], list[float | None]]:
    """The utilisations predicted for the slowest and the quickest link, and the rates that the published ones need."""
    with torch.device("meta"):
        weights = torch.nn.Linear(given.side, given.side, bias=False)
    seconds, parameters = given.compute_s, given.side**2
    layer = LayerTime("all layers", "Linear", seconds / 3, 2 * seconds / 3, parameters, 0)
    machine = device("h100")
    setting = Setting(Work((layer,), 1, 0.0, 0.0, "published"), cost(subject(weights, (given.side,)), 1), given.ranks,
                      Link(_ACROSS_S, 0.0), speeds((given.codec,), machine, None), shares_core=False)  # fmt: skip
    found = [predict(setting.at_rate(rate), given.strategy).utilisation for rate in given.rates_bps]
    return found, [rate_needed(setting, given.strategy, share) for share in given.published]


def answer(given: SetUp, folder: Path | None) -> tuple[Prediction, Prediction]:
    """The planner's predictions for the base and for the way."""
    chosen = subject(given.model)
    share = max(2, given.batch // given.way.ranks)
    counted, machine = cost(chosen, share), device(given.machine, folder)
    codecs = tuple({given.base.codec, given.way.codec})
    setting = Setting(estimate(counted, machine), counted, given.batch, Link.parse(given.link),
                      speeds(codecs, machine, folder), shares_core=False)  # fmt: skip
    return predict(setting, given.base), predict(setting, given.way)


def naive_seconds(numel: int, ranks: int, link: Link) -> float:
    """Every rank's gradients in turn over one shared switch, as the 8-bit paper reckons: P messages of all values.

    >>> round(1e3 * naive_seconds(60_000_000, 4, Link(0.0, 1 / (7 * 2**30))))
    128
    """
    return ranks * (link.latency_s + 4 * numel * link.s_per_byte)


def main(json: Json = False) -> None:
    """Print our answer beside what was published, for every set-up."""
    rows, records = [], []
    for each in SET_UPS:
        base, way = answer(each, cache_folder())
        ours = base.seconds / way.seconds
        records.append({"source": each.source, "model": each.model, "way": str(each.way), "published": each.published,
                        "predicted": ours, "assumed": each.assumed})  # fmt: skip
        rows.append([each.model, str(each.way), each.machine, each.link, f"{each.published:.2f} ×", f"{ours:.2f} ×",
                     each.source, each.assumed])  # fmt: skip
    naive = naive_seconds(60_000_000, 4, Link(0.0, 1 / (7 * 2**30)))
    one = answer(SET_UPS[-1], cache_folder())[0].seconds
    four = one / 4 + naive
    sites = [(each, *across(each)) for each in ACROSS_SITES]
    if json:
        told = [{"source": each.source, "way": str(each.strategy), "published": each.published, "predicted": found,
                 "rates_bps": each.rates_bps, "implied_bps": implied, "compute_s": each.compute_s,
                 "assumed": each.assumed} for each, found, implied in sites]  # fmt: skip
        echo_json({"results": records, "across_sites": told, "naive": {"exchange": naive, "one": one, "four": four}})
        return
    left = ("way", "machine", "link", "source", "assumed")
    echo_table(("model", "way", "machine", "link", "published", "here", "source", "assumed"), rows, left=left)
    typer.echo(
        f"The 8-bit paper's exchange, four transfers in turn at 7 GB/s: published 128 ms, here {1e3 * naive:.0f} ms. "
        f"With it a pass on 4 GPUs takes {1e3 * four:.0f} ms (published about 150), on one {1e3 * one:.0f} ms "
        f"(published 100): {'slower' if four > one else 'quicker'} than one. A ring is quicker than that exchange."
    )
    typer.echo("\nAcross sites: the share of a step in which nodes compute")
    echo_table(("way", "published", "here", "rate that the published implies", "source", "assumed"), [
        [str(each.strategy), _shares(each.published), _shares(found),
         " to ".join("none" if rate is None else words.plain(words.rate(rate)) for rate in implied), each.source,
         each.assumed] for each, found, implied in sites], left=("source", "assumed"))  # fmt: skip


def _shares(ends: Sequence[float]) -> str:
    return f"{100 * ends[0]:.0f} – {100 * ends[1]:.0f} %"
