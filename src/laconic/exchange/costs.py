"""The cost model of an exchange: seconds on a link, by closed forms in P, the values and the link.

Callers: algorithm="auto" (buckets, collectives, elastic jobs), codec="auto" (`chooser.py`, `late_hook.py`), sparse sums
(`sparse.py`) and the planner. Pure but for `speed_of`, which measures: equal arguments give equal choices on all ranks.
Measurements of a link, where they exist, take precedence (`transports/profile.py`).
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.codecs.selector import Sparse
from laconic.errors import BadInput
from laconic.exchange.coded_plan import GATHER
from laconic.schedules import registry
from laconic.schedules.link import Link
from laconic.schedules.schedule import core_size
from laconic.transports.profile import Profile
from laconic.transports.world import World

# An ordinary network under gloo, for choosing between one round and two before anything was measured.
GUESS = Link(latency_s=1e-3, s_per_byte=8e-9)
COARSE = 1 / 6
SURELY = 0.9  # of the time of what is known to work: patterns are only modelled
ROUND_S = 1e-3  # a second round waits for the slowest rank once more, which no link's parameters tell
MESSAGE_S = 4e-4  # processor time of an exchange beside its kernels (python -m benchmarks profile-bucket --numel 4096)
LEAST_NBYTES, MOST_NBYTES = 1 << 16, 1 << 22  # of a message: below, the processor is busy with messages alone
NATIVE = "native"  # the engine's own all-reduce
EXACT = ("butterfly", "rabenseifner", "ring", "tree")  # by which float32 values may go
SPARSE = ("ssar_recursive_doubling", "ssar_split_allgather", "dsar")
SPARSE_OR_DENSE = (*SPARSE, "native", "ring")

# Seconds per pair or value on one core. Measured with 1e7 values at 1 to 10 %: packing 4 to 8 ns, unpacking 4 to 9,
# merging 3 to 6 per pair of the union, joining chunks 4; writing out a dense vector 0.8 to 1.5, reckoned at 2 with its
# checksum and copy.
PACK_S = 5e-9
UNPACK_S = 5e-9
MERGE_S = 5e-9
JOIN_S = 4e-9
DENSE_S = 2e-9
_ADD_S_PER_BYTE = 0.25e-9  # what adding a received byte takes on that core when nobody else uses it
_SAMPLE = 1 << 18  # values a codec's speed is measured on
_LARGE = 1 << 20  # and its payload is judged by

Values = Sequence[tuple[Codec, int]]  # the codec and the length of each channel


def candidates(world: World) -> list[str]:
    """The all-reduce algorithms this world can run, `native` last when its engine has one."""
    names = registry.names("all_reduce")
    return [*names, NATIVE] if world.transport.has_native else names


def profile_of(world: World) -> Profile:
    """The world's profile; if there is none, all ranks measure it now."""
    if world.profile is None:
        from laconic.transports.probe import probe

        world.profile = probe(world.transport, quick=True)
    return world.profile


def pick(world: World, nbytes: int) -> str:
    """The algorithm with the least predicted time for an all-reduce of `nbytes`."""
    if world.world_size == 1:
        return "tree"
    return profile_of(world).cheapest(world.world_size, nbytes, candidates(world))


def coded_names() -> set[str]:
    """The names that `algorithm` may have for a compressed all-reduce."""
    return {"auto", GATHER, *SPARSE, *registry.names("all_reduce")}


def message_nbytes(link: Link) -> int:
    """The target size of a message on this link: twice the bytes sent in one message's overhead.

    That is 2·(L + MESSAGE_S)/G, as the nearest power of two, so that links that are measured a little differently give
    the same buckets. Smaller messages cost mostly latency; larger ones only arrive later.

    >>> [message_nbytes(Link.parse(text)) >> 10 for text in ("10gbit,1ms", "1gbit,1ms", "100mbit,1ms", "10mbit,1ms")]
    [4096, 256, 64, 64]
    """
    if link.s_per_byte == 0:
        return MOST_NBYTES
    wanted = 2 * (link.latency_s + MESSAGE_S) / link.s_per_byte
    return 1 << round(math.log2(min(max(wanted, LEAST_NBYTES), MOST_NBYTES)))


def raw_nbytes(chosen: Codec, nbytes: int) -> int:
    """Bytes of float32 values whose payload takes about `nbytes`; a codec that makes it longer counts as none.

    >>> raw_nbytes(codec("fp16"), 1 << 20) / 2**20
    1.9999847412109375
    """
    return int(nbytes * max(1.0, 4 * _LARGE / chosen.max_nbytes(_LARGE)))


