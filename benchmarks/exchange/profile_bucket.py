"""What the exchange of a model's buckets costs the processor, beside the codec's kernels: the aim is 1.3 times these.

    python -m benchmarks profile-bucket                          two ranks on this machine; about 10 seconds
    python -m benchmarks profile-bucket --calls 30               and where the time goes, by function

Nothing is trained: every rank sums the same buckets again and again on its main thread, whose processor time is what
counts; so it also tells something on a machine that does other things. Between two steps other memory is written, as
computing does, so that buckets, residuals and messages are out of the caches; kernels are timed after the same writing.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import time

import torch
from torch import Tensor, nn

from laconic.codecs import Codec, codec
from laconic.exchange.options import Options
from laconic.exchange.state import CompressionState
from laconic.transports.launcher import run_local
from laconic.transports.world import init

WRITTEN = 1 << 24  # values between two steps: 64 MB, more than caches hold


def kernels_s(chosen: Codec, buckets: list[Tensor], world_size: int, rest: Tensor) -> float:
    """Seconds of a step's calls of the codec, each bucket by itself: an encoding, and the mean of all payloads."""
    residuals, times = [torch.zeros_like(bucket) for bucket in buckets], []
    memory = [torch.zeros(chosen.max_nbytes(bucket.numel()), dtype=torch.uint8) for bucket in buckets]
    for _ in range(7):
        rest.add_(1.0)
        begun = time.thread_time()
        for bucket, residual, out in zip(buckets, residuals, memory, strict=True):
            payload = chosen.encode_feedback(bucket, residual, out=out)
            chosen.decode_mean([payload] * world_size, world_size, bucket)
        times.append(time.thread_time() - begun)
    return statistics.median(times)


def run_rank(spec: str, count: int, numel: int, steps: int, calls: int) -> tuple[float, float, str]:
    """Processor seconds a step of the exchange and of its kernels, and a profile of `calls` functions."""
    torch.set_num_threads(1)
    with init(timeout_s=100) as world:
        parameters = [nn.Parameter(torch.zeros(numel // 512, 512)) for _ in range(count)]
        named = [(f"layer{index}.weight", each) for index, each in enumerate(parameters)]
        state = CompressionState(spec, named, Options(world=world))
        buckets, rest = [torch.randn(numel) for _ in parameters], torch.zeros(WRITTEN)
        chosen, times, profile = codec(spec), list[float](), cProfile.Profile(time.thread_time)
        for step in range(steps + 3):
            rest.add_(1.0)
            profiles = calls and step >= 3
            begun = time.thread_time()
            if profiles:
                profile.enable()
            state.buckets.exchange([(bucket, [each]) for bucket, each in zip(buckets, parameters, strict=True)])
            profile.disable()
            times.append(time.thread_time() - begun)
        state.close()
        text = io.StringIO()
        if calls:
            pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(calls)
        return statistics.median(times[3:]), kernels_s(chosen, buckets, world.world_size, rest), text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="dynamic8")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--buckets", type=int, default=13)
    parser.add_argument("--numel", type=int, default=1 << 18, help="values of a bucket")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--calls", type=int, default=0, help="functions of a profile, which slows it down")
    asked = parser.parse_args()
    task = (asked.codec, asked.buckets, asked.numel, asked.steps, asked.calls)
    exchange_s, kernel_s, text = run_local(asked.ranks, run_rank, task, timeout_s=300)[0]
    print(text, end="")
    what = f"{asked.codec}, {asked.buckets} buckets of {asked.numel} values, {asked.ranks} ranks"
    ratio = exchange_s / kernel_s
    print(f"{what}: exchange {1e3 * exchange_s:.2f} ms of processor time, kernels {1e3 * kernel_s:.2f}: {ratio:.2f}")
