"""Check before training that all ranks ask for the same: different models of equal size would train nonsense.

Callers: `compress` and `distribute`. Ranks exchange a digest of their terms in one small collective. Only if digests
differ do they exchange the terms, to name the first difference.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.plans import CodecPlan
from laconic.errors import BadInput, Mismatch
from laconic.exchange.options import Options
from laconic.schedules.registry import build
from laconic.transports.base import Transport
from laconic.transports.executor import gather_texts, run
from laconic.transports.world import World

_DIGEST_NBYTES = 96
Terms = list[tuple[str, str]]  # what must be the same, and what it is here


def terms_of(
    named: Iterable[tuple[str, Tensor]], codec: CodecPlan, options: Options, **others: object
) -> Terms:
    """List the terms that ranks must share: codec, options and `others` by name, then the parameters in order.

    Raises:
        BadInput: a parameter is complex.
    """
    others_own = ("exempt", "scaler", "world")
    plain = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in others_own}
    scaled = options.scaler is not None
    given = {**others, "codec": _spelt(codec), **plain, "scaler": scaled, "exempt": options.exemptions}
    terms = [(name, str(value)) for name, value in given.items()]
    for number, (name, parameter) in enumerate(named):
        if parameter.is_complex() and parameter.requires_grad:
            text = "gradients are exchanged as real numbers; keep torch.view_as_real of it as the parameter"
            raise BadInput(f"parameter '{name}' is complex: {text}")
        dtype, trained = str(parameter.dtype).removeprefix("torch."), "" if parameter.requires_grad else ", frozen"
        terms.append((f"parameter {number}", f"'{name}' of {dtype} {tuple(parameter.shape)}{trained}"))
    return terms


def places_of(parameters: Iterable[Tensor], transport: Transport) -> Terms:
    """List where parameters lie, as far as ranks must share it.

    Ranks with and without a device train together, but gradients of two devices share no bucket. Where payloads travel
    on a device, all ranks have theirs there, and the same kernels.
    """
    devices = [parameter.device for parameter in parameters]
    runs = [len(list(run)) for _, run in itertools.groupby(devices)]
    terms = [("device", f"of {', then '.join(map(str, runs))} parameters a device")] if len(runs) > 1 else []
    if transport.collects:
        from laconic.codecs.device.ways import no_kernels

        kinds = ", ".join(sorted({device.type for device in devices}))
        terms += [("device", f"{kinds} of gradients"), ("way", no_kernels(transport.device) or "by kernels")]
    return terms


def _spelt(codec: CodecPlan) -> str:
    if isinstance(codec, Mapping):
        return str({step: str(each) for step, each in sorted(codec.items())})
    return "a function of the step" if callable(codec) and not isinstance(codec, Codec) else str(codec)


def check_alike(door: str, terms: Terms, transport: Transport) -> None:
    """Return once all ranks have called `door` with the same terms.

    Cost: one all-gather of 96 bytes a rank, and one of all terms where they differ.

    Raises:
        Mismatch: on every rank, naming the first term that differs, and what it is on which ranks.
        PeerLost, CollectiveTimeout: a rank did not call it.

    >>> from laconic.transports.threads import run_threads
    >>> def work(transport):
    ...     try:
    ...         check_alike("compress", [("codec", "onebit" if transport.rank == 1 else "topk")], transport)
    ...     except Mismatch as error:
    ...         return str(error)
    >>> run_threads(3, work)[0]
    '[rank 0/3] compress: codec differs: topk on ranks 0, 2; onebit on rank 1'
    """
    if transport.world_size == 1:
        return
    text = json.dumps(terms)
    own = f"{hashlib.sha256(text.encode()).hexdigest()} {len(text)}"
    digests = gather_texts(own, transport, _DIGEST_NBYTES, door)
    if len(set(digests)) == 1:
        return
    most = max(int(digest.split()[1]) for digest in digests)
    everyone = [json.loads(each) for each in gather_texts(text, transport, most, f"{door} in full")]
    difference, other = _first_difference(everyone, transport.rank)
    where = f"[rank {transport.rank}/{transport.world_size}] {door}"
    raise Mismatch(f"{where}: {difference}", rank=transport.rank, peer=other)


def have_equal(tensors: Iterable[Tensor], transport: Transport) -> bool:
    """Whether all ranks have the same bits in these tensors; costs one all-gather of 64 bytes a rank."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return len(set(gather_texts(digest.hexdigest(), transport, 64, "weights"))) == 1


def mean_of_ranks(values: Sequence[float], world: World) -> list[float]:
    """The mean over all ranks, the same bits on each."""
    total: Tensor = torch.tensor(values, dtype=torch.float64)
    run(build("all_reduce", "tree", world.world_size, len(values)), total, world.transport)
    return [float(value) for value in total / world.world_size]


def _first_difference(everyone: Sequence[Sequence[Any]], rank: int) -> tuple[str, int]:
    """Describe the first difference; also return the first rank that differs from this one."""
    for number in range(max(map(len, everyone))):
        found = [tuple(terms[number]) if number < len(terms) else None for terms in everyone]
        if len(set(found)) > 1:
            what = next(term[0] for term in found if term is not None)
            said = ["not there" if term is None else term[1] for term in found]
            ranks = {each: [str(r) for r, other in enumerate(said) if other == each] for each in dict.fromkeys(said)}
            told = [f"{each} on rank{'s' * (len(who) > 1)} {', '.join(who)}" for each, who in ranks.items()]
            return f"{what} differs: {'; '.join(told)}", next(r for r, each in enumerate(said) if each != said[rank])
    raise AssertionError("digests of equal terms are equal")
