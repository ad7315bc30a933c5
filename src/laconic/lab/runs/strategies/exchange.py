"""What the compressed exchange tells of a step and of a layer; the same behind `compress` and `distribute`."""

from __future__ import annotations

from typing import Any

from torch import nn

from laconic.exchange.state import CompressionState
from laconic.lab.records.record import Configuration
from laconic.lab.runs.strategies.base import coded_nbytes, wire_factor


def options_of(chosen: Configuration) -> dict[str, Any]:
    """The options of the door: modes other than sync, and codec auto, choose the algorithm themselves."""
    fixed = chosen.consistency == "sync" and chosen.codec != "auto"
    return {"algorithm": chosen.algorithm} if fixed else {}


def take_records(state: CompressionState) -> tuple[float, float, float, float]:
    """Seconds of encoding, waiting and decoding, and bytes sent, since they were last taken."""
    encode = wait = decode = sent = 0.0
    while state.records:
        record = state.records.popleft()
        encode, wait, decode = encode + record.encode_s, wait + record.wait_s, decode + record.decode_s
        sent += record.sent_nbytes
    return encode, wait, decode, sent


def payload_of(
    state: CompressionState, chosen: Configuration, name: str, parameter: nn.Parameter
) -> tuple[str, float]:
    """By what codec a parameter's gradient goes, and how many bytes a worker sends for it."""
    for form in state.layers:  # of matrix codecs, which know what each parameter becomes
        if form.name == name:
            return form.form, float(form.sent_nbytes)
    codec, nbytes = "none", 4.0 * parameter.numel()
    used = state.choice.codec_for(0, state.step) if state.auto is None else None
    if not state.parameters.exempt.covers(name, parameter):
        if used is None:
            codec = chosen.codec
        elif used.kind != "matrix" and not used.exact:
            codec, nbytes = chosen.codec, coded_nbytes(used, parameter.numel())
    return codec, nbytes * wire_factor(chosen.workers)
