"""Every kernel by Triton's interpreter beside the processor's codec: a process of its own that `test_kernels.py` reads.

`python -m tests.codecs.device.interpreted [NUMBER PARTS]` writes a line of JSON a spec: [spec, cases, what went wrong].
`TRITON_INTERPRET=1` has to be set before Triton is imported, and holds for the whole process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

import laconic
from laconic.codecs.device.kernels import KERNELS
from tests.codecs.device.conformity import compare
from tests.codecs.subjects import specs_of

CPU = torch.device("cpu")
COMPOSITIONS = {"topk": ["topk(0.05)+qsgd(4)", "topk(16, bucket=512)+linear8(64)", "topk(0.1)+bf16"]}


def served() -> Iterator[str]:
    """The specs of codecs that kernels serve; of every name in turn, if this process does a part of them only."""
    number, parts = map(int, sys.argv[1:] or (0, 1))
    for name in list(KERNELS.names())[number::parts]:
        for spec in [*specs_of(name), *COMPOSITIONS.get(name, [])]:
            if not KERNELS.get(name).why_not(laconic.codec(spec), CPU):
                yield spec


def main() -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    seen: set[str] = set()
    for spec in served():
        codec = laconic.codec(spec)
        cases, wrong = compare(codec, KERNELS.get(codec.name)(codec, CPU), first=codec.name not in seen)
        seen.add(codec.name)
        print(json.dumps([spec, cases, wrong]), flush=True)


if __name__ == "__main__":
    main()