@dataclass(frozen=True)
class ExchangeCost:
    """The cost of an exchange: seconds, and the bytes and messages that one rank sends."""

    codec: str
    form: str  # the algorithm
    encode_s: float
    wire_s: float
    decode_s: float
    sent_nbytes: float = 0.0
    messages: int = 0

    @property
    def seconds(self) -> float:
        return self.encode_s + self.wire_s + self.decode_s


@functools.lru_cache(maxsize=65536)
def plain_cost(numel: int, ranks: int, link: Link) -> ExchangeCost:
    """The quickest all-reduce of float32 values."""
    if ranks < 2 or not numel:
        return ExchangeCost("none", "none", 0.0, 0.0, 0.0)
    seconds = {name: registry.get("all_reduce", name).seconds(ranks, 4 * numel, link) for name in EXACT}
    name = min(seconds, key=lambda each: seconds[each])
    used = registry.get("all_reduce", name)
    sent = float(4 * used.sent_numel(ranks, numel) / ranks)
    return ExchangeCost("none", name, 0.0, seconds[name], 0.0, sent, int(used.rounds(ranks)))


@functools.lru_cache(maxsize=65536)
def coded_cost(spec: str, numel: int, ranks: int, link: Link, speed: tuple[float, float]) -> ExchangeCost:
    """An exchange of `numel` values through a codec whose encoding and decoding take `speed`, in seconds a value.

    direct encodes twice, parts that add up to 1 + 1/P of the values, and decodes 2(P−1)/P of them; gather decodes P
    times all. A matrix codec's two sums of factors are reckoned for a square matrix of `numel` values.
    """
    chosen, (encode_s, decode_s), share = codec(spec), speed, (ranks - 1) / ranks
    if ranks < 2 or not numel or chosen.exact:
        return plain_cost(numel, ranks, link)
    name, work_s = str(chosen), numel * encode_s
    if chosen.kind == "matrix":
        floats = math.sqrt(numel) * matrix_rank(chosen)
        wire_s = 2 * plain_cost(max(1, round(floats)), ranks, link).wire_s
        messages = 3 * int(registry.get("all_reduce", EXACT[0]).rounds(ranks))  # two factors, and what is no matrix
        return ExchangeCost(
            spec, "all-reduce of factors", work_s, wire_s, numel * decode_s, 16 * share * floats, messages
        )
    form, nbytes = cheapest_coded([(chosen, numel)], ranks, link), float(chosen.max_nbytes(numel))
    two_rounds = 2 * share * nbytes, 2 * (ranks - 1)
    if form in SPARSE:
        _, wire_s = cheapest_sparse(ranks, counts([(chosen, numel)])[0], numel, link)
        return ExchangeCost(name, form, work_s, wire_s, 0.0, *two_rounds)
    wire_s = _rounds_s(form, nbytes, ranks, link, reduced=False)
    if form == GATHER:
        decoded_s = ranks * numel * decode_s
        return ExchangeCost(name, form, work_s, wire_s, decoded_s, (ranks - 1) * nbytes, ranks - 1)
    return ExchangeCost(name, form, work_s * (1 + 1 / ranks), wire_s, 2 * numel * decode_s, *two_rounds)


def matrix_rank(chosen: Codec) -> int:
    """Columns of a low-rank codec's factors; one that sends whole factors is taken for a small one."""
    return int(getattr(chosen, "matrix_rank", 4))


def spared_s(waiting_s: float, plain_wire_s: float, wire_s: float, kernels_s: float) -> float:
    """Seconds that a codec would save of backward's wait for DDP.

    The wait shrinks in proportion to the time on the wire; the codec's kernels are added.

    >>> spared_s(waiting_s=0.8, plain_wire_s=1.0, wire_s=0.25, kernels_s=0.05)
    0.55
    """
    return round(waiting_s * (1 - min(1.0, wire_s / max(plain_wire_s, 1e-12))) - kernels_s, 12)


def _rounds_s(form: str, nbytes: float, ranks: int, link: Link, *, reduced: bool) -> float:
    """gather takes L + (P−1)·B·G, direct 2 L + 2·B·G·(P−1)/P, where B is the payload of all values."""
    if form == GATHER:
        return link.burst_s(ranks - 1, nbytes, reduced)
    return 2 * link.burst_s(ranks - 1, nbytes / ranks, reduced)


