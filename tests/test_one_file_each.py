"""To add a codec, a matrix codec, a schedule, a mode or a workload is to write one file: a package here has each.

The package lies in a temporary folder and is imported, nothing else; the shared suites, run on its things alone, find
them by their registration. A codec's slow twin is a second file, since no codec is trusted without one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CODEC = '''
"""The upper half of a float32: sign, exponent and seven bits."""
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
from laconic.codecs.base import Codec, check_input, register
from laconic.codecs.frame import HEADER_NBYTES, buffer_for, floats, seal, unseal, values_for


@register("upper")
@dataclass(frozen=True)
class Upper(Codec):
    fine: ClassVar[bool] = True
    source: ClassVar[str] = "nobody"
    summary: ClassVar[str] = "the upper half of every float32"

    def max_nbytes(self, numel):
        return HEADER_NBYTES + 2 * numel

    def encode(self, x, *, step=0, out=None):
        check_input(x)
        buffer, nbytes = buffer_for(self, x.numel(), out), self.max_nbytes(x.numel())
        halves = (x.detach().numpy().view(np.uint32) >> 16).astype("<u2")
        buffer[HEADER_NBYTES:nbytes].numpy()[:] = halves.view(np.uint8)
        return seal(buffer, self.name, x.numel(), nbytes)

    def _values(self, payload, numel):
        body = unseal(payload, self.name, numel, nbytes=self.max_nbytes(numel))
        return (body.copy().view("<u2").astype(np.uint32) << 16).view(np.float32)

    def decode(self, payload, numel, *, out=None):
        values = values_for(self, numel, out)
        floats(values, self)[:] = self._values(payload, numel)
        return values

    def decode_add(self, payload, out):
        total = floats(out, self)
        with np.errstate(invalid="ignore", over="ignore"):
            total += self._values(payload, out.numel())
'''

TWIN = '''
import numpy as np


def encode_body(x):
    return np.frombuffer(b"".join(value.astype("<f4").tobytes()[2:] for value in x), dtype=np.uint8)


def decode_body(body, numel):
    halves = body.tobytes()
    wide = b"".join(bytes(2) + halves[2 * i : 2 * i + 2] for i in range(numel))
    return np.frombuffer(wide, dtype="<f4")
'''

MATRIX_CODEC = '''
"""Every row of a matrix by its mean."""
from dataclasses import dataclass
from typing import ClassVar
import torch
from laconic.codecs.base import register as codec
from laconic.codecs.matrix import MatrixCodec
from laconic.errors import BadInput
from laconic.exchange.job import LayerForm, wire_nbytes
from laconic.exchange.matrices import MatrixBucket, MatrixMethod, register
from laconic.exchange.matrices.base import ExactSum


@codec("row_means")
@dataclass(frozen=True)
class RowMeans(MatrixCodec):
    source: ClassVar[str] = "nobody"
    summary: ClassVar[str] = "every row of a matrix by its mean"

    def floats_sent(self, shape):
        return shape[0]


@register("row_means")
class Method(MatrixMethod):
    def bucket(self, info, residuals):
        return Bucket(info, residuals)


class Bucket(MatrixBucket):
    def __init__(self, info, residuals):
        self.info, self.residuals, self.codec, self.sum = info, residuals, None, ExactSum()

    def use(self, chosen):
        if not isinstance(chosen, RowMeans):
            raise BadInput(f"this bucket is exchanged by row_means, not by {chosen}")
        self.codec = chosen

    def steps(self, buffer, route):
        parts, wholes = [], []
        for e in self.info.entries:
            values = buffer[e.start : e.stop]
            whole = None if e.exempt else self.residuals.whole(e.name, e.numel).add_(values).view(e.shape[0], -1)
            parts.append(self.residuals.settle(e.name, values) if whole is None else whole.mean(1))
            wholes.append(whole)
        total = torch.cat(parts)
        plan = self.sum.planned(total, route)
        rounds, size = len(plan.rounds), route.transport.world_size
        with route.transport.call("all_reduce", "row_means", self.info.numel, "float32", "", rounds) as call:
            yield from plan.steps_in(call, route.step)
        means = torch.split(total / size, [part.numel() for part in parts])
        for e, whole, own, mean in zip(self.info.entries, wholes, parts, means):
            if whole is None:
                buffer[e.start : e.stop] = mean
            else:
                whole.sub_(own.unsqueeze(1))
                buffer[e.start : e.stop].view_as(whole).copy_(mean.unsqueeze(1).expand_as(whole))
        return call.timings, plan.algorithm

    def layers(self, world_size):
        return [LayerForm(e.name, "rows", wire_nbytes(e.numel, world_size), 4 * e.shape[0]) for e in self.info.entries]
'''

SCHEDULE = '''
"""A chain: the sum is passed from rank to rank, and back."""
from laconic.schedules import Messages, Schedule, algorithm


@algorithm(
    "chain",
    "all_reduce",
    rounds=lambda world_size, **_: 2 * (world_size - 1),
    sent_numel=lambda world_size, numel, **_: 2 * (world_size - 1) * numel,
    seconds=lambda world_size, nbytes, link, **_: (world_size - 1)
    * (link.burst_s(1, nbytes, True) + link.burst_s(1, nbytes, False)),
)
def chain(world_size, numel):
    """Pass the sum along, and back."""
    last = world_size - 1
    there = [Messages.in_round(r, r, r + 1, 0, numel, "add") for r in range(last)]
    back = [Messages.in_round(2 * last - 1 - r, r + 1, r, 0, numel, "copy") for r in reversed(range(last))]
    return Schedule("all_reduce", "chain", world_size, numel, Messages.join(there + back))
'''

MODE = '''
"""The mean of all gradients at every step."""
from dataclasses import dataclass
from typing import ClassVar
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from laconic import all_reduce, broadcast
from laconic.consistency.base import Agreement, Mode, register


@register("in_one")
@dataclass(frozen=True)
class InOne(Mode):
    summary: ClassVar[str] = "gradients are averaged in one vector"
    source: ClassVar[str] = "nobody"
    examples: ClassVar[tuple[str, ...]] = ("in_one",)

    def install(self, setup):
        return InOneAgreement(setup)


class InOneAgreement(Agreement):
    def __init__(self, setup):
        super().__init__(setup)
        for value in setup.model.state_dict().values():
            broadcast(value)

    def before_step(self):
        with self.agreeing():
            gradients = [parameter.grad for parameter in self.model.parameters()]
            mean = all_reduce(parameters_to_vector(gradients), "mean", algorithm="direct")
            vector_to_parameters(mean, gradients)

    def after_step(self):
        self.settle()

    def finish(self):
        """All hold the same weights already."""
'''

WORKLOAD = '''
"""A small network on digits."""
from laconic.workloads.inputs import Pixels
from laconic.workloads.objective import CLASSIFICATION
from laconic.workloads.optimizers import linear_decay, momentum
from laconic.workloads.registry import declare
from laconic.workloads.workload import Workload

declare(
    "A 64-12-10 network on digits.",
    Workload(
        name="digits-small", dataset="digits", model="mlp((64, 12, 10), dropout=())", objective=CLASSIFICATION,
        optimizer=momentum, optimizer_name="SGD, momentum 0.9, rate falling linearly to 0", learning_rate=0.1,
        plan=linear_decay, batch=64, epochs=5, target=0.9, inputs=Pixels(largest=16.0),
    ),
)
'''

SUITES = (
    "tests/codecs/test_conformance.py",
    "tests/benchmarks/test_fuzz_codecs.py",
    "tests/exchange/test_matrices.py",
    "tests/schedules/test_laws.py",
    "tests/consistency/test_conformance.py",
    "tests/workloads/test_workloads.py",
)
# The codecs, the schedule, the mode and the workload above, with how many tests they have at least.
NAMES = {"upper": 20, "row_means": 7, "chain": 4, "in_one": 6, "digits-small": 3}
# Stands for the user's script: every process of a job, and pytest, begins by importing the package.
MODULES = ("codec", "matrix_codec", "schedule", "mode", "workload")
SITE = "import " + ", ".join(f"one_of_each.{module}" for module in MODULES) + "\n"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, to be put on the path."""
    folder = tmp_path_factory.mktemp("package")
    files = {
        "sitecustomize.py": SITE,
        "one_of_each/__init__.py": "",
        "one_of_each/codec.py": CODEC,
        "one_of_each/matrix_codec.py": MATRIX_CODEC,
        "one_of_each/schedule.py": SCHEDULE,
        "one_of_each/mode.py": MODE,
        "one_of_each/workload.py": WORKLOAD,
        "twin/codec_upper.py": TWIN,
        "twin_of_upper.py": "import os, reference\nreference.__path__.append(os.path.dirname(__file__) + '/twin')\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def passed(package: Path) -> dict[str, int]:
    """How many tests of the shared suites passed on each thing of the package, after none failed."""
    path = os.pathsep.join(map(str, (package, ROOT / "src", ROOT / "tests")))
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-p", "twin_of_upper"]
    done = subprocess.run(
        [*command, "-k", " or ".join(NAMES), *SUITES], cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "PASSED" in line]
    return {name: sum(name in line for line in lines) for name in NAMES}


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "least"), NAMES.items())
def test_what_one_file_adds_passes_the_shared_suites(name: str, least: int, passed: dict[str, int]) -> None:
    assert passed[name] >= least
