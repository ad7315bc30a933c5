"""Which sparse all-reduce is cheapest: closed forms in P, k, n and the link, under patterns that are uniform.

Callers: `sparse.py` for algorithm="auto", benchmarks. Pure numbers: equal arguments give equal choices on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from laconic.codecs.base import Codec
from laconic.codecs.selector import Sparse
from laconic.errors import BadInput
from laconic.exchange.coded import Channel
from laconic.exchange.sparse_stream import HEAD_NBYTES, ISIZE, message_nbytes
from laconic.schedules import registry
from laconic.schedules.link import Link
from laconic.schedules.schedule import core_size

SPARSE = ("ssar_recursive_doubling", "ssar_split_allgather", "dsar")
ALGORITHMS = (*SPARSE, "native", "ring")

# Seconds per pair or value on one core. Measured with 1e7 values at 1 to 10 %: packing 4 to 8 ns, unpacking 4 to 9,
# merging 3 to 6 per pair of the union, joining chunks 4; writing out a dense vector 0.8 to 1.5, reckoned at 2 with its
# checksum and copy.
PACK_S = 5e-9
UNPACK_S = 5e-9
MERGE_S = 5e-9
JOIN_S = 4e-9
DENSE_S = 2e-9
_ADD_S_PER_BYTE = 0.25e-9  # what adding a received byte takes on that core when nobody else uses it


def union_count(ranks: float, count: int, numel: int) -> float:
    """U(j) = n(1 − (1 − k/n)ʲ): how many places `ranks` ranks with `count` of `numel` each are expected to fill.

    >>> round(union_count(8, 100, 1000), 1)
    569.5
    """
    return numel * (1.0 - (1.0 - count / numel) ** ranks) if numel else 0.0


def predicted(
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
    (reduce_s_per_byte), so that crowded machines are reckoned with.
    """
    if world_size < 1 or not 0 <= count <= numel:
        raise BadInput(f"sparse: {count} of {numel} values on {world_size} ranks cannot be")
    slow = max(1.0, link.reduce_s_per_byte / _ADD_S_PER_BYTE)
    union = union_count(world_size, count, numel)
    chunk = -(-numel // world_size)

    def nbytes(pairs: float, of: int) -> int:
        return message_nbytes(min(of, round(pairs)), of)

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


def choose(world_size: int, count: int, numel: int, link: Link, codec: Codec | None = None) -> str:
    """The algorithm with the least predicted time; of equals the one named first in ALGORITHMS.

    `native` stands for the dense all-reduce; engines without one run a ring in its place.

    >>> gbit = Link(latency_s=50e-6, s_per_byte=8e-9, overhead_s=20e-6, gap_s=20e-6)
    >>> [choose(8, count, 10_000_000, gbit) for count in (100, 1_000_000, 10_000_000)]
    ['ssar_recursive_doubling', 'ssar_split_allgather', 'native']
    """
    seconds = predicted(world_size, count, numel, link, codec)
    return min(ALGORITHMS, key=lambda name: seconds[name])


def cheapest_sparse(world_size: int, count: int, numel: int, link: Link) -> tuple[str, float]:
    """The cheapest algorithm whose messages are sparse, and its predicted seconds with all that an exchange adds.

    Beyond the sum, the payload of this rank is read back and the sum is written out.
    """
    seconds = predicted(world_size, count, numel, link)
    name = min(SPARSE, key=lambda each: seconds[each])
    written = min(float(numel), union_count(world_size, count, numel))
    return name, seconds[name] + UNPACK_S * count + MERGE_S * written


def is_sparse(channels: Sequence[Channel]) -> bool:
    """Whether these channels can go by a sparse all-reduce, with as many values on every rank."""
    selected = [isinstance(c.codec, Sparse) and c.codec.chooser.fixed_size for c in channels]
    return any(selected) and all(chosen or c.codec.fine for chosen, c in zip(selected, channels, strict=True))


def counts(channels: Sequence[Channel]) -> tuple[int, int]:
    """How many values a rank sends of these channels, of how many."""
    numels = [channel.buffer.numel() for channel in channels]
    sent = [
        channel.codec.chooser.max_count(numel) if isinstance(channel.codec, Sparse) else numel
        for channel, numel in zip(channels, numels, strict=True)
    ]
    return sum(sent), sum(numels)
