"""Arguments that no codec can work with are refused when it is built, not when it first encodes."""

from __future__ import annotations

import pytest

from laconic import codecs
from laconic.errors import BadInput

HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "spec",
    [
        *("qsgd(4.0)", "dorefa(8.0)", "flexpoint(16.0)", "flexpoint(8, exponent=2.0)"),
        *("qsgd(true)", "dorefa(true)", "flexpoint(true)", "flexpoint(8, exponent=true)", "ternary(true)"),
        *("qsgd(seed=true)", "dorefa(seed=false)", "ternary(seed=true)", "natural(true)", "linear8(seed=true)"),
        *("dynamic8(64, upper=true)", "dynamic8(upper=abc)", "dynamic8(upper=none)", "threshold(true)"),
        *("dynamic8(upper=0.2)", "dynamic8(upper=0.3)", "dynamic8(upper=0.5)", "dynamic8(upper=nan)"),
        *(f"threshold({HUGE})", f"threshold(-{HUGE})", f"ternary({HUGE})", "threshold(nan)", "threshold(1e-60)"),
        *(f"qsgd(bucket={8 * 10**400})", f"ternary(bucket={20 * 10**400})", f"onebit({32 * 10**400})"),
        *(f"dynamic8({HUGE})", f"linear8({HUGE})", f"fp8(block={HUGE})"),
        *("qsgd(,2)", "qsgd(4,)", "qsgd(4,,seed=1)", "qsgd(,)"),
    ],
    ids=lambda spec: spec.replace("0" * 400, "…"),
)
def test_arguments_are_refused_when_a_codec_is_built(spec):
    with pytest.raises(BadInput):
        codecs.codec(spec)


@pytest.mark.parametrize("spec", ["qsgd()", "qsgd( )", "qsgd( 4 , seed = 3 )", "dynamic8(upper=1)", "threshold(1)"])
def test_spaces_whole_numbers_and_no_arguments_are_fine(spec):
    assert codecs.codec(spec) == codecs.codec(str(codecs.codec(spec)))