def cheapest_coded(
    values: Values, world_size: int, link: Link, *, once: bool = False, sparse: bool = True
) -> str:
    """gather or direct (`_rounds_s`), or a sparse all-reduce where that is cheaper than either.

    Both decode P payloads, in whole or in parts. Coarse codecs are gathered, which spares a second encoding, while that
    sends at most a sixth of what float32 would. Sparse all-reduces also encode once; they pay where the ranks'
    selections overlap, as those of many ranks do.

    Args:
        once: whether a rank has to know what it sent, and so must encode all of it once: not direct.
        sparse: whether the engine sends messages of varying length, as sparse all-reduces do.

    >>> def cheapest(spec, world_size, once=False):
    ...     return cheapest_coded([(codec(spec), 10**6)], world_size, GUESS, once=once)
    >>> cheapest("topk(0.001)", 4), cheapest("dynamic8", 4), cheapest("topk(0.25)", 16, once=True)
    ('gather', 'direct', 'dsar')
    """
    nbytes = sum(chosen.max_nbytes(numel) for chosen, numel in values)
    exact_nbytes = 8 / world_size * sum(numel for _, numel in values)  # a peer's share of a float32 ring
    one_round = _rounds_s(GATHER, nbytes, world_size, link, reduced=True)
    two_rounds = _rounds_s("direct", nbytes, world_size, link, reduced=True) + ROUND_S
    coarse = any(chosen.coarse for chosen, _ in values) and nbytes <= COARSE * exact_nbytes
    gathers = once or coarse or one_round <= two_rounds
    if sparse and world_size > 2 and is_sparse(values):
        count, numel = counts(values)
        name, seconds = cheapest_sparse(world_size, count, numel, link)
        work_s = world_size * count * (UNPACK_S + MERGE_S)
        if seconds + ROUND_S < SURELY * ((one_round + work_s) if gathers else two_rounds):
            return name
    return GATHER if gathers else "direct"


def rides_along(numel: int, world_size: int, link: Link) -> bool:
    """Whether exact values cost less in messages that are gathered anyway, (P−1)·4n bytes, than in two rounds more."""
    nbytes = 4.0 * numel
    extra = (world_size - 1) * nbytes * (link.s_per_byte + link.reduce_s_per_byte)
    return extra <= _rounds_s("direct", nbytes, max(world_size, 1), link, reduced=True)


def is_sparse(values: Values) -> bool:
    """Whether these can go by a sparse all-reduce, with as many values on every rank."""
    selected = [isinstance(chosen, Sparse) and chosen.chooser.fixed_size for chosen, _ in values]
    return any(selected) and all(known or chosen.fine for known, (chosen, _) in zip(selected, values, strict=True))


def counts(values: Values) -> tuple[int, int]:
    """How many values a rank sends of these, of how many."""
    sent = [chosen.chooser.max_count(numel) if isinstance(chosen, Sparse) else numel for chosen, numel in values]
    return sum(sent), sum(numel for _, numel in values)


def union_count(ranks: float, count: int, numel: int) -> float:
    """U(j) = n(1 − (1 − k/n)ʲ): how many places `ranks` ranks with `count` of `numel` each are expected to fill.

    >>> round(union_count(8, 100, 1000), 1)
    569.5
    """
    return numel * (1.0 - (1.0 - count / numel) ** ranks) if numel else 0.0


