"""Compiles kernels ahead of time, without a device, and reads from the result what it will cost there.

Callers: the tests, which refuse spilled registers, fused arithmetic, narrow loads and stores of bytes, and
`benchmarks/codecs/device_kernels.py`, which keeps the table. What is counted is a model: nothing here has run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from laconic.codecs.device.kernels import KERNELS
from laconic.codecs.device.kernels.launch import CHECKSUM, Variant

ARCHITECTURES = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_OPERANDS = {"load": 1, "store": 2, "atomic_rmw": 2}  # without a mask
_SHAPE = re.compile(r"(?:tensor<((?:\d+x)+))?!tt\.ptr<(f32|i32|i64)>")


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one kernel for one architecture."""

    kernel: str
    architecture: str
    registers: int  # of a thread
    spilled: int  # registers, or bytes of them, that do not fit
    shared_nbytes: int  # memory that a program's threads share
    nbytes_per_value: float  # that the kernel loads and stores, without tables, which stay in the cache
    fused: int  # multiply-adds with one rounding
    narrow_loads: int  # of floats, with less than 128 bits
    byte_stores: int


def variants() -> list[Variant]:
    """Every kernel that is launched for whole blocks, once."""
    found = {CHECKSUM.name: CHECKSUM}
    for name in KERNELS.names():
        found |= {variant.name: variant for variant in KERNELS.get(name).ahead}
    return list(found.values())


def compile_for(variant: Variant, architecture: str) -> Compiled:
    """Compile one kernel for one of ARCHITECTURES."""
    target, source = ARCHITECTURES[architecture], _source(variant)
    options = {"num_warps": variant.num_warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=target, options=options)
    moved, float_loads = _moved(made.asm["ttir"], variant)
    wide = float_loads / 4 / (variant.num_warps * target.warp_size)
    registers, spilled, fused, found_wide, byte_stores = (_amd if target.backend == "hip" else _nvidia)(made)
    return Compiled(
        variant.name, architecture, registers, spilled, made.metadata.shared, moved / variant.values, fused,
        max(0, int(wide) - found_wide), byte_stores,
    )  # fmt: skip


def _source(variant: Variant) -> ASTSource:
    """A kernel with its types and constants; all its pointers are aligned to 16 bytes, as those of tensors are."""
    names = variant.kernel.arg_names
    given = dict(zip([name for name in names if name not in variant.constants], variant.types, strict=True))
    aligned = [names.index(name) for name in given if given[name].startswith("*")]
    old = getattr(triton.backends.compiler, "AttrsDescriptor", None)
    if old is not None:  # Triton 3.2
        attributes = old.from_dict({"arg_properties": {"tt.divisibility": aligned}, "cls": "AttrsDescriptor"})
        return ASTSource(variant.kernel, given, variant.constants, attributes)
    signature = {name: given.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    return ASTSource(variant.kernel, signature, constants, {(at,): [["tt.divisibility", 16]] for at in aligned})


def _moved(text: str, variant: Variant) -> tuple[float, int]:
    """The bytes that a program loads and stores, and how many floats it loads; tables are marked to stay cached."""
    moved, float_loads = 0.0, 0
    constants = variant.constants
    padded, places = constants.get("PADDED"), constants.get("PLACES", 1)  # of planes, only `places` are there
    for line in text.splitlines():
        operation = re.search(r"tt\.(load|store|atomic_rmw)\b", line)
        if operation is None or "evict" in line:
            continue
        shape, kind = _SHAPE.findall(line)[0]
        count = 1
        sides = [int(side) for side in shape.split("x")[:-1]]
        for side in sides:
            count *= places if len(sides) == 3 and side == padded else side
        masked = shape and line.split(" : ")[0].split("tt.")[1].count("%") > _OPERANDS[operation[1]]
        share = variant.share if masked else 1.0
        moved += share * (8 if kind == "i64" else 4) * count * (2 if operation[1] == "atomic_rmw" else 1)
        float_loads += count if operation[1] == "load" and kind == "f32" and shape else 0
    return moved, float_loads


def _nvidia(made: Any) -> tuple[int, int, int, int, int]:
    text = made.asm["ptx"]
    architecture = re.search(r"\.target (\w+)", text)[1]  # type: ignore[index]
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(text)
        for tool in ("ptxas", "ptxas-blackwell"):
            command = [str(tools / tool), "-v", f"--gpu-name={architecture}", str(source), "-o", str(source) + ".out"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode == 0:
                break
    said = done.stderr + done.stdout
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
    registers = int(re.search(r"Used (\d+) registers", said)[1])  # type: ignore[index]
    wide = len(re.findall(r"\bld\.global\S*\.(?:v4\.[bfu]32|v2\.b64)", text))
    byte_stores = len(re.findall(r"\bst\.global\S*\.[bu]8", text))
    return registers, spilled, len(re.findall(r"\bfma\.rn\.f32", text)), wide, byte_stores


def _amd(made: Any) -> tuple[int, int, int, int, int]:
    """Divisions are made of fused steps there, so contraction is looked for in what the compiler was given."""
    text, given = made.asm["amdgcn"], made.asm["llir"]
    registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])  # type: ignore[index]
    spilled = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])  # type: ignore[index]
    fused = len(re.findall(r"\bf(?:mul|add|sub) (?:\w+ )*contract|llvm\.fmuladd|llvm\.fma\.", given))
    wide = len(re.findall(r"\b(?:global|buffer)_load_dwordx4", text))
    return registers, spilled, fused, wide, len(re.findall(r"\b(?:global|buffer)_store_byte", text))
