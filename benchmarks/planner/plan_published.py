"""Published set-ups, and what the planner says of them.

    python -m benchmarks plan-published

What a paper leaves open is said in `assumed`. A speed-up is over what the paper
compares with: the same machines without compression (SparCML), or one machine (Krizhevsky, Dettmers).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from laconic.cli.shared import Json, echo_json, echo_table
from laconic.planner.codec_speeds import speeds
from laconic.planner.cost import cost
from laconic.planner.devices import device
from laconic.planner.predict import Prediction, Setting, predict
from laconic.planner.strategy import Strategy
from laconic.planner.subject import subject
from laconic.planner.work import estimate
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
    if json:
        echo_json({"results": records, "naive": {"exchange": naive, "one": one, "four": four}})
        return
    left = ("way", "machine", "link", "source", "assumed")
    echo_table(("model", "way", "machine", "link", "published", "here", "source", "assumed"), rows, left=left)
    typer.echo(
        f"The 8-bit paper's exchange, four transfers in turn at 7 GB/s: published 128 ms, here {1e3 * naive:.0f} ms. "
        f"With it a pass on 4 GPUs takes {1e3 * four:.0f} ms (published about 150), on one {1e3 * one:.0f} ms "
        f"(published 100): {'slower' if four > one else 'quicker'} than one. A ring is quicker than that exchange."
    )