def sparse_seconds(
    world_size: int, count: int, numel: int, link: Link, codec: Codec | None = None
) -> dict[str, float]:
    """The time of each algorithm in seconds; P = world_size, k = count per rank, n = numel.

    With U(j) the union of j ranks' values (`union_count`), W(c, n) the bytes of c of n values (`message_nbytes`), and
    x(b) one exchange of b bytes, B(b) a burst of P − 1 messages of b bytes on `link`, p the largest power of two ≤ P:

        ssar_recursive_doubling  Σ_{i < log₂p} x(W(U(2ⁱP/p), n)) + pack, unpack and merge of U(2ⁱP/p) pairs;
                                 x(W(k, n)) + x(W(U(P), n)) more when P is no power of two
        ssar_split_allgather     B(W(k/P, n/P)) + B(W(U(P)/P, n/P)) + pack and unpack of k, then of U(P) pairs
                                 + merge of Σⱼ U(j)/P pairs + join of U(P) pairs
        dsar                     B(W(k/P, n/P)) + B(4n/P, or the codec's bytes) + pack and unpack of k pairs + n values
        ring, native             the closed form of ring for 4n bytes + n/2 values

    Work per pair and value is that of one free core, times what `link` says adding takes here beyond that
    (reduce_s_per_byte), which accounts for busy machines.
    """
    from laconic.exchange.sparse_stream import HEAD_NBYTES, ISIZE
    from laconic.exchange.sparse_stream import message_nbytes as stream_nbytes

    if world_size < 1 or not 0 <= count <= numel:
        raise BadInput(f"sparse: {count} of {numel} values on {world_size} ranks cannot be")
    slow = max(1.0, link.reduce_s_per_byte / _ADD_S_PER_BYTE)
    union = union_count(world_size, count, numel)
    chunk = -(-numel // world_size)

    def nbytes(pairs: float, of: int) -> int:
        return stream_nbytes(min(of, round(pairs)), of)

    core = core_size(world_size)
    doubling, pairs = 0.0, 0.0
    for level in range(core.bit_length() - 1):
        held = union_count((1 << level) * world_size / core, count, numel)
        doubling += link.exchange_s(nbytes(held, numel), reduced=False)
        pairs += held
    work = (PACK_S + UNPACK_S + 2 * MERGE_S) * pairs  # two streams of `held` merge
    if core < world_size:
        doubling += link.exchange_s(nbytes(count, numel), reduced=False)
        doubling += link.exchange_s(nbytes(union, numel), reduced=False)
        work += (PACK_S + UNPACK_S) * (count + union) + 2 * MERGE_S * count
    peers = world_size - 1
    split = link.burst_s(peers, nbytes(count / world_size, chunk), reduced=False)
    split_work = (PACK_S + UNPACK_S) * count
    merged = sum(union_count(j, count, numel) for j in range(2, world_size + 1)) / world_size
    gather = link.burst_s(peers, nbytes(union / world_size, chunk), reduced=False)
    gather_work = PACK_S * union / world_size + (UNPACK_S + JOIN_S) * union + MERGE_S * merged
    dense_nbytes = ISIZE * chunk if codec is None else codec.max_nbytes(chunk)
    dense = link.burst_s(peers, HEAD_NBYTES + dense_nbytes, reduced=False)
    ring = registry.get("all_reduce", "ring").seconds(world_size, ISIZE * numel, link)
    ring += slow * DENSE_S * numel / 2  # to write the stream out before
    return {
        "ssar_recursive_doubling": doubling + slow * work,
        "ssar_split_allgather": split + gather + slow * (split_work + gather_work),
        "dsar": split + dense + slow * (split_work + DENSE_S * numel),
        "native": ring,
        "ring": ring,
    }


def cheapest_sum(world_size: int, count: int, numel: int, link: Link, codec: Codec | None = None) -> str:
    """The algorithm with the least predicted time; of equals the one named first in SPARSE_OR_DENSE.

    `native` stands for the dense all-reduce; engines without one run a ring in its place.

    >>> gbit = Link(latency_s=50e-6, s_per_byte=8e-9, overhead_s=20e-6, gap_s=20e-6)
    >>> [cheapest_sum(8, count, 10_000_000, gbit) for count in (100, 1_000_000, 10_000_000)]
    ['ssar_recursive_doubling', 'ssar_split_allgather', 'native']
    """
    seconds = sparse_seconds(world_size, count, numel, link, codec)
    return min(SPARSE_OR_DENSE, key=lambda name: seconds[name])


def cheapest_sparse(world_size: int, count: int, numel: int, link: Link) -> tuple[str, float]:
    """The cheapest algorithm whose messages are sparse, and its predicted seconds with all that an exchange adds.

    Beyond the sum, the payload of this rank is read back and the sum is written out.
    """
    seconds = sparse_seconds(world_size, count, numel, link)
    name = min(SPARSE, key=lambda each: seconds[each])
    written = min(float(numel), union_count(world_size, count, numel))
    return name, seconds[name] + UNPACK_S * count + MERGE_S * written


def speed_of(chosen: Codec, now: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """Seconds a value of encoding with feedback, and of decoding into a sum.

    By the clock, on this machine as busy as it is; `time.thread_time` leaves out what others do. A device's codec
    (`on_device`) is timed there, from event to event.
    """
    device = getattr(chosen, "device", torch.device("cpu"))
    values = (torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0)) ** 3).to(device)
    residual, total = torch.zeros(_SAMPLE, device=device), torch.zeros(_SAMPLE, device=device)
    encode, decode = [], []
    for _ in range(5):
        begun = now()
        payload = chosen.encode_feedback(values, residual, step=1)
        _settle(residual)
        encoded = now()
        chosen.decode_add(payload, total)
        _settle(total)
        encode.append(encoded - begun)
        decode.append(now() - encoded)
    return statistics.median(encode) / _SAMPLE, statistics.median(decode) / _SAMPLE


def _settle(values: Tensor) -> None:
    """Wait until the values' device is idle."""
    if not values.is_cpu:
        from laconic.codecs.device.streams import wait

        wait(values)
